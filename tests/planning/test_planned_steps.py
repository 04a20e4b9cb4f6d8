"""Plans of attention, of accumulation windows, and of shards on the host."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.extras.planning.dry_run import fake_rank
from thunder_fsdp_sched.planning import (
    AnalyticCost,
    DryRun,
    cluster,
    compile_as_rank,
    dry_run_step,
    optimizer_state_bytes,
    simulate,
)

import pytest
import thunder
import torch
from coded import coded
from internals import effects
from models import Stack, modeled
from profiles import LONG_ONLY
from test_dry_run import make_on_meta
from torch.distributed.fsdp import CPUOffloadPolicy


@modeled(qkv=partial(torch.nn.Linear, 32, 96))
def Attention(self: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    heads = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
    return torch.nn.functional.scaled_dot_product_attention(*heads, mask, is_causal=mask is None).sum()


@pytest.mark.parametrize(
    ("cluster", "dtype", "masked", "kernel"),
    [
        ("h100-sxm", torch.bfloat16, False, "sdpafx_grad_forward"),
        pytest.param("h100-sxm", torch.float32, True, "sdpaex_grad_forward", marks=LONG_ONLY),
        ("cpu-2core", torch.bfloat16, False, "torch_scaled_dot_product_flash_attention_for_cpu"),
        pytest.param("h100-sxm", torch.float64, False, None, marks=LONG_ONLY),
    ],
)
def test_attention_is_planned_with_the_kernels_of_the_cluster(cluster, dtype, masked, kernel):
    length = 64

    def make() -> Any:
        with torch.device("meta"):
            mask = torch.zeros(2, 1, length, length, dtype=dtype) if masked else None
            return Attention().to(dtype), (torch.zeros(2, length, 32, dtype=dtype), *([mask] if masked else []))

    step = dry_run_step(make, world_size=2, on=cluster)
    scores = 2 * 4 * length * length * dtype.itemsize
    called = [bsym.sym.name for bsym in step.compiled.forward.bound_symbols]
    assert any(name.startswith(kernel) for name in called) if kernel else not any("sdpa" in name for name in called)
    saved = [tensor.nbytes for tensor in step.compiled.memory.tensors if tensor.kind == "saved for backward"]
    assert (max(saved) >= scores) is (kernel is None)


#
# Accumulation windows: their micro-batches are those that training under ``no_sync`` compiles
#


SLOW_LINKS = {"world_size": 16, "on": "cpu-2core"}


def compiled_as_in_training(options: dict[str, Any]) -> Any:
    """Return the transform after a micro-batch under ``no_sync`` and the last one were compiled, without a plan."""
    with fake_rank(0, 16, on=cluster("cpu-2core")):
        transform = fsdp(cluster="cpu-2core", **options)
        module, args = make_on_meta()
        jitted = thunder.jit(module, transforms=[transform])
        with jitted.no_sync():
            transform.sharded.compile(jitted, args, {})
        transform.sharded.compile(jitted, args, {})
    return transform


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sharding_strategy": "zero2"}, marks=LONG_ONLY),  # the fixture `zero2` is such a window
        {"sharding_strategy": "zero3", "accumulate": "sharded", "prefetch": 2},
        {"sharding_strategy": "zero3", "max_memory": "200kB"},
    ],
    ids=["zero2", "sharded", "max_memory"],
)
def test_a_planned_window_is_what_training_compiles(options: dict[str, Any]) -> None:
    step = dry_run_step(make_on_meta, micro_batches=4, **SLOW_LINKS, **options)
    transform = compiled_as_in_training(options)
    for ours, theirs in zip(step.transform.compiled, transform.compiled, strict=True):
        assert ours.no_sync is theirs.no_sync
        assert ours.call == theirs.call
        assert [op.bucket for op in ours.schedule.forward] == [op.bucket for op in theirs.schedule.forward]
        assert str(ours.schedule) == str(theirs.schedule)
        assert ours.memory.totals == theirs.memory.totals
    earlier, last = transform.compiled
    cost = AnalyticCost(step.cluster)
    seconds = [
        simulate(one.forward, one.backward, cost, in_window=in_window).step_seconds
        for one, in_window in ((earlier, False), (earlier, True), (earlier, True), (last, True))
    ]
    assert step.seconds == pytest.approx(sum(seconds), rel=1e-12)
    assert step.memory.peak.nbytes == max(
        earlier.predict_memory(device="cpu", accumulated=True, others=[last]).peak.nbytes,
        last.predict_memory(device="cpu", accumulated=[earlier], others=[earlier]).peak.nbytes,
    )


@pytest.fixture(scope="module")
def zero2() -> DryRun:
    return dry_run_step(make_on_meta, micro_batches=3, sharding_strategy="zero2", **SLOW_LINKS)


def test_zero2_communicates_once_in_a_planned_window(zero2: DryRun) -> None:
    first, further, last = (row.timeline for row in zero2.rows)
    bytes_of = [{i.bucket for i in timeline.intervals if i.bucket} for timeline in (first, further, last)]
    assert bytes_of[0] and not bytes_of[1] and bytes_of[2]
    assert further.step_seconds < first.step_seconds
    alone = dry_run_step(make_on_meta, sharding_strategy="zero2", **SLOW_LINKS)
    assert len(alone.rows) == 1 and zero2.seconds < 3 * alone.seconds
    longer = dataclasses.replace(zero2, micro_batches=5)
    assert longer.seconds == pytest.approx(zero2.seconds + 2 * further.step_seconds)


@pytest.mark.parametrize(
    ("numbers", "error", "refusal"),
    [
        ({"micro_batches": 0}, ValueError, coded("option.too-small", "micro_batches", "0")),
        ({"micro_batches": 1.5}, TypeError, coded("option.wrong-type", "micro_batches", "1.5")),
        ({"world_size": 0}, ValueError, coded("option.too-small", "world_size", "0")),
        ({"world_size": "2"}, TypeError, coded("option.wrong-type", "world_size", "'2'")),
        ({"replicas": 0}, ValueError, coded("option.too-small", "replicas", "0")),
        ({"replicas": 1.0}, TypeError, coded("option.wrong-type", "replicas", "1.0")),
    ],
)
def test_numbers_of_a_step_are_whole_and_at_least_one(numbers: Any, error: type[Exception], refusal: coded) -> None:
    with pytest.raises(error, check=refusal):
        dry_run_step(make_on_meta, **{**SLOW_LINKS, **numbers})


@pytest.mark.parametrize(
    ("rank", "world_size", "refusal"),
    [
        (2, 2, coded("plan.rank-beyond-world-size", "2")),
        (-1, 2, coded("option.too-small", "rank", "-1")),
        (0, 0, coded("option.too-small", "world_size", "0")),
    ],
)
def test_only_a_rank_that_exists_compiles(rank: int, world_size: int, refusal: coded) -> None:
    with pytest.raises(ValueError, check=refusal):
        compile_as_rank(make_on_meta, fsdp(), rank=rank, world_size=world_size)


#
# Shards on the host
#


@functools.cache
def planned(*, offloads: bool = False, on: Any = "h100-sxm") -> Any:
    def make() -> Any:
        with torch.device("meta"):
            return Stack(3, 32), (torch.randn(64, 32),)

    return dry_run_step(make, world_size=8, on=on, offload_policy=CPUOffloadPolicy() if offloads else None)


def test_offloaded_shards_and_their_optimizer_state_are_not_in_the_memory_of_the_device():
    offloaded = planned(offloads=True)
    buckets = offloaded.compiled.buckets
    assert offloaded.memory.fixed["shards"] == optimizer_state_bytes(buckets) == optimizer_state_bytes(buckets, 7) == 0
    assert optimizer_state_bytes(planned().compiled.buckets) == 2 * sum(bucket.shard.nbytes for bucket in buckets)

    # A module on the CPU has the memory of one on the meta device, although its shards are on the device of its inputs.
    def on_cpu() -> Any:
        return Stack(3, 32), (torch.randn(64, 32),)

    same = dry_run_step(on_cpu, world_size=8, on=cluster("h100-sxm"), offload_policy=CPUOffloadPolicy())
    assert same.memory.totals == offloaded.memory.totals and same.memory.fixed == offloaded.memory.fixed


def _gathers(step: DryRun) -> list[Any]:
    return [effects(b).issues for b in step.compiled.forward.bound_symbols if b.sym.name == "fsdp_all_gather"]


def test_a_plan_with_offloaded_shards_pays_for_copies_to_and_from_the_host():
    spec = cluster("h100-sxm")
    step, offloaded = planned(), planned(offloads=True)
    cost = AnalyticCost(spec)
    for here, there in zip(*map(_gathers, (step, offloaded)), strict=True):
        longer = cost.collective_seconds(there) - cost.collective_seconds(here)
        assert longer == pytest.approx(there.bucket.shard.nbytes / spec.host_bytes_per_second)
    slow = dataclasses.replace(spec, host_bandwidth=1e6)
    copied = 3 * sum(bucket.shard.nbytes for bucket in offloaded.compiled.buckets)  # gathered twice, and the gradients
    more = planned.__wrapped__(offloads=True, on=slow).after.step_seconds - offloaded.after.step_seconds
    assert 0.5 * copied / slow.host_bytes_per_second < more < copied / slow.host_bytes_per_second
    with pytest.raises(ValueError, check=coded("plan.cluster-lacks-host-bandwidth")):
        planned.__wrapped__(offloads=True, on=dataclasses.replace(spec, host_bandwidth=0))
