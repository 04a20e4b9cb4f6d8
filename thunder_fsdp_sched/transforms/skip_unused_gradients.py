"""Let kernels compute only the gradients that something reads, such as none for frozen weights of a layer norm."""

from __future__ import annotations

from typing import Any

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.inspection import args_of, with_bound_symbols
from ..kernels.executor import executor


def skip_unused_gradients(trace: TraceCtx) -> TraceCtx:
    """Clear the entries of output masks whose gradients nothing reads.

    Runs on the joint trace after ``differentiate`` or ``claim_operators``. Does nothing without kernels that have a mask.
    Before, with a frozen weight and bias::

        (t9, t10, t11) = torch_native_layer_norm_backward(t8, t1, [64], t2, t3, t_weight, t_bias, [True, True, True])

    After::

        (t9, _, _) = torch_native_layer_norm_backward(t8, t1, [64], t2, t3, t_weight, t_bias, [True, False, False])
    """
    read = {name for bsym in trace.bound_symbols for name in args_of(bsym)}
    bsyms = [_masked(bsym, read) if bsym.sym.executor is executor else bsym for bsym in trace.bound_symbols]
    return with_bound_symbols(trace, bsyms, "fsdp: skip unused gradients")


def _masked(bsym: BoundSymbol, read: set[str]) -> BoundSymbol:
    outputs = bsym.output
    if not isinstance(outputs, tuple) or not any(map(_is_mask, bsym.args)):
        return bsym
    wanted = [output is not None and output.name in read for output in outputs]
    args = tuple([wanted if _is_mask(argument) else argument for argument in bsym.args])
    return bsym.from_bsym(
        args=args, output=tuple(out if is_wanted else None for out, is_wanted in zip(outputs, wanted, strict=True))
    )


def _is_mask(argument: Any) -> bool:
    return isinstance(argument, list) and len(argument) > 0 and all(type(each) is bool for each in argument)
