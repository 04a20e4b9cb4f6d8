"""Branches of the outermost module on values that it computes from its arguments.

The outermost module cannot be a leaf, so it must not branch on the values of tensors. Arguments are an exception: their
values are known while Thunder traces, and in each call before anything runs. So a condition that depends on nothing else is
computed when the module is traced, and again in the prologue of each call. If it differs there, Thunder looks for another
trace, or makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.dtypes import is_exact_dtype
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.prims import PrimIDs, python_return
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.passes import transform_for_execution
from thunder.extend import get_always_executors

from ...capture.leaves import Leaves
from ...ir.inspection import args_of, nested, outs_of
from ...ir.operator_facts import facts_of
from ...private_thunder import new_trace
from ...runtime.traced_inputs import Path, value_at


class _Condition(NamedTuple):
    """A condition that a program computes from its arguments.

    Attributes:
        function: computes the condition from the tensors at ``paths``, which must have ``shapes``.
    """

    function: Callable[..., Any]
    paths: tuple[Path, ...]
    shapes: tuple[torch.Size, ...]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return the condition for these arguments."""
        tensors = [value_at({"INPUT_ARGS": args, "INPUT_KWARGS": kwargs}, path) for path in self.paths]
        if tuple(tensor.shape for tensor in tensors) != self.shapes:
            raise LookupError  # its operators are for other shapes
        return self.of(tensors)

    def of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return the condition for these tensors."""
        with torch.no_grad():
            return bool(self.function(*tensors))


def condition_of(leaves: Leaves, value: TensorProxy | NumberProxy) -> tuple[_Condition, bool] | None:
    """Return the condition that computes the truth of a traced value from the arguments, and its present value.

    Return ``None`` if the value depends on anything else, or on an operator that is not pure or computes in lower precision
    under autocast, or if tensors were changed in place.
    """
    trace = get_jit_ctx().computation_trace
    scope = trace.peek_scope() or []
    if any(bsym.sym.id is PrimIDs.COPY_ for bsym in nested(scope)):
        return None
    needed, found = {value.name}, list[BoundSymbol]()
    arguments = {name: value for name in needed if name in leaves.arguments}
    is_exact = get_compile_data().autocast_stack.is_empty()
    for bsym in reversed(scope):
        if needed.isdisjoint(outs_of(bsym)):
            continue
        read = (arg for arg in bsym.flat_proxy_args if isinstance(arg, TensorProxy))
        if not facts_of(bsym).pure or not (is_exact or all(is_exact_dtype(tensor.dtype) for tensor in read)):
            return None
        found.insert(0, bsym)
        needed = (needed - set(outs_of(bsym))) | set(args_of(bsym))
        arguments.update((arg.name, arg) for arg in bsym.flat_proxy_args if arg.name in leaves.arguments)
    if not needed or not needed <= leaves.arguments.keys():
        return None
    values = [leaves.arguments[name] for name in arguments]
    if not all(type(tensor) is torch.Tensor and not tensor.is_meta for _, tensor in values):
        return None  # in a plan, arguments have no values
    function = _function_of(found, new_trace(trace, "condition", list(arguments.values())), value)
    paths, tensors = zip(*values, strict=True)
    condition = _Condition(function, paths, tuple(tensor.shape for tensor in tensors))
    return condition, condition.of(tensors)


def _function_of(bsyms: Sequence[BoundSymbol], trace: TraceCtx, result: Any) -> Callable[..., Any]:
    """Return a function of the arguments of an empty trace that runs these operators."""
    trace.bound_symbols = [*bsyms]
    with tracectx(trace):
        python_return(result)
    return transform_for_execution(trace, get_always_executors()).python_callable()
