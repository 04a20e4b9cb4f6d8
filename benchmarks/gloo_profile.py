"""Steps of this package on CPUs with gloo, read from files of torch's profiler, for ``calibrate``.

gloo's threads record when each collective runs. It is exposed while it runs and the host waits in a range of this package.
A round of agreement counts as running while the host waits for it. The rest of a step is compute.
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
    collectives = _collectives(ranges)
    rounds = [(start, end) for start, end, name in ranges if name == "fsdp_wait_agreement"]
    waits = union((start, end) for start, end, name in ranges if name.startswith("fsdp_wait_"))
    exposed = [span[:2] for span in overlaps(waits, union([*rounds, *(c.span for c in collectives)]))]
    steps = []
    for since, until, name in ranges:
        if name.startswith("ProfilerStep"):
            found = [c for c in collectives if since <= c.start < until]
            running, computing = union(c.span for c in found), gaps(_inside(exposed, since, until), since, until)
            intervals = [Interval(COMPUTE, COMPUTE, COMPUTE, "", *span, 0, 0) for span in computing] + found
            intervals = [i._replace(start=i.start - since, end=i.end - since) for i in intervals]
            busy = {"gloo": length(running)}
            timeline = Timeline(tuple(intervals), (), until - since, length(computing), 0.0, busy)
            first = min(start for start, _, of in ranges if since <= start < until and of.startswith("fsdp_"))
            last = max(end for _, end, of in ranges if since < end <= until and "backward" in of.lower())
            steps.append(RecordedStep(str(path), rank, name, (first - since, last - since), timeline))
    return steps


def _inside(spans: Sequence[Span], since: float, until: float) -> list[Span]:
    return [span[:2] for span in overlaps([(since, until)], spans)]


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
