"""Mutation tests of ``verify``: traces with copies of offloaded activations and one error each must be refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from thunder_fsdp_sched import testing
from thunder_fsdp_sched.ir.host_copies import (
    fsdp_copy_to_device,
    fsdp_copy_to_host,
    fsdp_wait_device_copy,
    fsdp_wait_host_copy,
)
from thunder_fsdp_sched.ir.inspection import return_of
from thunder_fsdp_sched.transforms import VerificationError, verify

import pytest
import torch
from models import Stack
from offloading import offloading
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, tracectx

Mutation = Callable[["_Copies"], None]


@cache
def _compiled() -> testing.CompiledTraces:
    with offloading():
        [compiled] = testing.compile_on_fake_ranks(lambda: (Stack(3), (torch.ones(2, 4),)), 2)
    return compiled


class _Copies:
    """A trace to be changed, and the position of one of its copies: issue and wait.

    Args:
        name: ``"forward"`` or ``"backward"``.
    """

    def __init__(self, name: str) -> None:
        compiled = _compiled()
        self.forward = None if name == "forward" else compiled.forward
        original = compiled.forward if name == "forward" else compiled.backward
        self.trace: TraceCtx = from_trace(original)
        self.bsyms = self.trace.bound_symbols = [b for b in original.bound_symbols if b.sym.id is not PrimIDs.DEL]
        issue = fsdp_copy_to_host if name == "forward" else fsdp_copy_to_device
        wait = fsdp_wait_host_copy if name == "forward" else fsdp_wait_device_copy
        # The second copy, whose wait is not right after its issue.
        self.issue = [i for i, b in enumerate(self.bsyms) if b.sym is issue][1]
        future = self.bsyms[self.issue].output.name
        self.wait = next(i for i, b in enumerate(self.bsyms) if b.sym is wait and b.args[0].name == future)
        self.source: TensorProxy = self.bsyms[self.issue].args[0]
        self.result: TensorProxy = self.bsyms[self.wait].output

    def insert(self, position: int, symbol: Symbol, *args: Any, **kwargs: Any) -> None:
        self.bsyms.insert(position, symbol.bind(*args, **kwargs, output=symbol.meta(*args, **kwargs)))

    def change(self, position: int, **changes: Any) -> None:
        self.bsyms[position] = self.bsyms[position].from_bsym(**changes)

    @property
    def returned(self) -> BoundSymbol:
        return return_of(self.trace)

    def verify(self) -> None:
        verify(self.trace, forward=self.forward)


def _return_host_copy(copies: _Copies) -> None:
    outputs, *saved = copies.returned.args
    copies.change(-1, args=({**outputs, "output": (*outputs["output"], copies.result)}, *saved))


def _save_source(copies: _Copies) -> None:
    outputs, (tensors, others) = copies.returned.args
    copies.change(-1, args=(outputs, ((*tensors, copies.source), others)))


def _other_operand(copies: _Copies) -> None:
    copies.change(copies.wait, args=(copies.bsyms[copies.wait].args[0], copies.trace.args[0]))


def _other_shape(copies: _Copies) -> None:
    with tracectx(TraceCtx()):  # where the name is free
        other = TensorProxy(copies.result.name, like=copies.result, shape=(1, *copies.result.shape))
    copies.change(copies.wait, output=other)


def _forget_wait(copies: _Copies) -> None:
    outputs, (tensors, others) = copies.returned.args
    copies.change(-1, args=(outputs, (tuple(t for t in tensors if t is not copies.result), others)))
    del copies.bsyms[copies.wait]


def _write_view(copies: _Copies) -> None:
    copies.insert(copies.wait, prims.transpose, copies.source, tuple(reversed(range(copies.source.ndim))))
    view = copies.bsyms[copies.wait].output
    copies.insert(copies.wait + 1, prims.copy_, view, view, grad_enabled=False)


def _read_future(copies: _Copies) -> None:
    copies.bsyms.insert(
        copies.wait, prims.neg.bind(copies.bsyms[copies.issue].output, output=TensorProxy(like=copies.source))
    )


def _copy_other(copies: _Copies) -> None:
    unpacked = next(p for b in copies.bsyms for p in b.flat_proxy_outs if p.name.startswith("t_"))
    copies.change(copies.issue, args=(unpacked, *copies.bsyms[copies.issue].args[1:]))


FORWARD: dict[str, tuple[str, Mutation]] = {
    "a wait is missing": ("nothing waits for the copy", _forget_wait),
    "a wait is there twice": ("where its memory was freed", lambda c: c.bsyms.insert(c.wait, c.bsyms[c.wait])),
    "a wait keeps another value alive": ("with other operands", _other_operand),
    "the source is read after the wait": (
        "where its memory was freed",
        lambda c: c.insert(c.wait + 1, prims.neg, c.source),
    ),
    "the source is saved, too": ("where its memory was freed", _save_source),
    "the source is written": (
        "may write",
        lambda c: c.insert(c.wait, prims.copy_, c.source, c.source, grad_enabled=False),
    ),
    "a view of the source is written": ("may write", _write_view),
    "the host copy is computed with": ("which is in host memory", lambda c: c.insert(c.wait + 1, prims.neg, c.result)),
    "the host copy is an output": ("returns 'host_.*', which is in host memory", _return_host_copy),
    "a future is read": ("does not wait for", _read_future),
}


BACKWARD: dict[str, tuple[str, Mutation]] = {
    "a wait is missing": ("nothing before it defines", lambda c: c.bsyms.pop(c.wait)),
    "a wait is too late": ("nothing before it defines", lambda c: c.bsyms.insert(c.wait + 1, c.bsyms.pop(c.wait))),
    "a wait is there twice": ("no such copy in flight", lambda c: c.bsyms.insert(c.wait, c.bsyms[c.wait])),
    "the host copy is computed with": ("which is in host memory", lambda c: c.insert(c.issue, prims.neg, c.source)),
    "another value is copied back": ("has not copied to host memory", _copy_other),
    "the result has another shape": ("another shape, dtype or device", _other_shape),
}


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_traces_with_copies_are_accepted(name: str) -> None:
    _Copies(name).verify()


@pytest.mark.parametrize(
    ("name", "mutation"), [("forward", what) for what in FORWARD] + [("backward", what) for what in BACKWARD]
)
def test_an_error_in_a_copy_is_refused(name: str, mutation: str) -> None:
    message, change = (FORWARD if name == "forward" else BACKWARD)[mutation]
    copies = _Copies(name)
    with tracectx(copies.trace):
        change(copies)
    with pytest.raises(VerificationError, match=message):
        copies.verify()
