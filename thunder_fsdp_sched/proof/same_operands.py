"""Proof that passes give statements no other operands; see [Note: Whose value it is] in ``same_values``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..errors import coded_error
from ..ir.effects import effects, is_declared
from ..ir.inspection import UNPACKING, args_of, names, outs_of, statement, without_token
from .machine import VerificationError


def check_operands(original: TraceCtx, trace: TraceCtx) -> None:
    """Raise an error unless statements of this package read, save and return the same names as in the original trace.

    Statements may have moved, and others may have been added.

    Args:
        original: the trace as Thunder has split it.
        trace: the same trace, sorted and with slots.

    Raises:
        VerificationError: names the statement.
    """
    expected, actual = ({key: bsym for bsym in t.bound_symbols if (key := _operands(bsym))} for t in (original, trace))
    symbols = {key[:2] for key in expected}
    wrong = next((key for key in actual if key[:2] in symbols and key not in expected), None)
    if wrong is not None:
        made = (bsym for key, bsym in expected.items() if key[:2] == wrong[:2] and key not in actual)
        _refuse(actual[wrong], next(made, None))
    made_by = {name: bsym for bsym in original.bound_symbols for name in outs_of(bsym)}
    for bsym in trace.bound_symbols:
        if is_declared(bsym.sym) and effects(bsym).fills is not None:  # it writes what an operator has computed
            source = made_by.get(outs_of(bsym)[0])
            if source is None or args_of(source) != args_of(bsym):
                _refuse(bsym, source)


def _refuse(actual: BoundSymbol, expected: BoundSymbol | None) -> NoReturn:
    raise coded_error(
        VerificationError,
        "proof.statement-with-other-operands",
        statement=statement(actual),
        expected="nothing" if expected is None else statement(expected),
    )


def _operands(bsym: BoundSymbol) -> tuple[Any, ...] | None:
    """Return the symbol, the bucket, and the names of operands and results by position; ``None`` if there are none."""
    is_boundary = bsym.sym.id in UNPACKING or bsym.sym.id is PrimIDs.RETURN
    if not is_boundary and (not is_declared(bsym.sym) or effects(bsym).fills is not None):
        return None
    args = without_token(bsym).args
    read = args_of(bsym) if is_boundary else tuple(arg.name if isinstance(arg, Proxy) else None for arg in args)
    outs = tuple(p.name for p in bsym.flat_proxy_outs)
    has_values = any(read) or bool(outs)
    return (bsym.sym.name, effects(bsym).bucket, read, outs, *names(bsym.kwargs.values())) if has_values else None


def returned_by(last: BoundSymbol) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the outputs and of the saved values in a return statement, also once Thunder has unwrapped it."""
    first, *saved = last.args or (None,)
    outputs = first["output"] if isinstance(first, Mapping) else last.args
    return tuple(names(tree_iter(outputs))), tuple(names(tree_iter(saved))) if outputs is not last.args else ()
