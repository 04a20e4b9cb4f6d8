"""The choice of prefetch and kept buckets by simulated step time, within a memory budget."""

from __future__ import annotations

import dataclasses
import functools
import random
import re

from thunder_fsdp_sched import fsdp, testing
from thunder_fsdp_sched.extras.planning.dry_run import fake_rank
from thunder_fsdp_sched.planning import AnalyticCost, MemoryLimitError, cluster, simulate

import pytest
import thunder
import torch
from coded import coded
from internals import effects
from models import Layer
from profiles import with_long
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

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), Layer(16)) for _ in range(blocks))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head.forward(x).sum()


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


@pytest.mark.long  # a choice between candidates that others look at
def test_a_distance_that_fits_only_with_fewer_reductions_is_tried_even_if_a_smaller_one_fits():
    limit = int(0.97 * compiled().memory.peak.nbytes)
    free, fixed = compiled(max_memory=limit).choice, compiled(max_memory=limit, prefetch=1).choice
    assert {c.prefetch for c in free.considered if c.reductions == 2} == {0}
    assert free.chosen.prefetch == 1 and free.chosen.step_seconds <= fixed.chosen.step_seconds


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
