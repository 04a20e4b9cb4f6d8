"""Executors claim the operators of the joint trace, once for operators that are alike.

[Note: Operators are claimed once]
Thunder lets executors claim the operators of a trace twice: first to see whether the result waits for communication of
its own, and again for the trace that runs. Each time, every operator is decomposed and its parts are traced anew, which
takes as long as tracing a model with repeated blocks. ``JointPasses`` therefore claims all operators as they are, and they
are claimed here for the executors that follow, in Thunder's order and by Thunder's function. Operators with equal structural
keys (symbol, subsymbols, arguments, metadata and tags, with proxies numbered in order of appearance) are claimed once. The
others get copies with their own proxies.

An operator is claimed by itself if an executor could claim it differently the second time: one that keeps state, that is
not Thunder's or this package's, or that calls a function of somebody else. So is an operator whose result is one of its
arguments or gets other metadata. The new result then takes the place of the earlier one everywhere, as in Thunder.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transform_common import dce
from thunder.extend import Executor, FusionExecutor, OperatorExecutor, StatefulExecutor

from ..capture.bound_symbols import BoundSymbolCopies, StructuralKeys, Structure
from ..ir.caching import caching_throughout, with_caches
from ..ir.operator_facts import share_facts
from ..ir.registry import executor as own_executor
from ..private_traces import claim, gradient_rules_of


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
    """The structure of an operator, and the bound symbols that executors have made of it."""

    structure: Structure
    bsyms: Sequence[BoundSymbol]


def _claim_once(trace: TraceCtx, executors: Sequence[Executor]) -> TraceCtx:
    known: dict[Any, _Claimed] = {}
    is_repeatable = RepeatableRules(executors)
    keys = StructuralKeys()
    swap: dict[Variable, Proxy] = {}  # results that others take the place of
    new = from_trace(trace)
    for bsym in trace.bound_symbols:
        if _stays(bsym):
            bsyms: Sequence[BoundSymbol] = [bsym]
        else:
            structure = keys.of(bsym) if is_repeatable(bsym) else None
            if structure is not None and structure.key in known:
                first = known[structure.key]
                renames = dict(zip(first.structure.proxies, structure.proxies.values(), strict=True))
                bsyms = copies_of(first.bsyms, BoundSymbolCopies(new, renames))
            else:
                bsyms, replaced = _claim(bsym, new, executors)
                bsyms = list(map(caching_throughout, bsyms))
                swap |= replaced
                if structure is not None and not replaced and _read_only(bsyms, structure.proxies):
                    known[structure.key] = _Claimed(structure, bsyms)
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
        if new.name not in arguments and _key(new) == _key(old):
            renames[variableify(new)] = old
        else:
            replaced[variableify(old)] = new
    return [each.from_bsym_swap_proxies(renames) for each in bsyms], replaced


def _key(value: Proxy) -> Any:
    structure = StructuralKeys().of(value)
    return None if structure is None else structure.key


def _read_only(bsyms: Iterable[BoundSymbol], names: Iterable[str]) -> bool:
    """Return whether bound symbols read only proxies with these names and those that they define themselves."""
    defined = set(names)
    for bsym in bsyms:
        if any(arg.name not in defined for arg in bsym.flat_proxy_args):
            return False
        defined.update(out.name for out in bsym.flat_proxy_outs)
    return True


_OWNERS = ("thunder", "thunder_fsdp_sched")


class RepeatableRules:
    """Whether executors claim bound symbols, and Thunder differentiates them, in the same way each time.

    They may not if an executor keeps state, or if an executor or a rule belongs neither to Thunder nor to this package.

    Args:
        executors: those that claim operators.
    """

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
                for function in (
                    impl.checker,
                    impl.execution_transform,
                    impl.grad_transform,
                    getattr(impl.symbol, "meta", None),
                )
            ]
            self._known[sym_id] = all(map(_is_owned, (*functions, *gradient_rules_of(sym_id))))
        return self._known[sym_id] and all(map(self._is_repeatable, bsym.subsymbols))


def _is_known(executor: Executor) -> bool:
    kind = type(executor)
    if isinstance(executor, StatefulExecutor) or not isinstance(executor, OperatorExecutor | FusionExecutor):
        return False
    return kind.__module__.partition(".")[0] in _OWNERS


def _is_owned(function: Any) -> bool:
    function = None if function is None else inspect.unwrap(function)
    if isinstance(function, Symbol):
        function = function.meta
    return function is None or str(getattr(function, "__module__", None)).partition(".")[0] in _OWNERS
