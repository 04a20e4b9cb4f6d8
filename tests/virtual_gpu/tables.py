"""The tables of tests/virtual_gpu/README.md, which tests compare with actual runs.

``PYTHONPATH=tests python -m virtual_gpu.tables`` counts everything again and writes the tables into the page.
"""

from __future__ import annotations

import itertools
import linecache
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from tracing_shortcuts import tracing_shortcuts

from .histories import TRANSPORTS, run_history, setups_of, take_three_steps
from .log import Entry
from .mutations import is_ours
from .order import Order, Verdict
from .world import run

__all__ = ["COUNTED_CASES", "count_row", "documented", "mutation_row", "verdicts_of"]

PAGE = Path(__file__).with_name("README.md")

KINDS = ("kernel", "copy", "collective", "barrier", "record", "wait_event", "syncs")

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "autocast": {},
}

COUNTED_CASES = list(itertools.product(TRANSPORTS, ("zero3", "zero2"), PRECISIONS))

_BUCKET_IN_LINE = re.compile(r"fsdp_(?:all_gather|reduce_scatter|wait_params|wait_grads)\((\w+)")

_MIDDLE_BUCKET = ("bucket_blocks_1", "bucket_blocks_1_bfloat16")

MUTATION_KINDS = ("wait", "barrier", "event", "host wait", "record_stream", "reference")


def count_row(transport: str, strategy: str, precision: str) -> tuple[str, ...]:
    """Return a row of the table: the counts of the third step, and those of a middle block's bucket in it."""
    options = {"transport": transport, "sharding_strategy": strategy, **PRECISIONS[precision]}
    [log] = run(take_three_steps, precision, ranks=[0], **options).logs
    cells = []
    for of_a_bucket in (False, True):
        for phase in ("forward 2", "backward 2"):
            counts: Counter[str] = Counter()
            for entry in log.entries:
                if entry.phase == phase and (not of_a_bucket or _bucket_of(entry) in _MIDDLE_BUCKET):
                    counts[entry.kind] += 1
                    counts["syncs"] += entry.blocks or entry.kind.startswith("sync")
            cells.append(" ".join(str(counts[kind]) for kind in KINDS))
    return transport, strategy, precision, *cells


def _bucket_of(entry: Entry) -> str | None:
    """Return the bucket to whose communication ``entry`` belongs, found from the line of the trace."""
    for file, line, _ in entry.where:
        if file.startswith("thunder."):
            found = _BUCKET_IN_LINE.search(linecache.getline(file, line))
            return found[1] if found else None
    return None


def mutation_row(transport: str, setup: str, verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """Return a row of the table: how many mutations of each kind are flagged, of how many."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for mutation, verdict in verdicts:
        counts[mutation.kind][verdict] += 1
    cells = []
    for kind in MUTATION_KINDS:
        of = counts[kind]
        cells.append(f"{of['flagged']} of {of.total()}" if of else "")
    redundant = Counter(verdict for _, verdict in verdicts)
    return transport, setup, *cells, f"{redundant['implied']} + {redundant['apart']}"


def verdicts_of(setup: str, order: Order) -> list[Verdict]:
    """Return the verdict on each mutation of the package's ordering in a step.

    After an exception it is not known what is still needed, so only each ``record_stream`` is removed.
    """
    verdicts = order.verdicts(is_ours)
    return [v for v in verdicts if setup != "interrupted" or v.mutation.kind == "record_stream"]


def documented(table: str) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the rows of a table in the page by their first cells."""
    text = PAGE.read_text().partition(f"<!-- {table} -->\n")[2].partition("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines()[2:]]
    keys = {"counters": 3, "mutations": 2}[table]
    return {row[:keys]: row for row in rows}


def _written(table: str, head: Sequence[str], rows: Iterator[tuple[str, ...]]) -> None:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        lines.append("| " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
    text = PAGE.read_text()
    before, mark, after = text.partition(f"<!-- {table} -->\n")
    assert mark, f"{PAGE} has no mark for {table}"
    PAGE.write_text(before + mark + "\n".join(lines) + "\n\n" + after.partition("\n\n")[2])


def main() -> None:
    """Count everything again and write both tables."""
    head = ["transport", "strategy", "precision", "forward", "backward", "a bucket's forward", "a bucket's backward"]
    with tracing_shortcuts():
        _written("counters", head, (count_row(*case) for case in COUNTED_CASES))
    head = [
        "transport",
        "setup",
        "waits",
        "barriers",
        "events",
        "host waits",
        "record_stream",
        "references",
        "redundant",
    ]
    cases = [(t, s) for t in TRANSPORTS for s in setups_of(t)]
    with tracing_shortcuts():
        _written(
            "mutations", head, (mutation_row(t, s, verdicts_of(s, Order(run_history(t, s).logs))) for t, s in cases)
        )


if __name__ == "__main__":
    main()
