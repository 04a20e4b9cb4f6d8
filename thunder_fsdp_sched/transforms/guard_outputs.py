from __future__ import annotations

from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx

from ..ir.inspection import before_return, return_of, swap_args, with_bound_symbols
from ..ir.symbols import fsdp_detached, fsdp_guard_backward
from .differentiate import needing_gradient


def guard_outputs(epilogue: TraceCtx, *, no_sync: bool) -> TraceCtx:
    """Insert ``fsdp_guard_backward`` into the epilogue, which gets the outputs when they are connected to autograd.

    Runs on the epilogue after ``detach_state`` and before ``shard_prologue``. Before::

        return {'h': h, 'loss': t52}

    After::

        fsdp_guard_backward(False, h, t52)
        return {'h': h, 'loss': t52}

    See [Note: Requested gradients] in ``runtime.autograd``.
    """
    outputs = [argument for argument in epilogue.args if isinstance(argument, TensorProxy)]
    guard = fsdp_guard_backward.bind(no_sync, *outputs, output=None)
    return before_return(epilogue, guard, pass_name="fsdp: guard outputs")


def detach_state(epilogue: TraceCtx, *, computation: TraceCtx) -> TraceCtx:
    """Detach tensors that forward assigns to attributes of modules, if they do not depend on what requires a gradient.

    Runs first, on the epilogue. Thunder connects all results of the computation to autograd. A later call that reads the
    attribute would then differentiate this call as well. Before::

        module.mask = t3

    After::

        t3_detached = fsdp_detached(t3)
        module.mask = t3_detached
    """
    results = return_of(computation).args[0]["output"]
    needing = needing_gradient(computation)
    of_results = epilogue.args[len(epilogue.args) - len(results) :]
    constant = {
        argument.name: argument
        for argument, result in zip(of_results, results, strict=True)
        if isinstance(argument, TensorProxy) and result.name not in needing
    }
    bsyms, detached = [], dict[str, TensorProxy]()
    for bsym in epilogue.bound_symbols:
        if bsym.sym is prims.pack_attr:
            for argument in bsym.flat_proxy_args:
                if argument.name in constant and argument.name not in detached:
                    with tracectx(epilogue):
                        new = TensorProxy(f"{argument.name}_detached", like=argument, requires_grad=False)
                    detached[argument.name] = new
                    bsyms.append(fsdp_detached.bind(argument, output=new))
            bsym = swap_args(bsym, detached)
        bsyms.append(bsym)
    return with_bound_symbols(epilogue, bsyms, "fsdp: detach state") if detached else epilogue
