"""The check after each pass that ``Debug(check_passes=True)`` turns on."""

from __future__ import annotations

from thunder.core.prims import PrimIDs
from thunder.core.pytree import tree_iter
from thunder.core.trace import TraceCtx

from ..errors import coded_error
from ..ir.inspection import UNPACKING, args_of, names, outs_of, statement
from .machine import VerificationError


def check_well_formed(trace: TraceCtx, after: str) -> None:
    """Raise an error unless each name is defined once, and read only after that and before it is deleted.

    Raises:
        VerificationError: names the pass ``after`` which the trace was checked, and the bound symbol.
    """
    defined = set(names(tree_iter((trace.args, trace.kwargs))))
    for position, bsym in enumerate(trace.bound_symbols):
        outs = outs_of(bsym)
        fault = next(
            (f"reads {name!r}, which is not defined here" for name in args_of(bsym) if name not in defined), ""
        )
        # With symbolic values, Thunder's prologue reads the sizes of a tensor several times, under the same names.
        if not fault and bsym.sym.id not in UNPACKING and bsym.sym.id is not PrimIDs.SHAPE:
            fault = next((f"defines {name!r} again" for name in outs if name in defined), "")
        if fault:
            raise coded_error(
                VerificationError,
                "proof.ill-formed-trace",
                after=after,
                position=position,
                fault=fault,
                statement=statement(bsym),
            )
        defined.update(outs)
        if bsym.sym.id is PrimIDs.DEL:
            defined.difference_update(args_of(bsym))
