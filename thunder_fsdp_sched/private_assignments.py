"""Private names of Thunder's interpreter for the assignments of a program: see ``private_thunder``."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from thunder.core.interpreter import ProvenanceRecord, PseudoInst
from thunder.core.proxies import AnyProxy


def _modified_attributes(context: Any) -> list[Any]:
    """Return the dictionaries of attributes that the program has changed, wrapped."""
    sources = [(modified, modified.provenance) for modified in context._additional_outputs]
    return [m for m, source in sources if source.inst is PseudoInst.LOAD_ATTR and source.inputs[1].value == "__dict__"]


def modified_members(context: Any) -> list[tuple[ProvenanceRecord, Any]]:
    """Return the assignments of the program so far, each as the provenance of a dictionary and the key in it."""
    modifications = context._additional_outputs.items()
    return [(modified.provenance, key.value) for modified, changes in modifications for _, _, key, *_ in changes]


def save_attributes_of_root(context: Any) -> None:
    """Let the epilogue store the attributes that the program has assigned to the compiled module itself.

    Thunder stores attributes of submodules, but drops those of the outermost module, which has no proxy. It gets one here,
    unpacked separately, so that the prologue reads parameters as before.
    """
    root: ProvenanceRecord | None = None
    for modified in _modified_attributes(context):
        inputs = modified.provenance.inputs
        if inputs[0].inst is PseudoInst.INPUT_FN and not hasattr(inputs[0], "proxy"):
            if root is None:
                root = ProvenanceRecord(PseudoInst.INPUT_FN, inputs=[])
                root.proxy = AnyProxy(None, history=root)
            modified.provenance = ProvenanceRecord(PseudoInst.LOAD_ATTR, inputs=[root, inputs[1]])


def take_constants(context: Any, path_of: Callable[[ProvenanceRecord], Any]) -> list[tuple[Any, str, Any]]:
    """Remove plain values that the epilogue refuses, such as strings; return them, with path and attribute.

    Args:
        path_of: returns the path of an object from the inputs; ``None`` for an object that the program has made.
    """
    taken = []
    for modified in _modified_attributes(context):
        changed, modifications = modified.provenance.inputs[0], context._additional_outputs[modified]
        if not (path := path_of(changed)):
            continue
        latest = {key.value: value.value for inst, _, key, value in modifications if inst is PseudoInst.STORE_SUBSCR}
        constants = {key: value for key, value in latest.items() if isinstance(value, _CONSTANTS)}
        taken += [(path, key, value) for key, value in constants.items()]
        rest = [modification for modification in modifications if modification[2].value not in constants]
        del context._additional_outputs[modified]
        if rest:
            context._additional_outputs[modified] = rest
        else:
            vars(changed).pop("proxy", None)  # through which the epilogue would change the object
    return taken


_CONSTANTS = (str, bytes, enum.Enum, torch.dtype)


def forget_new_modules(context: Any) -> None:
    """Let the epilogue store nothing in modules that the program itself has made.

    Thunder stores buffers that a program assigns, even those that ``nn.CrossEntropyLoss()`` registers in forward, and
    fails, because such a module is not part of the compiled one.
    """
    for modified in [m for m in context._additional_outputs if _is_part_of_new_object(m.provenance)]:
        del context._additional_outputs[modified]


def _is_part_of_new_object(provenance: ProvenanceRecord) -> bool:
    """Return whether a value is, or was read from, an object that the program has made."""
    while provenance.inputs and provenance.inst in (PseudoInst.LOAD_ATTR, PseudoInst.BINARY_SUBSCR):
        provenance = provenance.inputs[0]
    makes = provenance.inputs[0].value if provenance.inst is PseudoInst.OPAQUE else None
    return provenance.inst is PseudoInst.NEW or getattr(makes, "__name__", None) == "__new__"
