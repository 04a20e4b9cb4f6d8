"""The table of tests/virtual_gpu/README.md, which tests compare with actual runs.

``PYTHONPATH=tests python -m virtual_gpu.tables`` counts everything again and writes the table into the page.
"""

from __future__ import annotations

import itertools
import linecache
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from .histories import TRANSPORTS, take_three_steps
from .log import Entry
from .world import Result, run

PAGE = Path(__file__).with_name("README.md")
_MARK = "<!-- counters -->\n"

KINDS = ("kernel", "copy", "collective", "barrier", "record", "wait_event", "syncs")

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "autocast": {},
}

COUNTED_CASES = list(itertools.product(TRANSPORTS, ("zero3", "zero2"), PRECISIONS))

_BUCKET_IN_LINE = re.compile(r"fsdp_(?:all_gather|reduce_scatter|wait_params|wait_grads)\((\w+)")

_MIDDLE_BUCKET = ("bucket_blocks_1", "bucket_blocks_1_bfloat16")


def run_case(transport: str, strategy: str, precision: str) -> Result:
    """Take three steps as one rank, or as two where ranks or their collectives meet."""
    options = {"transport": transport, "sharding_strategy": strategy, **PRECISIONS[precision]}
    return run(take_three_steps, precision, ranks=None if transport in ("flat", "symmetric_memory") else [0], **options)


def count_row(result: Result, *case: str) -> tuple[str, ...]:
    """Return a row of the table: the counts of the third step, and those of a middle block's bucket in it."""
    cells = []
    for of_a_bucket in (False, True):
        for phase in ("forward 2", "backward 2"):
            counts: Counter[str] = Counter()
            for entry in result.logs[0].entries:
                if entry.phase == phase and (not of_a_bucket or _bucket_of(entry) in _MIDDLE_BUCKET):
                    counts[entry.kind] += 1
                    counts["syncs"] += entry.blocks or entry.kind.startswith("sync")
            cells.append(" ".join(str(counts[kind]) for kind in KINDS))
    return *case, *cells


def _bucket_of(entry: Entry) -> str | None:
    """Return the bucket to whose communication ``entry`` belongs, found from the line of the trace."""
    for file, line, _ in entry.where:
        if file.startswith("thunder."):
            found = _BUCKET_IN_LINE.search(linecache.getline(file, line))
            return found[1] if found else None
    return None


def documented() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the rows of the table in the page by their first three cells."""
    text = PAGE.read_text().partition(_MARK)[2].partition("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines()[2:]]
    return {row[:3]: row for row in rows}


def main() -> None:
    """Count everything again and write the table."""
    head = ["transport", "strategy", "precision", "forward", "backward", "a bucket's forward", "a bucket's backward"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case in COUNTED_CASES:
        lines.append("| " + " | ".join(count_row(run_case(*case), *case)) + " |")
        print(lines[-1], flush=True)
    before, mark, after = PAGE.read_text().partition(_MARK)
    assert mark, f"{PAGE} has no mark for the table"
    PAGE.write_text(before + mark + "\n".join(lines) + "\n\n" + after.partition("\n\n")[2])


if __name__ == "__main__":
    main()
