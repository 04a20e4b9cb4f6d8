"""Traces that a user's transform changes after ``fsdp(...)`` are proved again before they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import VerificationError, fsdp
from thunder_fsdp_sched.ir.inspection import is_backward_trace, with_bound_symbols

import pytest
import thunder
import torch
from internals import effects
from ranks import on_ranks
from thunder.core.symbol import BoundSymbol
from torch import nn


class _Layers(nn.Sequential):
    """Enough layers for slots to be used several times."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(4, 4) for _ in range(5)))


class Reorder(thunder.Transform):
    """A user's transform that changes the order of a trace."""

    def __init__(self, change: Callable[[list[BoundSymbol]], None], *, backward: bool) -> None:
        self.change, self.backward = change, backward

    def transform_trace_post_optimization(self, computation_trace: Any, **kwargs: Any) -> Any:
        bsyms = list(computation_trace.bound_symbols)
        if is_backward_trace(computation_trace) is self.backward:
            self.change(bsyms)
        return with_bound_symbols(computation_trace, bsyms)


def _named(bsyms: list[BoundSymbol], name: str) -> list[int]:
    return [position for position, bsym in enumerate(bsyms) if bsym.sym.name == name]


def _last_gather_first(bsyms: list[BoundSymbol]) -> None:
    """Issue the last gather as early as its place among this plugin's statements allows, over values still to be read."""
    gather = _named(bsyms, "fsdp_all_gather")[-1]
    others = (position for position in range(gather) if effects(bsyms[position]).bucket is not None)
    bsyms.insert(max(others) + 1, bsyms.pop(gather))


def _swap_gathers(bsyms: list[BoundSymbol]) -> None:
    first, second = _named(bsyms, "fsdp_all_gather")[:2]
    bsyms[first], bsyms[second] = bsyms[second], bsyms[first]


def _use_before_wait(bsyms: list[BoundSymbol]) -> None:
    reduction, *_ = _named(bsyms, "fsdp_reduce_scatter")
    wait, *_ = _named(bsyms, "fsdp_wait_grads")
    bsyms.insert(reduction, bsyms.pop(wait))


def _without_agreement(bsyms: list[BoundSymbol]) -> None:
    del bsyms[_named(bsyms, "fsdp_agreed")[0]]


def _copied(bsyms: list[BoundSymbol]) -> None:
    bsyms[:] = [bsym.from_bsym() for bsym in bsyms]


BROKEN: dict[str, tuple[Callable[[list[BoundSymbol]], None], bool, str]] = {
    "a slot": (_last_gather_first, False, r"reads .* of bucket (.|\n)*has overwritten for bucket '4'"),
    "two gathers": (
        _swap_gathers,
        False,
        r"the forward trace has another order(.|\n)*before: .*bucket_0.*\n +now: .*bucket_1",
    ),
    "a wait": (_use_before_wait, True, "the backward trace has another order"),
    "the agreement": (_without_agreement, True, "the backward trace has another order(.|\n)*before: fsdp_agreed"),
}


def _jit(change: Callable[[list[BoundSymbol]], None], *, backward: bool, **options: Any) -> Any:
    transforms = [
        fsdp(bucketing_strategy="layer", prefetch=0, sharding_strategy="zero3"),
        Reorder(change, backward=backward),
    ]
    return thunder.jit(_Layers(), transforms=transforms, **options)


@pytest.mark.parametrize("what", BROKEN)
@on_ranks()
def test_a_later_transform_that_breaks_an_order_is_an_error_before_anything_runs(what: str) -> None:
    change, backward, message = BROKEN[what]
    with pytest.raises(VerificationError, match=rf"after fsdp\(...\), Reorder has changed(.|\n)*{message}"):
        _jit(change, backward=backward)(torch.ones(2, 4))


@on_ranks()
def test_a_later_transform_may_copy_and_extend_a_trace() -> None:
    model, reference = _jit(_copied, backward=True), _Layers()
    model(torch.ones(2, 4)).sum().backward()
    reference(torch.ones(2, 4)).sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_local(), p.rows.of(q.grad))
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(2, 4)), reference(torch.ones(2, 4)))
    with pytest.raises(ValueError, match=r"traces that Reorder changes after fsdp\(...\) would run unproved"):
        _jit(_copied, backward=True, cache="no caching")(torch.ones(2, 4))


@on_ranks()
def test_no_later_transform_may_change_traces_of_which_ranks_that_differ_run_others() -> None:
    def jit(change: Callable[[list[BoundSymbol]], None]) -> Any:
        transforms = [fsdp(ranks_may_differ=True), Reorder(change, backward=True)]
        return thunder.jit(_Layers(), transforms=transforms)

    with pytest.raises(ValueError, match=r"ranks_may_differ: after fsdp\(...\), Reorder has changed a trace"):
        jit(_copied)(torch.ones(2, 4))
    jit(lambda bsyms: None)(torch.ones(2, 4)).sum().backward()
