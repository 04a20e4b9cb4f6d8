"""Refuse operators whose gradient Thunder computes wrongly."""

from __future__ import annotations

from thunder.core.pytree import tree_iter
from thunder.core.trace import TraceCtx

from ..errors import coded_error
from ..ir.gradients import LOST_IN_SEQUENCES, WRONG_GRADIENTS, needing_gradient
from ..ir.inspection import names, source_of


def refuse_wrong_gradients(trace: TraceCtx) -> TraceCtx:
    """Raise NotImplementedError for operators of which Thunder silently loses a gradient.

    Runs on the computation before it is differentiated. Changes nothing. Of ``index_put`` Thunder returns the gradient of
    the values as that of the first index, tensors in a list or tuple (``hstack``, ``lstm_cell``) get none, and that of
    ``prod`` is NaN for elements that are zero.
    """
    bsyms = [b for b in trace.bound_symbols if b.sym.name in WRONG_GRADIENTS]
    needing = needing_gradient(trace) if bsyms else frozenset()
    for bsym in bsyms:
        where = f" ({source})" if (source := source_of(bsym)) else ""
        if bsym.sym.name in LOST_IN_SEQUENCES:
            sequences = [each for each in (*bsym.args, *bsym.kwargs.values()) if isinstance(each, list | tuple)]
            if not needing.isdisjoint(names(tree_iter(sequences))):
                raise coded_error(
                    NotImplementedError, "trace.no-gradient-of-sequence", operator=bsym.sym.name, where=where
                )
            continue
        if bsym.sym.name == "prod":
            if not needing.isdisjoint(names(bsym.flat_proxy_args)):
                raise coded_error(NotImplementedError, "trace.wrong-gradient-of-prod", where=where)
            continue
        values = bsym.args[2] if len(bsym.args) > 2 else bsym.kwargs["values"]
        if values.name in needing:
            raise coded_error(NotImplementedError, "trace.no-gradient-of-values", operator=bsym.sym.name, where=where)
    return trace
