"""The functions that are kept whole, with grad rules that call the kernels of their gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import thunder.torch as ltorch
from thunder.core.symbol import Symbol
from thunder.extend import Executor, get_default_executors

from .executor import executor


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


def _keep_whole(symbol: Symbol, *differentiable: str) -> None:
    """Claim a function.

    Args:
        differentiable: names of the arguments besides the first that gradients are passed to.
    """
    names = frozenset(differentiable)

    def call_of(args: Any, kwargs: Any) -> Any:
        from .calls import call_of  # here, because many models call none of these functions

        return call_of(symbol, names, args, kwargs)

    def can_run(*args: Any, **kwargs: Any) -> bool:
        return call_of(args, kwargs) is not None

    def execute(*args: Any, **kwargs: Any) -> Any:
        return call_of(args, kwargs).execute()

    def differentiate(*args: Any, **kwargs: Any) -> Any:
        return call_of(args, kwargs).differentiate()

    executor.register_implementation(symbol, checker=can_run, execution_transform=execute, grad_transform=differentiate)


for _symbol in (ltorch.layer_norm, ltorch.group_norm, ltorch.rms_norm):
    _keep_whole(_symbol, "weight", "bias")
# Cross entropy, log-softmax, embedding and tanh are not among them: Thunder calls torch's kernels for them itself. `relu`
# takes two operators in Thunder, too. RMS norm is one kernel on GPUs only. See `benchmarks/this_machine.py`.
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
