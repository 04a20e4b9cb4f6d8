"""Refuse operators whose gradient Thunder computes wrongly."""

from __future__ import annotations

from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.gradients import LOST_IN_SEQUENCES, WRONG_GRADIENTS, needing_gradient
from ..ir.inspection import names, source_of


class WrongGradient(NotImplementedError):
    """An operator has a gradient that Thunder does not compute.

    Attributes:
        bsym: the operator.
    """

    def __init__(self, bsym: BoundSymbol, text: str) -> None:
        super().__init__(text)
        self.bsym = bsym


def refuse_wrong_gradients(trace: TraceCtx) -> TraceCtx:
    """Raise :class:`WrongGradient` for operators of which Thunder silently loses a gradient.

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
                raise WrongGradient(
                    bsym,
                    f"fsdp: Thunder computes no gradient of tensors in a list or tuple for {bsym.sym.name!r}{where}. Use "
                    f"torch.cat or torch.stack in place of hstack and the like, and nn.GRUCell, or linear layers and "
                    f"gates, in place of nn.LSTMCell",
                )
            continue
        if bsym.sym.name == "prod":
            if not needing.isdisjoint(names(bsym.flat_proxy_args)):
                raise WrongGradient(
                    bsym,
                    f"fsdp: Thunder's gradient of 'prod'{where} is NaN where an element is zero. Use cumprod",
                )
            continue
        values = bsym.args[2] if len(bsym.args) > 2 else bsym.kwargs["values"]
        if values.name in needing:
            raise WrongGradient(
                bsym,
                f"fsdp: Thunder computes no gradient of the values of {bsym.sym.name!r}{where}. Write to a copy instead, "
                f"z = y.clone(); z[indices] = values, or with accumulate=True use scatter_add",
            )
    return trace
