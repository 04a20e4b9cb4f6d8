"""Tables of planned steps."""

from __future__ import annotations

import textwrap

from rich.table import Table

from ...ir.read_schedule import read_schedule
from ...sizes import human_bytes
from ...transforms.write_grads_in_place import share_written_in_place
from ..planning.dry_run import DryRun
from ..planning.fit import block_of
from ..planning.suggestions import Suggestions
from ..planning.timeline import Timeline
from ..step_memory.slot_memory import shared_slots
from .report import milliseconds, plain_table


def answer(step: DryRun, model: str, verdict: str, found: Suggestions | None) -> str:
    """Return the model, its inputs, time and memory of a planned step, and the three best changes, in lines of 80 columns.

    Args:
        model: the name that the user gave.
        verdict: whether the step fits.
        found: the changes; ``None`` if they were not looked for.
    """
    plan, options = step.transform.plan, step.transform.options
    params = [param for bucket in plan for param in bucket.params]
    blocks = {block for param in params if (block := block_of(param.name))[-1].isdecimal()}
    largest = max(params, key=lambda param: param.numel)
    dtypes = dict.fromkeys(f"shards {b.dtype}, computed in {b.param_dtype}, reduced in {b.reduce_dtype}" for b in plan)
    lines = [
        f"{model}: {sum(param.numel for param in params):,} parameters, {len(blocks)} blocks; the largest is "
        f"{largest.name} {largest.shape}",
        *(precision.replace("torch.", "") for precision in dtypes),
        f"{step.compiled.call}" + f", {step.micro_batches} micro-batches" * (step.micro_batches > 1),
        f"{options.sharding_strategy.strategy}, {step.world_size} ranks of {step.cluster.name}: "
        f"{1e3 * step.seconds:,.2f} ms a step",
        verdict,
    ]
    for change in found.ranked[:3] if found is not None else ():
        fits = "" if change.fits else ", does not fit"
        lines.append(f"  {1e3 * change.extra_seconds:+10,.2f} ms  {' and '.join(change.changes)}{fits}")
    wrapped = (textwrap.fill(line, 80, subsequent_indent="  ", break_on_hyphens=False) for line in lines)
    return "\n".join([*wrapped, ""])


def dry_run_table(step: DryRun) -> Table:
    """Return a table of a planned step, unsorted and scheduled, on its cluster. It fits 80 columns."""
    what = "one step" if step.window is None else "the last micro-batch"
    rows = [
        [
            name,
            *_times(timeline),
            f"{timeline.over_max:.2f}",
            f"{timeline.over_sum:.2f}",
            human_bytes(timeline.peak_unsharded_bytes),
        ]
        for name, timeline in (("unsorted", step.before), ("scheduled", step.after))
    ]
    columns = ["", "step", *_PARTS, "over\nmax", "over\nsum", "peak\nunsharded"]
    table = plain_table(f"{what} on {step.cluster.name}, simulated; times in ms", columns, rows)
    compiled = step.compiled
    parts, in_flight = [], []
    for name, trace in (("forward", compiled.forward), ("backward", compiled.backward)):
        if trace is not None:
            used, least = shared_slots(trace)
            parts.append(f"{name} {human_bytes(used)} ({human_bytes(least)} live at once)")
            in_flight.append(f"{name} {read_schedule(trace).gathers_in_flight}")
    table.caption = f"scheduled: {step.after.breakdown}\nmemory of shared slots: {', '.join(parts)}\n"
    table.caption += f"gathers in flight, at most: {', '.join(in_flight)}"
    if compiled.backward is not None:
        in_place, total = share_written_in_place(compiled.backward)
        table.caption += f"\ngradients written in place: {human_bytes(in_place)} of {human_bytes(total)}"
    return table


def window_table(step: DryRun) -> Table:
    """Return a table of the micro-batches of a planned step, which must have several. It fits 80 columns."""
    window = step.window
    assert window is not None
    earlier, last = (human_bytes(memory.peak.nbytes) for memory in step.memories)
    number = step.micro_batches
    further = "2" if number == 3 else f"each of 2 to {number - 1}"
    rows = [["1, no_sync", *_times(window.first), earlier]]
    if number > 2:
        rows.append([f"{further}, no_sync", *_times(window.further), earlier])
    rows.append([f"{number}, reduces", *_times(step.after), last])
    columns = ["micro-batch", "time", *_PARTS, "peak\nmemory"]
    table = plain_table(f"{number} micro-batches; times in ms", columns, rows)
    table.caption = f"all micro-batches: {1e3 * step.seconds:,.2f} ms; peak memory without optimizer state"
    return table


_PARTS = ("compute", "communi-\ncation", "exposed")


def _times(timeline: Timeline) -> list[str]:
    """Return the time of a step and its parts in ms."""
    communication = sum(timeline.communication_seconds.values())
    seconds = (timeline.step_seconds, timeline.compute_seconds, communication, timeline.exposed_seconds)
    return milliseconds(*seconds)
