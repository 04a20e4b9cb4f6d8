from __future__ import annotations

from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

from ..ir.inspection import before_return
from ..ir.symbols import fsdp_guard_backward


def guard_outputs(epilogue: TraceCtx, *, no_sync: bool) -> TraceCtx:
    """Insert ``fsdp_guard_backward`` into the epilogue, which gets the outputs when they are connected to autograd.

    Runs on the epilogue after ``insert_unshard``. Before::

        return {'h': h, 'loss': t52}

    After::

        fsdp_guard_backward(False, h, t52)
        return {'h': h, 'loss': t52}

    See [Note: Requested gradients] in ``runtime.autograd``.
    """
    outputs = [argument for argument in epilogue.args if isinstance(argument, TensorProxy)]
    guard = fsdp_guard_backward.bind(no_sync, *outputs, output=None)
    return before_return(epilogue, guard, pass_name="fsdp: guard outputs")
