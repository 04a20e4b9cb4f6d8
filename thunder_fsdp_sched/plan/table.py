"""The table of a plan's buckets: cells for any renderer, and the plain text that ``print(plan)`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .specs import BucketSpec

__all__ = ["PlanTable", "as_text", "table_of"]


class PlanTable(NamedTuple):
    """The cells of a plan's table. Sizes are in bytes.

    Attributes:
        columns: headers; the first column has names, the others numbers or short words.
        rows: one for each bucket, in the order of the plan.
        total: the last row.
        notes: what all buckets have in common, or only some, one line each.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    total: tuple[str, ...]
    notes: tuple[str, ...]


def table_of(plan: Sequence[BucketSpec], title: str) -> PlanTable:
    """Return the cells of the table. A value that is the same for all buckets is a note instead of a column."""
    dtypes = {bucket.name: _dtypes(bucket) for bucket in plan}
    shows_dtypes = len(set(dtypes.values())) > 1
    shows_ranks = len({(b.group, b.layout.world_size, b.replicas) for b in plan}) > 1 or any(
        b.replicas > 1 for b in plan
    )
    columns = ["bucket", "parameters", "unsharded bytes", "bytes a rank", "padding"]
    columns += ["dtype"] * shows_dtypes + ["ranks"] * shows_ranks
    rows = []
    for bucket in plan:
        ranks = f"{bucket.layout.world_size}" + (f" x {bucket.replicas}" if bucket.replicas > 1 else "")
        cells = [
            bucket.name if bucket.requires_grad else f"{bucket.name} (frozen)",
            str(len(bucket.params)),
            f"{bucket.unsharded_bytes:,}",
            f"{bucket.shard_bytes:,}",
            f"{bucket.padding_bytes:,}",
        ]
        rows.append((*cells, *[dtypes[bucket.name]] * shows_dtypes, *[ranks] * shows_ranks))
    total = [
        f"{len(plan)} bucket{'s' * (len(plan) != 1)}",
        str(sum(len(b.params) for b in plan)),
        f"{sum(b.unsharded_bytes for b in plan):,}",
        f"{sum(b.shard_bytes for b in plan):,}",
        f"{sum(b.padding_bytes for b in plan):,}",
    ]
    reasons: dict[str, list[str]] = {}
    for bucket in plan:
        reasons.setdefault(f"{bucket.comm.transport}: {bucket.comm.reason}", []).append(bucket.name)
    notes = [] if shows_dtypes else [f"dtype: {dtype}" for dtype in dict.fromkeys(dtypes.values())]
    notes += [reason + (f" ({', '.join(names)})" if len(reasons) > 1 else "") for reason, names in reasons.items()]
    kept = [bucket.name for bucket in plan if not bucket.reshard_after_forward]
    if 0 < len(kept) < len(plan):
        notes.append(f"unsharded until backward: {', '.join(kept)}")
    for size in sorted({bucket.secondary_size for bucket in plan if bucket.secondary_size is not None}):
        among = [bucket.name for bucket in plan if bucket.secondary_size == size]
        of = f": {', '.join(among)}" if len(among) < len(plan) else ""
        notes.append(f"backward gathers among {size} ranks, from secondary shards{of}")
    for factor in sorted({bucket.divide_factor for bucket in plan if bucket.divide_factor is not None}):
        of = ", ".join(bucket.name for bucket in plan if bucket.divide_factor == factor)
        notes.append(f"sum of gradients divided by {factor:g}: {of}")
    total += [""] * (shows_dtypes + shows_ranks)
    return PlanTable(title, tuple(columns), tuple(rows), tuple(total), tuple(notes))


def as_text(table: PlanTable) -> str:
    """Return the table as lines of text, as wide as its longest names."""
    lines = [table.columns, *table.rows, table.total]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [f"buckets, {table.title}", _line(table.columns, widths), "-" * (sum(widths) + 2 * len(widths) - 2)]
    text += [_line(row, widths) for row in table.rows]
    return "\n".join([*text, text[2], _line(table.total, widths), *table.notes])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join([first.lstrip().ljust(widths[0]), *others]).rstrip()


def _dtypes(bucket: BucketSpec) -> str:
    """Return the dtype of shards, and those of gathers and reductions if they differ."""
    shards, gathered, reduced = (
        str(dtype).removeprefix("torch.") for dtype in (bucket.dtype, bucket.param_dtype, bucket.reduce_dtype)
    )
    return shards if shards == gathered == reduced else f"{shards}, gathered {gathered}, reduced {reduced}"
