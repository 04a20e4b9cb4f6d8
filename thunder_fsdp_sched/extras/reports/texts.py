"""Texts without other libraries: the table of buckets that ``print(plan)`` shows, and what a pass changed, for logs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from thunder.core.trace import TraceCtx

from ...plan.specs import BucketSpec

Key = TypeVar("Key")


class PlanTable(NamedTuple):
    """The cells of a plan's table. Sizes are in bytes."""

    title: str
    columns: tuple[str, ...]  # headers; the first column has names, the others numbers or short words
    rows: tuple[tuple[str, ...], ...]  # in the order of the plan; one for buckets of blocks that are alike
    total: tuple[str, ...]
    notes: tuple[str, ...]  # what all buckets have in common, or only some, one line each

    def __str__(self) -> str:
        """Return the table as lines of text, as wide as its longest names."""
        lines = [self.columns, *self.rows, self.total]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [f"buckets, {self.title}", _line(self.columns, widths), "-" * (sum(widths) + 2 * len(widths) - 2)]
        text += [_line(row, widths) for row in self.rows]
        return "\n".join([*text, text[2], _line(self.total, widths), *self.notes])


def table_of(plan: Sequence[BucketSpec], title: str) -> PlanTable:
    """Return the cells of the table. A value that is the same for all buckets is a note instead of a column."""
    dtypes = {bucket.name: _dtypes(bucket) for bucket in plan}
    shows_dtypes = len(set(dtypes.values())) > 1
    ranks = {b.name: f"{b.layout.world_size}" + (f" x {b.replicas}" if b.replicas > 1 else "") for b in plan}
    shows_ranks = len({(b.group, ranks[b.name]) for b in plan}) > 1 or any(b.replicas > 1 for b in plan)
    columns = ["bucket", "parameters", "unsharded bytes", "bytes a rank", "padding"]
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
    reasons = _names_by(plan, lambda b: f"{b.comm.transport}: {b.comm.reason}")
    notes += [reason + (f" ({names})" if len(reasons) > 1 else "") for reason, names in reasons.items()]
    kept = [bucket.name for bucket in plan if bucket.options.sharding_strategy == "zero2"]
    if 0 < len(kept) < len(plan):
        notes.append(f"unsharded until backward: {', '.join(kept)}")
    sizes = _names_by(plan, lambda b: b.options.secondary_ranks)
    for size, names in sizes.items():
        of = f": {names}" if len(sizes) > 1 else ""
        notes += [f"backward gathers among {size} ranks, from secondary shards{of}"] * (size is not None)
    for policy, names in _names_by(plan, lambda b: b.options.comm_policy).items():
        notes += [f"sent by {policy}" + (f": {names}" if len(plan) > names.count(",") + 1 else "")] * (
            policy is not None
        )
    for factor, names in _names_by(plan, lambda b: b.options.gradient_divide_factor).items():
        notes += [] if factor is None else [f"sum of gradients divided by {factor:g}: {names}"]
    columns += ["dtype"] * shows_dtypes + ["ranks"] * shows_ranks
    return PlanTable(title, tuple(columns), tuple(_join_alike(rows)), total, tuple(notes))


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


def _sizes(buckets: Sequence[BucketSpec]) -> list[str]:
    """Return the number of parameters, and bytes: unsharded, of a rank, and of padding."""
    numbers = (
        [len(b.params) for b in buckets],
        [b.unsharded_bytes for b in buckets],
        [b.shard_bytes for b in buckets],
        [b.padding_bytes for b in buckets],
    )
    return [f"{sum(of_buckets):,}" for of_buckets in numbers]


def _names_by(buckets: Sequence[BucketSpec], key: Callable[[BucketSpec], Key]) -> dict[Key, str]:
    """Return the names of buckets by a property, in order of appearance."""
    names: dict[Key, list[str]] = {}
    for bucket in buckets:
        names.setdefault(key(bucket), []).append(bucket.name)
    return {value: ", ".join(of_value) for value, of_value in names.items()}


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join([first.lstrip().ljust(widths[0]), *others]).rstrip()


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
