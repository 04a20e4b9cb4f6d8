"""The description of a cluster, made as fast as recorded steps were."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from ...compiled_traces import CompiledTraces
from ...ir.effects import sends
from ...ir.schedule import GATHERS
from .clusters import ClusterSpec
from .cost import AnalyticCost
from .recorded import RecordedStep
from .simulate import simulate
from .timeline import Interval, length, overlaps, union


def calibrate(spec: ClusterSpec, compiled: CompiledTraces, steps: Sequence[RecordedStep]) -> ClusterSpec:
    """Return the cluster with the speed of compute and of links at which recorded steps ran.

    The compute of a step keeps its relative costs. The bandwidth of links is such that the recorded collectives take the
    time for which the link was busy; that of the rank which was busy for the least time, because the others waited for it.

    Args:
        spec: the cluster that resembles the machine most.
        compiled: traces of the same model, with inputs of the same shapes, on as many ranks; the schedule may be another.
        steps: steps of this package, from :func:`~thunder_fsdp_sched.extras.planning.recorded.read_recorded`.

    Raises:
        ValueError: no recorded collective is of a bucket of these traces.
    """
    issues = {
        (issue.kind, issue.bucket.spec.name): issue
        for trace in compiled.traces
        for bsym in trace.bound_symbols
        if (issue := sends(bsym)) is not None and issue.bucket is not None
    }
    planned = simulate(compiled.forward, compiled.backward, AnalyticCost(spec)).compute_seconds
    slower = statistics.median(step.compute_seconds for step in steps) / planned
    found = [[i for i in step.timeline.collectives if (i.kind, i.bucket) in issues] for step in steps]
    if not all(found):
        raise ValueError(
            f"profile: {steps[0].path} holds no collective of the buckets {sorted({name for _, name in issues})}; "
            "record a run of this model with the same bucketing_strategy"
        )
    busy = _busy_seconds(spec, steps, found)
    at_any_rate = replace(spec, intra_node_bandwidth=math.inf, inter_node_bandwidth=math.inf)
    expected, latency = (
        sum(AnalyticCost(of).collective_seconds(issues[i.kind, i.bucket]) for i in found[0])
        for of in (spec, at_any_rate)
    )
    # Latencies stay, unless they alone take longer than the recorded collectives.
    slower_link = 1.0  # one rank sends nothing
    if expected > latency:
        slower_link = max((busy - latency) / (expected - latency), 0.1 * busy / expected)
    return replace(
        spec,
        name=f"{spec.name} as recorded",
        flops={dtype: peak / slower for dtype, peak in spec.flops.items()},
        memory_bandwidth=spec.memory_bandwidth / slower,
        kernel_overhead=spec.kernel_overhead * slower,
        launch_overhead=spec.launch_overhead * (slower if spec.synchronous else 1.0),
        intra_node_bandwidth=spec.intra_node_bandwidth / slower_link,
        inter_node_bandwidth=spec.inter_node_bandwidth / slower_link,
        contention=0.0,  # recorded compute contains it
    )


def _busy_seconds(spec: ClusterSpec, steps: Sequence[RecordedStep], found: Sequence[Sequence[Interval]]) -> float:
    """Return the time of the collectives of a step at full speed of the link, on the rank that waits least for others."""
    by_step: dict[str, list[float]] = {}
    for step, collectives in zip(steps, found, strict=True):
        gathers, reductions = (
            union(i.span for i in collectives if (i.kind in GATHERS) is gathers) for gathers in (True, False)
        )
        both = sum(end - start for start, end, _ in overlaps(gathers, reductions))
        lost = both * (2 - spec.gather_share - spec.reduction_share)
        by_step.setdefault(step.name, []).append(length(gathers) + length(reductions) - lost)
    return statistics.median(map(min, by_step.values()))
