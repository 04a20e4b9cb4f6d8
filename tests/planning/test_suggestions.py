"""Suggestions for a step that does not fit: each promises the memory and the time of a step compiled with the change."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from thunder_fsdp_sched import CommPolicy
from thunder_fsdp_sched.extras.planning.clusters import ClusterSpec, cluster
from thunder_fsdp_sched.extras.planning.cost import AnalyticCost
from thunder_fsdp_sched.extras.planning.dry_run import dry_run_step, replan
from thunder_fsdp_sched.extras.planning.fit import optimizer_state_bytes
from thunder_fsdp_sched.extras.planning.suggestions import Suggestion, suggest

import pytest
import torch
from internals import gather_of
from models import Stack
from profiles import LONG
from torch.distributed.fsdp import CPUOffloadPolicy


def make(samples: int = 64) -> Any:
    with torch.device("meta"):
        return Stack(3, 32), (torch.randn(samples, 32),)


def device(nbytes: int) -> ClusterSpec:
    return dataclasses.replace(cluster("h100-sxm"), name="tiny", memory=nbytes)


def plan(nbytes: int, **options: Any) -> Any:
    return dry_run_step(make, world_size=8, on=device(nbytes), **options)


@functools.cache
def plan_that_fits(*, offloads: bool = False) -> Any:
    return plan(10**9, offload_policy=CPUOffloadPolicy() if offloads else None)


def compile_with(changes: tuple[str, ...], nbytes: int, **options: Any) -> Any:
    """Compile a step anew with the changes as a user would write them."""
    arguments: dict[str, Any] = {"world_size": 8, **options}
    inputs = make
    for change in changes:
        if change == "half the batch (32 of 64 samples a rank)":
            inputs = lambda: make(32)  # noqa: E731
        else:
            arguments |= eval(
                f"dict({change})", {**vars(torch.distributed.fsdp), "torch": torch, "CommPolicy": CommPolicy}
            )
    return dry_run_step(inputs, on=device(nbytes), **arguments)


def check_promise(suggestion: Suggestion, nbytes: int, **options: Any) -> None:
    step = compile_with(suggestion.changes, nbytes, **options)
    memory = step.memory.with_optimizer_state(optimizer_state_bytes(step.compiled.buckets))
    assert suggestion.peak_bytes == memory.peak.nbytes, suggestion
    assert suggestion.step_seconds == step.after.step_seconds, suggestion
    assert suggestion.fits is (memory.peak.nbytes <= nbytes)


def check_promises(suggestions: Sequence[Suggestion], nbytes: int, **options: Any) -> None:
    """Check the first suggestion of every second set of options, or all with ``-m long``."""
    first = {frozenset(change.partition("=")[0] for change in s.changes): s for s in reversed(suggestions)}
    for suggestion in suggestions if LONG else list(first.values())[::2]:
        check_promise(suggestion, nbytes, **options)


def test_every_suggestion_has_the_memory_and_the_time_of_a_step_compiled_with_it():
    nbytes = 200_000
    step = plan(nbytes, sharding_strategy="zero2")
    said: list[str] = []
    found = suggest(step, headroom=0, progress=said.append)
    assert not found.plan.fits and found.plan.step_seconds == step.after.step_seconds
    alone = [s for s in found.ranked if len(s.changes) == 1]
    kinds = {s.changes[0].partition("=")[0] for s in alone}
    assert kinds >= {"sharding_strategy", "prefetch", "world_size", "max_memory", "offload_policy"}, kinds
    assert [s for s in found.ranked if s.fits], str(found)
    check_promises(found.ranked, nbytes, sharding_strategy="zero2")
    for suggestion in found.ranked:
        assert suggestion.extra_seconds == suggestion.step_seconds - step.after.step_seconds
    keys = [(not s.fits, s.seconds_per_sample if s.fits else s.peak_bytes) for s in found.ranked]
    assert keys == sorted(keys)
    assert {s.changes[-1].partition("=")[0] for s in found.ranked if s.traced} == {
        "half the batch (32 of 64 samples a rank)",
        "mp_policy",
    }
    assert found.dry_runs == 2 == sum(line.startswith("dry run") for line in said)
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("ms a sample") == len(found.ranked)


def test_offloaded_shards_and_their_optimizer_state_are_not_in_the_memory_of_the_device():
    offloaded = plan_that_fits(offloads=True)
    buckets = offloaded.compiled.buckets
    assert offloaded.memory.fixed["shards"] == optimizer_state_bytes(buckets) == optimizer_state_bytes(buckets, 7) == 0
    assert optimizer_state_bytes(plan_that_fits().compiled.buckets) == 2 * sum(
        bucket.shard.nbytes for bucket in buckets
    )

    # A module on the CPU has the memory of one on the meta device, although its shards are on the device of its inputs.
    def on_cpu() -> Any:
        return Stack(3, 32), (torch.randn(64, 32),)

    same = dry_run_step(on_cpu, world_size=8, on=device(10**9), offload_policy=CPUOffloadPolicy())
    assert same.memory.totals == offloaded.memory.totals and same.memory.fixed == offloaded.memory.fixed


def test_a_plan_with_offloaded_shards_pays_for_copies_to_and_from_the_host():
    spec = device(10**9)
    step, offloaded = plan_that_fits(), plan_that_fits(offloads=True)
    cost = AnalyticCost(spec)
    for here, there in zip(step.compiled.buckets, offloaded.compiled.buckets, strict=True):
        gathers = [cost.collective_seconds(gather_of(bucket)) for bucket in (here, there)]
        assert gathers[1] - gathers[0] == pytest.approx(there.shard.nbytes / spec.host_bytes_per_second)
    slow = dataclasses.replace(spec, host_bandwidth=1e6)
    copied = 3 * sum(bucket.shard.nbytes for bucket in offloaded.compiled.buckets)  # gathered twice, and the gradients
    more = replan(offloaded, on=slow).after.step_seconds - offloaded.after.step_seconds
    assert 0.5 * copied / slow.host_bytes_per_second < more < copied / slow.host_bytes_per_second
    with pytest.raises(ValueError, match="lacks host_bandwidth"):
        replan(step, on=dataclasses.replace(spec, host_bandwidth=0), offload_policy=CPUOffloadPolicy())


def test_several_changes_are_combined_if_none_alone_is_enough_and_dry_runs_are_limited():
    nbytes = 125_000
    found = suggest(plan(nbytes), headroom=0, dry_runs=1)
    assert not any(s.fits for s in found.ranked if len(s.changes) == 1), str(found)
    fitting = [s for s in found.ranked if s.fits]
    assert fitting and all(len(s.changes) == 2 for s in fitting), str(found)
    check_promises(fitting, nbytes)
    assert "recompute blocks.0" in str(found)
    assert found.dry_runs == 1 and sum(len(s.changes) == 1 and s.traced for s in found.ranked) == 1
    assert any("half the batch" in reason and "1 were allowed" in reason for reason in found.untried)


def test_if_nothing_fits_the_least_memory_and_what_is_missing_are_named():
    found = suggest(plan(1000), headroom=100, dry_runs=0)
    assert found.ranked and not any(s.fits for s in found.ranked)
    nbytes, changes = found.least
    assert nbytes <= min(s.peak_bytes for s in found.ranked)
    assert "nothing fits: the least is" in str(found) and changes.split(" and ")[0] in str(found)


def test_a_step_that_fits_gets_changes_that_make_it_faster():
    found = suggest(plan_that_fits())
    assert found.plan.fits
    faster = 'sharding_strategy="zero2"', 'prefetch="auto"', "comm_policy=CommPolicy(gather='int8', reduce='bfloat16')"
    assert {s.changes for s in found.ranked} == {(change,) for change in faster}
    for suggestion in found.ranked:
        check_promise(suggestion, 10**9)
