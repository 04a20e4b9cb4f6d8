"""Tables of planned steps."""

from __future__ import annotations

from rich import box
from rich.table import Table

from ..ir.schedule import read_schedule
from ..ir.slots import shared_slots
from ..planning.dry_run import DryRun
from ..transforms.write_grads_in_place import share_written_in_place
from .report import human_bytes


def dry_run_table(step: DryRun) -> Table:
    """Return a table of a planned step, unsorted and scheduled, on its cluster. It fits 80 columns."""
    what = "one step" if step.window is None else "the last micro-batch"
    table = Table(
        title=f"{what} on {step.cluster.name}, simulated; times in ms", box=box.SIMPLE_HEAD, title_justify="left"
    )
    table.add_column("", no_wrap=True)
    for column in ("step", "compute", "communi-\ncation", "exposed", "over\nmax", "over\nsum", "peak\nunsharded"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, timeline in (("unsorted", step.before), ("scheduled", step.after)):
        table.add_row(
            name,
            f"{timeline.step_seconds * 1e3:,.2f}",
            f"{timeline.compute_seconds * 1e3:,.2f}",
            f"{sum(timeline.communication_seconds.values()) * 1e3:,.2f}",
            f"{timeline.exposed_seconds * 1e3:,.2f}",
            f"{timeline.over_max:.2f}",
            f"{timeline.over_sum:.2f}",
            human_bytes(timeline.peak_unsharded_bytes),
        )
    compiled = step.compiled
    parts, in_flight = [], []
    for name, trace in (("forward", compiled.forward), ("backward", compiled.backward)):
        if trace is not None:
            used, least = shared_slots(trace)
            parts.append(f"{name} {human_bytes(used)} ({human_bytes(least)} live at once)")
            in_flight.append(f"{name} {read_schedule(trace).gathers_in_flight}")
    table.caption_justify = "left"
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
    table = Table(title=f"{window.micro_batches} micro-batches; times in ms", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("micro-batch", no_wrap=True)
    for column in ("time", "compute", "communi-\ncation", "exposed", "peak\nmemory"):
        table.add_column(column, justify="right", no_wrap=True)
    earlier, last = step.memories
    rows = [("1, no_sync", window.first, earlier), (f"{window.micro_batches}, reduces", step.after, last)]
    if window.micro_batches > 2:
        further = "2" if window.micro_batches == 3 else f"each of 2 to {window.micro_batches - 1}"
        rows.insert(1, (f"{further}, no_sync", window.further, earlier))
    for name, timeline, memory in rows:
        seconds = (
            timeline.step_seconds,
            timeline.compute_seconds,
            sum(timeline.communication_seconds.values()),
            timeline.exposed_seconds,
        )
        table.add_row(name, *(f"{1e3 * s:,.2f}" for s in seconds), human_bytes(memory.peak.nbytes))
    table.caption_justify = "left"
    table.caption = f"all micro-batches: {1e3 * step.seconds:,.2f} ms; peak memory without optimizer state"
    return table
