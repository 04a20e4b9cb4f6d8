"""The memory of a step as a file: JSON that says everything that a :class:`~thunder_fsdp_sched.StepMemory` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..ir.json_fields import field_of, read_json, typed
from ..ir.step_memory import KINDS, KnownDetails, StepMemory, TensorMemory
from ..ir.unknown_memory import UnknownMemory

__all__ = ["load_memory", "save_memory"]

_FORMAT = 1

_TENSOR_TYPES = {"kind": str, "name": str, "nbytes": int, "start": int, "end": int, "source": str}
"""The type of each field of a :class:`TensorMemory` in a file."""


def save_memory(memory: StepMemory, path: str | Path) -> None:
    """Write the memory of a step as JSON."""
    content = {
        "format": _FORMAT,
        "fixed": dict(memory.fixed),
        "backward": memory.backward,
        "statements": list(memory.statements),
        "wasted": memory.wasted,
        "unknowns": [unknown._asdict() for unknown in memory.unknowns],
        "tensors": [tensor._asdict() for tensor in memory.tensors],
    }
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def load_memory(path: str | Path) -> StepMemory:
    """Read a file written by :func:`save_memory`.

    Raises:
        ValueError: the file is not one; the message names the file and the first fault.
    """
    return read_json(path, "memory", "memory of a step", _FORMAT, _memory)


def _memory(content: dict[str, Any]) -> StepMemory:
    fixed = field_of(content, "fixed", dict, "the file")
    statements = tuple(_list_of(content, "statements", str))
    length = len(statements)
    tensors = []
    for number, tensor in enumerate(field_of(content, "tensors", list, "the file")):
        at = f"tensors[{number}]"
        fields = typed(tensor, dict, at)
        read = TensorMemory(*(field_of(fields, name, types, at) for name, types in _TENSOR_TYPES.items()))
        if read.kind not in KINDS:
            raise ValueError(f"{at}.kind: {read.kind!r} is none of {', '.join(KINDS)}")
        if not -1 <= read.start <= read.end < length:
            raise ValueError(f"{at}: it exists from {read.start} to {read.end}, and there are {length} positions")
        tensors.append(read)
    unknowns = []
    for number, unknown in enumerate(field_of(content, "unknowns", list, "the file")):
        at = f"unknowns[{number}]"
        fields = typed(unknown, dict, at)
        nbytes = field_of(fields, "nbytes", (int, type(None)), at)
        name, reason = (field_of(fields, key, str, at) for key in ("name", "reason"))
        unknowns.append(UnknownMemory(name, reason, nbytes, tuple(_list_of(fields, "positions", int, at))))
    wasted = tuple(_list_of(content, "wasted", int))
    if len(wasted) != length:
        raise ValueError(f"wasted: it has {len(wasted)} positions, and there are {length} statements")
    return StepMemory(
        {kind: field_of(fixed, kind, int, "fixed") for kind in fixed},
        tuple(tensors),
        field_of(content, "backward", int, "the file"),
        statements,
        KnownDetails(tuple(unknowns), wasted),
    )


def _list_of(content: dict[str, Any], name: str, of: type, json_path: str = "the file") -> list[Any]:
    values = field_of(content, name, list, json_path)
    return [typed(value, of, f"{name}[{number}]") for number, value in enumerate(values)]
