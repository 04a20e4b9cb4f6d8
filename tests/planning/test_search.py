"""The choice of prefetch and kept buckets by simulated step time, within a memory budget. One rank searches for all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

from thunder_fsdp_sched import CompiledTraces, ScheduleDisagreement, fsdp, testing
from thunder_fsdp_sched.extras.planning import choosing
from thunder_fsdp_sched.extras.planning.dry_run import fake_rank
from thunder_fsdp_sched.planning import AnalyticCost, Choice, ClusterSpec, MemoryLimitError, Protocol, cluster, simulate

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from internals import effects
from models import Layer
from profiles import with_long
from ranks import on_ranks
from scenario import everywhere
from torch import nn

# A device that computes slowly enough to hide communication, without launch overhead.
SLOW = dataclasses.replace(
    cluster("h100-sxm"),
    name="slow",
    flops=dict.fromkeys(cluster("h100-sxm").flops, 1e9),
    memory_bandwidth=1e9,
    launch_overhead=0.0,
)


class Model(nn.Module):
    """Blocks with norms, whose values are worth recomputing, and a head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), Layer(16)) for _ in range(blocks))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head.forward(x).square().mean()


@functools.cache
def compiled(blocks: int = 3, batch: int = 2, **options):
    """Return the traces of a step. With a batch of 32, its activations need more memory than its parameters."""
    make = lambda: (Model(blocks), (torch.randn(batch, 16),))  # noqa: E731
    [traces] = testing.compile_on_fake_ranks(make, 8, cluster=SLOW, **options)
    return traces


def slot_bytes(traces) -> int:
    """Return the bytes that the slots of both traces span, which is what is allocated."""
    slots = {b.args[1] for t in (traces.forward, traces.backward) for b in t.bound_symbols if b.sym.name in ISSUES}
    arenas: dict = {}
    for slot in slots:
        arenas[slot.arena] = max(arenas.get(slot.arena, 0), slot.end)
    return sum(arenas.values())


ISSUES = ("fsdp_all_gather", "fsdp_reduce_scatter")


def test_a_limit_keeps_the_buckets_that_fit_and_gathers_the_others_again():
    roomy = compiled(10, max_memory="1GB", prefetch=1)
    regions = [e.slot_issue.region for e in map(effects, roomy.forward.bound_symbols) if e.slot_issue is not None]
    assert slot_bytes(roomy) == sum(region.nbytes for region in regions)  # gradients take the place of their parameters
    assert set(roomy.choice.chosen.kept_buckets) == {g.bucket for g in testing.gathers(roomy.forward)}
    assert not testing.gathers(roomy.backward)

    limit = (roomy.memory.peak.nbytes + compiled(10, prefetch=1).memory.peak.nbytes) // 2
    tight = compiled(10, max_memory=limit, prefetch=1)
    testing.assert_peak_memory_at_most(tight, limit)
    kept = set(tight.choice.chosen.kept_buckets)
    assert kept
    assert {g.bucket for g in testing.gathers(tight.backward)} == {
        g.bucket for g in testing.gathers(tight.forward)
    } - kept
    assert slot_bytes(tight) == tight.choice.chosen.unsharded_bytes
    step = simulate(tight.forward, tight.backward, AnalyticCost(SLOW)).step_seconds
    assert step == pytest.approx(tight.choice.chosen.step_seconds, rel=0.01)


def least(**options) -> tuple[int, int, int]:
    """Return the bytes, distance and reductions in flight that the error of a limit too small for anything names."""
    with pytest.raises(MemoryLimitError, check=coded("plan.step-exceeds-max-memory")) as error:
        compiled(max_memory=1000, **options)
    pattern = r"with prefetch=(\d), (\d) large reductions in flight .* the step needs ([\d,]+) bytes"
    distance, reductions, needed = re.search(pattern, str(error.value)).groups()
    assert error.value.least_bytes == int(needed.replace(",", ""))
    return error.value.least_bytes, int(distance), int(reductions)


def test_the_error_of_a_memory_limit_has_the_least_bytes_of_all_distances():
    needed, *setting = least()
    assert (needed, *setting) == least(prefetch=0)
    assert least(prefetch=1) > (needed, 1, 0), "a distance that the user gives stays fixed"
    traces = compiled(max_memory=needed)
    chosen = traces.settings
    assert [chosen.prefetch, chosen.reductions_in_flight] == setting == [0, 0] and chosen.recomputed
    testing.assert_peak_memory_at_most(traces, needed)


def test_fewer_reductions_in_flight_are_tried_before_values_are_computed_again():
    free = compiled(batch=32, prefetch=1)
    limit = int(0.8 * free.memory.peak.nbytes)
    traces = compiled(batch=32, max_memory=limit, prefetch=1)
    testing.assert_peak_memory_at_most(traces, limit)
    chosen = traces.choice.chosen
    [with_two] = [c for c in traces.choice.considered if c.reductions == 2 and not c.backward_arena]
    assert traces.settings.reductions_in_flight == chosen.reductions == 1
    assert chosen.step_seconds < with_two.step_seconds

    def most_at_once(of) -> int:
        """Return how many reductions of the largest size are in flight at once."""
        sizes = {b.spec.name: b.spec.grad_bytes for b in of.buckets}
        large = [r for r in testing.reductions(of.backward) if sizes[r.bucket] == max(sizes.values())]
        return max(sum(r.issue <= one.issue < r.wait for r in large) for one in large)

    assert (most_at_once(free), most_at_once(traces)) == (2, 1)


def test_a_later_call_does_not_let_an_earlier_step_exceed_the_limit():
    limit = int(0.6 * compiled(batch=32).memory.peak.nbytes)
    transform = fsdp(max_memory=limit, cluster=SLOW)
    with fake_rank(0, 8):
        model = thunder.jit(Model(3), transforms=[transform])
        model(torch.randn(32, 16))
        model(torch.randn(1, 16))  # has room for more slots, but the first step would have to share them
    first, second = transform.compiled
    assert first.settings.recomputed and not second.settings.recomputed
    for traces in (first, second):
        testing.assert_peak_memory_at_most(traces, limit)


def test_candidates_of_the_search_that_are_not_chosen_take_no_memory():
    traces = compiled(max_memory=int(0.8 * compiled().memory.peak.nbytes))
    assert len(traces.choice.considered) > 1
    collectives = "fsdp_all_gather", "fsdp_reduce_scatter"
    slots = [b.args[1] for trace in traces.traces for b in trace.bound_symbols if b.sym.name in collectives]
    for arena in {bucket.arena for bucket in traces.buckets}:
        assert arena.nbytes == max(slot.end for slot in slots if slot.arena is arena)


def test_automatic_prefetch_minimizes_the_simulated_step_time():
    traces = compiled(prefetch="auto")
    times = {c.prefetch: c.step_seconds for c in traces.choice.considered}
    assert times[traces.settings.prefetch] <= min(times.values()) * 1.001
    assert times[0] > times[1], "prefetch must reduce the simulated step time"
    testing.assert_prefetch_distance(traces, traces.settings.prefetch)


@pytest.mark.parametrize("seed", with_long(range(12), *range(1, 12)))
def test_a_search_that_may_use_the_memory_of_the_default_is_never_slower(seed: int) -> None:
    """On a device that is drawn so that compute and communication take similar times."""
    draw = random.Random(seed)
    spec = dataclasses.replace(
        SLOW,
        flops=dict.fromkeys(SLOW.flops, 10 ** draw.uniform(6, 10)),
        intra_node_bandwidth=10 ** draw.uniform(7, 9),
        contention=draw.choice([0.0, 0.2]),
    )

    def step(**options):
        [traces] = testing.compile_on_fake_ranks(make, 8, cluster=spec, **options)
        return simulate(traces.forward, traces.backward, AnalyticCost(spec)).step_seconds, traces

    blocks, batch = draw.randint(1, 3), draw.choice([2, 32])
    make = lambda: (Model(blocks), (torch.randn(batch, 16),))  # noqa: E731
    seconds, default = step(prefetch=1)
    assert step(prefetch="auto")[0] <= seconds
    more = int(draw.uniform(0, 1.2) * sum(b.nbytes for b in testing.gathers(default.forward)))
    limit = default.memory.peak.nbytes + more
    for prefetch in ("auto", 1):
        limited, traces = step(prefetch=prefetch, max_memory=limit)
        assert limited <= seconds
        testing.assert_peak_memory_at_most(traces, limit)


#
# One rank searches for the settings of a trace, and all ranks compile what it has found
#

LAYERS = {"bucketing_strategy": "layer"}
CPU = cluster("cpu-2core")
MACHINES = (  # of ranks 0 and 1; their best settings differ
    dataclasses.replace(cluster("h100-sxm"), name="slow links", intra_node_bandwidth=1e6, launch_overhead=1e-4),
    dataclasses.replace(CPU, name="slow memory", memory_bandwidth=1e6, protocols=(Protocol(0.0, 0.0, 0.0),)),
)


def _batch(rank: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rank)).double()


@contextlib.contextmanager
def _searching(rank: int) -> Iterator[list[str]]:
    """Give the ranks different machines, and record the machine for which this rank searches."""
    searched: list[str] = []

    def machine() -> ClusterSpec:
        searched.append(MACHINES[rank].name)
        return MACHINES[rank]

    with mock.patch.object(choosing, "cluster_of_this_process", machine):
        yield searched


def _jit(**options: Any) -> Any:
    group = dist.new_group(timeout=timedelta(seconds=60))
    return thunder.jit(Model().double(), transforms=[fsdp(ranks=group, **LAYERS, **options)])


def _all_equal(value: Any) -> None:
    first, *others = everywhere(value)
    assert all(other == first for other in others), (first, *others)


LIMITS: dict[str, dict[str, Any]] = {"prefetch": {"prefetch": "auto"}, "max_memory": {"max_memory": 160_000}}


def _found_alone(spec: ClusterSpec, options: dict[str, Any]) -> Choice:
    [traces] = testing.compile_on_fake_ranks(
        lambda: (Model().double(), (_batch(0, 64),)), 2, ranks=[0], cluster=spec, **LAYERS, **options
    )
    return traces.choice


@pytest.mark.parametrize("case", with_long(LIMITS, "max_memory"))
def test_ranks_that_would_find_different_schedules_alone_compile_the_one_of_rank_0(case: str, ranks: Any) -> None:
    first, second = map(_settings, ranks.run(_train_one_step, LIMITS[case]))
    assert first == second != _settings(_found_alone(MACHINES[1], LIMITS[case]))


def _settings(choice: Choice) -> list[Any]:
    chosen = choice.chosen
    return [chosen.prefetch, chosen.kept_buckets, chosen.reductions]


def _train_one_step(rank: int, world_size: int, options: dict[str, Any]) -> Choice:
    with _searching(rank) as searched:
        model, reference = _jit(**options), Model().double()
        model(_batch(rank, 64)).backward()
    transform = model._lc_transforms[-1]
    [compiled] = transform.compiled
    assert everywhere(searched) == [[MACHINES[0].name], []]
    kept = [bucket.name for bucket in transform.plan if bucket.options.sharding_strategy == "zero2"]
    _all_equal([str(compiled.schedule), str(compiled.choice), sorted(compiled.settings.recomputed), kept])
    for other in range(world_size):
        (reference(_batch(other, 64)) / world_size).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_local(), p.rows.of(q.grad))
    return compiled.choice


@on_ranks()
def test_a_window_is_planned_by_one_rank(rank: int) -> None:
    with _searching(rank) as searched:
        model = _jit(max_memory=200_000)
        with model.no_sync():
            model(_batch(rank, 64)).backward()
        model(_batch(rank, 64)).backward()
    assert everywhere(searched) == [[MACHINES[0].name] * 2, []]
    _all_equal(
        [[str(c.schedule), str(c.choice), sorted(c.settings.recomputed)] for c in model._lc_transforms[-1].compiled]
    )


@on_ranks()
def test_the_rank_with_the_largest_batch_searches_and_others_compile_alone_what_is_known(rank: int) -> None:
    with _searching(rank) as searched:
        model = _jit(max_memory=160_000)
        model(_batch(rank, (32, 64)[rank])).backward()
        assert everywhere(searched) == [[], [MACHINES[1].name]]
        searched.clear()
        model(_batch(rank, (48, 64)[rank])).backward()  # rank 0 compiles alone
        assert not searched
        assert len(model._lc_transforms[-1].compiled) == (2, 1)[rank]
        _all_equal([model._lc_transforms[-1].compiled[-1].choice.chosen[:3]])
        # What is known does not fit, so rank 0 would have to search alone.
        with pytest.raises(
            ScheduleDisagreement,
            check=coded("ranks.actions-differ", "rank 0: the search for the schedule", "rank 1: the forward"),
        ):
            model(_batch(rank, (128, 64)[rank]))
        model(_batch(rank, 64)).backward()


@on_ranks()
def test_an_error_of_the_rank_that_searches_is_raised_on_all(rank: int) -> None:
    model = _jit(prefetch="auto")
    with mock.patch.object(choosing, "cluster_of_this_process", side_effect=ArithmeticError("on purpose")):
        expected = ArithmeticError if rank == 0 else ScheduleDisagreement
        with pytest.raises(expected, match="on purpose"):
            model(_batch(rank, 64))
    model(_batch(rank, 64)).backward()


@on_ranks()
def test_a_rank_whose_traces_exceed_the_limit_tells_the_others(rank: int) -> None:
    model = _jit(max_memory=200_000)
    real = choosing.check_memory

    def check_memory(traces: CompiledTraces, **arguments: Any) -> None:
        real(traces, **{**arguments, "limit": 1000 if rank else arguments["limit"]})

    with mock.patch.object(choosing, "check_memory", check_memory):
        code, expected = (
            ("plan.traces-exceed-max-memory", MemoryLimitError)
            if rank
            else ("ranks.actions-differ", ScheduleDisagreement)
        )
        with pytest.raises(expected, check=coded(code, "max_memory: 1,000 bytes")):
            model(_batch(rank, 64))
