"""Refuse operators whose gradient Thunder computes wrongly."""

from __future__ import annotations

from collections.abc import Iterable

from thunder.core.prims import PrimIDs
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..errors import coded_error
from ..ir.gradients import LOST_IN_SEQUENCES, WRONG_GRADIENTS, is_wrong_of_complex, needing_gradient
from ..ir.inspection import names, source_of


def refuse_wrong_gradients(trace: TraceCtx) -> TraceCtx:
    """Raise NotImplementedError for operators of which Thunder silently loses a gradient, or computes a wrong one.

    Runs on the computation before it is differentiated. Changes nothing. Of ``index_put`` Thunder returns the gradient of
    the values as that of the first index, tensors in a list or tuple (``hstack``, ``lstm_cell``) get none, and that of
    ``prod`` is NaN for elements that are zero. Most operators that read complex values have wrong gradients.
    """
    bsyms = [bsym for bsym in trace.bound_symbols if bsym.sym.name in WRONG_GRADIENTS or _is_wrong_of_complex(bsym)]
    needing = needing_gradient(trace) if bsyms else frozenset()
    for bsym in bsyms:
        name, where = bsym.sym.name, f" ({source})" if (source := source_of(bsym)) else ""
        read: Iterable[str] = names(bsym.flat_proxy_args)
        if name in LOST_IN_SEQUENCES:
            read = names(
                tree_iter([each for each in (*bsym.args, *bsym.kwargs.values()) if isinstance(each, list | tuple)])
            )
            error = coded_error(NotImplementedError, "trace.no-gradient-of-sequence", operator=name, where=where)
        elif name == "index_put":
            read = [(bsym.args[2] if len(bsym.args) > 2 else bsym.kwargs["values"]).name]
            error = coded_error(NotImplementedError, "trace.no-gradient-of-values", operator=name, where=where)
        elif name == "prod":
            error = coded_error(NotImplementedError, "trace.wrong-gradient-of-prod", where=where)
        else:
            error = coded_error(NotImplementedError, "trace.wrong-gradient-of-complex", operator=name, where=where)
        if not needing.isdisjoint(read):
            raise error
    return trace


def _is_wrong_of_complex(bsym: BoundSymbol) -> bool:
    is_operator = bsym.sym.id is not PrimIDs.RETURN and not bsym.sym.name.startswith("fsdp_")
    return is_operator and is_wrong_of_complex(bsym.sym.name, tree_iter((bsym.args, bsym.kwargs)))
