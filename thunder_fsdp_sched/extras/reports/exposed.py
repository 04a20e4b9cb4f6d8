"""Exposed communication of recorded steps by rank, bucket and phase, and a cluster that is as fast as they were."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group

from ...errors import coded_error
from ...ir.effects import sends
from ..planning.clusters import ClusterSpec
from ..planning.cost import AnalyticCost
from ..planning.recorded import RecordedStep, read_recorded
from ..planning.simulate import simulate
from ..planning.timeline import Timeline, length, union
from .plot import plot_timelines
from .texts import as_text, milliseconds, plain_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...compiled_traces import CompiledTraces

_PHASES = ("forward", "backward", "outside")
_ROWS = 20

Key = tuple[str, str, str]
"""Phase (``"forward"``, ``"backward"``, or ``"outside"`` of them), kind of collective, and bucket."""


def exposed_communication(profile: Any) -> ExposedCommunication:
    """Measure the communication that compute did not hide, in steps of any training run that torch's profiler recorded.

    It is the time in which communication runs and compute does not, by the union of intervals, read from the kernels of a
    GPU and their streams. Ranges of this package and of FSDP2 name the buckets.

    Args:
        profile: a ``torch.profiler.profile`` that has ended (it can be exported only once), or the path of a file of its
            ``export_chrome_trace`` (``.json`` or ``.json.gz``), or the paths of several ranks' files.

    Raises:
        ValueError: a file is not one of torch's profiler, or has no step or no communication of GPUs, or files are of one
            rank or of different steps; the message names the files.
    """
    if hasattr(profile, "export_chrome_trace"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                profile.export_chrome_trace(path := f"{folder}/profile.json")
            except RuntimeError as error:
                raise coded_error(ValueError, "plan.profile-exported-before", error=error) from error
            return ExposedCommunication(read_recorded([path]))
    return ExposedCommunication(read_recorded([profile] if isinstance(profile, (str, Path)) else profile))


def calibrate(spec: ClusterSpec, compiled: CompiledTraces, steps: Sequence[RecordedStep]) -> ClusterSpec:
    """Return the cluster with the speeds of compute and links that recorded steps reached.

    The compute of a step keeps its relative costs. The bandwidth of links is such that the recorded collectives take
    the time for which the link was busy, on the rank where that was shortest, because the others waited for it.

    Args:
        spec: the cluster that resembles the machine most.
        compiled: traces of the same model, with inputs of the same shapes, on as many ranks; the schedule may differ.
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
        raise coded_error(
            ValueError,
            "plan.profile-of-other-buckets",
            path=steps[0].path,
            buckets=sorted({name for _, name in issues}),
        )
    by_step: dict[str, list[float]] = defaultdict(list)
    for step, collectives in zip(steps, found, strict=True):
        by_step[step.name].append(length(union(i.span for i in collectives)))
    busy = statistics.median(map(min, by_step.values()))
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


@dataclass(frozen=True)
class ExposedCommunication:
    """Exposed communication of recorded steps, which ``print`` shows as tables.

    Times are seconds of one step, means over steps.

    Attributes:
        steps: the steps in order, and for each the ranks in order.
    """

    steps: Sequence[RecordedStep]

    @cached_property
    def by_rank(self) -> dict[int, float]:
        """The exposed communication of each rank."""
        return {rank: _mean(s.timeline.exposed_seconds for s in of) for rank, of in self._ranks.items()}

    @cached_property
    def by_bucket(self) -> dict[Key, dict[int, float]]:
        """The exposed communication of each bucket in each phase by rank, which adds up to that of the rank."""
        found: dict[Key, dict[int, float]] = defaultdict(lambda: dict.fromkeys(self._ranks, 0.0))
        for step in self.steps:
            for key, exposed in _exposed(step.timeline).items():
                found[key][step.rank] += exposed / len(self._ranks[step.rank])
        return dict(found)

    @cached_property
    def _ranks(self) -> dict[int, list[RecordedStep]]:
        ranks: dict[int, list[RecordedStep]] = defaultdict(list)
        for step in self.steps:
            ranks[step.rank].append(step)
        return dict(ranks)

    def table(self) -> Group:
        """Return tables for ``rich``, in milliseconds; buckets with the most exposed communication come first."""
        steps = {str(rank): of for rank, of in self._ranks.items()}
        ranks = [[rank, *milliseconds(*map(_mean, zip(*map(_parts, of), strict=True)))] for rank, of in steps.items()]
        buckets = []
        for key, seconds in sorted(self.by_bucket.items(), key=lambda item: -sum(item[1].values())):
            most = max(seconds, key=seconds.__getitem__)
            figures = [_mean(seconds.values()), seconds[most]]
            buckets.append([*key, *milliseconds(*figures), str(most)])
        count = len(next(iter(steps.values())))
        columns = ["rank", "forward +\nbackward", "whole\nstep", "compute", "communi-\ncation", "exposed", "idle"]
        tables = [plain_table(f"exposed communication; ms, mean of {count} step{'s' * (count > 1)}", columns, ranks)]
        columns = ["phase", "collective", "bucket", "exposed,\nmean", "on the\nworst", "rank"]
        tables.append(plain_table("by bucket, most first", columns, buckets[:_ROWS], texts=3))
        if len(buckets) > _ROWS:
            tables[-1].caption = f"and {len(buckets) - _ROWS} more"
        return Group(*tables)

    def __str__(self) -> str:
        return as_text(self.table(), 100)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the last step of each rank, with exposed communication in red.

        Args:
            path: the file to write; its extension chooses the format (.png, .svg, .pdf).
        """
        named = [(f"rank {rank}, {steps[-1].name}", steps[-1].timeline) for rank, steps in self._ranks.items()]
        return plot_timelines(named, path)


def _exposed(timeline: Timeline) -> dict[Key, float]:
    """Return the seconds of the waits of a recorded step."""
    found: dict[Key, float] = defaultdict(float)
    for wait in timeline.intervals:
        if wait.kind == "wait":
            found[_PHASES[wait.trace], wait.label, wait.bucket] += wait.seconds
    return found


def _parts(step: RecordedStep) -> list[float]:
    """Return the seconds of forward and backward, of the whole step, and of its parts."""
    (begin, end), t = step.passes, step.timeline
    of_step = t.step_seconds, t.compute_seconds, t.communicating_seconds, t.exposed_seconds, t.idle_seconds
    return [end - begin, *of_step]


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
