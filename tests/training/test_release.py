"""``release``: the memory of slots is freed, and nothing changes in the numbers."""

from __future__ import annotations

from typing import Any

import thunder_fsdp_sched  # before thunder
from thunder_fsdp_sched import testing
from thunder_fsdp_sched.ir.inspection import args_of
from thunder_fsdp_sched.ir.symbols import fsdp_release, fsdp_wait_params
from thunder_fsdp_sched.options import check_options
from thunder_fsdp_sched.runtime import ops
from thunder_fsdp_sched.transforms import VerificationError, verify

import pytest
import torch
from extending import extended
from models import GPT, Layer, Stack
from profiles import LONG
from ranks import Ranks
from reference import Twins, loss_of
from thunder.core.prims import PrimIDs
from thunder.core.trace import TraceCtx, from_trace

each_release = pytest.mark.parametrize("release", ["step", "bucket"])


def allocated(twins: Twins) -> set[str]:
    """Return the slots of the compiled traces whose memory is allocated."""
    slots = {
        arg
        for compiled in twins.transform.compiled
        for trace in (compiled.forward, compiled.backward)
        if trace is not None
        for bsym in trace.bound_symbols
        if bsym.sym.name in ("fsdp_all_gather", "fsdp_reduce_scatter")
        for arg in bsym.args[1:2]
    }
    return {str(slot) for slot in slots if slot.arena._memory is not None}


class _Failure(Exception):
    pass


def _train(rank: int, world_size: int, release: str, strategies: tuple[str, ...]) -> None:
    for strategy in strategies:
        options: dict[str, Any] = {"sharding_strategy": strategy, "release": release}
        if world_size == 2 and strategy == "zero3":  # more ranks add up in another order
            model = GPT(blocks=1, block=Layer)
            twins = Twins(rank, world_size, model, tolerance=0, jit_reference=True, **options)
            twins.use(lambda params: torch.optim.AdamW(params, lr=1e-2))
            for step in range(3):
                twins.backward(step)
                assert not allocated(twins)
                twins.update()

        twins = Twins(rank, world_size, Stack(2).double(), **options)
        with twins.sharded.no_sync():
            twins.backward(0)
        assert not allocated(twins)
        twins.backward(1)
        twins.update()

        losses = twins.forward(2)
        is_kept = strategy == "zero2"
        assert bool(allocated(twins)) is (is_kept or release == "step")
        with torch.no_grad():  # an evaluation between forward and backward
            twins.forward(3)
        assert bool(allocated(twins)) is is_kept
        for loss in losses:
            loss.backward()
        twins.update()

        first, second = twins.forward(4), twins.forward(5)
        if is_kept:
            second[0].backward()
            with pytest.raises(RuntimeError, match=r"release: the memory of bucket '\S+', which this backward reads"):
                first[0].backward()
            twins.sharded.zero_grad()
        else:
            for loss in (*first, *second):
                loss.backward()
            twins.update()
        _fail_in_backward(twins)
        twins.train(steps=2)
        assert not allocated(twins)


def _fail_in_backward(twins: Twins) -> None:
    real, calls = ops._grad_view, 0

    def fail_once(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise _Failure
        return real(*args)

    ours = loss_of(twins.sharded(*twins.inputs(6)))
    ops._grad_view = fail_once
    try:
        with pytest.raises(_Failure):
            ours.backward()
    finally:
        ops._grad_view = real
    twins.sharded.zero_grad()


@each_release
def test_training_gives_the_same_bits_and_frees_memory(ranks: Ranks, release: str) -> None:
    ranks.run(_train, release, ("zero2", "zero3"))


def _steps_extended(rank: int, world_size: int, strategy: str, extends: bool, no_sync: bool) -> list[torch.Tensor]:
    """Train with or without an extension, and return the parameters."""
    torch.manual_seed(0)
    twins = Twins(rank, world_size, Stack(2).double(), sharding_strategy=strategy, transport="all_to_all")
    if extends:
        extended(twins.transform, no_sync=no_sync)
    for step in range(3):
        if step == 1:
            with twins.sharded.no_sync():
                twins.backward(10)
        twins.backward(step)
        assert not any(slot.startswith("more_") for slot in allocated(twins))
        twins.update()
    first, second = twins.forward(4), twins.forward(5)
    for loss in (*second, *first):
        loss.backward()
    twins.update()
    _fail_in_backward(twins)
    twins.train(steps=2)
    used = {str(s) for c in twins.transform.compiled for b in c.backward.bound_symbols for s in b.args[1:2]}
    assert any(slot.startswith("more_slot_") for slot in used) is (extends and strategy == "zero3")
    return [param.detach().to_local().clone() for param in twins.sharded.parameters()]


def _train_extended(rank: int, world_size: int, choices_of: dict[str, tuple[bool, ...]]) -> None:
    for strategy, choices in choices_of.items():
        plain = _steps_extended(rank, world_size, strategy, extends=False, no_sync=False)
        for no_sync in choices:
            ours = _steps_extended(rank, world_size, strategy, extends=True, no_sync=no_sync)
            assert len(plain) == len(ours) > 0 and all(map(torch.equal, plain, ours))


def test_training_with_an_extension_gives_the_same_bits(ranks: Ranks) -> None:
    ranks.run(_train_extended, {"zero2": (True,), "zero3": (False, True) if LONG else (False,)})


def test_training_on_four_ranks_frees_each_bucket(four_ranks: Ranks) -> None:
    four_ranks.run(_train, "bucket", ("zero3",))


#
# In the trace
#


def compiled(**options: Any) -> testing.CompiledTraces:
    model = Stack(3).double()
    [traces] = testing.compile_on_fake_ranks(
        lambda: (model, model.inputs(torch.Generator().manual_seed(0))), 2, **options
    )
    return traces


def without_dels(trace: TraceCtx) -> TraceCtx:
    own = from_trace(trace)
    own.bound_symbols = [b for b in trace.bound_symbols if b.sym.id is not PrimIDs.DEL]
    return own


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_predicted_peak_is_lower_if_each_bucket_is_freed(strategy: str) -> None:
    never, bucket = (compiled(sharding_strategy=strategy, release=when) for when in ("never", "bucket"))
    assert bucket.memory.peak.nbytes <= never.memory.peak.nbytes
    assert never.memory.bytes_at(len(never.memory.statements) - 1)["unsharded buckets"] > 0
    assert bucket.memory.bytes_at(len(bucket.memory.statements) - 1)["unsharded buckets"] == 0


def _move(trace: TraceCtx, position: int, to: int) -> None:
    trace.bound_symbols.insert(to, trace.bound_symbols.pop(position))


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_verify_refuses_to_free_what_is_still_used(strategy: str) -> None:
    traces = compiled(sharding_strategy=strategy, release="bucket")
    backward = without_dels(traces.backward)
    verify(backward, forward=traces.forward)
    bsyms = backward.bound_symbols
    release = next(
        i
        for i, b in enumerate(bsyms)
        if b.sym is fsdp_release
        and any(r.sym.name == "fsdp_reduce_scatter" and r.args[1] is b.args[0] for r in bsyms[:i])
    )
    slot = bsyms[release].args[0]
    its = next(i for i, b in enumerate(bsyms) if b.sym.name == "fsdp_reduce_scatter" and b.args[1] is slot)
    _move(backward, release, its + 1)
    with pytest.raises(VerificationError, match=r"frees \S+ before the wait for bucket"):
        verify(backward, forward=traces.forward)
    _move(backward, its + 1, its)
    with pytest.raises(VerificationError, match=r"frees \S+, whose gradients are yet to be reduced"):
        verify(backward, forward=traces.forward)


def test_verify_refuses_to_free_parameters_before_their_last_read() -> None:
    forward = without_dels(compiled(release="bucket").forward)
    bsyms = forward.bound_symbols
    wait = next(i for i, b in enumerate(bsyms) if b.sym is fsdp_wait_params)
    params = {p.name for p in bsyms[wait].output}
    read = max(i for i, b in enumerate(bsyms) if params.intersection(args_of(b)))
    release = next(i for i, b in enumerate(bsyms) if i > read and b.sym is fsdp_release)
    _move(forward, release, wait + 1)
    with pytest.raises(VerificationError, match=r"frees \S+ of bucket '\S+', which is read until bound symbol"):
        verify(forward)


def test_verify_refuses_to_free_a_kept_bucket_in_forward() -> None:
    traces = compiled(sharding_strategy="zero2", release="bucket")
    forward = without_dels(traces.forward)
    release = next(b for b in traces.backward.bound_symbols if b.sym is fsdp_release)
    forward.bound_symbols.insert(-1, release)
    with pytest.raises(VerificationError, match=r"frees own_\S+, which backward reads"):
        verify(forward)


def test_release_is_checked() -> None:
    given = dict(thunder_fsdp_sched.fsdp.__kwdefaults__)
    with pytest.raises(ValueError, match="release: expected 'never', 'step' or 'bucket', got 'now'"):
        check_options(**(given | {"release": "now"}))
    for limit in ("max_memory", "max_unsharded_bytes"):
        with pytest.raises(ValueError, match=f"{limit}: cannot be combined with release='bucket'"):
            check_options(**(given | {"release": "bucket", limit: "1GiB"}))
