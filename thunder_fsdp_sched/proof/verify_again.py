"""Prove traces once more that later transforms have changed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..errors import coded_error
from ..ir.effects import is_declared
from ..ir.inspection import is_backward_trace, statement
from ..ir.registry import handles_of
from .machine import Machine, VerificationError
from .same_values import check_values


def verify_again(
    verified: Sequence[TraceCtx], final: Sequence[TraceCtx], *, max_gathers_in_flight: int | None, after: str
) -> None:
    """Prove the traces that Thunder makes a program of, after later transforms have changed those that were verified.

    Args:
        verified: the forward trace, and the backward trace if there is one, as this plugin has returned them.
        final: the same traces after the transforms that follow.
        max_gathers_in_flight: see ``verify``.
        after: those transforms, for messages.

    Raises:
        VerificationError: a transform has removed, added or reordered statements of this plugin, which the ranks have
            agreed on, or the trace breaks a promise.
    """
    try:
        for old, new in zip(verified, final, strict=True):
            half = "backward" if is_backward_trace(old) else "forward"
            mine, theirs = ([b for b in trace.bound_symbols if is_declared(b.sym)] for trace in (old, new))
            for was, now in itertools.zip_longest(mine, theirs):
                if was is None or now is None or _identity(was) != _identity(now):
                    was_text, now_text = ("nothing" if bsym is None else statement(bsym) for bsym in (was, now))
                    raise coded_error(
                        VerificationError, "proof.statements-out-of-order", half=half, before=was_text, now=now_text
                    )
        machine = Machine(max_gathers_in_flight)
        for trace in final:
            machine.run(trace)
        check_values(verified, final)
    except VerificationError as error:
        raise coded_error(
            VerificationError, "proof.later-transform-broke-trace", transforms=after, error=error
        ) from None


def _identity(bsym: BoundSymbol) -> tuple[Any, ...]:
    """Return the symbol and the buckets, slots and the like on which it operates."""
    return bsym.sym, *handles_of(bsym)
