"""Facts about operators: aliases of outputs, purity, and writes to inputs. Unknown operators count as unsafe.

[Note: Sources of facts]
1. *Symbols of this package* are known exactly, from their declared effects. Passes follow views of slots themselves.
2. *Prims of Thunder* are in an explicit table. A prim that is not in the table is unknown.
3. *Functions of torch* are observed, whichever symbol of Thunder calls them: see [Note: Observing a function] in
   ``observation``. So are Thunder's own small implementations, which call torch.
4. *Composite symbols and fusions* have the facts that follow from their subsymbols. If the function of a composite can
   also be observed, the two sources are combined: an output aliases the inputs of either, and the symbol is pure only
   in both.
5. *Symbols of other executors* that replace exactly one operator have the facts of that operator.
6. *Functions of users*, of whichever executor, are declared with :func:`declare_operator`, or else observed as in 3.
   What they do besides calling torch cannot be observed, so they are not pure.

Everything else is unknown: all outputs may alias all tensor inputs, and it is never recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import reduce
from typing import Any, NamedTuple

from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import FutureTensorProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol

from ..errors import coded_error
from ..private_thunder import FACTS, function_called_by, torch_function_of
from .inspection import args_of, outs_of
from .observation import Observed, observe_call


class Facts(NamedTuple):
    """The facts about one bound symbol.

    Attributes:
        aliases: for each output that may share memory with inputs, the names of these inputs.
        pure: whether running it again returns the same values and modifies nothing.
        writes: names of the inputs that it modifies in place.
        known: whether the facts come from a reliable source. If not, ``aliases`` and ``pure`` are the safe assumptions,
            and it may write any of its inputs.
        by_position: names of the inputs whose memory it is known to address by position in the storage.
        draws: whether it is known to draw random numbers. If it is not pure, it may draw in any case.
    """

    aliases: dict[str, tuple[str, ...]]
    pure: bool
    writes: frozenset[str] = frozenset()
    known: bool = True
    by_position: frozenset[str] = frozenset()
    draws: bool = False


_NOT_VALUES = frozenset({PrimIDs.COMMENT, PrimIDs.DEL, PrimIDs.GET_GRAD, PrimIDs.PUT_GRAD, PrimIDs.RETURN})

# fmt: off
_VIEW_PRIMS = frozenset({
    PrimIDs.BITCAST, PrimIDs.BROADCAST_IN_DIM, PrimIDs.CONVERT_ELEMENT_TYPE, PrimIDs.DEVICE_PUT, PrimIDs.IMAG,
    PrimIDs.REAL, PrimIDs.RESHAPE, PrimIDs.SHALLOW_COPY, PrimIDs.SLICE, PrimIDs.SQUEEZE, PrimIDs.STRIDE_ORDER,
    PrimIDs.TRANSPOSE, PrimIDs.UNFOLD, PrimIDs.VIEW,
})
"""Prims that may return a view of an input, or the input itself, as a conversion does if there is nothing to convert."""

_FRESH_PRIMS = frozenset(p for p in PrimIDs if p.name == "_GROUPED_MM") | frozenset({
    PrimIDs.ABS, PrimIDs.ACOS, PrimIDs.ACOSH, PrimIDs.ADD, PrimIDs.AMAX, PrimIDs.AMIN, PrimIDs.ARGMAX,
    PrimIDs.ARGMIN, PrimIDs.ASIN, PrimIDs.ASINH, PrimIDs.ATAN, PrimIDs.ATAN2, PrimIDs.ATANH, PrimIDs.BITWISE_AND,
    PrimIDs.BITWISE_LEFT_SHIFT, PrimIDs.BITWISE_NOT, PrimIDs.BITWISE_OR, PrimIDs.BITWISE_RIGHT_SHIFT,
    PrimIDs.BITWISE_XOR, PrimIDs.CAT, PrimIDs.CEIL, PrimIDs.CLONE, PrimIDs.CONVOLUTION, PrimIDs.COPY_WITH_SETITEM,
    PrimIDs.COS, PrimIDs.COSH, PrimIDs.DIGAMMA, PrimIDs.DIV, PrimIDs.EMBEDDING, PrimIDs.EMBEDDING_BACKWARD,
    PrimIDs.EQ, PrimIDs.ERF, PrimIDs.ERFC, PrimIDs.ERFCINV, PrimIDs.ERFINV, PrimIDs.EXP, PrimIDs.EXP2,
    PrimIDs.EXPM1, PrimIDs.FLIP, PrimIDs.FLOOR, PrimIDs.FMOD, PrimIDs.FREXP, PrimIDs.FULL, PrimIDs.GATHER,
    PrimIDs.GE, PrimIDs.GT, PrimIDs.INDEX_ADD, PrimIDs.INDEX_COPY, PrimIDs.INDEX_PUT, PrimIDs.IOTA,
    PrimIDs.ISFINITE, PrimIDs.ITEM, PrimIDs.LE, PrimIDs.LERP, PrimIDs.LGAMMA, PrimIDs.LINEAR, PrimIDs.LOG,
    PrimIDs.LOG10, PrimIDs.LOG1P, PrimIDs.LOG2, PrimIDs.LT, PrimIDs.MATMUL, PrimIDs.MAXIMUM, PrimIDs.MINIMUM,
    PrimIDs.MUL, PrimIDs.NDTRI, PrimIDs.NE, PrimIDs.NEG, PrimIDs.NEXTAFTER, PrimIDs.PAD, PrimIDs.POW,
    PrimIDs.PROD, PrimIDs.PY_ABS, PrimIDs.PY_FLOORDIV, PrimIDs.RECIPROCAL, PrimIDs.REMAINDER, PrimIDs.ROUND,
    PrimIDs.RSQRT, PrimIDs.SCATTER, PrimIDs.SCATTER_ADD, PrimIDs.SHAPE, PrimIDs.SIGN, PrimIDs.SIGNBIT,
    PrimIDs.SIN, PrimIDs.SINH, PrimIDs.SORT, PrimIDs.SQRT, PrimIDs.STD, PrimIDs.SUB, PrimIDs.SUM, PrimIDs.TAKE,
    PrimIDs.TAKE_ALONG_AXIS, PrimIDs.TAN, PrimIDs.TANH, PrimIDs.TENSOR_FROM_SEQUENCE, PrimIDs.TOPK, PrimIDs.TRUNC,
    PrimIDs.UNIFORM_PHILOX, PrimIDs.VAR, PrimIDs.VAR_MEAN, PrimIDs.WHERE, PrimIDs.ZETA,
})
# fmt: on
"""Prims that return new memory, return equal values for equal inputs, and modify nothing."""

_RANDOM_PRIMS = frozenset(
    {PrimIDs.GET_AND_UPDATE_RNG_STATE, PrimIDs.MULTINOMIAL, PrimIDs.RANDINT, PrimIDs.RANDN, PrimIDs.UNIFORM}
)
"""Prims that return new memory with random numbers."""

_KEPT, _LIKE = FACTS

_IMPURE_TAGS: set[Any] = {OpTags.RANDOM_OP, OpTags.IN_PLACE, OpTags.DONT_DCE}


def facts_of(bsym: BoundSymbol) -> Facts:
    """Return the facts about ``bsym``; see [Note: Sources of facts].

    Several passes ask for them, so a bound symbol caches them, like its flat arguments: only its tags change. Copies
    have them, too, if they are a ``CachingBoundSymbol``.
    """
    facts = _kept_facts(bsym)
    tags = _IMPURE_TAGS.intersection((*bsym.tags, *(bsym.sym.tags or ())))
    if tags and (facts.pure or not facts.draws):
        return facts._replace(pure=False, draws=facts.draws or OpTags.RANDOM_OP in tags)
    return facts


def _kept_facts(bsym: BoundSymbol) -> Facts:
    facts: Facts | None = vars(bsym).get(_KEPT)
    if facts is None:
        like = vars(bsym).pop(_LIKE, None)
        facts = vars(bsym)[_KEPT] = _facts_of(bsym) if like is None else _renamed(_kept_facts(like[0]), like[1])
    return facts


def share_facts(bsym: BoundSymbol, other: BoundSymbol, names: Mapping[str, Proxy]) -> None:
    """Give a bound symbol the facts of another one that differs only in its proxies.

    Args:
        names: the proxies of ``bsym``, by the names of those of ``other``.
    """
    vars(bsym)[_LIKE] = other, names


def _renamed(facts: Facts, names: Mapping[str, Proxy]) -> Facts:
    if not (facts.aliases or facts.writes or facts.by_position):
        return facts
    return Facts(
        {names[out].name: tuple(names[name].name for name in read) for out, read in facts.aliases.items()},
        facts.pure,
        frozenset(names[name].name for name in facts.writes),
        facts.known,
        frozenset(names[name].name for name in facts.by_position),
        facts.draws,
    )


DECLARED_FACTS: dict[Symbol, Callable[[BoundSymbol], Facts]] = {}
"""The facts about each symbol of this package, which ``registry`` derives from its declared effects."""


def _facts_of(bsym: BoundSymbol) -> Facts:
    sym = bsym.sym
    if sym.id in _NOT_VALUES:
        return Facts({}, pure=False)
    if (of_declared := DECLARED_FACTS.get(sym)) is not None:
        return of_declared(bsym)
    if isinstance(sym.id, PrimIDs):
        return _of_prim(sym.id, bsym)
    if sym in _declared:
        return _declared[sym](bsym)
    looked_through = _look_through(bsym) if bsym.subsymbols else None
    if sym.is_fusion:
        return looked_through or _unknown(bsym)
    observed = _observe(bsym, _function_of(bsym))
    if observed is None:
        return looked_through or _of_implemented(bsym) or _of_users_function(bsym) or _unknown(bsym)
    if looked_through is None or not looked_through.known:
        return observed
    return _either(observed, looked_through)


def tensors_read(bsym: BoundSymbol) -> tuple[str, ...]:
    """Return the names of the tensors, or futures of tensors, that ``bsym`` reads, each once."""
    return tuple(dict.fromkeys(p.name for p in bsym.flat_proxy_args if isinstance(p, (TensorProxy, FutureTensorProxy))))


def tensors_returned(bsym: BoundSymbol) -> list[str]:
    """Return the names of the tensors that ``bsym`` returns."""
    return [p.name for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]


def _alias_all(bsym: BoundSymbol) -> dict[str, tuple[str, ...]]:
    """Let each output alias all inputs."""
    tensors = tensors_read(bsym)
    return dict.fromkeys(outs_of(bsym), tensors) if tensors else {}


def _unknown(bsym: BoundSymbol) -> Facts:
    return Facts(_alias_all(bsym), pure=False, known=False)


def _of_prim(prim: Hashable, bsym: BoundSymbol) -> Facts:
    """Return the facts about ``bsym``, which is or implements ``prim``."""
    if prim is PrimIDs.COPY_:
        destination = bsym.args[1].name
        return Facts(dict.fromkeys(outs_of(bsym), (destination,)), pure=False, writes=frozenset({destination}))
    if prim is PrimIDs.UPDATE_ALIASES:
        pairs = zip(bsym.flat_proxy_outs, bsym.flat_proxy_args, strict=True)
        return Facts({new.name: (old.name,) for new, old in pairs}, pure=True)
    if prim in _VIEW_PRIMS:
        return Facts(_alias_all(bsym), pure=True)
    if prim in _FRESH_PRIMS:
        return Facts({}, pure=True)
    if prim is PrimIDs.EMPTY or prim in _RANDOM_PRIMS:  # new memory, with other values each time
        return Facts({}, pure=False, draws=prim in _RANDOM_PRIMS)
    return _unknown(bsym)


def _look_through(bsym: BoundSymbol) -> Facts:
    """Return the facts that follow from those about the subsymbols of ``bsym``."""
    aliases, inputs = Aliases(), frozenset(args_of(bsym))
    writes: set[str] = set()
    by_position: set[str] = set()
    of_parts = [facts_of(sub) for sub in bsym.subsymbols]
    for sub, facts in zip(bsym.subsymbols, of_parts, strict=True):
        writes |= aliases.roots(*facts.writes)
        by_position |= aliases.roots(*facts.by_position)
        aliases.add(sub)
    return Facts(
        {out: tuple(sorted(of)) for out in outs_of(bsym) if (of := aliases.roots(out) & inputs)},
        pure=all(facts.pure for facts in of_parts),
        writes=inputs & writes,
        known=all(facts.known for facts in of_parts),
        by_position=inputs & by_position,
        draws=any(facts.draws for facts in of_parts),
    )


def _function_of(bsym: BoundSymbol) -> Callable[..., Any] | None:
    """Return the torch function that ``bsym`` calls, or will call once executors claim it."""
    return function_called_by(bsym) or torch_function_of(bsym.sym.id)


def observed_call(bsym: BoundSymbol, strides: Mapping[str, tuple[int, ...]]) -> Observed | None:
    """Observe the call for inputs with these strides; ``None`` if it cannot be observed.

    :func:`facts_of` knows no strides, so its aliases are those of contiguous inputs, and of any input where that is safer.

    Args:
        strides: strides by name; inputs that are not in it are contiguous.
    """
    function = _function_of(bsym)
    if function is None or bsym.sym.is_fusion:
        return None
    found = observe_call(bsym, function, strides)
    return found[0] if found and len(found[0].aliases) == len(tensors_returned(bsym)) else None


def _observe(bsym: BoundSymbol, function: Callable[..., Any] | None) -> Facts | None:
    """Return the observed facts of a function with the arguments of ``bsym``."""
    found = () if function is None else observe_call(bsym, function)
    return reduce(_either, [_named(observed, bsym) for observed in found]) if found else None


def _named(observed: Observed, bsym: BoundSymbol) -> Facts:
    """Return ``observed`` with the names of the inputs and outputs of ``bsym``."""
    inputs, outs, defined = tensors_read(bsym), tensors_returned(bsym), outs_of(bsym)
    of_outs = observed.aliases
    if len(outs) != len(of_outs):
        # The meta function returns another structure, so each output may alias any input that one of them aliases.
        of_outs = (frozenset().union(*of_outs),) * len(outs)
    aliases = {
        out: tuple(inputs[i] for i in sorted(of))
        for out, of in zip(outs, of_outs, strict=True)
        if of and out in defined
    }
    writes, by_position = (frozenset(inputs[i] for i in found) for found in (observed.writes, observed.by_position))
    return Facts(aliases, observed.pure, writes, by_position=by_position, draws=observed.draws)


def _of_implemented(bsym: BoundSymbol) -> Facts | None:
    """Return the facts about the operator that an executor's symbol replaces, with the same arguments; else ``None``."""
    executor = bsym.sym.executor
    found = [
        _of_prim(id, bsym) if isinstance(id, PrimIDs) else _observe(bsym, torch_function_of(id))
        for id, info in (executor.implmap.items() if executor is not None else ())
        if info.symbol is bsym.sym and info.execution_transform is None
    ]
    known = [facts for facts in found if facts is not None and facts.known]
    return reduce(_either, known) if known and len(known) == len(found) else None


_declared: dict[Symbol, Callable[[BoundSymbol], Facts]] = {}


def declare_operator(symbol: Symbol, *, pure: bool = False, views: bool = False) -> None:
    """Declare what an operator of your own executor does, where that cannot be observed: see [Note: Sources of facts].

    An operator whose function runs on fake tensors needs this only to be recomputed.

    Args:
        symbol: as ``register_operator`` of the executor has returned it. It modifies none of its inputs.
        pure: whether it returns equal values for equal inputs, and does nothing else.
        views: whether its outputs may share memory with its inputs.

    Raises:
        TypeError: ``symbol`` is not a symbol of an executor, or ``pure`` or ``views`` is no bool.
    """
    if not isinstance(symbol, Symbol) or symbol.executor is None:
        raise coded_error(TypeError, "trace.symbol-not-registered", got=symbol)
    for name, value in {"pure": pure, "views": views}.items():
        if not isinstance(value, bool):
            raise coded_error(TypeError, "trace.operator-fact-not-bool", name=name, got=value)
    _declared[symbol] = lambda bsym: Facts(_alias_all(bsym) if views else {}, pure)


def _of_users_function(bsym: BoundSymbol) -> Facts | None:
    """Return the observed facts about a function that belongs neither to torch nor to Thunder.

    There are none if it cannot run on fake tensors, or keeps memory between calls.
    """
    function = (bsym._call_ctx or {}).get(bsym.sym.name)
    found = () if function is None else observe_call(bsym, function)
    if not found or any(observed.elsewhere for observed in found):
        return None
    return reduce(_either, [_named(observed, bsym) for observed in found])._replace(pure=False)


def _either(a: Facts, b: Facts) -> Facts:
    return Facts(
        {
            out: tuple(dict.fromkeys((*a.aliases.get(out, ()), *b.aliases.get(out, ()))))
            for out in {**a.aliases, **b.aliases}
        },
        a.pure and b.pure,
        a.writes | b.writes,
        by_position=a.by_position | b.by_position,
        draws=a.draws or b.draws,
    )


class Aliases:
    """The views in the part of a trace so far: for any value, the values whose memory it may share."""

    def __init__(self, bsyms: Iterable[BoundSymbol] = ()) -> None:
        self._roots: dict[str, frozenset[str]] = {}
        for bsym in bsyms:
            self.add(bsym)

    def add(self, bsym: BoundSymbol) -> None:
        """Record the next bound symbol in trace order."""
        for out, inputs in facts_of(bsym).aliases.items():
            self._roots[out] = self.roots(*inputs)

    def link(self, name: str, to: str) -> None:
        """Count ``name`` as a view of ``to``."""
        self._roots[name] = self.roots(to)

    def roots(self, *names: str) -> frozenset[str]:
        """Return the values whose memory the named ones may share; a value itself if it is not a view."""
        return frozenset().union(*(self._roots.get(name, frozenset({name})) for name in names))


def is_pure(bsym: BoundSymbol) -> bool:
    """Return whether running ``bsym`` again is known to return the same values and to modify nothing."""
    return facts_of(bsym).pure
