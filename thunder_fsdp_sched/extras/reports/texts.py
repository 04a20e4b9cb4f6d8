"""The table of buckets that ``print(plan)`` shows, the changes by a pass, for logs, and tables of figures."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from thunder.core.trace import TraceCtx

from ...plan.specs import BucketSpec, Plan
from ...sizes import human_bytes


def plan_table(plan: Plan, *, title: str = "buckets") -> Group:
    """Return a table of the buckets of a plan: number of parameters, bytes, and all else that differs between buckets.

    A value that is the same for all buckets, or that only some have, is a note below. Names are never cut: in a narrow
    terminal they continue on the next line.
    """
    dtypes = {bucket.name: _dtypes(bucket) for bucket in plan}
    shows_dtypes = len(set(dtypes.values())) > 1
    ranks = {b.name: f"{b.layout.world_size}" + (f" x {b.replicas}" if b.replicas > 1 else "") for b in plan}
    shows_ranks = len({(b.group, ranks[b.name]) for b in plan}) > 1 or any(b.replicas > 1 for b in plan)
    rows = [
        (
            bucket.name if bucket.requires_grad else f"{bucket.name} (frozen)",
            *_sizes([bucket]),
            *[dtypes[bucket.name]] * shows_dtypes,
            *[ranks[bucket.name]] * shows_ranks,
        )
        for bucket in plan
    ]
    total = (f"{len(plan)} bucket{'s' * (len(plan) != 1)}", *_sizes(plan), *[""] * (shows_dtypes + shows_ranks))
    notes = [] if shows_dtypes else [f"dtype: {dtype}" for dtype in dict.fromkeys(dtypes.values())]
    notes += _notes(plan, "{}", lambda b: f"{b.comm.transport}: {b.comm.reason}")
    notes += _notes(plan, "unsharded until backward", lambda b: b.options.sharding_strategy == "zero2" or None)
    notes += _notes(plan, "backward gathers among {} ranks, from secondary shards", lambda b: b.options.secondary_ranks)
    notes += _notes(plan, "sent by {}", lambda b: b.options.comm_policy)
    notes += _notes(plan, "sum of gradients divided by {:g}", lambda b: b.options.gradient_divide_factor)
    title = f"{title}, {plan.world_size} ranks of process group {plan.group!r}"
    table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("bucket", overflow="fold")
    columns = ["param-\neters", "unsharded\nbytes", "bytes\na rank", "padding"]
    for column in [*columns, *["dtype"] * shows_dtypes, *["ranks"] * shows_ranks]:
        table.add_column(column, justify="left" if column == "dtype" else "right", no_wrap=True)
    for row in _join_alike(rows):
        table.add_row(*row)
    table.add_section()
    table.add_row(*total)
    return Group(table, *map(Text, notes))


def plan_text(plan: Plan) -> str:
    """Return the table in lines as wide as it needs."""
    return as_text(plan_table(plan), 200)


def as_text(table: RenderableType, width: int) -> str:
    """Return a table as lines of text."""
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def _join_alike(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Join the rows of three or more buckets whose names differ only in their first number: ``"30 x blocks.1-30.up"``."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        alike.setdefault((re.sub(r"\d+", "#", name, count=1), *cells), []).append(name)
    for (pattern, *cells), names in alike.items():
        numbers = [int(found[0]) if (found := re.search(r"\d+", name)) else 0 for name in names]
        if len(names) < 3 or numbers != list(range(numbers[0], numbers[0] + len(names))):
            yield from ((name, *cells) for name in names)
        else:
            yield f"{len(names)} x {pattern.replace('#', f'{numbers[0]}-{numbers[-1]}')}", *cells


def _sizes(buckets: Iterable[BucketSpec]) -> list[str]:
    """Return the number of parameters, and bytes: unsharded, of a rank, and of padding."""
    sizes = [(len(b.params), b.unsharded_bytes, b.shard_bytes, b.padding_bytes) for b in buckets]
    count, *nbytes = map(sum, zip(*sizes, strict=True))
    return [f"{count:,}", *(human_bytes(n, 4) for n in nbytes)]


def _notes(plan: Plan, text: str, value_of: Callable[[BucketSpec], object]) -> Iterator[str]:
    """Yield a note for each value of buckets except ``None``, with the names of its buckets unless all share it."""
    names: dict[object, list[str]] = {}
    for bucket in plan:
        names.setdefault(value_of(bucket), []).append(bucket.name)
    for value, of_value in names.items():
        if value is not None:
            yield text.format(value) + (f": {', '.join(of_value)}" if len(of_value) < len(plan) else "")


def _dtypes(bucket: BucketSpec) -> str:
    """Return the dtype of shards, and those of gathers and reductions if they differ."""
    shards, gathered, reduced = (
        str(dtype).removeprefix("torch.") for dtype in (bucket.dtype, bucket.param_dtype, bucket.reduce_dtype)
    )
    return shards if shards == gathered == reduced else f"{shards}, gathered {gathered}, reduced {reduced}"


def describe_change(before: TraceCtx, after: TraceCtx) -> str:
    """Return how many bound symbols a pass has added, removed or replaced, and which of this package's symbols."""
    old, new = before.bound_symbols, after.bound_symbols
    known = {id(bsym) for bsym in old}
    own = Counter(bsym.sym.name for bsym in new if bsym.sym.name.startswith("fsdp_"))
    own.subtract(bsym.sym.name for bsym in old if bsym.sym.name.startswith("fsdp_"))
    changed = sum(id(bsym) not in known for bsym in new)
    parts = [f"{len(old):,} -> {len(new):,} bound symbols ({changed:,} new or rewritten)"]
    return ", ".join([*parts, *(f"{number:+} {name}" for name, number in sorted(own.items()) if number)])


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
