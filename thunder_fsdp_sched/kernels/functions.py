"""The functions that are kept whole, with grad rules that call the kernels of their gradients."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import Symbol
from thunder.core.transforms import get_grad, put_grad
from thunder.extend import Executor, get_default_executors

from ..ir.observation import describe
from ..private_thunder import shape_of, torch_function_of
from .symbols import cached, call_operator, device_of, executor
from .torch_program import TorchProgram, torch_program


def with_kernels(executors: Sequence[Executor], computes_on: Collection[str]) -> tuple[Executor, ...]:
    """Return executors with that of torch's kernels before Thunder's default ones: see [Note: Torch's kernels].

    Args:
        executors: as a user has passed them to ``thunder.jit``. Without all of Thunder's default ones, and where the
            executor is among them already, the user decides.
        computes_on: types of the devices of the parameters, in a plan those of the cluster.
    """
    defaults = get_default_executors()
    if executor in executors or not set(defaults) <= set(executors) or set(computes_on) != {"cpu"}:
        return tuple(executors)
    first = min(map(executors.index, defaults))
    return (*executors[:first], executor, *executors[first:])


class _KernelCall(NamedTuple):
    program: TorchProgram
    inputs: Sequence[TensorProxy]


def _call_of(symbol: Symbol, differentiable: frozenset[str], args: Any, kwargs: Any) -> _KernelCall | None:
    """Return what torch runs for a call of a function; ``None`` if Thunder decomposes it.

    The arguments go to torch by name, except the first, because Thunder leaves out some of torch's.
    """
    bound = inspect.signature(symbol.meta).bind(*args, **kwargs).arguments
    given = {name: argument for name, argument in bound.items() if argument is not None}
    first, *named = given
    leaves, spec = tree_flatten((tuple(given.values()), {}))
    inputs = {leaf.name: leaf for leaf in leaves if isinstance(leaf, TensorProxy)}
    wanted = {
        p.name
        for name, p in given.items()
        if (name == first or name in differentiable) and isinstance(p, TensorProxy) and dtypes.is_inexact_dtype(p.dtype)
    }
    others = [p for name, p in inputs.items() if name not in wanted and dtypes.is_inexact_dtype(p.dtype)]
    if any(p is not given.get("weight") for p in others):
        return None  # such as a mask that is learned: torch has another kernel for it, or none
    if any(map(_is_symbolic, leaves)) or (arguments := describe(leaves, {})) is None:
        return None
    # That of hardswish has no path.
    function = torch_function_of(symbol.id) or getattr(torch.nn.functional, symbol.name)
    flags = tuple([name in wanted for name in inputs])
    program = cached(torch_program, function, arguments, spec, device_of(inputs.values()), tuple(named), flags)
    return None if program is None else _KernelCall(program, tuple(inputs.values()))


def _is_symbolic(leaf: Any) -> bool:
    if isinstance(leaf, TensorProxy):
        return any(isinstance(size, NumberProxy) for size in shape_of(leaf))
    return isinstance(leaf, NumberProxy)


def _keep_whole(symbol: Symbol, *differentiable: str) -> None:
    """Claim a function.

    Args:
        differentiable: names of the arguments besides the first that gradients are passed to.
    """
    names = frozenset(differentiable)

    def can_run(*args: Any, **kwargs: Any) -> bool:
        return _call_of(symbol, names, args, kwargs) is not None

    def execute(*args: Any, **kwargs: Any) -> Any:
        call = _call_of(symbol, names, args, kwargs)
        assert call is not None
        return call.program.run(call_operator, call.inputs, None)[0]

    def differentiate(*args: Any, **kwargs: Any) -> Any:
        call = _call_of(symbol, names, args, kwargs)
        assert call is not None
        result, grads = call.program.run(call_operator, call.inputs, get_grad)
        for argument, grad in zip(call.inputs, grads, strict=True):
            if grad is not None:
                put_grad(argument, grad)
        return result

    executor.register_implementation(symbol, checker=can_run, execution_transform=execute, grad_transform=differentiate)


for _symbol in (ltorch.layer_norm, ltorch.group_norm, ltorch.rms_norm):
    _keep_whole(_symbol, "weight", "bias")
# Cross entropy, log-softmax, embedding and tanh are not among them: Thunder calls torch's kernels for them itself. `relu`
# takes two operators in Thunder, too. RMS norm is one kernel on GPUs only. See `benchmarks/kernels.py`.
for _symbol in (
    # activations
    ltorch.elu,
    ltorch.gelu,
    ltorch.glu,
    ltorch.hardswish,
    ltorch.hardtanh,
    ltorch.leaky_relu,
    ltorch.logsigmoid,
    ltorch.mish,
    ltorch.relu6,
    ltorch.sigmoid,
    ltorch.silu,
    ltorch.softplus,
    # softmax
    ltorch._softmax,
    ltorch.logsumexp,
    # pooling and interpolation
    ltorch.avg_pool1d,
    ltorch.avg_pool2d,
    ltorch.avg_pool3d,
    ltorch.interpolate,
):
    _keep_whole(_symbol)
_keep_whole(ltorch.mse_loss, "target")
_keep_whole(ltorch.scaled_dot_product_attention, "key", "value")
