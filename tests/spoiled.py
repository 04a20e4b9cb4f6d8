"""Helpers that break traces: swapped operands and results, an operator that may change its input, and audits that fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from thunder_fsdp_sched import ScheduleDisagreement, VerificationError
from thunder_fsdp_sched.proof import audit

import pytest
import thunder
import torch
from coded import coded
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

_change: Callable[[torch.Tensor], object] | None = None


def total(w: torch.Tensor) -> torch.Tensor:
    return w.sum()


def _total(w: torch.Tensor) -> torch.Tensor:
    assert w.data_ptr()  # which fake tensors do not have, so it cannot be observed
    if _change is not None:
        _change(w)
    return w.sum()


@contextlib.contextmanager
def changing(change: Callable[[torch.Tensor], object] | None) -> Iterator[None]:
    """Let :func:`total` call a function on its argument when a compiled trace runs it."""
    global _change
    _change = change
    try:
        yield
    finally:
        _change = None


def _scalar(w: TensorProxy) -> TensorProxy:
    return TensorProxy(like=w, shape=())


def executors(replaces: Callable[..., Any] = total, meta: Any = _scalar, fn: Callable[..., Any] = _total) -> list[Any]:
    """Return executors, of which the first runs an operator without gradient in place of a function."""
    executor = thunder.extend.OperatorExecutor(f"spoiled_{replaces.__name__}")
    thunder.extend.register_executor(executor)
    operator = executor.register_operator(f"{replaces.__name__}_of", meta=meta, fn=fn, replaces=replaces)
    executor.register_implementation(operator, operator, grad_transform=lambda w: operator(w))
    return [executor, *thunder.get_default_executors()]


def fails_in_backward(lies: bool = True) -> Any:
    """Let audits of backwards find an error at each of their statements."""
    real_compare = audit.Auditor._compare

    def compare(auditor: audit.Auditor, expected: Any, *found: Any) -> None:
        real_compare(auditor, expected, *found)
        if lies and auditor.name == "audit_backward":
            auditor._fail(expected, "fails on purpose")

    return mock.patch.object(audit.Auditor, "_compare", compare)


def raises_on_all(rank: int, run: Callable[[], object], *names: str) -> None:
    """Check that an error that the audit of rank 1 finds is raised on all ranks."""
    own, theirs = coded("proof.wrong-operator-facts"), coded("ranks.actions-differ", "rank 1: the audit of a trace")
    expected = (own if rank else theirs).naming(*names)
    with pytest.raises(VerificationError if rank else ScheduleDisagreement, check=expected):
        run()


def swap(bsyms: list[BoundSymbol], name: str, *, results: bool = False) -> None:
    """Swap the last two operands of the first statement of a name, or its results."""
    at = next(position for position, bsym in enumerate(bsyms) if bsym.sym.name == name)
    *others, first, second = bsyms[at].output if results else bsyms[at].args
    bsyms[at] = bsyms[at].from_bsym(**{"output" if results else "args": (*others, second, first)})


def swap_returned(bsyms: list[BoundSymbol]) -> None:
    """Swap the last two gradients that a backward returns."""
    [(*others, first, second)] = bsyms[-1].args
    bsyms[-1] = bsyms[-1].from_bsym(args=((*others, second, first),))
