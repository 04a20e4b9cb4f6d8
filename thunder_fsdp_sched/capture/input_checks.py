"""Choose how each call compares the values that a program reads, and which of them: see [Note: Guarded inputs]."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from operator import attrgetter, itemgetter, methodcaller
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from thunder.core.interpreter import get_interpreterruntimectx, unwrap
from thunder.core.proxies import Proxy

from ..runtime.traced_inputs import EQUAL, IS, KEYS, LENGTH, TYPE, Check
from .module_members import OF_MODULES
from .paths import ATTRIBUTE, GLOBALS, ITEM, Path
from .refusals import is_of_program

_STATE = (list, dict, set, deque, tuple, range, frozenset, bytes, str)
CHECKED_BY_THUNDER = (bool, int, float, complex, str, slice, torch.device)
COMPARED = (*CHECKED_BY_THUNDER, *_STATE, torch.Tensor, torch.nn.Module)
IGNORED = (Proxy, torch.Tensor, torch.nn.Module, ModuleType)
_CODE = (FunctionType, BuiltinFunctionType, MethodDescriptorType, type, attrgetter, itemgetter, methodcaller)
_BY_EQUALITY: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, range, set, frozenset, slice, MethodType),
    *(torch.dtype, torch.layout, torch.memory_format, torch.device),
)


def check_of(value: Any) -> Check:
    """Return how each call compares a value."""
    if isinstance(value, (*_CODE, NoneType, enum.Enum)):
        return IS, value
    if isinstance(value, _BY_EQUALITY):
        return EQUAL, value if not isinstance(value, set) else set(value)
    if isinstance(value, (list, tuple)):
        return LENGTH, (type(value), len(value))
    if isinstance(value, dict):
        return KEYS, (type(value), tuple(value))
    return TYPE, type(value)


def is_checked(path: Path, value: Any, checks: Mapping[Path, Check]) -> bool:
    """Return whether the next call may have another value at a path, so that the prologue compares it.

    Args:
        checks: those of values that the program has read before.
    """
    owner = getattr(value, "__self__", None) if path[-1][0] == ATTRIBUTE else None
    is_method = owner is not None and not isinstance(owner, (torch.nn.Module, ModuleType))  # as builtins have
    is_item = path[-1][0] == ITEM and path[:-1] in checks
    is_state = _is_state_of_program(path, value) or (isinstance(value, _CODE) and is_item)
    return not (is_method or isinstance(value, IGNORED)) and (is_state or may_differ(path))


def _is_state_of_program(path: Path, value: Any) -> bool:
    """Return whether a value is plain, and from the closure or the globals of a function that belongs to no library."""
    if not isinstance(value, _STATE) or str(path[-1][1]).startswith("__"):  # such as __builtins__
        return False
    frame = get_interpreterruntimectx().frame_stack[-1]
    if not is_of_program(frame.code.co_filename):
        return False
    if GLOBALS not in path:
        return (ATTRIBUTE, "__closure__") in path
    owner = unwrap(frame.globals).get(path[path.index(GLOBALS) + 1][1])
    return not isinstance(owner, ModuleType) or is_of_program(getattr(owner, "__file__", None) or "<builtin>")


def may_differ(path: Path) -> bool:
    """Return whether a value at a path belongs to an object, and may differ in the next call."""
    if len(path) == 1 or any(kind == ATTRIBUTE and str(key).startswith("__") for kind, key in path[1:]):
        return False
    (source_kind, source), (kind, key) = path[-2] if len(path) > 2 else (ITEM, None), path[-1]
    is_part = (kind == ATTRIBUTE and key in OF_MODULES) or (source_kind == ATTRIBUTE and source in OF_MODULES)
    return not is_part or source == "_buffers"
