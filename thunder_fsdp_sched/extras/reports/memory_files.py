"""The memory of a step as a file: JSON with all of a :class:`~thunder_fsdp_sched.StepMemory`, or a snapshot for viewers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..json_files import read_json, write_json
from ..step_memory.step_memory import KINDS, Details, StepMemory, TensorMemory
from ..step_memory.unknown_memory import UnknownMemory

__all__ = ["load_memory", "save_memory", "save_snapshot"]

_FORMAT = 1


def save_memory(memory: StepMemory, path: str | Path) -> None:
    """Write the memory of a step as JSON."""
    content = {
        "fixed": dict(memory.fixed),
        "backward": memory.backward,
        "statements": list(memory.statements),
        "wasted": memory.wasted,
        "unknowns": [unknown._asdict() for unknown in memory.unknowns],
        "tensors": [tensor._asdict() for tensor in memory.tensors],
    }
    write_json(path, _FORMAT, content)


class _MemoryFile(NamedTuple):
    """The content of a file: the fields of a :class:`~thunder_fsdp_sched.StepMemory`."""

    fixed: Mapping[str, int]
    backward: int
    statements: tuple[str, ...]
    wasted: tuple[int, ...]
    unknowns: tuple[UnknownMemory, ...]
    tensors: tuple[TensorMemory, ...]


def load_memory(path: str | Path) -> StepMemory:
    """Read a file written by :func:`save_memory`.

    Raises:
        ValueError: the file was not written by :func:`save_memory`, or is damaged; the message names the first fault.
    """
    file = read_json(path, "memory", "memory of a step", _FORMAT, _MemoryFile)
    if fault := _fault(file):
        raise ValueError(f"memory: {path} holds no memory of a step: {fault}")
    details = Details(file.unknowns, file.wasted)
    return StepMemory(file.fixed, file.tensors, file.backward, file.statements, lambda: details)


def _fault(file: _MemoryFile) -> str:
    length = len(file.statements)
    for number, tensor in enumerate(file.tensors):
        if tensor.kind not in KINDS:
            return f"tensors[{number}].kind: {tensor.kind!r} is none of {', '.join(KINDS)}"
        if not -1 <= tensor.start <= tensor.end < length:
            return f"tensors[{number}]: it exists from {tensor.start} to {tensor.end}, and there are {length} positions"
    if len(file.wasted) != length:
        return f"wasted: it has {len(file.wasted)} positions, and there are {length} statements"
    return ""


def save_snapshot(memory: StepMemory, path: str | Path, measured: Mapping[str, Any] | None = None) -> None:
    """Write the predicted memory of a step in the format of CUDA's memory snapshots, which pytorch.org/memory_viz shows.

    Args:
        measured: ``torch.cuda.memory._snapshot()``. The prediction is shown beside it, as one more device.
    """
    measured = measured or {"segments": []}
    traces = [*measured.get("device_traces", ()), list(_events(memory))]
    Path(path).write_bytes(pickle.dumps({**measured, "device_traces": traces}))


def _events(memory: StepMemory) -> Iterator[dict[str, Any]]:
    """Yield what the allocator would record in the step, with positions as times."""
    whole_step = (
        TensorMemory(kind, "", nbytes, -1, len(memory.statements), "") for kind, nbytes in memory.fixed.items()
    )
    tensors = [tensor for tensor in (*whole_step, *memory.tensors) if tensor.nbytes]
    address = 0
    changes = []
    for tensor in tensors:
        file, _, line = (tensor.source or "traces:0").rpartition(":")
        at = max(tensor.start, 0)
        statement = memory.statements[at] if tensor.start >= 0 else "before the step"
        frames = [
            {"name": f"{tensor.kind} {tensor.name}".rstrip(), "filename": file, "line": int(line)},
            {"name": statement, "filename": "backward" if at >= memory.backward else "forward", "line": at},
        ]
        event = {"addr": address, "size": tensor.nbytes, "stream": 0, "frames": frames}
        changes.append((at, 0, {**event, "action": "alloc", "time_us": at}))
        for action in ("free_requested", "free_completed"):
            changes.append((tensor.end, 1, {**event, "action": action, "time_us": tensor.end}))
        address += tensor.nbytes
    changes.sort(key=lambda change: change[:2])
    yield from (event for _, _, event in changes)
