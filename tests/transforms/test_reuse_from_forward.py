"""Backward reuses buckets that forward left in their slots instead of gathering them again, if they are still resident."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from thunder_fsdp_sched.ir.slots import peak_live_bytes

import pytest
import torch
from internals import assign_slots, effects, fsdp_all_gather
from models import GPT, Layer, Stack, compile_model
from ranks import on_ranks
from scenario import Run, do
from step_counter import StepCounter
from thunder.core.trace import TraceCtx, from_trace
from torch.distributed.fsdp import MixedPrecisionPolicy

WIDTH = 16


class CallPattern(NamedTuple):
    """The forwards and backwards between two updates of the parameters."""

    actions: Sequence[Callable[[Run], Any]]
    forwards: int
    backwards: int
    reuses: int
    """Backwards that find buckets of their own forward. A forward without gradients also runs the compiled trace."""


_step = do.micro_batch(1, no_sync=False)
_another_shape = do.micro_batch(1, batch=5, no_sync=False)  # in the first step this compiles and may grow the arena
PATTERNS = {
    "usual": CallPattern([_step], 1, 1, 1),
    "evaluation in between": CallPattern([do.forward(), do.forward(1, grad=False), do.backward()], 2, 1, 0),
    "last in first out": CallPattern([do.forward(0), do.forward(1), do.backward(), do.backward()], 2, 2, 1),
    "first in first out": CallPattern([do.forward(0), do.forward(1), do.backward(0), do.backward(0)], 2, 2, 0),
    "another shape in between": CallPattern([do.forward(), _another_shape, do.backward()], 2, 2, 1),
    "never goes backward": CallPattern([do.forward(), _step, lambda run: run.pending.clear()], 2, 1, 1),
}


def _gathers(trace: TraceCtx) -> list[Any]:
    return [b for b in trace.bound_symbols if b.sym is fsdp_all_gather]


@on_ranks()
def test_backward_gathers_only_buckets_that_are_not_resident() -> None:
    run = Run(Stack(4, WIDTH).double(), transport="flat")
    for pattern in PATTERNS.values():

        def act(actions: Sequence[Callable[[Run], Any]] = pattern.actions) -> None:
            for action in actions:
                action(run)

        act()  # compiles, for which ranks exchange digests
        run.step()
        compiled = run.transform.compiled[0]
        in_forward, in_backward = _gathers(compiled.forward), _gathers(compiled.backward)
        resident = sum(effects(b).issues.resident for b in in_backward)
        assert 0 < resident < len(in_backward)
        everything = pattern.forwards * len(in_forward) + pattern.backwards * len(in_backward)
        for _ in range(2):
            with StepCounter(run.model.parameters()) as counter, counter.phase("step"):
                act()
            issued = sum(c.kind == "all_gather" for c in counter.counts().collectives)
            assert issued == everything - pattern.reuses * resident
            run.step()  # compares gradients and parameters with the unsharded model's


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_resident_buckets_hardly_increase_the_arena(prefetch: int) -> None:
    torch.manual_seed(0)
    compiled = compile_model(lambda: Stack(6, 256).double(), 8, prefetch=prefetch)
    forward, backward = compiled.forward, compiled.backward
    assert forward is not None and backward is not None
    resident = [b.args[0].spec.unsharded_bytes for b in _gathers(backward) if effects(b).issues.resident]
    block = max(b.args[0].spec.unsharded_bytes for b in _gathers(backward))
    assert effects(_gathers(backward)[0]).issues.resident, (
        "the first gather of backward, which no compute could hide, must be resident"
    )
    assert sum(resident) >= prefetch * block
    for trace, growth in ((forward, 1.0), (backward, 33 / 32)):
        unmarked = assign_slots(_without_marks(trace))
        assert _arena_bytes(trace) <= growth * _arena_bytes(unmarked)


def test_a_large_head_whose_gradients_are_wider_leaves_room_for_them_beside_resident_buckets() -> None:
    """Its parameters are at the top of forward's arena, so that its gradients use that place and what backward adds."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    compiled = compile_model(lambda: GPT(width=64, vocab=1500, blocks=4, block=Layer), 8, mp_policy=policy)
    forward, backward = compiled.forward, compiled.backward
    assert forward is not None and backward is not None
    head = _gathers(forward)[-1].args[1]
    assert head.end == _arena_bytes(forward)
    assert sum(effects(b).issues.resident for b in _gathers(backward)) > 3  # also pieces of the last block, and another
    assert _arena_bytes(backward) == peak_live_bytes(backward)


def _arena_bytes(trace: TraceCtx) -> int:
    return max(b.args[1].end for b in trace.bound_symbols if b.sym.name in ("fsdp_all_gather", "fsdp_reduce_scatter"))


def _without_marks(trace: TraceCtx) -> TraceCtx:
    """Return the trace without the marks that tie backward's gathers to forward's."""
    unmarked = from_trace(trace)
    for bsym in trace.bound_symbols:
        if bsym.sym is fsdp_all_gather:
            bsym = bsym.from_bsym(kwargs=bsym.kwargs | {"resident": None})
        unmarked.bound_symbols.append(bsym)
    returned = trace.bound_symbols[-1]
    if isinstance(returned.args[0], dict):  # forward's, with what it saves
        unmarked.bound_symbols[-1] = returned.from_bsym(args=(returned.args[0]["output"],))
    return unmarked
