"""Executors claim the operators of the joint trace, once for operators that are alike.

[Note: Operators are claimed once]
Thunder lets executors claim the operators of a trace twice: first to see whether the result waits for communication of
its own, and again for the trace that runs. Each time, every operator is decomposed and its parts are traced anew, which
takes as long as tracing a model with repeated blocks. ``JointPasses`` therefore claims all operators as they are, and this
pass claims them for the executors that follow, in Thunder's order and by Thunder's function. Operators with equal tokens
(symbol, subsymbols, arguments, metadata and tags, with proxies numbered in order of appearance) are claimed once. The
others get copies with their own proxies.

An operator is claimed by itself if an executor could claim it differently the second time: one that keeps state, that is
not Thunder's or this package's, or that calls a function of somebody else. So is an operator whose result is one of its
arguments or gets other metadata. The new result then takes the place of the earlier one everywhere, as in Thunder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transform_common import dce
from thunder.extend import Executor, FusionExecutor, OperatorExecutor, StatefulExecutor

from ..private_api import claim
from ..private_interpreter import renamed
from ..trace import symbols
from ..trace.operator_facts import keep_facts, share_facts
from ..tracing.trace_tokens import Indescribable, TraceTokens

__all__ = ["claim_operators"]

_OWNERS = ("thunder", "thunder_fsdp_sched")


def claim_operators(trace: TraceCtx, *, executors: Sequence[Executor], once: bool = True) -> TraceCtx:
    """Return the trace with its operators claimed by ``executors``, the first that can, without dead code.

    Args:
        trace: the joint trace as Thunder has differentiated it (forward alone without gradients).
        executors: in order of priority.
        once: whether operators that are alike are claimed once. Without it, each is claimed by itself.
    """
    if not once:
        return dce(claim(trace, executors))
    claimed = _claim_once(trace, executors)
    new = dce(claimed)
    keep_facts(new.bound_symbols, claimed.bound_symbols)
    return new


class _Claimed(NamedTuple):
    """What claiming an operator has made of it.

    Attributes:
        proxies: those of the operator and its subsymbols, in order of appearance.
        bsyms: what runs in its place.
    """

    proxies: list[Proxy]
    bsyms: list[BoundSymbol]


def _claim_once(trace: TraceCtx, executors: Sequence[Executor]) -> TraceCtx:
    known: dict[Any, _Claimed] = {}
    is_repeatable = _Repeatable(executors)
    swap: dict[Variable, Proxy] = {}  # results that others take the place of
    new = from_trace(trace)
    for bsym in trace.bound_symbols:
        if _stays(bsym):
            bsyms = [bsym]
        else:
            tokens = _tokens_of(bsym) if is_repeatable(bsym) else None
            if tokens is not None and tokens in known:
                bsyms = _Copies(known[tokens], bsym, new).bsyms
            else:
                bsyms, replaced = _claim(bsym, new, executors)
                swap |= replaced
                proxies = _proxies_of(bsym)
                if tokens is not None and not replaced and _read_only(bsyms, proxies):
                    known[tokens] = _Claimed(proxies, bsyms)
        new.bound_symbols += [each.from_bsym_swap_proxies(swap) for each in bsyms] if swap else bsyms
    return new


def _stays(bsym: BoundSymbol) -> bool:
    """Return whether no executor has to claim a bound symbol, or it is this package's and so claimed already."""
    sym = bsym.sym
    return sym.python_impl is not None or sym.id is PrimIDs.GET_GRAD or sym.executor is symbols.executor


def _claim(
    bsym: BoundSymbol, trace: TraceCtx, executors: Sequence[Executor]
) -> tuple[list[BoundSymbol], dict[Variable, Proxy]]:
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


def _tokens_of(bsym: BoundSymbol) -> Any:
    tokens = TraceTokens()
    try:
        tokens.add_bsym(bsym)
    except Indescribable:
        return None
    return tuple(tokens.tokens)


def _proxies_of(bsym: BoundSymbol) -> list[Proxy]:
    """Return the proxies of a bound symbol and its subsymbols in order of appearance, each once."""
    found: dict[str, Proxy] = {}
    for each in (bsym, *_below(bsym)):
        for proxy in (*each.flat_proxy_args, *each.flat_proxy_outs):
            found.setdefault(proxy.name, proxy)
    return list(found.values())


def _below(bsym: BoundSymbol) -> Iterable[BoundSymbol]:
    for sub in bsym.subsymbols:
        yield sub
        yield from _below(sub)


def _read_only(bsyms: Iterable[BoundSymbol], proxies: Iterable[Proxy]) -> bool:
    """Return whether bound symbols read only these proxies and what they define themselves."""
    defined = {proxy.name for proxy in proxies}
    for bsym in bsyms:
        if any(arg.name not in defined for arg in bsym.flat_proxy_args):
            return False
        defined.update(out.name for out in bsym.flat_proxy_outs)
    return True


class _Copies:
    """Copies of what claiming an operator has made of it, for an operator that is alike."""

    def __init__(self, claimed: _Claimed, bsym: BoundSymbol, trace: TraceCtx) -> None:
        proxies = _proxies_of(bsym)
        self._new = {old.name: new for old, new in zip(claimed.proxies, proxies, strict=True)}
        self._trace = trace
        self.bsyms = [self._copy(each) for each in claimed.bsyms]
        for new, old in zip(self.bsyms, claimed.bsyms, strict=True):
            share_facts(new, old, self._new)

    def _copy(self, bsym: BoundSymbol) -> BoundSymbol:
        subsymbols = [self._copy(sub) for sub in bsym.subsymbols]
        args, kwargs, output = self._swap(bsym.args), self._swap(bsym.kwargs), self._swap(bsym.output)
        return bsym.from_bsym(args=args, kwargs=kwargs, output=output, subsymbols=subsymbols)

    def _swap(self, value: Any) -> Any:
        if isinstance(value, Proxy):
            new = self._new.get(value.name)
            if new is None:
                new = self._new[value.name] = renamed(value, self._trace, set(value.tags))
            return new
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self._swap(item) for item in value])
        if kind is dict:
            return {key: self._swap(item) for key, item in value.items()}
        return value


class _Repeatable:
    """Whether all executors claim a bound symbol in the same way each time."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = executors
        self._are_known = all(map(_is_known, executors))
        self._known: dict[Any, bool] = {}

    def __call__(self, bsym: BoundSymbol) -> bool:
        return self._are_known and self._is_repeatable(bsym)

    def _is_repeatable(self, bsym: BoundSymbol) -> bool:
        sym_id = bsym.sym.id
        if sym_id not in self._known:
            functions = [
                function
                for executor in self._executors
                if (impl := executor.implmap.get(sym_id)) is not None
                for function in (impl.checker, impl.execution_transform, getattr(impl.symbol, "meta", None))
            ]
            self._known[sym_id] = all(map(_is_owned, functions))
        return self._known[sym_id] and all(map(self._is_repeatable, bsym.subsymbols))


def _is_known(executor: Executor) -> bool:
    kind = type(executor)
    if isinstance(executor, StatefulExecutor) or not isinstance(executor, OperatorExecutor | FusionExecutor):
        return False
    return kind.__module__.partition(".")[0] in _OWNERS


def _is_owned(function: Callable[..., Any] | None) -> bool:
    return function is None or getattr(function, "__module__", "").partition(".")[0] in _OWNERS
