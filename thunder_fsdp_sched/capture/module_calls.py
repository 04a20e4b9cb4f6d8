"""Trace calls of modules without hooks as calls of ``forward``, and tag what each call adds to the trace.

[Note: Module calls]
Thunder has one table of functions that it calls in place of others while it traces ("lookasides"). The first ``thunder.jit``
with ``fsdp`` registers one there for ``nn.Module.__call__``, for the rest of the process. In programs that ``fsdp`` does not
shard it does what torch does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import unwrap
from thunder.core.jit_ext import get_jit_ctx

from ..private_thunder import call_interpreted, call_module_as_torch, look_aside_module_calls
from ..private_torch import is_hooked
from .bound_symbols import tag_call

_callers: weakref.WeakKeyDictionary[Any, weakref.ref[Callable[..., Any]]] = weakref.WeakKeyDictionary()


def trace_module_calls(compile_data: Any, call: Callable[..., Any]) -> None:
    """Let ``call(module, *args, **kwargs)``, with wrapped values, trace the calls of modules without hooks.

    Thunder interprets ``nn.Module.__call__``, which tests eight dictionaries of hooks, and this takes half of its time.

    Args:
        compile_data: that of one jitted module; other programs that Thunder compiles are not affected.
        call: :func:`call_forward`, or something that calls it; the caller keeps it alive.
    """
    register()
    _callers[compile_data] = weakref.ref(call)


@functools.cache
def register() -> None:
    """Let Thunder call this module wherever a program calls a module; see [Note: Module calls]."""
    look_aside_module_calls(_call)


def call_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Interpret ``module.forward``."""
    return call_interpreted(_forward, module, *args, **kwargs)


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    known = _callers.get(get_compile_data())
    call = None if known is None else known()
    if call is None:
        return call_module_as_torch(module, *args, **kwargs)
    if is_hooked(unwrap(module)):
        call = call_module_as_torch
    scope = get_jit_ctx().computation_trace.peek_scope()
    before = len(scope)
    result = call(module, *args, **kwargs)
    tag_call(scope[before:])
    return result
