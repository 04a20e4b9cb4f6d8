"""Printed reports: the communication lines of a trace before and after sorting, and tables of schedules and plans."""

from __future__ import annotations

import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from thunder.core.dtypes import to_torch_dtype
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ...compiled_traces import CompiledTraces
from ...ir.effects import effects
from ...ir.inspection import statement, statements
from ...ir.read_schedule import is_communication
from ...ir.schedule import GATHERS, ISSUES, WAITS
from ...sizes import human_bytes
from ..planning.blocks import block_of
from ..planning.dry_run import DryRun
from ..planning.timeline import Timeline
from ..step_memory.step_memory import StepMemory
from ..step_memory.value_memory import shared_slots
from .texts import milliseconds, plain_table

_COLORS = (GATHERS, "green"), (ISSUES, "yellow"), (WAITS, "cyan")
"""Kinds of symbols and their colors; the first kind that contains a symbol's name counts."""


def make_console(*, quiet: bool = False) -> Console:
    """Return the console to print on, as wide as the terminal, or 132 columns if the output is redirected."""
    console = Console(quiet=quiet, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 132
    return console


def communication_lines(trace: TraceCtx, *, width: int | None = None) -> list[str]:
    """Return the communication of a trace, each line as the trace prints it, after its position.

    Args:
        trace: an execution trace, sorted or not. A position is the number of bound symbols before it, ``del``
            statements not counted, as in a :class:`~thunder_fsdp_sched.Schedule`.
        width: columns; longer lines have only the symbol, its bucket and the comment, as far as they fit. The default
            shortens nothing.
    """
    return [_line(position, bsym, width) for position, bsym in _communication(trace)]


def step_before_and_after(traces: CompiledTraces, *, title: str, width: int) -> Group:
    """Return the communication lines of forward and backward, each before and after sorting, in ``width`` columns."""
    found = {
        "forward, before sorting": traces.forward_before,
        "forward, after sorting": traces.forward,
        "backward, before sorting": traces.backward_before,
        "backward, after sorting": traces.backward,
    }
    parts: list[RenderableType] = []
    for name, trace in found.items():
        if trace is not None:
            parts += [Text(f"{title}, {name}", style="bold"), *_rendered(trace, width), Text()]
    return Group(*parts)


def answer(step: DryRun, model: str, verdict: str, memory: StepMemory) -> str:
    """Return lines of 80 columns: the model, its inputs, the time and memory of a planned step, and what limits it.

    Args:
        model: the name that the user gave.
        verdict: whether the step fits.
        memory: the memory of the step, with the optimizer's state.
    """
    plan, options, peak, time = step.transform.plan, step.transform.options, memory.peak, step.after
    params = [param for bucket in plan for param in bucket.params]
    blocks = {block for param in params if (block := block_of(param.name))[-1].isdecimal()}
    largest = max(params, key=lambda param: param.numel)
    dtypes = dict.fromkeys(f"shards {b.dtype}, computed in {b.param_dtype}, reduced in {b.reduce_dtype}" for b in plan)
    kind, nbytes = max(peak.by_kind.items(), key=lambda item: item[1])
    link = max(time.communication_seconds.values(), default=0.0)
    bound = "links" if link > time.compute_seconds else "compute"
    shares = {
        "of the step is exposed communication": time.exposed_seconds / time.step_seconds,
        f"of the step is the work of the busiest stream, so it is bound by {bound}": 1 / time.over_max,
        f"of the memory is used at the peak, {nbytes / peak.nbytes:.0%} of it by {kind}": peak.nbytes
        / step.cluster.memory,
    }
    lines = [
        f"{model}: {sum(param.numel for param in params):,} parameters, {len(blocks)} blocks; the largest is "
        f"{largest.name} {largest.shape}",
        *(precision.replace("torch.", "") for precision in dtypes),
        f"{step.compiled.call}" + f", {step.micro_batches} micro-batches" * (step.micro_batches > 1),
        f"{options.sharding_strategy.strategy}, {step.world_size} ranks of {step.cluster.name}: "
        f"{1e3 * step.seconds:,.2f} ms a step",
        *(f"runs as it is: {leaf}" for leaf in step.transform.sharded.leaves.summary()),
        verdict,
        *(f"{share:6.1%} {what}" for what, share in shares.items()),
    ]
    wrapped = (textwrap.fill(line, 80, subsequent_indent="  ", break_on_hyphens=False) for line in lines)
    return "\n".join([*wrapped, ""])


def dry_run_table(step: DryRun) -> Table:
    """Return a table of a planned step, unsorted and scheduled, on its cluster. It fits 80 columns."""
    what = "one step" if step.micro_batches == 1 else "the last micro-batch"
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
    schedules = filter(None, (compiled.forward_schedule, compiled.backward_schedule))
    for name, trace, schedule in zip(("forward", "backward"), compiled.traces, schedules, strict=False):
        used, least = shared_slots(trace)
        parts.append(f"{name} {human_bytes(used)} ({human_bytes(least)} live at once)")
        in_flight.append(f"{name} {schedule.gathers_in_flight}")
    table.caption = f"scheduled: {step.after.breakdown}\nmemory of shared slots: {', '.join(parts)}\n"
    table.caption += f"gathers in flight, at most: {', '.join(in_flight)}"
    if compiled.backward is not None:
        written = _gradients(compiled.backward)
        total, in_place = sum(written.values()), written.pop("", 0)
        table.caption += f"\ngradients written in place: {human_bytes(in_place)} of {human_bytes(total)}"
        copied = [f"{human_bytes(nbytes)} {why}" for why, nbytes in written.most_common(3)]
        table.caption += f"; copied: {', '.join(copied)}" if copied else ""
    return table


def window_table(step: DryRun) -> Table:
    """Return a table of the micro-batches of a planned step, which must have several. It fits 80 columns."""
    rows, number = [], 1
    for row in step.rows:
        numbers = f"{number}" if row.number == 1 else f"each of {number} to {number + row.number - 1}"
        number += row.number
        what = "no_sync" if number <= step.micro_batches else "reduces"
        rows.append([f"{numbers}, {what}", *_times(row.timeline), human_bytes(row.memory.peak.nbytes)])
    columns = ["micro-batch", "time", *_PARTS, "peak\nmemory"]
    table = plain_table(f"{step.micro_batches} micro-batches; times in ms", columns, rows)
    table.caption = f"all micro-batches: {1e3 * step.seconds:,.2f} ms; peak memory without optimizer state"
    return table


_PARTS = ("compute", "communi-\ncation", "exposed")


def _times(timeline: Timeline) -> list[str]:
    """Return the time of a step and its parts in ms."""
    communication = sum(timeline.communication_seconds.values())
    seconds = (timeline.step_seconds, timeline.compute_seconds, communication, timeline.exposed_seconds)
    return milliseconds(*seconds)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _communication(trace: TraceCtx) -> Iterator[tuple[int, BoundSymbol]]:
    """Yield the lines of the schedule of a trace, with their positions."""
    return ((position, bsym) for position, bsym in enumerate(statements(trace)) if is_communication(bsym))


def _rendered(trace: TraceCtx, width: int) -> Iterator[Text]:
    last = None
    for position, bsym in _communication(trace):
        if last is not None and position > last + 1:
            yield Text(f"      : {_count(position - last - 1, 'operation')}", style="dim")
        color = next((color for names, color in _COLORS if bsym.sym.name in names), "")
        yield Text(_line(position, bsym, width), style=color, no_wrap=True)
        last = position


def _line(position: int, bsym: BoundSymbol, width: int | None) -> str:
    text = statement(bsym)
    found = re.search(r"\w+\((\w+)(, slot_\w+)?", text)
    if width is None or len(text) + 6 <= width or found is None:
        return f"{position:5d} {text}"
    name, slot = found.group(1), found.group(2) or ""
    _, mark, comment = text.partition("  #")
    forms = ((slot, mark + comment), (slot, ""), ("", ""))
    lines = [f"{position:5d} {bsym.sym.name}({name}{slot}, …){note}" for slot, note in forms]
    if fitting := [line for line in lines if len(line) <= width]:
        return fitting[0]
    kept = max(width - len(lines[-1]) + len(name) - 1, 2)  # the ends of a path distinguish buckets, the middle does not
    return lines[-1].replace(name, f"{name[: kept - kept // 2]}…{name[-(kept // 2) :]}")[:width]


def _gradients(trace: TraceCtx) -> Counter[str]:
    """Return the bytes of reduced gradients by the reason of their copies; ``""`` for those written in place."""
    made: dict[str, tuple[str, Any]] = {}
    written: set[str] = set()
    found: Counter[str] = Counter()
    for bsym in trace.bound_symbols:
        e = effects(bsym)
        if e.fills is not None:
            written.update(e.in_place)
        made.update((out.name, (bsym.sym.name, out)) for out in bsym.flat_proxy_outs if out.name not in made)
        for name, region in e.collects.items():
            assert region.param is not None
            operator, gradient = made[name]
            computed = to_torch_dtype(gradient.dtype)
            why = f"computed by {operator}"
            if computed != region.dtype:
                why = f"computed in {computed}, reduced in {region.dtype}".replace("torch.", "")
            numel = region.bucket.spec.layout.placements[region.param].numel
            found["" if name in written else why] += numel * region.dtype.itemsize
    return found
