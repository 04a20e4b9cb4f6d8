"""Exposed communication of recorded steps: by rank, by bucket and phase, and which ranks waited for which."""

from __future__ import annotations

import io
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group

from ..planning.calibration import calibrate
from ..planning.clusters import ClusterSpec, cluster_of_this_process
from ..planning.clusters import cluster as cluster_of
from ..planning.cost import AnalyticCost
from ..planning.recorded import RecordedStep, read_recorded
from ..planning.simulate import simulate
from ..planning.timeline import Interval, Timeline, overlaps
from .plot import plot_timelines
from .report import milliseconds, plain_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...compiled_traces import CompiledTraces

_PHASES = ("forward", "backward", "outside")
_ROWS = 20

Key = tuple[str, str, str]
"""Phase (``"forward"``, ``"backward"``, or ``"outside"`` of them), kind of collective, and bucket."""


def exposed_communication(
    profile: Any, *, compiled: CompiledTraces | None = None, cluster: ClusterSpec | str | None = None
) -> ExposedCommunication:
    """Measure the communication that compute did not hide in steps that torch's profiler recorded, of any training run.

    It is the time in which communication runs and compute does not, by the union of intervals. On a GPU it is read from
    kernels and their streams; on a CPU with gloo from the collectives of its threads and the host's waits. Ranges of this
    package and of FSDP2 name the buckets.

    Args:
        profile: a ``torch.profiler.profile`` that has ended (it can be exported only once), or the path of a file of its
            ``export_chrome_trace`` (``.json`` or ``.json.gz``), or the paths of several ranks' files.
        compiled: the traces of the recorded step, ``transform.compiled[-1]``, to simulate beside it.
        cluster: the machine to simulate, by default that of this process; compute and links get the recorded speed.

    Raises:
        ValueError: a file is not one of torch's profiler, or has no step or no communication, or files are of one rank
            or of different steps; the message names the files.
    """
    if hasattr(profile, "export_chrome_trace"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                profile.export_chrome_trace(path := f"{folder}/profile.json")
            except RuntimeError as error:
                raise ValueError(f"profile: it was exported before, so pass the path of that file ({error})") from error
            steps = read_recorded([path])
    else:
        steps = read_recorded([profile] if isinstance(profile, (str, Path)) else profile)
    if compiled is None:
        return ExposedCommunication(steps)
    spec = calibrate(cluster_of(cluster) if cluster else cluster_of_this_process(), compiled, steps)
    return ExposedCommunication(steps, simulate(compiled.forward, compiled.backward, AnalyticCost(spec)))


@dataclass(frozen=True)
class ExposedCommunication:
    """Exposed communication of recorded steps, which ``print`` shows as tables.

    Times are seconds of one step, means over steps.

    Attributes:
        steps: the steps in order, and of each the ranks in order.
        predicted: the simulated step, if there is one.
    """

    steps: Sequence[RecordedStep]
    predicted: Timeline | None = None

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
    def waited_for(self) -> dict[tuple[int, int], float]:
        """The exposed communication of one rank in which it waited until another, the last, began the same collective.

        The clocks of ranks are aligned by the ends of their collectives.
        """
        waited: dict[tuple[int, int], float] = defaultdict(float)
        for _, of_step in groupby(self.steps, key=lambda step: step.name):
            ranks = list(of_step)
            runs = [_numbered(step) for step in ranks]
            shared = [key for key in runs[0] if all(key in of_rank for of_rank in runs)]
            if not shared:
                continue
            clocks = [statistics.median(of[key].end - runs[0][key].end for key in shared) for of in runs]
            waits: list[dict[Key, list[tuple[float, float]]]] = [defaultdict(list) for _ in ranks]
            for step, of_rank in zip(ranks, waits, strict=True):
                for wait in _waits(step.timeline):
                    of_rank[_key(wait)].append(wait.span)
            for key in shared:
                begins = [of[key].start - clock for of, clock in zip(runs, clocks, strict=True)]
                last = max(range(len(ranks)), key=begins.__getitem__)
                for number, step in enumerate(ranks):
                    span = runs[number][key].start, begins[last] + clocks[number]
                    seconds = sum(end - start for start, end, _ in overlaps(waits[number][key[:3]], [span]))
                    if seconds:
                        waited[step.rank, ranks[last].rank] += seconds / len(self._ranks[step.rank])
        return dict(waited)

    @cached_property
    def _ranks(self) -> dict[int, list[RecordedStep]]:
        ranks: dict[int, list[RecordedStep]] = defaultdict(list)
        for step in self.steps:
            ranks[step.rank].append(step)
        return dict(ranks)

    def table(self) -> Group:
        """Return tables for ``rich``, in milliseconds; buckets with the most exposed communication come first."""
        steps = {str(rank): of for rank, of in self._ranks.items()}
        ranks = [
            [rank, *milliseconds(_mean(s.passes[1] - s.passes[0] for s in of), *_parts(s.timeline for s in of))]
            for rank, of in steps.items()
        ]
        expected: dict[Key, float] = {}
        if self.predicted is not None:
            expected = _exposed(self.predicted)
            ranks.append(["predicted", *milliseconds(self.predicted.step_seconds, *_parts([self.predicted]))])
        buckets = []
        for key, seconds in sorted(self.by_bucket.items(), key=lambda item: -sum(item[1].values())):
            most = max(seconds, key=seconds.__getitem__)
            figures = [_mean(seconds.values()), seconds[most]]
            predicted = milliseconds(expected.get(key, 0.0)) if expected else []
            buckets.append([*key, *milliseconds(*figures), str(most), *predicted])
        waited = sorted(self.waited_for.items(), key=lambda item: -item[1])
        waits = [[str(rank), str(last), *milliseconds(seconds)] for (rank, last), seconds in waited]
        count = len(next(iter(steps.values())))
        columns = ["rank", "forward +\nbackward", "whole\nstep", "compute", "communi-\ncation", "exposed", "idle"]
        tables = [plain_table(f"exposed communication; ms, mean of {count} step{'s' * (count > 1)}", columns, ranks)]
        columns = ["phase", "collective", "bucket", "exposed,\nmean", "on the\nworst", "rank"]
        columns += ["predicted"] * bool(expected)
        tables.append(plain_table("by bucket, most first", columns, buckets[:_ROWS], texts=3))
        if len(buckets) > _ROWS:
            tables[-1].caption = f"and {len(buckets) - _ROWS} more"
        if waits:
            columns = ["rank", "waited for rank", "exposed"]
            tables.append(plain_table("waits for late ranks", columns, waits[:_ROWS]))
        return Group(*tables)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=100)
        console.print(self.table())
        return console.file.getvalue()  # type: ignore[attr-defined]

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the last step of each rank, and the prediction, with exposed communication in red.

        Args:
            path: the file to write; its extension chooses the format (.png, .svg, .pdf).
        """
        named = [(f"rank {rank}, {steps[-1].name}", steps[-1].timeline) for rank, steps in self._ranks.items()]
        named += [("predicted", self.predicted)] if self.predicted is not None else []
        return plot_timelines(named, path)


def _waits(timeline: Timeline) -> list[Interval]:
    return [interval for interval in timeline.intervals if interval.kind == "wait"]


_KINDS = {"fsdp_wait_params": "all_gather", "fsdp_wait_grads": "reduce_scatter"}
"""The collectives that simulated waits wait for."""


def _key(interval: Interval) -> Key:
    return _PHASES[interval.trace], _KINDS.get(interval.label, interval.label), interval.bucket


def _exposed(timeline: Timeline) -> dict[Key, float]:
    found: dict[Key, float] = defaultdict(float)
    for wait in _waits(timeline):
        found[_key(wait)] += wait.seconds
    return found


def _numbered(step: RecordedStep) -> dict[Any, Interval]:
    """Return the collectives of a step, keyed by what they are and their number among those."""
    counts: Counter[Key] = Counter()
    numbered = {}
    for interval in step.timeline.collectives:
        key = _key(interval)
        numbered[(*key, counts[key])] = interval
        counts[key] += 1
    return numbered


def _parts(timelines: Iterable[Timeline]) -> list[float]:
    """Return the means of the whole step, compute, communication, exposed communication, and idle time."""
    rows = [
        (
            t.step_seconds,
            t.compute_seconds,
            t.communicating_seconds,
            t.exposed_seconds,
            t.idle_seconds,
        )
        for t in timelines
    ]
    return [_mean(column) for column in zip(*rows, strict=True)]


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
