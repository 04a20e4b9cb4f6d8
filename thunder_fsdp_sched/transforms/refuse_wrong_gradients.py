"""Refuse operators whose gradient Thunder computes wrongly."""

from __future__ import annotations

import thunder.torch as ltorch
from thunder.core.trace import TraceCtx

from ..ir.gradients import needing_gradient
from ..ir.inspection import source_of


def refuse_wrong_gradients(trace: TraceCtx) -> TraceCtx:
    """Raise NotImplementedError for operators of which Thunder silently loses a gradient.

    Runs on the computation before it is differentiated. Changes nothing. So far that is ``index_put`` with values that need
    a gradient: Thunder returns theirs as that of the first index.
    """
    writes = [bsym for bsym in trace.bound_symbols if bsym.sym.id == ltorch.index_put.id]
    needing = needing_gradient(trace) if writes else frozenset()
    for bsym in writes:
        values = bsym.args[2] if len(bsym.args) > 2 else bsym.kwargs["values"]
        if values.name in needing:
            where = f" ({source})" if (source := source_of(bsym)) else ""
            raise NotImplementedError(
                f"fsdp: Thunder computes no gradient of the values of {bsym.sym.name!r}{where}. Write to a copy instead, "
                f"z = y.clone(); z[indices] = values, or with accumulate=True use scatter_add"
            )
    return trace
