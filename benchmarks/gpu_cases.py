"""The configurations that ``python benchmarks/gpu.py first`` tries, the jobs of its workers, and texts for errors."""

from __future__ import annotations

import dataclasses
import json
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CASES", "REFERENCE", "Case", "Job", "describe_error", "has_failed"]


@dataclass(frozen=True)
class Case:
    """One configuration of ``fsdp``."""

    strategy: str
    transport: str
    precision: str = "float32"
    offload: bool = False

    @property
    def name(self) -> str:
        extra = [self.precision] * (self.precision != "float32") + ["offload"] * self.offload
        return " ".join([self.strategy, self.transport, *extra])


_TRANSPORTS = ("flat", "all_to_all", "coalesced", "all_reduce", "staged", "symmetric_memory")

CASES = {
    case.name: case
    for case in (
        *(Case("zero3", transport) for transport in _TRANSPORTS),
        Case("zero2", "flat"),
        Case("zero2", "symmetric_memory"),
        Case("zero3", "flat", precision="bfloat16"),
        Case("zero3", "staged", precision="bfloat16"),
        Case("zero3", "flat", offload=True),
    )
}
"""All configurations, keyed by name."""

REFERENCE = "unsharded"
"""The name of the case that trains without ``fsdp``. The other cases are compared with it."""


@dataclass(frozen=True)
class Job:
    """The job of a worker.

    Attributes:
        work: the name of a function in ``gpu_steps.WORK``.
        cases: the names of cases, in the order in which they run.
        device: ``"cuda"``, or ``"cpu"`` to test this program without a GPU.
        one_device: whether all ranks use GPU 0.
        limit: seconds that a case may take.
        repeats: how often a case trains, each time from the same parameters.
        fuse: whether Thunder uses its fusion executors. A default executor compiles the loss with torch.compile on GPUs,
            which refuses to run together with torch's sanitizer.
        store: the file of the process group's store.
        results: the prefix of the files into which ranks write.
        references: the folder with the parameters of the unsharded model after training.
    """

    work: str
    cases: tuple[str, ...]
    device: str
    backend: str
    world_size: int
    one_device: bool
    limit: float
    blocks: int
    width: int
    length: int
    batch: int
    steps: int
    repeats: int
    fuse: bool
    store: str
    results: str
    references: str

    def results_of(self, rank: int) -> Path:
        """Return the file into which ``rank`` writes."""
        return Path(f"{self.results}-{rank}.jsonl")

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Job:
        content = json.loads(path.read_text())
        return cls(**{**content, "cases": tuple(content["cases"])})


def describe_error(error: BaseException, lines: int = 4) -> str:
    """Return the type and the first lines of an error, and the innermost line of this project in its traceback."""
    from_sanitizer = getattr(error, "errors", None)  # of torch.cuda._sanitizer: its text only counts them
    text = str(from_sanitizer[0]) if isinstance(from_sanitizer, list) and from_sanitizer else str(error)
    first = [line for line in text.splitlines() if line.strip()][:lines]
    described = "\n".join([f"{type(error).__name__}: {first[0] if first else '(no message)'}", *first[1:]])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        inside = re.search(r"(thunder_fsdp_sched|transforms|benchmarks)[/\\][\w/\\]+\.py$", frame.filename)
        if inside and not inside[0].endswith("gpu_worker.py"):  # it only calls the function that failed
            return f"{described}\n  at {inside[0]}:{frame.lineno}, in {frame.name}"
    return described


def has_failed(record: Mapping[str, Any]) -> bool:
    """Return whether a case, or a part of its record, failed; a refusal is not a failure."""
    parts = [part for part in record.values() if isinstance(part, dict)]
    return record["status"] == "failed" or any("error" in part and not part.get("refused") for part in parts)
