"""Let executors claim the operators of the joint trace, and kernels skip gradients that nothing reads.

[Note: Operators are claimed once]
Thunder lets executors claim the operators of a trace twice: first to see whether the result waits for Thunder's own
communication, and again for the trace that runs. Each time, every operator is decomposed and its parts are traced anew,
which takes as long as tracing a model with repeated blocks. So ``PassExecutor`` claims all operators unchanged, and
this pass lets the other executors claim them, in Thunder's order and with Thunder's function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import dce
from thunder.extend import Executor

from ..ir.inspection import args_of, with_bound_symbols
from ..ir.registry import with_caches
from ..kernels.executor import executor
from ..private_thunder import claim


def claim_operators(trace: TraceCtx, *, executors: Sequence[Executor]) -> TraceCtx:
    """Let each operator be claimed by the first of ``executors`` that can, and eliminate dead code.

    Args:
        trace: the joint trace as Thunder has differentiated it (forward alone without gradients).
        executors: the executors, in order of priority.
    """
    return dce(with_caches(claim(_without_zeros_of_no_shape(trace), executors)))


def _without_zeros_of_no_shape(trace: TraceCtx) -> TraceCtx:
    """Return the trace with ``full`` in place of each ``zeros`` without dimensions, which Thunder calls without a shape."""
    if not any(map(_is_zeros_of_no_shape, trace.bound_symbols)):
        return trace
    new = with_bound_symbols(trace, (), "fsdp: zeros without dimensions")
    with tracectx(new):
        for bsym in trace.bound_symbols:
            if _is_zeros_of_no_shape(bsym):
                out = bsym.output
                bsym = prims.full.bind((), 0, device=out.device, dtype=out.dtype, output=out)
            new.bound_symbols.append(bsym)
    return new


def _is_zeros_of_no_shape(bsym: BoundSymbol) -> bool:
    return bsym.sym.id == ltorch.zeros.id and not bsym.args


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
