"""The memory of a step as a file: JSON that says everything that a :class:`~thunder_fsdp_sched.StepMemory` does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..ir.json_files import read_json, write_json
from ..ir.step_memory import KINDS, Details, StepMemory, TensorMemory
from ..ir.unknown_memory import UnknownMemory

__all__ = ["load_memory", "save_memory"]

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


class _File(NamedTuple):
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
        ValueError: the file is not one; the message names the file and the first fault.
    """
    file = read_json(path, "memory", "memory of a step", _FORMAT, _File)
    if fault := _fault(file):
        raise ValueError(f"memory: {path} holds no memory of a step: {fault}")
    details = Details(file.unknowns, file.wasted)
    return StepMemory(file.fixed, file.tensors, file.backward, file.statements, lambda: details)


def _fault(file: _File) -> str:
    length = len(file.statements)
    for number, tensor in enumerate(file.tensors):
        if tensor.kind not in KINDS:
            return f"tensors[{number}].kind: {tensor.kind!r} is none of {', '.join(KINDS)}"
        if not -1 <= tensor.start <= tensor.end < length:
            return f"tensors[{number}]: it exists from {tensor.start} to {tensor.end}, and there are {length} positions"
    if len(file.wasted) != length:
        return f"wasted: it has {len(file.wasted)} positions, and there are {length} statements"
    return ""
