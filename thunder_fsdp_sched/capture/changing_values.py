"""Calls whose results change from one call of forward to the next: random numbers, clocks, torch's generators.

[Note: Values that change]
While Thunder traces, it runs everything that is not an operator on tensors, and the trace keeps the result. So Python draws
a random number once, and LayerDrop drops the same layers in every call. Each function that the interpreter does not
interpret further is checked here, also within ``random.choice`` or ``uuid.uuid4``, by whatever name or object the program
calls it. The functions of the table raise an error, except that

- a seeded generator that forward itself has made draws the same numbers in each call, and
- clocks that ``logging``, ``warnings``, torch and Thunder read for themselves do not influence what forward computes.

Environment variables change rarely, and libraries read them anywhere, so the prologue compares those that forward reads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from thunder.core.interpreter import PseudoInst, WrappedValue, get_interpreterruntimectx, unwrap

from ..ir.inspection import is_library
from .refusals import refusal

_COUNTING = ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")
_CLOCKS = frozenset(
    (*_COUNTING, *(f"{name}_ns" for name in _COUNTING))
    + ("localtime", "gmtime", "ctime", "asctime", "strftime", "now", "utcnow", "today")
)
_BYTES = frozenset({"urandom", "getrandom", "generate_time_safe", "UuidCreate"})
_CHANGING = {
    **dict.fromkeys(("time", "datetime"), _CLOCKS),
    **dict.fromkeys(("posix", "nt", "_uuid"), _BYTES),
    "_random": frozenset({"random", "getrandbits", "seed", "getstate", "setstate"}),
    "torch._C": frozenset(
        ("initial_seed", "seed", "manual_seed", "get_state", "set_state", "get_offset", "set_offset", "clone_state")
        + ("graphsafe_get_state", "graphsafe_set_state")
    ),
}
"""The names of functions that are not interpreted and whose results change, by their module or that of their class."""

_MAKING = frozenset({"__new__", "__init__", "default_rng"})
_SEEDING = frozenset({"seed", "manual_seed"})
_RANDOM_OF_TORCH = frozenset({"torch.random", "torch.cuda.random"})
READ_CLOCKS = frozenset({"logging", "warnings"})
"""Modules whose reads of clocks do not influence what forward computes."""


def changing_value(function: Any, args: Sequence[Any]) -> NotImplementedError | None:
    """Return the error for a call whose result, or whose effect on a generator, is not the same in each call of forward.

    Args:
        function: one without a lookaside.
        args: the wrapped arguments; the first is the object that a method belongs to.
    """
    if isinstance(function, FunctionType):
        return _of_torch(function.__name__) if function.__module__ in _RANDOM_OF_TORCH else None
    module = getattr(function, "__module__", None)
    if module is None:
        owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
        module = getattr(owner, "__module__", None)
    if not isinstance(module, str) or isinstance(function, type):  # a class calls its methods
        return None
    name = getattr(function, "__name__", "")
    if not (module.startswith("numpy.random") or name in _CHANGING.get(module, ())):
        return None
    if name in _CLOCKS and module in ("time", "datetime"):
        caller = get_interpreterruntimectx().frame_stack[-1]
        if str(caller.module).partition(".")[0] in READ_CLOCKS or is_library(caller.code.co_filename):
            return None
        return refusal(
            f"forward calls {module}.{name}, which the trace would keep the result of",
            "Read clocks outside of forward; pass a time that forward computes with as a tensor",
        )
    if name in _MAKING or name in _SEEDING:
        is_seeded = any(unwrap(arg) is not None for arg in args[name != "default_rng" :])
        if is_seeded and (name in _MAKING or _is_of_made_generator(args)):
            return None
    elif _is_of_made_generator(args):
        return None
    if module == "torch._C":
        return _of_torch(name)
    called = {"_random": "random", "_uuid": "uuid", "posix": "os", "nt": "os"}.get(module, "numpy.random")
    return refusal(
        f"forward draws random numbers ({called}.{name}), and the trace would keep them for all calls",
        "Draw with torch, such as torch.rand(()), if forward computes with the number, or else outside of forward, and pass "
        "the result as an argument; each value that decides a branch is then compiled once",
    )


def _of_torch(name: str) -> NotImplementedError:
    return refusal(
        f"forward reads or changes the state of a generator of torch ({name}), which a trace does only once",
        "Do so outside of forward. Operators such as torch.rand and dropout draw anew in each call",
    )


def _is_of_made_generator(args: Sequence[Any]) -> bool:
    """Return whether the program has made the generator that a method belongs to.

    A function that is not interpreted may also return one that has existed before, such as an item of a deque.
    """
    if not args or not isinstance(args[0], WrappedValue) or args[0].provenance.inst is not PseudoInst.OPAQUE:
        return False
    makes = args[0].provenance.inputs[0].value
    return isinstance(makes, type) or getattr(makes, "__name__", None) in _MAKING


class ForeignIterators:
    """The iterators that a traced program has not made: in the next call they are at another position."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}  # by identity

    def note(self, value: Any) -> None:
        """Note a value that the program reads from its inputs, its module or a global."""
        if hasattr(type(value), "__next__"):
            self._known[id(value)] = value

    def error(self, iterator: Any) -> NotImplementedError | None:
        """Return the error for a program that takes the next item of an iterator; ``None`` if it has made it."""
        if id(iterator) not in self._known:
            return None
        return refusal(
            f"forward takes an item of an iterator that it has not made ({type(iterator).__name__}), and the trace would "
            f"keep the item for all calls",
            "Take items outside of forward, and pass them as arguments, or count calls in a buffer",
        )


def environment_read(function: Any, args: Sequence[Any]) -> str | None:
    """Return the name of the environment variable that a call of one of ``READ_ENVIRONMENT`` reads; ``None`` for all."""
    return os.fsdecode(unwrap(args[1])) if function is _ENVIRON.__getitem__ else None


def set_default(function: Any, args: Sequence[Any]) -> None:
    """Set a variable before the program calls ``os.environ.setdefault``, so that it reads what later calls read."""
    if function is _ENVIRON.setdefault and unwrap(args[0]) is os.environ:
        os.environ.setdefault(*map(unwrap, args[1:]))


_ENVIRON: Any = type(os.environ)
READ_ENVIRONMENT = frozenset({_ENVIRON.__getitem__, _ENVIRON.__iter__, _ENVIRON.__len__})
"""The functions with which programs read environment variables; ``get``, ``in`` and ``items`` call them."""
