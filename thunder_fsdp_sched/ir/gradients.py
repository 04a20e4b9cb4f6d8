"""The values of a computation that gradients pass through, as autograd would connect them.

[Note: Constants]
In torch, the result of ``y.detach()`` or ``torch.zeros_like(y)`` requires no gradient. Thunder passes zeros back
through such an operator. A parameter that nothing else uses then gets zeros instead of no gradient; they are reduced,
and optimizers do not skip them. So ``mark_constants`` gives these results the tag that Thunder gives to those under
``torch.no_grad()``, and Thunder's autograd treats the operator as a constant. Later passes read only tags and dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thunder.core import dtypes
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from .inspection import args_of, defined_by, is_inexact, python_type_of

RETURNING_CONSTANTS = frozenset({
    "detach", "empty_like", "full_like", "multinomial", "new_empty", "new_empty_strided", "new_full", "new_ones",
    "new_tensor", "new_zeros", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
})  # fmt: skip
"""Names of operators whose results require no gradient in torch, whatever they read."""

LOST_IN_SEQUENCES = frozenset({"column_stack", "dstack", "hstack", "lstm_cell", "meshgrid", "row_stack", "vstack"})
"""Names of operators that take tensors in a list or tuple, to which Thunder passes no gradient."""

WRONG_GRADIENTS = LOST_IN_SEQUENCES | {"index_put", "prod"}
"""Names of operators for which Thunder computes a wrong gradient, or silently none."""

_RIGHT_OF_COMPLEX = frozenset({
    "abs", "cat", "clone", "complex", "contiguous", "detach", "expand", "flatten", "permute", "polar", "reshape",
    "squeeze", "stack", "transpose", "unsqueeze", "view", "view_as_complex", "view_as_real",
})  # fmt: skip
"""Names of operators whose gradients Thunder computes correctly for complex values, too."""

PIECEWISE_CONSTANT = frozenset({"bernoulli", "ceil", "div", "dropout", "floor", "pow", "round", "trunc"})
"""Names of operators that may be constant in their inputs, to which Thunder then passes no gradient."""


def is_wrong_of_complex(name: str, values: Iterable[Any]) -> bool:
    """Return whether Thunder computes a wrong gradient for an operator that reads complex values.

    torch's gradient of ``a * b`` with respect to ``a`` is multiplied by the conjugate of ``b``, Thunder's by ``b``. Other
    operators have the same fault, so all but a few count as wrong.
    """
    return name.strip("_") not in _RIGHT_OF_COMPLEX and has_complex(values)


def has_complex(values: Iterable[Any]) -> bool:
    """Return whether a complex tensor or number is among these values."""
    return any(
        dtypes.is_complex_dtype(v.dtype) if isinstance(v, TensorProxy) else python_type_of(v) is complex for v in values
    )


def mark_constants(bsyms: Iterable[BoundSymbol]) -> None:
    """Tag the results of operators such as ``detach`` as constants. Adds nothing but tags; see [Note: Constants]."""
    for bsym in bsyms:
        if bsym.sym.name in RETURNING_CONSTANTS:
            for out in defined_by(bsym):
                out.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)


def with_gradient(bsym: BoundSymbol) -> list[str]:
    """Return the names of the results of an operator that pass gradients to its inputs."""
    tensors = (out for out in defined_by(bsym) if is_inexact(out))
    return [out.name for out in tensors if ProxyTag.DETACHED_AUTOGRAD_GRAPH not in out.tags]


def requiring_gradient(trace: TraceCtx) -> set[str]:
    """Return the names of the arguments of a trace that require gradients."""
    return {arg.name for arg in trace.args if isinstance(arg, TensorProxy) and arg.requires_grad}


def needing_gradient(trace: TraceCtx) -> frozenset[str]:
    """Return the names of values that derive, through operators with gradients, from arguments that require them."""
    needing = requiring_gradient(trace)
    for bsym in trace.bound_symbols:
        if not needing.isdisjoint(args_of(bsym)):
            needing.update(with_gradient(bsym))
    return frozenset(needing)
