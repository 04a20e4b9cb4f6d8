"""Printed reports: the communication lines of a trace before and after sorting, and tables of schedules and plans."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ...compiled_traces import CompiledTraces
from ...ir.inspection import statement, statements
from ...ir.read_schedule import is_communication
from ...ir.schedule import GATHERS, ISSUES, WAITS
from ...plan.plan import Plan
from ...sizes import human_bytes

_SIDE_BY_SIDE = 128
"""Columns of a terminal that two traces next to each other need."""

_COLORS = {**dict.fromkeys(ISSUES, "yellow"), **dict.fromkeys(GATHERS, "green"), **dict.fromkeys(WAITS, "cyan")}


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
    """Return the communication lines of forward and backward, each as :func:`before_and_after` shows them."""
    steps = (traces.forward_before, traces.forward), (traces.backward_before, traces.backward)
    parts: list[RenderableType] = []
    for name, (before, after) in zip(("forward", "backward"), steps, strict=True):
        if before is not None and after is not None:
            parts += [before_and_after(before, after, title=f"{title}, {name}", width=width), Text()]
    return Group(*parts)


def before_and_after(before: TraceCtx, after: TraceCtx, *, title: str, width: int) -> RenderableType:
    """Return the communication lines of a trace before and after sorting, side by side if ``width`` allows.

    Args:
        title: a title for the traces, such as ``"ZeRO-3, forward"``.
        width: columns of the terminal.
    """
    if width < _SIDE_BY_SIDE:
        parts: list[RenderableType] = []
        for name, trace in (("before sorting", before), ("after sorting", after)):
            parts += [Text(f"{title}, {name}", style="bold"), *_rendered(trace, width), Text()]
        return Group(*parts[:-1])
    half = (width - 2) // 2
    table = Table(title=title, title_style="bold", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("before sorting", no_wrap=True, width=half)
    table.add_column("after sorting", no_wrap=True, width=half)
    for left, right in zip_longest(_rendered(before, half), _rendered(after, half), fillvalue=Text()):
        table.add_row(left, right)
    return table


def plain_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1) -> Table:
    """Return a table whose columns after the first ``texts`` hold figures."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < texts else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def milliseconds(*seconds: float) -> list[str]:
    """Return times as cells of a table in milliseconds."""
    return [f"{1e3 * s:,.2f}" for s in seconds]


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
    for row in (*cells.rows, cells.total):
        if row is cells.total:
            table.add_section()
        table.add_row(*(human_bytes(int(c.replace(",", "")), 4) if 2 <= n <= 4 else c for n, c in enumerate(row)))
    table.caption = "\n".join(cells.notes)
    table.caption_justify = "left"
    return table


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
        yield Text(_line(position, bsym, width), style=_COLORS.get(bsym.sym.name, ""), no_wrap=True)
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
    kept = max(width - len(lines[-1]) + len(name) - 1, 2)  # both ends of a path tell buckets apart, the middle does not
    return lines[-1].replace(name, f"{name[: kept - kept // 2]}…{name[-(kept // 2) :]}")[:width]
