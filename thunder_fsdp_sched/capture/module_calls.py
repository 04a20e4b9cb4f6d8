"""How calls of modules are traced: without hooks as calls of ``forward``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import unwrap

from ..private_interpreter import call_interpreted, call_module_as_torch, is_hooked, look_aside_module_calls

__all__ = ["call_forward", "trace_module_calls"]

_callers: weakref.WeakKeyDictionary[Any, weakref.ref[Callable[..., Any]]] = weakref.WeakKeyDictionary()


def trace_module_calls(compile_data: Any, call: Callable[..., Any]) -> None:
    """Let ``call(module, *args, **kwargs)``, with wrapped values, trace the calls of modules without hooks.

    Thunder interprets ``nn.Module.__call__``, which tests eight dictionaries of hooks, and this takes half of its time.

    Args:
        compile_data: that of one jitted module; other programs that Thunder compiles are not affected.
        call: :func:`call_forward`, or something that calls it; the caller keeps it alive.
    """
    _callers[compile_data] = weakref.ref(call)


def call_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Interpret ``module.forward``."""
    return call_interpreted(_forward, module, *args, **kwargs)


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    known = _callers.get(get_compile_data())
    call = None if known is None else known()
    if call is None or is_hooked(unwrap(module)):
        call = call_module_as_torch
    return call(module, *args, **kwargs)


look_aside_module_calls(_call)
