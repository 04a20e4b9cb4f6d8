"""Fingerprints of traced computations. Thunder differentiates computations with equal fingerprints alike.

[Note: Modes share a joint trace]
``no_sync`` changes only the reductions that this package inserts, and many flags of a program change nothing that it
computes. Yet Thunder differentiates a program and claims its operators anew in each mode, which takes most of the time
of compiling. So the joint trace of an earlier compilation, as our passes have first seen it, is used again:

1. Thunder traces the program in the new mode, too.
2. ``fingerprint`` computes the structural key of the trace, with proxies numbered in order of appearance. It covers all
   that differentiation and claiming read: symbols with their subsymbols, arguments, metadata and tags of proxies, which
   argument is which parameter, executors, compile options, and the state of torch that Thunder's cache is keyed by.
3. If an earlier compilation has an equal one, Thunder goes on with a trace that has the same arguments and computes
   nothing (``without_computation``), and ``PassExecutor`` replaces it by the earlier joint trace.

The first two steps are skipped if the inputs fit an earlier compilation in all but the mode of ``no_sync``, because tracing
would give the same again. Thunder then compiles the earlier traces again, as another entry of its cache
(``private_cache.TraceCache``). This needs a fingerprint, traces that are not forgotten yet, and a program that neither
changes a tensor in place nor assigns constants to attributes (``can_compile_again``).

The prologue and the epilogue are those of the new mode; they pass values by position. A computation without a fingerprint
is compiled in full: one under autocast or with symbolic values, with an executor that keeps state, with kinds of proxies
that have no key, or with other transforms that would see the trace in between. So is one that replaces an argument (the
number of batches in a batch norm), because Thunder reads the new value from the trace.

Each set of compiled traces keeps its fingerprint, which holds no tensors and takes less memory than the traces.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from thunder.core.compile_data import get_compile_data
from thunder.core.options import CACHE_OPTIONS
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transform_common import Transform
from thunder.extend import StatefulExecutor

from ..private_thunder import cache_info
from .bound_symbols import StructuralKeys
from .observation import attention_backends
from .value_keys import IdentityKey


def fingerprint(trace: TraceCtx, parameters: Mapping[str, str], transform: Transform) -> tuple[Any, ...] | None:
    """Return a key of a traced computation. Thunder would transform traces with equal keys into equal traces.

    Args:
        trace: the computation, before ``insert_unshard``.
        parameters: the parameter name of each argument that is a parameter, keyed by the argument's name.
        transform: the transform that sees the trace now.

    Returns:
        ``None`` if the trace cannot be shared.
    """
    data = get_compile_data()
    if data is None or not defers_autograd(transform):
        return None
    if data.cache_option is not CACHE_OPTIONS.CONSTANT_VALUES or not data.autocast_stack.is_empty():
        return None
    if any(isinstance(executor, StatefulExecutor) for executor in data.executors_list):
        return None
    arguments = {arg.name for arg in trace.args if isinstance(arg, Proxy)}
    if any(arg.name not in arguments for arg in trace.output["flat_args"] if isinstance(arg, Proxy)):
        return None
    structure = StructuralKeys().of(
        (tuple(trace.args), dict(trace.kwargs), tuple(sorted(map(str, trace.tags)))),
        [parameters.get(arg.name) if isinstance(arg, Proxy) else None for arg in trace.args],
        *trace.bound_symbols,
        [list(data.executors_list), dict(data.compile_options), cache_info(), attention_backends()],
    )
    return None if structure is None else (IdentityKey(weakref.ref(data)), *structure.key)


def can_compile_again(transform: Transform) -> bool:
    """Return whether Thunder may compile its traces again for another mode, unless they write in place.

    Args:
        transform: the transform that sees the trace now. Another one before it may have changed the trace.
    """
    data = get_compile_data()
    return data is not None and bool(data.transforms) and data.transforms[0] is transform


def defers_autograd(transform: Transform) -> bool:
    """Return whether no transform after ``transform`` sees the computation before Thunder differentiates it."""
    after = transforms_after(transform)
    return after is not None and not any(map(_sees_computation, after))


def transforms_after(transform: Transform) -> Sequence[Transform] | None:
    """Return the transforms that Thunder applies after ``transform``; ``None`` if it is not called by ``thunder.jit``."""
    data = get_compile_data()
    applied = () if data is None else data.transforms
    position = next((i for i, each in enumerate(applied) if each is transform), None)
    return None if position is None else applied[position + 1 :]


def without_computation(trace: TraceCtx) -> TraceCtx:
    """Return a trace with the arguments of ``trace`` that computes and returns nothing."""
    new = from_trace(trace)
    new.names = trace.names.copy()
    last = trace.bound_symbols[-1]
    known = {arg.name for arg in trace.args if isinstance(arg, Proxy)}
    arguments = [a for a in last.args[0]["flat_args"] if not isinstance(a, Proxy) or a.name in known]
    returned = {**last.args[0], "flat_args": arguments, "output": ()}
    unpacked = [bsym for bsym in trace.bound_symbols if bsym.sym.id is PrimIDs.UNPACK_TRIVIAL]
    new.bound_symbols = [*unpacked, last.from_bsym(args=(returned,))]
    return new


def needs_backward(trace: TraceCtx) -> bool:
    """Return whether Thunder differentiates a computation."""
    data = get_compile_data()
    if data is not None and data.disable_torch_autograd_support:
        return False
    return any(isinstance(arg, TensorProxy) and arg.requires_grad for arg in trace.args)


def _sees_computation(transform: Transform) -> bool:
    return type(transform).transform_traces_pre_prologue is not Transform.transform_traces_pre_prologue
