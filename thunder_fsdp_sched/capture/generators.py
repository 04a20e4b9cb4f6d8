"""Generators of a traced program: what they return, what leaves them, and what is thrown into them.

[Note: Traced generators]
Thunder runs a generator's frame up to the next ``yield``. It drops the value that a generator returns. If a
``StopIteration`` leaves a generator, Python raises an error, but Thunder takes it for the generator's end. And exceptions
that are thrown into a generator, such as that of a ``with`` statement, do not reach its ``except`` and ``finally``. Here a
generator returns a value by raising ``StopIteration``, and an exception is sent into it as a value, which its next
instruction raises.

Python closes a generator that the program leaves; a trace does not. So forward is refused if closing would run code.
"""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Callable
from types import GeneratorType
from typing import Any

from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    do_raise,
    get_interpreterruntimectx,
    unwrap,
    wrap_const,
)

from ..private_interpreter import call_interpreted
from .refusals import is_of_program, refusal


class _Thrown:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def interpret(suspended: dict[int, tuple[Any, str]], run: Callable[..., Any], inst: Any, /, **state: Any) -> Any:
    """Interpret an instruction of a generator.

    Args:
        suspended: collects the frames of generators that run code when they are closed, by their identities, with the line.
        run: interprets the instruction as Thunder does.
    """
    stack, frame = state["stack"], state["frame"]
    suspended.pop(id(frame), None)
    top = unwrap(stack.getitem_wrapped(-1)) if len(stack) else None
    if isinstance(top, _Thrown) and not _delegates(top, inst, stack):
        stack.pop_wrapped()
        return do_raise(top.error)
    if inst.opname == "CALL_INTRINSIC_1" and isinstance(top, GeneratorExit):
        return None  # from Python 3.12 on, this makes an error of a StopIteration; Thunder expects no other exception
    if inst.opname in ("RETURN_VALUE", "RETURN_CONST"):
        value = inst.argval if inst.opname == "RETURN_CONST" else top
        if value is None:
            return run(inst, **state)
        frame.inst_ptr = -1  # which no handler covers
        return do_raise(StopIteration(value))
    result = run(inst, **state)
    if result is INTERPRETER_SIGNALS.YIELD_VALUE and _runs_code_when_closed(frame):
        suspended[id(frame)] = frame, f"{frame.code.co_filename}:{frame.positions.lineno}"
    if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED and is_of_program(frame.code.co_filename):
        error = get_interpreterruntimectx().curexc
        if isinstance(error, StopIteration) and not _handles(frame):
            return do_raise(RuntimeError("generator raised StopIteration"), error)
    return result


def error_of_left(suspended: dict[int, tuple[Any, str]]) -> NotImplementedError:
    """Return the error for generators that forward has left, although closing them would run code."""
    what = "forward leaves a generator in a try or with statement, whose rest Python would run"
    return refusal(what, "Take all of its items, or call close() of it", next(reversed(suspended.values()))[1])


def _delegates(thrown: _Thrown, inst: Any, stack: Any) -> bool:
    """Return whether an instruction passes a thrown exception on to the generator of ``yield from``."""
    if inst.opname in ("SEND", "YIELD_FROM"):
        inner = stack.getitem_wrapped(-2)
        if not _is_suspended(inner.value):
            return False
        is_closed = isinstance(thrown.error, GeneratorExit) and _close(inner)
        return not is_closed
    is_before = inst.opname == "RESUME" and inst.arg & 3 == 2
    return is_before or inst.opname == "JUMP_BACKWARD_NO_INTERRUPT"


def _handler(frame: Any, offset: int) -> int | None:
    """Return where the handler of an exception of an instruction begins, from Python 3.11 on."""
    entries = getattr(dis.Bytecode(frame.code), "exception_entries", ())
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)


def _handles(frame: Any) -> bool:
    """Return whether an exception of the current instruction has a handler, as all in a generator have from Python 3.12."""
    return bool(frame.try_stack) or _handler(frame, 2 * frame.inst_ptr) is not None


_SILENT = frozenset({
    "BUILD_TUPLE", "CALL_INTRINSIC_1", "COPY", "DELETE_FAST", "LOAD_CONST", "POP_EXCEPT", "PUSH_EXC_INFO", "STORE_FAST",
})  # fmt: skip
"""Instructions of a handler that passes an exception on: clauses for others, and what the compiler adds."""


def _runs_code_when_closed(frame: Any) -> bool:
    """Return whether Python would run code of the program if it closed a generator at the current instruction."""
    offset: int | None = 2 * frame.inst_ptr
    while offset is not None and (handler := _handler(frame, offset)) is not None:
        offset = _passed_on(frame, handler)
    return bool(frame.try_stack) or offset is None


def _passed_on(frame: Any, handler: int) -> int | None:
    """Return where a handler raises ``GeneratorExit`` again; ``None`` if it runs other code first."""
    kinds: list[Any] = []
    for inst in dis.get_instructions(frame.code):
        if inst.offset < handler:
            continue
        if inst.opname in ("RERAISE", "CLEANUP_THROW"):
            return inst.offset
        if inst.opname == "LOAD_GLOBAL":
            kinds.append(unwrap(frame.globals).get(inst.argval, vars(builtins).get(inst.argval)))
        elif inst.opname == "CHECK_EXC_MATCH":
            if not all(isinstance(kind, type) and not issubclass(GeneratorExit, kind) for kind in kinds):
                return None
            kinds.clear()
        elif inst.opname.startswith("POP_JUMP") and not kinds:
            handler = inst.argval  # the next clause
        elif inst.opname not in _SILENT:
            return None
    return None


def _is_suspended(generator: Any) -> bool:
    return isinstance(generator, GeneratorType) and inspect.getgeneratorstate(generator) == inspect.GEN_SUSPENDED


def look_aside(function: Any, generator: WrappedValue) -> Callable[..., Any] | None:
    """Return what to call in place of the methods ``throw`` and ``close`` of a generator that has begun."""
    if not _is_suspended(generator.value):
        return None
    return _close if function is GeneratorType.close else _throw


def _throw(generator: WrappedValue, kind: WrappedValue, *more: WrappedValue) -> Any:
    error = next((unwrap(value) for value in more[:1] if unwrap(value) is not None), unwrap(kind))
    return call_interpreted(
        GeneratorType.send, generator, wrap_const(_Thrown(error() if isinstance(error, type) else error))
    )


def _close(generator: WrappedValue) -> Any:
    try:
        generator.value.send(_Thrown(GeneratorExit()))
    except (GeneratorExit, StopIteration):
        return wrap_const(None)
    except Exception as error:
        return do_raise(error)
    return do_raise(RuntimeError("generator ignored GeneratorExit"))
