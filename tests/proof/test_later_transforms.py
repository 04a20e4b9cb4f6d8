"""Traces that a user's transform changes after ``fsdp(...)`` are proved again before they run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from thunder_fsdp_sched import VerificationError, fsdp
from thunder_fsdp_sched.ir.inspection import with_bound_symbols

import pytest
import thunder
import torch
from coded import coded
from internals import effects, outs_of
from models import Chain
from ranks import on_ranks
from scenario import Run
from spoiled import swap, swap_returned
from thunder.core.proxies import Proxy, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceTag, tracectx
from thunder.executors import torchex
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
        changed = with_bound_symbols(computation_trace, computation_trace.bound_symbols)
        if (TraceTag.BACKWARD in computation_trace.tags) is self.backward:
            with tracectx(changed):
                self.change(changed.bound_symbols)
        return changed


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


# A change, whether it is one of backward, and names that tell its error from others.
BROKEN: dict[str, tuple[Callable[[list[BoundSymbol]], None], bool, tuple[str, ...]]] = {
    "a slot": (_last_gather_first, False, ("of bucket '3'", "has overwritten for bucket '4'")),
    "two gathers": (_swap_gathers, False, ("forward trace", "fsdp_all_gather(bucket_0", "fsdp_all_gather(bucket_1")),
    "a wait": (_use_before_wait, True, ("backward trace", "fsdp_reduce_scatter(bucket_4", "fsdp_wait_grads(bucket_4")),
    "the agreement": (_without_agreement, True, ("backward trace", "before: fsdp_agreed")),
}


def _jit(
    change: Callable[[list[BoundSymbol]], None],
    *,
    backward: bool,
    module: Callable[[], nn.Module] = _Layers,
    **options: Any,
) -> Any:
    transforms = [
        fsdp(bucketing_strategy="layer", prefetch=0, sharding_strategy="zero3"),
        Reorder(change, backward=backward),
    ]
    return thunder.jit(module(), transforms=transforms, **options)


@pytest.mark.parametrize("what", BROKEN)
@on_ranks()
def test_a_later_transform_that_breaks_an_order_is_an_error_before_anything_runs(what: str) -> None:
    change, backward, names = BROKEN[what]
    with pytest.raises(VerificationError, check=coded("proof.later-transform-broke-trace", *names)):
        _jit(change, backward=backward)(torch.ones(2, 4))


class _Pair(nn.Module):
    """Two parameters of equal shape, with different gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.a).exp() + x * self.b * x


def _pairs() -> nn.Module:
    torch.manual_seed(0)
    return Chain(lambda index: _Pair(), count=2)


def _swap_saved(bsyms: list[BoundSymbol]) -> None:
    returned, ((first, second, *more), others) = bsyms[-1].args
    bsyms[-1] = bsyms[-1].from_bsym(args=(returned, ((second, first, *more), others)))


class _TwoOutputs(_Pair):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * self.a).exp(), x * self.b


def _swap_gradients_of_outputs(bsyms: list[BoundSymbol]) -> None:
    at = next(i for i in _named(bsyms, "unpack_sequence") if bsyms[i].args[0].name == "cotangents")
    bsyms[at] = bsyms[at].from_bsym(output=bsyms[at].output[::-1])


def _swap_copies(bsyms: list[BoundSymbol]) -> None:
    """Send copies of two gradients, under new names, in each other's place."""
    at, *_ = _named(bsyms, "fsdp_reduce_scatter")
    *others, a, b = bsyms[at].args
    copies = [x.replace_name(f"copy_of_{x.name}") for x in (a, b)]
    bsyms[at] = bsyms[at].from_bsym(args=(*others, *copies[::-1]))
    bsyms[at:at] = [torchex.neg.bind(x, output=copy) for x, copy in zip((a, b), copies, strict=True)]


def _swap_names_of_computed_gradients(bsyms: list[BoundSymbol]) -> None:
    at, *_ = _named(bsyms, "fsdp_reduce_scatter")
    a, b = bsyms[at].args[-2:]
    for position in range(at):
        if defined := {a.name: b, b.name: a}.keys() & outs_of(bsyms[position]):
            bsyms[position] = bsyms[position].from_bsym(output=b if a.name in defined else a)


_READ, _DEFINED = "which is not what it read before", "as another value than before"
SWAPPED: dict[str, tuple[Callable[[list[BoundSymbol]], None], bool, str]] = {
    "gradients": (partial(swap, name="fsdp_reduce_scatter"), True, "as the gradient of parameter 'blocks.1.a'"),
    "copies of gradients": (_swap_copies, True, "as the gradient of parameter"),
    "names of computed gradients": (_swap_names_of_computed_gradients, True, _DEFINED),
    "sharded gradients": (partial(swap, name="fsdp_wait_grads", results=True), True, _DEFINED),
    "parameters": (partial(swap, name="fsdp_wait_params", results=True), False, _DEFINED),
    "shards": (partial(swap, name="fsdp_all_gather"), False, _READ),
    "returned gradients": (swap_returned, True, _READ),
    "saved values": (_swap_saved, False, _DEFINED),
    "gradients of outputs": (_swap_gradients_of_outputs, True, _DEFINED),
}


@on_ranks()
def test_a_later_transform_that_swaps_values_of_equal_shape_is_an_error() -> None:
    for what, (change, backward, fault) in SWAPPED.items():
        model = _jit(change, backward=backward, module=_TwoOutputs if what == "gradients of outputs" else _pairs)
        with pytest.raises(VerificationError, check=coded("proof.later-transform-broke-trace", fault)):
            model(torch.ones(4, 4))
            pytest.fail(what)
    model = _jit(partial(swap, name="fsdp_accumulate_grads"), backward=True, module=_pairs)
    with model.no_sync(), pytest.raises(VerificationError, check=coded("proof.later-transform-broke-trace", _READ)):
        model(torch.ones(4, 4))


def _rename_all(bsyms: list[BoundSymbol]) -> None:
    """Give each computed value another name."""
    new = {}
    for position, bsym in enumerate(bsyms):
        if not bsym.sym.name.startswith("unpack_"):
            new |= {variableify(p): p.replace_name(f"new_{p.name}") for p in bsym.flat_proxy_outs}
        bsyms[position] = bsym.from_bsym_swap_proxies(new)


def _fuse_gradients(bsyms: list[BoundSymbol]) -> None:
    """Compute the gradients of a reduction in one fusion each, of which nobody sees inside."""
    at, *_ = _named(bsyms, "fsdp_reduce_scatter")
    for grad in bsyms[at].args[-2:]:
        position = next(i for i, b in enumerate(bsyms) if grad.name in outs_of(b))
        fusion, old = Symbol("opaque", meta=None), bsyms[position]
        call = fusion.bind(*old.flat_proxy_args, output=grad)
        constants = [arg for arg in old.flat_args if not isinstance(arg, Proxy)]
        assert not constants
        call._call_ctx = {"opaque": old._call_ctx[old.sym.name] if old._call_ctx else getattr(torch, old.sym.name)}
        bsyms[position] = call


def _scale_gradients(bsyms: list[BoundSymbol]) -> None:
    """Negate each gradient twice before it is sent, under new names."""
    for at in reversed(_named(bsyms, "fsdp_reduce_scatter")):
        *others, a, b = bsyms[at].args
        added = []
        for x in (a, b):
            once, twice = (x.replace_name(f"{x.name}_{number}") for number in range(2))
            added += [torchex.neg.bind(x, output=once), torchex.neg.bind(once, output=twice)]
        bsyms[at] = bsyms[at].from_bsym(args=(*others, added[1].output, added[3].output))
        bsyms[at:at] = added


def _unpack_in_another_order(bsyms: list[BoundSymbol]) -> None:
    first, second = _named(bsyms, "unpack_trivial")[:2]
    bsyms[first], bsyms[second] = bsyms[second], bsyms[first]


@on_ranks()
def test_a_later_transform_may_rename_fuse_process_and_copy_values() -> None:
    for change in (_rename_all, _fuse_gradients, _scale_gradients, _unpack_in_another_order, _copied):
        later = Reorder(change, backward=change is not _unpack_in_another_order)
        run = Run(_pairs().double(), after=[later], bucketing_strategy="layer", prefetch=0)
        run.train(1, batch=4)
        run.forward(1, grad=False, batch=4)
    with pytest.raises(ValueError, check=coded("trace.no-caching-with-later-transform", "Reorder")):
        _jit(_copied, backward=True, cache="no caching")(torch.ones(2, 4))


@on_ranks()
def test_no_later_transform_may_change_traces_of_which_ranks_that_differ_run_others() -> None:
    def jit(change: Callable[[list[BoundSymbol]], None]) -> Any:
        transforms = [fsdp(ranks_may_differ=True), Reorder(change, backward=True)]
        return thunder.jit(_Layers(), transforms=transforms)

    with pytest.raises(ValueError, check=coded("ranks.later-transform-changed-trace", "Reorder")):
        jit(_copied)(torch.ones(2, 4))
    jit(lambda bsyms: None)(torch.ones(2, 4)).sum().backward()
