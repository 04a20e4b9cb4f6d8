"""Instructions that Thunder's interpreter does not interpret as Python does, or that a trace would not reproduce."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from thunder.core.interpreter import INTERPRETER_SIGNALS, wrap_const

from ..private_interpreter import call_interpreted
from ..private_lookups import unpacks
from .paths import Paths
from .refusals import is_of_program, refusal


def _unpack_sequence(inst: Any, stack: Any) -> Any:
    return None if unpacks(inst, stack) else NotImplemented


def _delete_attribute(inst: Any, stack: Any) -> Any:
    deleted = call_interpreted(delattr, stack.pop_wrapped(), wrap_const(inst.argval))
    return deleted if isinstance(deleted, INTERPRETER_SIGNALS) else None


def _match_class(inst: Any, stack: Any) -> Any:
    """Interpret a pattern such as ``case Point(1, y=y)``, for which Thunder reads the wrong attributes."""
    names, kind, subject = (stack.pop_wrapped() for _ in range(3))
    found = call_interpreted(_match, subject, kind, wrap_const(inst.arg), names)
    if isinstance(found, INTERPRETER_SIGNALS):
        return found
    is_old = sys.version_info < (3, 11)  # which keeps the subject, and pushes whether it matches
    with stack.set_cur_instruction(inst):
        stack.append(subject if is_old and found.value is None else found)
        if is_old:
            stack.append(found.value is not None)
    return None


def _call_with_list(inst: Any, stack: Any) -> Any:
    """Make a list of the iterable in ``f(*iterable)``, because Thunder takes no other."""
    index = -1 - (inst.arg & 1)  # below the keyword arguments, if there are any
    iterable = stack.getitem_wrapped(index)
    if not isinstance(iterable.value, list | tuple):
        found = call_interpreted(_listed, iterable)
        if isinstance(found, INTERPRETER_SIGNALS):
            return found
        with stack.set_cur_instruction(inst):
            stack[index] = found
    return NotImplemented


INSTEAD: dict[str, Callable[[Any, Any], Any]] = {
    "CALL_FUNCTION_EX": _call_with_list,
    "DELETE_ATTR": _delete_attribute,
    "MATCH_CLASS": _match_class,
    "UNPACK_SEQUENCE": _unpack_sequence,
}
"""Functions that interpret an instruction, by its name, with the interpreter's stack. They return ``None``, the signal of an
exception, or ``NotImplemented`` where Thunder is to interpret it."""


def _listed(values: Iterable[Any]) -> list[Any]:
    return [*values]


def _match(subject: Any, kind: type, count: int, names: tuple[str, ...]) -> tuple[Any, ...] | None:
    if not isinstance(subject, kind):
        return None
    positional = getattr(kind, "__match_args__", ())
    is_whole = count == 1 and not hasattr(kind, "__match_args__") and issubclass(kind, _MATCHED_AS_A_WHOLE)
    if count > len(positional) + is_whole:
        raise TypeError(f"{kind.__name__}() accepts {len(positional)} positional sub-patterns ({count} given)")
    attributes = (*positional[:count], *names)
    if not all(hasattr(subject, name) for name in attributes):
        return None
    found = [getattr(subject, name) for name in attributes]
    return (subject, *found) if is_whole else (*found,)


_MATCHED_AS_A_WHOLE = (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)


def outer_assignment(inst: Any, frame: Any, paths: Paths) -> NotImplementedError | None:
    """Return the error for an instruction that assigns a global, or a variable of a function outside of forward.

    Args:
        inst: one of ``OUTER_STORES``.
        frame: the interpreter's.
        paths: those of the compilation.
    """
    if not is_of_program(frame.code.co_filename):
        return None
    if inst.opname.endswith("_DEREF"):  # the variable may be one that only functions in forward share
        index = inst.arg + (frame.code.co_nlocals if sys.version_info < (3, 11) else 0)
        if paths.of(frame.localsplus[index].provenance) is None:
            return None
    return refusal(
        f"forward assigns {inst.argval!r}, a variable outside of it, which the trace would not assign",
        "Return the value, or assign it to an attribute or a buffer of the module",
    )


OUTER_STORES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"})
"""The instructions that may assign a variable outside of forward."""
