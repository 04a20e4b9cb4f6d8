"""Guard the backward of a compiled forward, and tell it which outputs each input reaches."""

from __future__ import annotations

from collections import defaultdict
from functools import reduce
from operator import or_
from typing import Any

from thunder.core import dtypes, prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.trace import TraceCtx, from_trace, tracectx

from ..ir.gradients import needing_gradient, with_gradient
from ..ir.inspection import args_of, before_return, names, outs_of, return_of, swap_args, with_bound_symbols
from ..ir.symbols import LEAF, fsdp_detached, fsdp_guard_backward


def guard_outputs(epilogue: TraceCtx, *, no_sync: bool, computation: TraceCtx) -> TraceCtx:
    """Insert ``fsdp_guard_backward`` into the epilogue, which runs after the outputs are connected to autograd.

    Runs on the epilogue after ``detach_constants`` and before ``shard_prologue``. Before::

        return {'h': h, 'loss': t52}

    After, with three inputs of which the second reaches the first output alone::

        fsdp_guard_backward(False, h, t52, reached=(3, 1, 3))
        return {'h': h, 'loss': t52}

    See [Note: Requested gradients] in ``runtime.autograd`` and [Note: Outputs without gradient] in
    ``runtime.unused_outputs``.
    """
    outputs = [argument for argument in epilogue.args if isinstance(argument, TensorProxy)]
    marks = outputs_reached(computation, epilogue)
    guard = fsdp_guard_backward.bind(no_sync, *outputs, **marks, output=None)
    return before_return(epilogue, guard, pass_name="fsdp: guard outputs")


def detach_constants(epilogue: TraceCtx, *, computation: TraceCtx) -> TraceCtx:
    """Detach results that need no gradient, where forward returns them or assigns them to attributes.

    Runs first, on the epilogue. Thunder connects all results of the computation to autograd. If the program keeps such
    a result, all tensors saved for backward stay alive, and a later call that reads it from an attribute would
    differentiate this call as well. Before::

        module.mask = t3
        return {'loss': t9, 'mask': t3}

    After::

        t3_detached = fsdp_detached(t3)
        module.mask = t3_detached
        return {'loss': t9, 'mask': t3_detached}
    """
    results = return_of(computation).args[0]["output"]
    needing = needing_gradient(computation)
    of_results = epilogue.args[len(epilogue.args) - len(results) :]
    constant = {
        argument.name: result
        for argument, result in zip(of_results, results, strict=True)
        if isinstance(argument, TensorProxy) and result.name not in needing
    }
    inputs = {*names(computation.args)}
    returned = {
        name for name, result in constant.items() if result.name not in inputs and dtypes.is_inexact_dtype(result.dtype)
    }
    bsyms, detached = [], dict[str, TensorProxy]()
    parts = _returned(epilogue)
    detaching = from_trace(epilogue)
    detaching.names = {*epilogue.names}  # the epilogue is compiled again for the other mode of `no_sync`
    for bsym in epilogue.bound_symbols:
        is_returned = bsym.sym.id is PrimIDs.RETURN or not parts.isdisjoint(outs_of(bsym))
        swapped = constant.keys() if bsym.sym is prims.pack_attr else returned if is_returned else ()
        for argument in bsym.flat_proxy_args:
            if argument.name in swapped and argument.name not in detached:
                with tracectx(detaching):
                    new = TensorProxy(f"{argument.name}_detached", like=argument, requires_grad=False)
                detached[argument.name] = new
                bsyms.append(fsdp_detached.bind(argument, output=new))
        bsyms.append(swap_args(bsym, detached) if swapped else bsym)
    return with_bound_symbols(detaching, bsyms, "fsdp: detach constants") if detached else epilogue


def outputs_reached(computation: TraceCtx, epilogue: TraceCtx) -> dict[str, Any]:
    """Return for each tensor among the inputs of a computation the outputs that it ``reached``, as bits.

    An operator connects its inputs with all of its outputs that have a gradient, as a node of autograd does. Outputs
    that the program neither returns nor assigns to an attribute, such as new values of buffers, do not count. If all
    inputs that require a gradient reach the same outputs, nothing is returned. A leaf module connects its inputs; which
    of its parameters it connects is known only when it has run. So ``by_leaves`` has, for each output of a leaf, the
    outputs of the computation that it reaches.

    Args:
        computation: as Thunder has traced it.
        epilogue: as Thunder has traced it; its last arguments are the outputs of the computation.
    """
    returned = return_of(computation).args[0]
    outputs, _ = tree_flatten(returned["output"])
    visible = _visible(outputs, epilogue)
    bits: dict[str, int] = defaultdict(int)
    for number, output in enumerate(outputs):
        if visible[number]:
            bits[output.name] |= 1 << number
    by_leaves: dict[str, tuple[int, ...]] = {}
    for bsym in reversed(computation.bound_symbols[:-1]):
        reaching = reduce(or_, (bits[name] for name in with_gradient(bsym)), 0)
        read = args_of(bsym) if reaching else ()
        if read and bsym.sym.name == LEAF:
            leaf = bsym.args[0]
            read = tuple(names(bsym.args[1 : 1 + len(leaf.inputs)]))
            former = by_leaves.get(leaf.name, (0,) * len(leaf.outputs))
            by_leaves[leaf.name] = tuple(map(or_, former, (bits[out.name] for out in bsym.flat_proxy_outs)))
        for name in read:
            bits[name] |= reaching
    inputs = [arg for arg in returned["flat_args"] if isinstance(arg, TensorProxy)]
    found = {bits[arg.name] for arg in inputs if arg.requires_grad}
    reached = {"reached": tuple(bits[arg.name] for arg in inputs)} if len(found) > 1 or by_leaves else {}
    return {**reached, "by_leaves": by_leaves} if by_leaves else reached


def _returned(epilogue: TraceCtx) -> set[str]:
    """Return the names of the values that the epilogue returns, and of parts of objects that it makes and returns."""
    returned = set(args_of(return_of(epilogue)))
    for bsym in reversed(epilogue.bound_symbols):
        if not returned.isdisjoint(outs_of(bsym)):
            returned.update(args_of(bsym))
    return returned


def _visible(outputs: list[Any], epilogue: TraceCtx) -> list[bool]:
    """Return which outputs of the computation may get a gradient, in this call's backward or in that of a later call."""
    seen = _returned(epilogue)
    seen.update(*(args_of(bsym) for bsym in epilogue.bound_symbols if bsym.sym is prims.pack_attr))
    given = epilogue.args[len(epilogue.args) - len(outputs) :]
    return [next(names([argument]), None) in seen for argument in given]
