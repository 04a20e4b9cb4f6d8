"""Executors claim the operators of the joint trace, once for operators that are alike.

[Note: Operators are claimed once]
Thunder lets executors claim the operators of a trace twice: first to see whether the result waits for communication of
its own, and again for the trace that runs. Each time, every operator is decomposed and its parts are traced anew, which
takes as long as tracing a model with repeated blocks. ``JointPasses`` therefore claims all operators as they are, and they
are claimed here for the executors that follow, in Thunder's order and by Thunder's function. Operators with equal tokens
(symbol, subsymbols, arguments, metadata and tags, with proxies numbered in order of appearance) are claimed once. The
others get copies with their own proxies.

An operator is claimed by itself if an executor could claim it differently the second time: one that keeps state, that is
not Thunder's or this package's, or that calls a function of somebody else. So is an operator whose result is one of its
arguments or gets other metadata. The new result then takes the place of the earlier one everywhere, as in Thunder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transform_common import dce
from thunder.extend import Executor

from ..capture.bsym_copies import BoundSymbolCopies
from ..capture.repeatable_rules import RepeatableRules
from ..capture.trace_tokens import Indescribable, TraceTokens
from ..ir.caching import caching_throughout, with_caches
from ..ir.operator_facts import share_facts
from ..ir.registry import executor as own_executor
from ..private_traces import claim

__all__ = ["claim_operators", "copies_of"]


def claim_operators(trace: TraceCtx, *, executors: Sequence[Executor], once: bool = True) -> TraceCtx:
    """Return the trace with its operators claimed by ``executors``, the first that can, without dead code.

    Args:
        trace: the joint trace as Thunder has differentiated it (forward alone without gradients).
        executors: in order of priority.
        once: whether operators that are alike are claimed once. Without it, each is claimed by itself.
    """
    if not once:
        return dce(with_caches(claim(trace, executors)))
    return dce(with_caches(_claim_once(trace, executors)))


class _Claimed(NamedTuple):
    """What claiming an operator has made of it.

    Attributes:
        proxies: those of the operator and its subsymbols, in order of appearance.
        bsyms: what runs in its place.
    """

    proxies: Sequence[Proxy]
    bsyms: Sequence[BoundSymbol]


def _claim_once(trace: TraceCtx, executors: Sequence[Executor]) -> TraceCtx:
    known: dict[Any, _Claimed] = {}
    is_repeatable = RepeatableRules(executors)
    tokens = TraceTokens()
    swap: dict[Variable, Proxy] = {}  # results that others take the place of
    new = from_trace(trace)
    for bsym in trace.bound_symbols:
        if _stays(bsym):
            bsyms: Sequence[BoundSymbol] = [bsym]
        else:
            own = _tokens_of(bsym, tokens) if is_repeatable(bsym) else None
            proxies = tuple(tokens.proxies.values())
            if own is not None and own in known:
                claimed = known[own]
                renames = {old.name: each for old, each in zip(claimed.proxies, proxies, strict=True)}
                bsyms = copies_of(claimed.bsyms, BoundSymbolCopies(new, renames))
            else:
                bsyms, replaced = _claim(bsym, new, executors)
                bsyms = list(map(caching_throughout, bsyms))
                swap |= replaced
                if own is not None and not replaced and _read_only(bsyms, proxies):
                    known[own] = _Claimed(proxies, bsyms)
        new.bound_symbols += [each.from_bsym_swap_proxies(swap) for each in bsyms] if swap else bsyms
    return new


def copies_of(bsyms: Sequence[BoundSymbol], copies: BoundSymbolCopies) -> list[BoundSymbol]:
    """Return copies of bound symbols, which share what is known about their operators."""
    new = [copies.copy(bsym) for bsym in bsyms]
    for bsym, old in zip(new, bsyms, strict=True):
        share_facts(bsym, old, copies.new)
    return new


def _stays(bsym: BoundSymbol) -> bool:
    """Return whether no executor has to claim a bound symbol, or it is this package's and so claimed already."""
    sym = bsym.sym
    return sym.python_impl is not None or sym.id is PrimIDs.GET_GRAD or sym.executor is own_executor


def _claim(
    bsym: BoundSymbol, trace: TraceCtx, executors: Sequence[Executor]
) -> tuple[list[BoundSymbol], Mapping[Variable, Proxy]]:
    """Return what runs in place of a bound symbol, and the results that others take the place of."""
    single = from_trace(trace)
    outputs = bsym.flat_proxy_outs
    single.bound_symbols = [bsym, prims.python_return.bind(tuple(outputs), output=())]
    claimed = claim(single, executors)
    trace.name_ctr = claimed.name_ctr  # or the next search for a free name would start from here again
    *bsyms, returned = claimed.bound_symbols
    renames: dict[Variable, Proxy] = {}
    replaced: dict[Variable, Proxy] = {}
    arguments = {arg.name for arg in bsym.flat_proxy_args}
    for old, new in zip(outputs, returned.flat_args, strict=True):
        if new.name == old.name:
            continue
        if new.name not in arguments and _facts(new) == _facts(old):
            renames[variableify(new)] = old
        else:
            replaced[variableify(old)] = new
    return [each.from_bsym_swap_proxies(renames) for each in bsyms], replaced


def _facts(value: Any) -> Any:
    """Return what Thunder knows of a value; ``None`` if it is no proxy that is known here."""
    tokens = TraceTokens()
    try:
        tokens.add(value)
    except Indescribable:
        return None
    return tokens.tokens


def _tokens_of(bsym: BoundSymbol, tokens: TraceTokens) -> Any:
    tokens.begin()
    try:
        tokens.add_bsym(bsym)
    except Indescribable:
        return None
    return tuple(tokens.tokens)


def _read_only(bsyms: Iterable[BoundSymbol], proxies: Iterable[Proxy]) -> bool:
    """Return whether bound symbols read only these proxies and what they define themselves."""
    defined = {proxy.name for proxy in proxies}
    for bsym in bsyms:
        if any(arg.name not in defined for arg in bsym.flat_proxy_args):
            return False
        defined.update(out.name for out in bsym.flat_proxy_outs)
    return True
