"""The functions that are kept whole, with grad rules that call the kernels of their gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.extend import Executor, FusionExecutor, OperatorExecutor, get_default_executors

from ..private_thunder import functions_that_run_again
from .executor import elementwise, executor, gradients

_OF_TWO_BYTES = frozenset({dtypes.bfloat16, dtypes.float16})


def with_kernels(executors: Sequence[Executor], computes_on: Collection[str]) -> tuple[Executor, ...]:
    """Insert the executors of torch's kernels before Thunder's default ones: see [Note: Torch's kernels].

    Args:
        executors: those of ``thunder.jit``. If a default one is missing, the user has chosen, and nothing is inserted.
        computes_on: device types of the parameters; in a plan, of the cluster.
    """
    defaults = get_default_executors()
    if not set(defaults) <= set(executors):
        return tuple(executors)
    added = [executor] * (set(computes_on) == {"cpu"}) + [elementwise] * (not any(map(_fuses_all, executors)))
    first = min(map(executors.index, defaults))
    return (*executors[:first], *(each for each in (*added, gradients) if each not in executors), *executors[first:])


def _fuses_all(candidate: Executor) -> bool:
    """Return whether an executor fuses elementwise operators wherever they are, as nvFuser and Inductor do."""
    is_partial = getattr(candidate, "required_ops", None)  # Thunder's executors that fuse only around `cat` or a loss
    return isinstance(candidate, FusionExecutor) and PrimIDs.MUL in candidate.implmap and not is_partial


def _is_of_two_bytes(args: Any, kwargs: Any) -> bool:
    """Return whether an operand has elements of two bytes, all operands are real, and ``alpha`` is 1.

    With another ``alpha``, the result of Thunder has another dtype than torch's for some operands.
    """
    alpha = kwargs.get("alpha", 1)
    found = {a.dtype for a in args if isinstance(a, TensorProxy)}
    is_complex = any(isinstance(a, complex) for a in args) or any(map(dtypes.is_complex_dtype, found))
    return not found.isdisjoint(_OF_TWO_BYTES) and not is_complex and type(alpha) in (int, float) and alpha == 1


def _keep_whole(
    symbol: Symbol,
    *differentiable: str,
    of_all: bool = False,
    by: OperatorExecutor = executor,
    function: Callable[..., Any] | None = None,
    if_called_with: Callable[[Any, Any], bool] = lambda args, kwargs: True,
) -> None:
    """Register torch's kernels for a function of Thunder.

    Args:
        differentiable: names of the arguments that get gradients, besides the first.
        of_all: whether all arguments get gradients; their names are not known.
        by: the executor that claims the function.
        function: torch's function; ``None`` for the one that has the symbol's name.
        if_called_with: whether a call with these positional and keyword arguments is claimed.
    """
    names = None if of_all else frozenset(differentiable)

    def kernels_of(args: Any, kwargs: Any) -> Any:
        from .calls import call_of  # here, because many models call none of these functions

        return call_of(symbol, function, names, args, kwargs)

    def can_run(*args: Any, **kwargs: Any) -> bool:
        return if_called_with(args, kwargs) and kernels_of(args, kwargs) is not None

    def execute(*args: Any, **kwargs: Any) -> Any:
        return kernels_of(args, kwargs).execute()

    def differentiate(*args: Any, **kwargs: Any) -> Any:
        return kernels_of(args, kwargs).differentiate()

    by.register_implementation(symbol, checker=can_run, execution_transform=execute, grad_transform=differentiate)


for _symbol in (ltorch.layer_norm, ltorch.group_norm, ltorch.rms_norm):
    _keep_whole(_symbol, "weight", "bias")
# Log-softmax, embedding and tanh are left out, because Thunder itself calls torch's kernels for them. Cross entropy is a
# log-softmax and a negative log-likelihood; only the latter is kept whole, because Thunder copies its input twice. RMS norm
# is a single kernel only on GPUs. See `benchmarks/this_machine.py`.
for _symbol in (
    ltorch.celu,
    ltorch.elu,
    ltorch.gelu,
    ltorch.glu,
    ltorch.hardshrink,
    ltorch.hardsigmoid,
    ltorch.hardswish,
    ltorch.hardtanh,
    ltorch.leaky_relu,
    ltorch.logsigmoid,
    ltorch.mish,
    ltorch.relu,
    ltorch.relu6,
    ltorch.selu,
    ltorch.sigmoid,
    ltorch.silu,
    ltorch.softplus,
    ltorch.softshrink,
):
    for _executor in (executor, elementwise):
        # The id of some names a function that does not take `inplace`.
        _keep_whole(_symbol, by=_executor, function=getattr(torch.nn.functional, _symbol.name))
for _symbol in (
    ltorch._softmax,
    ltorch.logsumexp,
    ltorch.avg_pool1d,
    ltorch.avg_pool2d,
    ltorch.avg_pool3d,
    ltorch.interpolate,
):
    _keep_whole(_symbol)
_keep_whole(ltorch.mse_loss, "target")
_keep_whole(ltorch.nll_loss)
_keep_whole(ltorch.scaled_dot_product_attention, "key", "value")

# Thunder computes these functions of bfloat16 and float16 in float32. It casts each operand and the result, as a fusion
# executor needs it, and saves the operands in float32. Torch casts inside a single kernel. Python's operators are used
# because they also accept a number as first operand.
_OPERATORS: dict[Symbol, Callable[..., Any]] = {
    ltorch.add: lambda a, b, alpha: a + b,
    ltorch.sub: lambda a, b, alpha: a - b,
    ltorch.mul: operator.mul,
    ltorch.true_divide: operator.truediv,
    ltorch.div: operator.truediv,
    ltorch.pow: operator.pow,
    ltorch.mean: lambda a, dim=None, **options: torch.mean(a, dim, **options),
    ltorch.sum: lambda a, dim=None, **options: torch.sum(a, dim, **options),
}
for _symbol, _function in _OPERATORS.items():
    _keep_whole(_symbol, "b", by=elementwise, function=_function, if_called_with=_is_of_two_bytes)
for _symbol in (
    ltorch.abs,
    ltorch.cos,
    ltorch.erf,
    ltorch.exp,
    ltorch.log,
    ltorch.neg,
    ltorch.reciprocal,
    ltorch.rsqrt,
    ltorch.sin,
    ltorch.sqrt,
    ltorch.square,
    ltorch.tanh,
):
    _keep_whole(_symbol, by=elementwise, if_called_with=_is_of_two_bytes)


def _is_not_autocast(args: Any, kwargs: Any) -> bool:
    """Return whether Thunder infers dtypes without autocast; the operators of a trace run without it."""
    return not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


# For the gradient of these, such as `torch.addmm` or `conv_transpose2d`, Thunder runs the function again under autograd. The
# backward of a matrix product then takes half as much compute again. `embedding_bag` is left out, because torch reports too
# few bytes for its results.
for _symbol in functions_that_run_again():
    if _symbol.name == "embedding_bag":
        continue
    _keep_whole(_symbol, of_all=True, by=gradients, if_called_with=_is_not_autocast)
