"""Trace the calls of modules: as calls of ``forward``, each with a tag.

[Note: Module calls]
Thunder has one table of functions that it calls in place of others while it traces ("lookasides"). The first ``thunder.jit``
with ``fsdp`` registers one there for ``nn.Module.__call__``, for the rest of the process. In programs that ``fsdp`` does not
shard, it does what torch does. The bound symbols that a call adds to the trace get a tag: see [Note: Regions] in
``bound_symbols``. So do those of a call of ``torch.utils.checkpoint.checkpoint``, which Thunder's own lookaside traces.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import INTERPRETER_SIGNALS, do_raise, get_interpreterruntimectx, unwrap
from thunder.core.jit_ext import get_jit_ctx

from ..extensions import load
from ..ir.bound_symbols import IN_CHECKPOINT, tag_call
from ..private_interpreter import (
    call_interpreted,
    call_module_as_torch,
    look_aside_checkpoints,
    look_aside_module_calls,
)
from ..private_lookups import attribute
from ..private_torch import is_hooked
from .input_reads import InputReads
from .leaves import Leaves
from .refusals import count_refused, latest_refused

_reads: weakref.WeakKeyDictionary[Any, tuple[InputReads, Leaves | None]] = weakref.WeakKeyDictionary()


def trace_module_calls(compile_data: Any, reads: InputReads, leaves: Leaves | None = None) -> None:
    """Let the calls of modules without hooks be traced as calls of ``forward``.

    Otherwise Thunder interprets ``nn.Module.__call__``, whose tests of eight dictionaries of hooks take half of its time.

    Args:
        compile_data: Thunder's data of one jitted module; other programs that Thunder compiles are not affected.
        reads: notes what the program reads from its inputs.
        leaves: modules that are not traced; see [Note: Leaf modules] in ``extras.leaf_modules.run``.
    """
    _register()
    _reads[compile_data] = reads, leaves


@functools.cache
def _register() -> None:
    """Let Thunder call :func:`_call` and :func:`_checkpoint`; see [Note: Module calls]."""
    look_aside_module_calls(_call)
    look_aside_checkpoints(_checkpoint)


def _call_forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Interpret ``module.forward``."""
    forward = attribute(module, "forward")
    return forward if isinstance(forward, INTERPRETER_SIGNALS) else call_interpreted(forward, *args, **kwargs)


def _call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    known = _reads.get(get_compile_data())
    if known is None:
        return call_module_as_torch(module, *args, **kwargs)
    reads, leaves = known
    if leaves and unwrap(module) in leaves:
        return load("extras.leaf_modules.capture:call_leaf")(leaves, module, *args, **kwargs)
    call = call_module_as_torch if is_hooked(unwrap(module)) else _call_forward
    scope = get_jit_ctx().computation_trace.peek_scope()
    before, refused = len(scope), count_refused()
    is_automatic = leaves is not None and leaves.automatic
    try:
        result = reads.call(call, module, *args, **kwargs)
    except Exception as error:  # in the interpreter itself
        from .module_in_error import internal_error

        result = do_raise(latest_refused() if count_refused() > refused else internal_error(error))
    if count_refused() > refused and result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        result = do_raise(latest_refused())  # here, because this module may run as it is
    if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        from .module_in_error import name_in_error  # here, because most programs can be traced

        name_in_error(unwrap(module), names_leaf=not is_automatic)
        if is_automatic:
            raised = get_interpreterruntimectx().curexc
            load("extras.leaf_modules.capture:note_obstacle")(leaves, raised, module, *args, **kwargs)
    tag_call(scope[before:], unwrap(module))
    return result


def _checkpoint(lookaside: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Trace a call of ``torch.utils.checkpoint.checkpoint`` as Thunder does, and tag what it adds to the trace.

    Thunder adds the bound symbols to the outermost scope. For a region within another one, this would be before those that
    the outer region has added so far.
    """
    trace = get_jit_ctx().computation_trace
    before = len(trace.bound_symbols)
    result = lookaside(*args, **kwargs)
    added = trace.bound_symbols[before:]
    del trace.bound_symbols[before:]
    trace.peek_scope().extend(bsym.from_bsym(tags={*bsym.tags, IN_CHECKPOINT}) for bsym in added)
    return result
