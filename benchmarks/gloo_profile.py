"""Steps of this package on CPUs with gloo, read from files of torch's profiler, for ``calibrate``.

gloo's threads record when each collective runs. It is exposed while it runs and the host waits in a range of this package;
the rest of a step counts as compute.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from thunder_fsdp_sched.extras.planning.recorded import RecordedStep
from thunder_fsdp_sched.extras.planning.timeline import COMPUTE, Interval, Timeline, gaps, length, overlaps, union

Span = tuple[float, float]


def read_steps(path: Path, rank: int) -> list[RecordedStep]:
    """Return the steps that a rank has recorded, in order."""
    ranges: list[tuple[float, float, str]] = []
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            ranges.append((1e-6 * event["ts"], 1e-6 * (event["ts"] + event["dur"]), event["name"]))
    ranges.sort()
    waits = union((start, end) for start, end, name in ranges if name.startswith("fsdp_wait_"))
    collectives = _collectives(ranges)
    backward = [end for _, end, name in ranges if "Backward" in name or "backward" in name]
    return [
        _step(path, rank, step, collectives, waits, backward) for step in ranges if step[2].startswith("ProfilerStep")
    ]


def _collectives(ranges: Sequence[tuple[float, float, str]]) -> list[Interval]:
    """Return when gloo's threads ran collectives of buckets; those of one kind run in the order of their issue."""
    issued: list[tuple[float, str, str]] = []  # when, the symbol, and the bucket
    for start, end, name in ranges:
        if match := re.fullmatch(r"(fsdp_all_gather|fsdp_reduce_scatter)\((.*)\)", name):
            calls = [of for since, _, of in ranges if start <= since < end and of.startswith("c10d::")]
            issued += [(start, *match.groups()) for _ in calls]
    found = []
    for start, end, name in ranges:
        if not re.match("gloo:.*(gather|reduce|to_?all)", name):
            continue
        gathers = "gather" in name
        of = next((o for o in issued if o[0] <= start and ("gather" in o[1]) is gathers), None)
        if of is not None:
            issued.remove(of)
            found.append(Interval("gloo", of[1], of[1], of[2], start, end, 0, 0))
    return found


def _step(
    path: Path,
    rank: int,
    step: tuple[float, float, str],
    collectives: Sequence[Interval],
    waits: Sequence[Span],
    backward: Sequence[float],
) -> RecordedStep:
    since, until, name = step
    inside = [c for c in collectives if since <= c.start < until]
    running = union(c.span for c in inside)
    exposed = [(start, end) for start, end, _ in overlaps(waits, running) if since <= start < until]
    computing = gaps(exposed, since, until)
    intervals = [Interval(COMPUTE, COMPUTE, COMPUTE, "", start - since, end - since, 0, 0) for start, end in computing]
    intervals += [c._replace(start=c.start - since, end=c.end - since) for c in inside]
    timeline = Timeline(tuple(intervals), (), until - since, length(computing), 0.0, {"gloo": length(running)})
    first = min(c.start for c in inside) - since
    last = max(end for end in backward if since < end <= until) - since
    return RecordedStep(str(path), rank, name, (first, last), timeline)
