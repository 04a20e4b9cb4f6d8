"""Recompute regions of ``torch.utils.checkpoint`` up to their results.

[Note: Last operators of a region]
Thunder tags the values of a region that backward recomputes: all values except the results of the region. The values in
an operator's grad rule or decomposition inherit its tag. So an operator that computes a result has no tag, and all
other values that its rule computes in forward are saved: the softmax of a ``cross_entropy``, the statistics of a
``layer_norm``, the intermediate values of a ``gelu``. This pass makes such a result a copy of a value that is
recomputed like all others.
"""

from __future__ import annotations

from thunder.core import prims
from thunder.core.proxies import ProxyTag, TensorProxy, variableify
from thunder.core.trace import TraceCtx, tracectx

from ..ir.bound_symbols import IN_CHECKPOINT
from ..ir.inspection import defined_by, with_bound_symbols
from ..ir.operator_facts import is_pure
from ..private_thunder import renamed


def recompute_whole_regions(trace: TraceCtx) -> TraceCtx:
    """Let operators that compute the results of a ``torch.utils.checkpoint`` region be recomputed, too.

    Runs on the computation after ``draw_once``, which leaves out operators that are not pure, and before it is
    differentiated. Before, where ``t9`` is recomputed and ``t10`` is a result::

        t9 = ltorch.linear(h, t_head_weight, None)
        t10 = ltorch.cross_entropy(t9, targets)

    After, where ``t11`` is recomputed, too::

        t9 = ltorch.linear(h, t_head_weight, None)
        t11 = ltorch.cross_entropy(t9, targets)
        t10 = prims.shallow_copy(t11)

    See [Note: Last operators of a region].
    """
    new = with_bound_symbols(trace, (), "fsdp: recompute whole regions")
    with tracectx(new):
        for bsym in trace.bound_symbols:
            results = [out for out in defined_by(bsym) if isinstance(out, TensorProxy)]
            results = [out for out in results if ProxyTag.RECOMPUTE_IN_BACKWARD not in out.tags]
            if not results or IN_CHECKPOINT not in bsym.tags or not is_pure(bsym):
                new.bound_symbols.append(bsym)
                continue
            inner = [renamed(out, new, {*out.tags, ProxyTag.RECOMPUTE_IN_BACKWARD}) for out in results]
            swaps = {variableify(out): value for out, value in zip(results, inner, strict=True)}
            new.bound_symbols.append(bsym.from_bsym_swap_proxies(swaps))
            for out, value in zip(results, inner, strict=True):
                new.bound_symbols.append(prims.shallow_copy.bind(value, output=out))
    return new
