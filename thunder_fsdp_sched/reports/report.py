"""Printed reports: the communication lines of a trace before and after sorting, and tables of schedules and plans."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, zip_longest

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from thunder.core.trace import TraceCtx

from ..ir.inspection import statement, statements
from ..ir.schedule import Schedule
from ..ir.symbols import GATHERS, ISSUES, WAITS, fsdp_accumulate_grads, fsdp_reduce_unreduced
from ..plan.plan import Plan

__all__ = [
    "before_and_after",
    "communication_lines",
    "human_bytes",
    "plan_table",
    "schedule_table",
    "summarize_thunder",
]

_SIDE_BY_SIDE = 128
"""Columns of a terminal that two traces next to each other need."""

_SHOWN = ISSUES | WAITS | {fsdp_accumulate_grads.name, fsdp_reduce_unreduced.name}
_COLORS = {**dict.fromkeys(ISSUES, "yellow"), **dict.fromkeys(GATHERS, "green"), **dict.fromkeys(WAITS, "cyan")}
_LINE = re.compile(r"(?P<out>.*? = )?(?P<symbol>\w+)\((?P<args>[^)]*)\)(?P<comment>\s*#.*)?$")


@dataclass(frozen=True)
class _Line:
    position: int
    symbol: str
    text: str
    compute: int  # bound symbols between the line before and this one


def communication_lines(trace: TraceCtx, *, width: int | None = None) -> list[str]:
    """Return the communication of a trace, each line as the trace prints it, after its position.

    Args:
        trace: an execution trace, sorted or not. A position is the number of bound symbols before it, ``del``
            statements not counted, as in a :class:`~thunder_fsdp_sched.Schedule`.
        width: columns; longer lines are shortened, first in the middle of lists of names. The default shortens nothing.
    """
    return [_numbered(line, width) for line in _lines(trace)]


def before_and_after(
    before: TraceCtx, after: TraceCtx, *, title: str, width: int, compute: bool = True
) -> RenderableType:
    """Return the communication lines of a trace before and after sorting, side by side if ``width`` allows.

    Args:
        title: a title for the traces, such as ``"ZeRO-3, forward"``.
        width: columns of the terminal.
        compute: also print the number of bound symbols of compute between two lines.
    """
    if width < _SIDE_BY_SIDE:
        parts: list[RenderableType] = []
        for name, trace in (("before sorting", before), ("after sorting", after)):
            parts += [Text(f"{title}, {name}", style="bold"), *_rendered(trace, width, compute), Text()]
        return Group(*parts[:-1])
    half = (width - 2) // 2
    table = Table(title=title, title_style="bold", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("before sorting", no_wrap=True, width=half)
    table.add_column("after sorting", no_wrap=True, width=half)
    for left, right in zip_longest(_rendered(before, half, compute), _rendered(after, half, compute), fillvalue=Text()):
        table.add_row(left, right)
    return table


def schedule_table(schedule: Schedule, *, title: str) -> Table:
    """Return a table of the communication ops of a schedule, with slots and first consumers."""
    table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("at", justify="right")
    table.add_column("symbol", no_wrap=True)
    table.add_column("bucket", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("slot", no_wrap=True)
    table.add_column("read\nat", justify="right", no_wrap=True)
    table.add_column("why there", overflow="fold")
    for op in schedule:
        table.add_row(
            str(op.position),
            Text(op.kind, style=_COLORS.get(op.kind, "")),
            op.bucket,
            f"{op.nbytes:,}",
            op.slot,
            "" if op.first_consumer is None else str(op.first_consumer),
            Text(op.reason if op.travels else f"{op.reason}, already resident"),
        )
    table.caption, table.caption_justify = _in_flight(schedule), "left"
    return table


def _in_flight(schedule: Schedule) -> str:
    return f"{_count(schedule.gathers_in_flight, 'gather')} in flight at most"


def plan_table(plan: Plan, *, title: str = "buckets") -> Table:
    """Return a table of the buckets of a plan: number of parameters, bytes, and what else differs between buckets.

    Names are never cut: in a narrow terminal they continue on the next line.
    """
    cells = plan.table
    table = Table(title=f"{title}, {cells.title}", title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(cells.columns[0], overflow="fold")
    headers = {"parameters": "param-\neters", "unsharded bytes": "unsharded\nbytes", "bytes a rank": "bytes\na rank"}
    for column in cells.columns[1:]:
        table.add_column(headers.get(column, column), justify="left" if column == "dtype" else "right", no_wrap=True)
    for row in cells.rows:
        table.add_row(*row)
    table.add_section()
    table.add_row(*cells.total)
    table.caption = "\n".join(cells.notes)
    table.caption_justify = "left"
    return table


def summarize_thunder(trace: TraceCtx) -> list[str]:
    """Return the communication of a trace of Thunder's own ``fsdp``, one line for each run of the same operation.

    A line has the positions of the run and the number of bound symbols of compute within it.
    """
    found = []
    for position, bsym in enumerate(statements(trace)):
        match = re.search(r"all_gather|reduce_scatter|wait", bsym.sym.name)
        if match is not None:
            found.append((match.group(), position))
    lines = []
    for operation, run in groupby(found, key=lambda entry: entry[0]):
        positions = [position for _, position in run]
        compute = positions[-1] - positions[0] + 1 - len(positions)
        lines.append(
            f"{positions[0]:5d} to {positions[-1]:5d}  {len(positions):4d} x {operation}"
            + (f", {_count(compute, 'other operation')} in between" if compute else "")
        )
    return lines


def human_bytes(nbytes: int) -> str:
    """Return bytes as text: ``4927488`` -> ``"4.93 MB"`` (powers of ten)."""
    size, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{nbytes} B" if units[0] == "B" else f"{size:.3g} {units[0]}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _lines(trace: TraceCtx) -> list[_Line]:
    lines: list[_Line] = []
    last = -1
    for position, bsym in enumerate(statements(trace)):
        if bsym.sym.name in _SHOWN:
            lines.append(_Line(position, bsym.sym.name, statement(bsym), position - last - 1 if lines else 0))
            last = position
    return lines


def _rendered(trace: TraceCtx, width: int, compute: bool) -> list[Text]:
    rendered = []
    for line in _lines(trace):
        if compute and line.compute:
            rendered.append(Text(f"      : {_count(line.compute, 'operation')}", style="dim"))
        rendered.append(Text(_numbered(line, width), style=_COLORS.get(line.symbol, ""), no_wrap=True))
    return rendered


def _numbered(line: _Line, width: int | None) -> str:
    text = f"{line.position:5d} {line.text}"
    if width is None or len(text) <= width:
        return text
    for shortened in _shorter(line.text):
        text = f"{line.position:5d} {shortened}"
        if len(text) <= width:
            return text
    if (name := re.search(r"\bbucket_\w+", text)) and (kept := width - len(text) + len(name[0]) - 1) >= 16:
        half = kept // 2  # both ends of a path tell buckets apart, the middle does not
        return f"{text[: name.start()]}{name[0][: kept - half]}…{name[0][len(name[0]) - half :]}{text[name.end() :]}"
    return text[: max(width - 1, 0)] + "…"


def _shorter(text: str) -> Iterator[str]:
    """Yield ever shorter versions of a line of a trace: with fewer names in lists, without bytes, without results."""
    match = _LINE.match(text)
    if match is None:
        return
    out, symbol, args, comment = (match.group(g) or "" for g in ("out", "symbol", "args", "comment"))
    outs, names = (names.strip("()").rstrip(",").split(", ") for names in (out.removesuffix(" = "), args))
    fixed = 1 if symbol in WAITS or symbol == "fsdp_all_reduce" else 2  # the bucket; for issues also the slot
    for keep, note in ((2, comment), (1, comment), (1, ""), (0, "")):
        left = f"({_abbreviate(outs, keep)}) = " if len(outs) > 1 else out
        rest = [_abbreviate(names[fixed:], keep)] if names[fixed:] else []
        yield f"{left}{symbol}({', '.join([*names[:fixed], *rest])}){note}"
    yield f"{symbol}({names[0]}, …)"


def _abbreviate(names: list[str], keep: int) -> str:
    """Return ``a, b, … 9`` for eleven names of which two are kept; ``… 11`` if none are."""
    if len(names) <= keep:
        return ", ".join(names)
    return ", ".join([*names[:keep], f"… {len(names) - keep}"])
