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
    needing = needing_gradient(trace)
    for bsym in trace.bound_symbols:
        values = bsym.args[2:3] or [bsym.kwargs.get("values")]
        if bsym.sym.id == ltorch.index_put.id and getattr(values[0], "name", None) in needing:
            where = f" ({source})" if (source := source_of(bsym)) else ""
            raise NotImplementedError(
                f"fsdp: Thunder computes no gradient of the values of {bsym.sym.name!r}{where}. Write to a copy instead, "
                f"z = y.clone(); z[indices] = values, or with accumulate=True use scatter_add"
            )
    return trace
