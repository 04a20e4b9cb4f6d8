"""Planning an accumulation window: its micro-batches are those that training under ``no_sync`` compiles."""

from __future__ import annotations

from typing import Any

from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.planning.cost import AnalyticCost
from thunder_fsdp_sched.planning.dry_run import DryRun, dry_run_step, replan
from thunder_fsdp_sched.planning.fake_ranks import fake_rank, jit
from thunder_fsdp_sched.planning.simulate import simulate
from thunder_fsdp_sched.planning.suggestions import suggest

import pytest
from test_dry_run import invoke, make_on_meta
from test_replanning import plan_of

SLOW_LINKS = {"world_size": 16, "on": "cpu-2core"}


def compiled_as_in_training(options: dict[str, Any]) -> Any:
    """Return the transform after a micro-batch under ``no_sync`` and the last one were compiled, without a plan."""
    with fake_rank(0, 16):
        transform = fsdp(cluster="cpu-2core", **options)
        module, args = make_on_meta()
        jitted = jit(module, transform)
        with jitted.no_sync():
            transform.sharded.compile(jitted, args, {})
        transform.sharded.compile(jitted, args, {})
    return transform


@pytest.mark.parametrize(
    "options",
    [
        {"sharding_strategy": "zero2"},
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
    assert zero2.window is not None
    first, further, last = zero2.window.first, zero2.window.further, zero2.after
    bytes_of = [{i.bucket for i in timeline.intervals if i.bucket} for timeline in (first, further, last)]
    assert bytes_of[0] and not bytes_of[1] and bytes_of[2]
    assert further.step_seconds < first.step_seconds
    alone = replan(zero2, micro_batches=1)
    assert alone.window is None
    assert plan_of(alone) == plan_of(dry_run_step(make_on_meta, sharding_strategy="zero2", **SLOW_LINKS))
    assert zero2.seconds < 3 * alone.seconds
    assert replan(alone, micro_batches=3).seconds == zero2.seconds
    assert replan(zero2, micro_batches=5).seconds == pytest.approx(zero2.seconds + 2 * further.step_seconds)


def test_suggestions_are_for_all_micro_batches(zero2: DryRun) -> None:
    found = suggest(zero2, headroom=zero2.cluster.memory, dry_runs=0)
    assert found.plan.step_seconds == zero2.seconds
    assert found.plan.samples == 3 * 4
    [sharded] = [s for s in found.ranked if s.changes == ('accumulate="sharded"',)]
    assert sharded.step.micro_batches == 3
    assert sharded.peak_bytes < found.plan.peak_bytes


def test_plan_prints_the_micro_batches(zero2: DryRun) -> None:
    command = "plan test_dry_run:make_on_meta --world-size 16 --cluster cpu-2core --sharding zero2 --micro-batches 3"
    result = invoke(*command.split())
    assert result.exit_code == 0, result.output
    for text in ("1, no_sync", "2, no_sync", "3, reduces", f"all micro-batches: {1e3 * zero2.seconds:,.2f} ms"):
        assert text in result.output, result.output


def test_a_window_needs_a_micro_batch() -> None:
    with pytest.raises(ValueError, match="micro_batches: expected 1 or more, got 0"):
        dry_run_step(make_on_meta, micro_batches=0, **SLOW_LINKS)
