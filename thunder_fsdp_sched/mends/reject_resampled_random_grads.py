from __future__ import annotations

from collections.abc import Iterator

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.extend import TemporaryExecutor

from ..errors import coded_error
from ..ir.inspection import UNPACKING, args_of, nested, outs_of, source_of
from ..ir.operator_facts import facts_of, is_pure
from ..ir.registry import executor


def reject_resampled_random_grads(trace: TraceCtx, *, forward: TraceCtx, computation: TraceCtx) -> TraceCtx:
    """Raise an error if gradients depend on random numbers that backward draws in place of forward's.

    Runs first on the backward trace, before ``write_grads_in_place``, and changes nothing. It refuses an operator of
    forward that runs again and is not known to be pure, and one that draws without having run in forward, unless the
    model has a backward of its own (``torch.autograd.Function``) that may draw. For example::

        (t42,) = gumbel_softmax_vjp(((t31,), {}), t20)

    Args:
        forward: the forward trace that runs.
        computation: the program that was differentiated.

    Raises:
        NotImplementedError: names the operator.
    """
    has_own_backward = any(isinstance(b.sym.executor, TemporaryExecutor) for b in nested(computation.bound_symbols))
    needed: set[str] = set()  # by gradients that are returned
    in_forward = frozenset(out for part in parts_of(forward) for out in outs_of(part))
    for part in reversed(list(parts_of(trace))):
        outs = set(outs_of(part))
        if (outs and outs.isdisjoint(needed)) or part.sym.id in _NO_OPERATORS:
            continue
        needed.update(args_of(part))
        if is_pure(part) or part.sym.executor is executor:
            continue
        if part.sym.name.endswith("_vjp") or any(out.removeprefix("bw_") in in_forward for out in outs):
            _refuse(part, "again")
        if facts_of(part).draws and not has_own_backward:
            _refuse(part, "in backward")
    return trace


_NO_OPERATORS = UNPACKING | {PrimIDs.DEL}


def _refuse(bsym: BoundSymbol, reason: str) -> None:
    raise coded_error(
        NotImplementedError,
        "trace.random-operator-drawn-again",
        operator=described(bsym),
        when=reason,
        function=_name(bsym),
    )


def _name(bsym: BoundSymbol) -> str:
    return bsym.sym.name.removesuffix("_vjp")


def described(bsym: BoundSymbol) -> str:
    source = source_of(bsym)
    return f"{_name(bsym)!r} ({source})" if source else repr(_name(bsym))


def parts_of(trace: TraceCtx) -> Iterator[BoundSymbol]:
    """Yield the bound symbols of a trace, in place of fusions those that they consist of."""
    for bsym in trace.bound_symbols:
        yield from bsym.subsymbols if bsym.sym.is_fusion else (bsym,)
