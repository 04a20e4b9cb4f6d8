"""Mutation tests of ``verify``: correct traces with one error each must be refused.

``MUTATIONS`` lists the mutations with the message that each must cause. They are tried on a chain of four blocks, and on the
forward and backward traces of a model that Thunder compiled. ``test_agreement`` tests what a single rank cannot detect, such
as an order that differs between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched import testing
from thunder_fsdp_sched.ir.inspection import args_of, outs_of, return_of
from thunder_fsdp_sched.ir.symbols import (
    GRAD_WRITERS,
    fsdp_all_gather,
    fsdp_params_unchanged,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
    residency_marks,
)
from thunder_fsdp_sched.transforms import VerificationError, assign_slots, sort_communication, verify

import pytest
import torch
from synthetic_traces import FakeProcessGroup, chain
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from torch import nn


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block.forward(x))
        return x.sum()


@cache
def _compiled() -> testing.CompiledTraces:
    [compiled] = testing.compile_on_fake_ranks(lambda: (Blocks(), (torch.ones(2, 4),)), 2, prefetch=2)
    return compiled


TRACES: dict[str, Callable[[], TraceCtx]] = {
    "chain": lambda: assign_slots(sort_communication(chain(4), prefetch=2)),
    "forward": lambda: _compiled().forward,
    "backward": lambda: _compiled().backward,
}


def correct_trace(name: str) -> TraceCtx:
    """Return a correct trace without ``del`` statements, which the caller may change."""
    return own_copy(TRACES[name]())


def own_copy(trace: TraceCtx) -> TraceCtx:
    own = from_trace(trace)
    own.bound_symbols = [b for b in trace.bound_symbols if b.sym.id is not PrimIDs.DEL]
    return own


def positions(trace: TraceCtx, symbol: Symbol) -> list[int]:
    return [i for i, b in enumerate(trace.bound_symbols) if b.sym is symbol]


def first_reader(trace: TraceCtx, position: int) -> int:
    """Return the position of the first bound symbol that reads an output of the one at ``position``."""
    outs = set(outs_of(trace.bound_symbols[position]))
    return next(i for i, b in enumerate(trace.bound_symbols) if i > position and not outs.isdisjoint(args_of(b)))


def new_like(trace: TraceCtx, proxy: TensorProxy) -> TensorProxy:
    with tracectx(trace):
        return TensorProxy(like=proxy)


def gathered_weight(trace: TraceCtx, which: int = 0) -> tuple[int, TensorProxy]:
    """Return the position of a wait, and a gathered matrix among its outputs."""
    wait = positions(trace, fsdp_wait_params)[which]
    return wait, next(p for p in trace.bound_symbols[wait].output if p.ndim == 2)


def in_place_grads(trace: TraceCtx, reduction: int) -> list[int]:
    """Return the positions of the bound symbols that write the gradients of a reduction in place."""
    grads = set(args_of(trace.bound_symbols[reduction]))
    return [i for i, b in enumerate(trace.bound_symbols) if b.sym.name in GRAD_WRITERS and b.output.name in grads]


def in_place_grad(trace: TraceCtx, which: int = 0) -> int:
    """Return the position of a bound symbol that writes a gradient of one of the reductions in place."""
    return in_place_grads(trace, positions(trace, fsdp_reduce_scatter)[which])[0]


def change_args(trace: TraceCtx, position: int, changes: dict[int, Any]) -> None:
    bsym = trace.bound_symbols[position]
    args = tuple(changes.get(i, arg) for i, arg in enumerate(bsym.args))
    trace.bound_symbols[position] = bsym.from_bsym(args=args)


def view_of(trace: TraceCtx, weight: TensorProxy) -> BoundSymbol:
    view = new_like(trace, weight)
    with tracectx(trace):
        return prims.transpose.bind(weight, (1, 0), output=view)


def read_at_the_end(trace: TraceCtx, proxy: TensorProxy) -> None:
    late = new_like(trace, proxy)
    with tracectx(trace):
        trace.bound_symbols.insert(-1, prims.neg.bind(proxy, output=late))


#
# The mutations
#


def swap_two_gathers(trace: TraceCtx) -> None:
    a, b = positions(trace, fsdp_all_gather)[:2]
    bsyms = trace.bound_symbols
    bsyms[a], bsyms[b] = bsyms[b], bsyms[a]


def move_a_wait_below_its_consumer(trace: TraceCtx) -> None:
    wait = positions(trace, fsdp_wait_params)[0]
    consumer = first_reader(trace, wait)
    trace.bound_symbols.insert(consumer, trace.bound_symbols.pop(wait))


def drop_a_wait(trace: TraceCtx) -> None:
    del trace.bound_symbols[positions(trace, fsdp_wait_params)[0]]


def issue_a_gather_that_is_never_waited_for(trace: TraceCtx) -> None:
    gather = trace.bound_symbols[positions(trace, fsdp_all_gather)[0]]
    with tracectx(trace):
        extra = gather.from_bsym(output=fsdp_all_gather.meta(*gather.args))
    trace.bound_symbols.insert(-1, extra)


def wait_twice(trace: TraceCtx) -> None:
    wait = positions(trace, fsdp_wait_params)[0]
    trace.bound_symbols.insert(wait + 1, trace.bound_symbols[wait])


def wait_for_another_bucket(trace: TraceCtx) -> None:
    first, second = positions(trace, fsdp_wait_params)[:2]
    bsym = trace.bound_symbols[first]
    other = trace.bound_symbols[second].args[0]
    trace.bound_symbols[first] = bsym.from_bsym(args=(other, *bsym.args[1:]))


def wait_for_params_as_grads(trace: TraceCtx) -> None:
    wait = positions(trace, fsdp_wait_params)[0]
    bsym = trace.bound_symbols[wait]
    trace.bound_symbols[wait] = bsym.from_bsym(sym=fsdp_wait_grads)


def reuse_a_live_slot(trace: TraceCtx) -> None:
    first, second = positions(trace, fsdp_all_gather)[:2]
    slot = trace.bound_symbols[first].args[1]
    bsym = trace.bound_symbols[second]
    trace.bound_symbols[second] = bsym.from_bsym(args=(bsym.args[0], slot, *bsym.args[2:]))


def gradients_into_a_live_slot(trace: TraceCtx) -> None:
    reduction = positions(trace, fsdp_reduce_scatter)[0]
    live = next(i for i in positions(trace, fsdp_wait_params) if i > reduction)
    future = trace.bound_symbols[live].args[1].name
    issue = next(i for i in positions(trace, fsdp_all_gather) if trace.bound_symbols[i].output.name == future)
    assert issue < reduction < live
    slot = trace.bound_symbols[issue].args[1]
    for position in (*in_place_grads(trace, reduction), reduction):
        change_args(trace, position, {1: slot})


def read_a_parameter_after_its_gradient_is_written(trace: TraceCtx) -> None:
    slots = {trace.bound_symbols[i].args[:2]: trace.bound_symbols[i].output for i in positions(trace, fsdp_all_gather)}
    reductions = positions(trace, fsdp_reduce_scatter)
    reduction = next(i for i in reductions if trace.bound_symbols[i].args[:2] in slots)
    future = slots[trace.bound_symbols[reduction].args[:2]]
    params = next(b.output for b in trace.bound_symbols if b.sym is fsdp_wait_params and b.args[1] is future)
    grad = in_place_grads(trace, reduction)[0]
    weight = params[trace.bound_symbols[grad].args[2]]
    late = new_like(trace, weight)
    with tracectx(trace):
        trace.bound_symbols.insert(grad + 1, prims.neg.bind(weight, output=late))


def gradient_into_another_slot(trace: TraceCtx) -> None:
    grad = in_place_grad(trace)
    slots = [trace.bound_symbols[gather].args[1] for gather in positions(trace, fsdp_all_gather)]
    other = next(slot for slot in slots if slot is not trace.bound_symbols[grad].args[1])
    change_args(trace, grad, {1: other})


def gradient_at_another_index(trace: TraceCtx) -> None:
    grad = in_place_grad(trace)
    change_args(trace, grad, {2: trace.bound_symbols[grad].args[2] + 1})


def gradient_into_another_bucket(trace: TraceCtx) -> None:
    change_args(trace, in_place_grad(trace), {0: trace.bound_symbols[in_place_grad(trace, 1)].args[0]})


def gradient_without_slot(trace: TraceCtx) -> None:
    change_args(trace, in_place_grad(trace), {1: None})


def gradient_that_nothing_reduces(trace: TraceCtx) -> None:
    reduction = positions(trace, fsdp_reduce_scatter)[0]
    change_args(trace, reduction, {2 + trace.bound_symbols[in_place_grad(trace)].args[2]: None})


def gather_between_a_gradient_in_place_and_its_reduction(trace: TraceCtx) -> None:
    for reduction in positions(trace, fsdp_reduce_scatter):
        first, *_ = in_place_grads(trace, reduction)
        between = [i for i in positions(trace, fsdp_all_gather) if first < i < reduction]
        if between:
            change_args(trace, between[0], {1: trace.bound_symbols[reduction].args[1]})
            return
    raise AssertionError("there is no gather between a gradient and its reduction")


def drop_the_writer_of_a_gradient(trace: TraceCtx) -> None:
    del trace.bound_symbols[in_place_grad(trace)]


def read_a_gradient_in_place(trace: TraceCtx) -> None:
    grad = in_place_grad(trace)
    value = trace.bound_symbols[grad].output
    with tracectx(trace):
        trace.bound_symbols.insert(grad + 1, prims.neg.bind(value, output=TensorProxy(like=value)))


def gather_without_slot(trace: TraceCtx) -> None:
    gather = positions(trace, fsdp_all_gather)[0]
    bsym = trace.bound_symbols[gather]
    trace.bound_symbols[gather] = bsym.from_bsym(args=(bsym.args[0], None, *bsym.args[2:]))


def read_a_view_of_a_view_after_reuse(trace: TraceCtx) -> None:
    wait, weight = gathered_weight(trace)
    first = view_of(trace, weight)
    second = view_of(trace, first.output)
    trace.bound_symbols[wait + 1 : wait + 1] = [first, second]
    read_at_the_end(trace, second.output)


def read_a_view_out_of_a_fusion_after_reuse(trace: TraceCtx) -> None:
    wait, weight = gathered_weight(trace)
    view = view_of(trace, weight)
    fusion = Symbol("fused0", lambda w: None, is_fusion=True)
    trace.bound_symbols.insert(wait + 1, fusion.bind(weight, output=(view.output,), subsymbols=(view,)))
    read_at_the_end(trace, view.output)


def _foreign(trace: TraceCtx, weight: TensorProxy) -> BoundSymbol:
    with tracectx(trace):
        bsym = prims.neg.bind(weight, output=TensorProxy(like=weight))
    return bsym.from_bsym(args=(*bsym.args, FakeProcessGroup()))


def unknown_communication_after_a_gather(trace: TraceCtx) -> None:
    gather = positions(trace, fsdp_all_gather)[0]
    trace.bound_symbols.insert(gather + 1, _foreign(trace, trace.bound_symbols[gather].flat_proxy_args[0]))


def unknown_communication_in_a_composite(trace: TraceCtx) -> None:
    gather = positions(trace, fsdp_all_gather)[0]
    inner = _foreign(trace, trace.bound_symbols[gather].flat_proxy_args[0])
    composite = Symbol("all_reduce_and_add", lambda w: None)
    bsym = composite.bind(inner.flat_proxy_args[0], output=inner.output, subsymbols=(inner,))
    trace.bound_symbols.insert(gather + 1, bsym)


def unknown_communication_before_a_reduction(trace: TraceCtx) -> None:
    reduction = positions(trace, fsdp_reduce_scatter)[0]
    last_gather = positions(trace, fsdp_all_gather)[-1]
    reduction = next(i for i in positions(trace, fsdp_reduce_scatter) if i > last_gather + 1)
    shard = trace.bound_symbols[last_gather].flat_proxy_args[0]
    trace.bound_symbols.insert(reduction, _foreign(trace, shard))


def reduce_before_the_last_gradient(trace: TraceCtx) -> None:
    reduction = positions(trace, fsdp_reduce_scatter)[0]
    grads = set(args_of(trace.bound_symbols[reduction]))
    last = max(i for i, b in enumerate(trace.bound_symbols[:reduction]) if not grads.isdisjoint(outs_of(b)))
    trace.bound_symbols.insert(last, trace.bound_symbols.pop(reduction))


def return_a_parameter(trace: TraceCtx) -> None:
    _, weight = gathered_weight(trace, -1)
    last = return_of(trace)
    trace.bound_symbols[-1] = last.from_bsym(args=({**last.args[0], "output": weight}, *last.args[1:]))


def save_a_parameter(trace: TraceCtx) -> None:
    _, weight = gathered_weight(trace, -1)
    last = return_of(trace)
    trace.bound_symbols[-1] = last.from_bsym(args=(last.args[0], ((weight,), ())))


def miscount_issues_in_a_mark(trace: TraceCtx) -> None:
    position = next(i for i in positions(trace, fsdp_all_gather) if residency_marks(trace.bound_symbols[i]))
    bsym = trace.bound_symbols[position]
    off_by_one = {mark: number + 1 for mark, number in residency_marks(bsym).items()}
    trace.bound_symbols[position] = bsym.from_bsym(kwargs=bsym.kwargs | off_by_one)


def mark_an_overwritten_bucket_as_followed(trace: TraceCtx) -> None:
    gathers = positions(trace, fsdp_all_gather)
    bsym = trace.bound_symbols[gathers[0]]
    trace.bound_symbols[gathers[0]] = bsym.from_bsym(kwargs=bsym.kwargs | {"followed_by": len(gathers) - 1})


def mark_two_gathers_of_one_slot_as_resident(trace: TraceCtx) -> None:
    first, *_, last = positions(trace, fsdp_all_gather)
    before = sum(b.sym in (fsdp_all_gather, fsdp_reduce_scatter) for b in trace.bound_symbols[:last])
    bucket, _, *shards = trace.bound_symbols[last].args
    trace.bound_symbols[last] = trace.bound_symbols[last].from_bsym(
        args=(bucket, trace.bound_symbols[first].args[1], *shards), kwargs={"preceded_by": before}
    )


def reuse_a_shared_slot_in_a_window(trace: TraceCtx) -> None:
    position = positions(trace, fsdp_all_gather)[0]
    bsym = trace.bound_symbols[position]
    trace.bound_symbols[position] = bsym.from_bsym(kwargs=bsym.kwargs | {"window": "open"})


ALL_TRACES, FORWARD, BACKWARD = ("chain", "forward", "backward"), ("chain", "forward"), ("backward",)

_WRONG_DESTINATION = (
    r"of '\S+' at index \d+ of bucket '\S+' in slot_\d+, but bucket '\S+' reduces it in slot_\d+, index \d+"
)

# The mutation, the traces on which it is tried, and the message of the error.
MUTATIONS: list[tuple[Callable[[TraceCtx], None], tuple[str, ...], str]] = [
    (reuse_a_shared_slot_in_a_window, ALL_TRACES, r"reuses slot_\d+, which does not keep bucket '\S+' until backward"),
    (swap_two_gathers, ALL_TRACES, r"gathers bucket '\S+' after a bucket whose first consumer is later"),
    (move_a_wait_below_its_consumer, ALL_TRACES, r"reads '\w+', which nothing before it defines"),
    (drop_a_wait, ALL_TRACES, r"reads '\w+', which nothing before it defines"),
    (issue_a_gather_that_is_never_waited_for, ALL_TRACES, r"fsdp_all_gather of bucket '\S+' is never waited for"),
    (wait_twice, ALL_TRACES, r"waits a second time for '\w+' of bucket '\S+'"),
    (wait_for_another_bucket, ALL_TRACES, r"waits for '\w+', which bucket '\S+' did not issue"),
    (wait_for_params_as_grads, ALL_TRACES, r"waits for '\w+', which bucket '\S+' did not issue"),
    (reuse_a_live_slot, ALL_TRACES, r"writes slot_\d+ for bucket '\S+' while bucket '\S+' in slot_\d+ is read until"),
    (gradients_into_a_live_slot, BACKWARD, r"writes slot_\d+ for bucket '\S+' while bucket '\S+' in slot_\d+ is read"),
    (
        read_a_parameter_after_its_gradient_is_written,
        BACKWARD,
        r"writes slot_\d+ for bucket '\S+' while bucket '\S+' in slot_\d+ is read until",
    ),
    (gradient_into_another_slot, BACKWARD, _WRONG_DESTINATION),
    (gradient_at_another_index, BACKWARD, _WRONG_DESTINATION),
    (gradient_into_another_bucket, BACKWARD, _WRONG_DESTINATION),
    (gradient_without_slot, BACKWARD, r"bucket '\S+' has no slot"),
    (
        gradient_that_nothing_reduces,
        BACKWARD,
        r"the gradient of '\S+' for bucket '\S+', which never reduces it",
    ),
    (
        gather_between_a_gradient_in_place_and_its_reduction,
        BACKWARD,
        r"writes slot_\d+ for bucket '\S+' while bucket '\S+' in slot_\d+ is read until",
    ),
    (drop_the_writer_of_a_gradient, BACKWARD, r"reads '\w+', which nothing before it defines"),
    (read_a_gradient_in_place, BACKWARD, r"reads '\w+', a gradient in the slot of bucket '\S+' for its reduction"),
    (gather_without_slot, ALL_TRACES, r"bucket '\S+' has no slot"),
    (read_a_view_of_a_view_after_reuse, ALL_TRACES, r"writes slot_\d+ for bucket '\S+' while bucket '\S+'"),
    (read_a_view_out_of_a_fusion_after_reuse, ALL_TRACES, r"writes slot_\d+ for bucket '\S+' while bucket '\S+'"),
    (unknown_communication_after_a_gather, ALL_TRACES, r"communicates, but a collective of bucket '\S+' was moved"),
    (unknown_communication_in_a_composite, ALL_TRACES, r"communicates, but a collective of bucket '\S+' was moved"),
    (unknown_communication_before_a_reduction, BACKWARD, r"communicates, but a collective of bucket '\S+' was moved"),
    (reduce_before_the_last_gradient, BACKWARD, r"reads '\w+', which nothing before it defines"),
    (return_a_parameter, FORWARD, r"returns '\w+', which is stored in slot_\d+"),
    (
        miscount_issues_in_a_mark,
        ("forward", "backward"),
        r"states (followed|preceded)_by=\d+ for bucket '\S+', but the trace has \d+",
    ),
    (
        mark_an_overwritten_bucket_as_followed,
        ("forward",),
        r"leaves bucket '\S+' in slot_\d+, which a later collective writes",
    ),
    (
        mark_two_gathers_of_one_slot_as_resident,
        BACKWARD,
        r"writes slot_\d+ for bucket '\S+' while bucket '\S+' in slot_\d+ is read",
    ),
    (save_a_parameter, FORWARD, r"saves '\w+' for backward, which is stored in slot_\d+ of bucket '\S+'"),
]


@pytest.mark.parametrize("name", TRACES)
def test_correct_traces_pass(name: str) -> None:
    verify(correct_trace(name))


@pytest.mark.parametrize(
    ("mutate", "name", "message"),
    [
        pytest.param(mutate, name, message, id=f"{mutate.__name__}-{name}")
        for mutate, names, message in MUTATIONS
        for name in names
    ],
)
def test_verify_refuses_a_mutated_trace(mutate: Callable[[TraceCtx], None], name: str, message: str) -> None:
    trace = correct_trace(name)
    mutate(trace)
    with pytest.raises(VerificationError, match=message):
        verify(trace)


def test_backward_may_expect_only_buckets_that_its_forward_left() -> None:
    verify(correct_trace("backward"), forward=correct_trace("forward"))
    forward = correct_trace("forward")
    for position in positions(forward, fsdp_all_gather):
        bsym = forward.bound_symbols[position]
        forward.bound_symbols[position] = bsym.from_bsym(kwargs=bsym.kwargs | {"followed_by": None})
    with pytest.raises(VerificationError, match=r"expects bucket '\S+' in slot_\d+, where forward did not leave it"):
        verify(correct_trace("backward"), forward=forward)


def test_a_pinned_schedule_must_keep_the_limit_of_gathers_in_flight() -> None:
    pinned = _compiled().schedule
    assert pinned.forward.gathers_in_flight == 3
    with pytest.raises(VerificationError, match=r"gathers bucket '.*max_gathers_in_flight=2"):
        testing.compile_on_fake_ranks(
            lambda: (Blocks(), (torch.ones(2, 4),)), 2, schedule=pinned, max_gathers_in_flight=2
        )


#
# Kept buckets (ZeRO-2): gradients in the place of parameters that forward has saved
#


@cache
def _compiled_kept() -> testing.CompiledTraces:
    [compiled] = testing.compile_on_fake_ranks(lambda: (Blocks(), (torch.ones(2, 4),)), 2, sharding_strategy="zero2")
    return compiled


def saved_weight(trace: TraceCtx, which: int) -> tuple[int, int, TensorProxy]:
    """Return the positions of the write of a weight's gradient and of the weight's last read, and the weight."""
    write = [i for i, b in enumerate(trace.bound_symbols) if b.sym.name in GRAD_WRITERS and b.args[2] == 0][which]
    wait = next(
        b
        for b in _compiled_kept().forward.bound_symbols
        if b.sym is fsdp_wait_params and b.args[0] is trace.bound_symbols[write].args[0]
    )
    weight = wait.output[0]
    read = max(i for i, b in enumerate(trace.bound_symbols) if weight.name in args_of(b))
    assert 0 < read < write
    return write, read, weight


def drop_a_guard(trace: TraceCtx) -> None:
    del trace.bound_symbols[positions(trace, fsdp_params_unchanged)[1]]


def guard_after_the_first_read(trace: TraceCtx) -> None:
    write, read, _ = saved_weight(trace, 0)
    bucket = trace.bound_symbols[write].args[0]
    guard = next(i for i in positions(trace, fsdp_params_unchanged) if trace.bound_symbols[i].args[0] is bucket)
    trace.bound_symbols.insert(read, trace.bound_symbols.pop(guard))


def guard_again_after_the_gradients(trace: TraceCtx) -> None:
    write, _, _ = saved_weight(trace, 0)
    bucket = trace.bound_symbols[write].args[0]
    guards = [trace.bound_symbols[i] for i in positions(trace, fsdp_params_unchanged)]
    trace.bound_symbols.insert(write + 1, next(g for g in guards if g.args[0] is bucket))


def read_a_saved_parameter_after_its_gradient_is_written(trace: TraceCtx) -> None:
    write, _, weight = saved_weight(trace, 1)
    late = new_like(trace, weight)
    with tracectx(trace):
        trace.bound_symbols.insert(write + 1, prims.neg.bind(weight, output=late))


def read_a_view_of_a_saved_parameter_at_the_end(trace: TraceCtx) -> None:
    _, read, weight = saved_weight(trace, 1)
    view = view_of(trace, weight)
    trace.bound_symbols.insert(read, view)
    read_at_the_end(trace, view.output)


def gradients_into_the_private_slot_of_another_bucket(trace: TraceCtx) -> None:
    first, second = positions(trace, fsdp_reduce_scatter)[:2]
    slot = trace.bound_symbols[second].args[1]
    for position in [*in_place_grads(trace, first), first]:
        change_args(trace, position, {1: slot})


def return_a_saved_parameter(trace: TraceCtx) -> None:
    _, _, weight = saved_weight(trace, 1)
    returned = return_of(trace)
    trace.bound_symbols[-1] = returned.from_bsym(args=((*returned.args[0], weight),))


_OVERWRITTEN = r"writes own_\S+ for bucket '\S+' while bucket '\S+' in own_\S+ is read until"


def test_correct_gradients_over_kept_parameters_pass() -> None:
    backward = own_copy(_compiled_kept().backward)
    reductions = [backward.bound_symbols[i] for i in positions(backward, fsdp_reduce_scatter)]
    assert reductions
    assert all(r.args[1] is r.args[0].private_slot for r in reductions)
    verify(backward, forward=_compiled_kept().forward)
    with pytest.raises(VerificationError, match=r"writes gradients into own_\S+ without a guard"):
        verify(backward)  # nothing is known about what forward has saved


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (drop_a_guard, r"reads '\w+' in own_\S+ before the guard of bucket"),
        (guard_after_the_first_read, r"reads '\w+' in own_\S+ before the guard of bucket"),
        (guard_again_after_the_gradients, r"may gather bucket '\S+' again where its gradients are"),
        (read_a_saved_parameter_after_its_gradient_is_written, _OVERWRITTEN),
        (read_a_view_of_a_saved_parameter_at_the_end, _OVERWRITTEN),
        (gradients_into_the_private_slot_of_another_bucket, _OVERWRITTEN),
        (return_a_saved_parameter, _OVERWRITTEN),
    ],
)
def test_verify_refuses_wrong_gradients_over_kept_parameters(mutate: Callable[[TraceCtx], None], message: str) -> None:
    backward = own_copy(_compiled_kept().backward)
    mutate(backward)
    with pytest.raises(VerificationError, match=message):
        verify(backward, forward=_compiled_kept().forward)


def test_verify_follows_a_view_that_forward_has_saved() -> None:
    compiled = _compiled_kept()
    forward, backward = own_copy(compiled.forward), own_copy(compiled.backward)
    weight = saved_weight(backward, 1)[2]
    view = view_of(forward, weight)
    forward.bound_symbols.insert(
        first_reader(
            forward,
            next(
                i
                for i, b in enumerate(forward.bound_symbols)
                if b.sym is fsdp_wait_params and weight.name in outs_of(b)
            ),
        ),
        view,
    )
    bsyms = backward.bound_symbols
    unpack = next(i for i, b in enumerate(bsyms) if weight.name in outs_of(b))
    bsyms[unpack] = bsyms[unpack].from_bsym(output=[*bsyms[unpack].output, view.output])
    verify(backward, forward=forward)
    read_at_the_end(backward, view.output)
    with pytest.raises(VerificationError, match=_OVERWRITTEN):
        verify(backward, forward=forward)
