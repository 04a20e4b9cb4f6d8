"""Functions that are kept whole return torch's own numbers, for all dtypes and strides, and save no more than torch does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401

import pytest
import thunder
import torch
from torch import Tensor
from torch.nn import functional as F

F64, BF16 = torch.float64, torch.bfloat16


def tensor(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


HEADS = tuple(tensor(2, 3, 5, 8, seed=seed) for seed in range(3))
FLASH = "scaled_dot_product_flash_attention_for_cpu"
causal = partial(F.scaled_dot_product_attention, is_causal=True, scale=0.3)
CASES: dict[str, tuple[str | None, Callable[..., Any], tuple[Any, ...]]] = {
    "layer norm": ("native_layer_norm", F.layer_norm, (tensor(6, 3, 8), (8,), tensor(8), tensor(8, seed=1))),
    "group norm": ("native_group_norm", F.group_norm, (tensor(2, 6, 5), 3, tensor(6), tensor(6, seed=1))),
    "gelu": ("gelu", F.gelu, (tensor(6, 8),)),
    "gelu by tanh": ("gelu", partial(F.gelu, approximate="tanh"), (tensor(6, 8),)),
    "silu": ("silu", F.silu, (tensor(6, 8),)),
    "mish": ("mish", F.mish, (tensor(6, 8),)),
    "elu": ("elu", partial(F.elu, alpha=1.3), (tensor(6, 8),)),
    "leaky relu": ("leaky_relu", partial(F.leaky_relu, negative_slope=0.1), (tensor(6, 8),)),
    "hardswish": ("hardswish", F.hardswish, (tensor(6, 8),)),
    "softplus": ("softplus", F.softplus, (tensor(6, 8),)),
    "logsigmoid": ("log_sigmoid_forward", F.logsigmoid, (tensor(6, 8),)),
    "glu": ("glu", partial(F.glu, dim=0), (tensor(6, 8),)),
    "hardtanh": ("hardtanh", F.hardtanh, (tensor(6, 8),)),
    "relu6": ("hardtanh", F.relu6, (tensor(6, 8),)),
    "sigmoid": ("sigmoid", torch.sigmoid, (tensor(6, 8),)),
    "softmax": ("softmax", partial(F.softmax, dim=-1), (tensor(6, 8),)),
    "softmax in another dtype": ("softmax", partial(torch.softmax, dim=-1, dtype=F64), (tensor(6, 8),)),
    "mean squared error": ("mse_loss", F.mse_loss, (tensor(6, 5), tensor(6, 5, seed=1))),
    "logsumexp": ("logsumexp", partial(torch.logsumexp, dim=(0,)), (tensor(6, 5),)),
    "average of 1 dimension": ("avg_pool2d", partial(F.avg_pool1d, kernel_size=2), (tensor(2, 4, 6),)),
    "average of 2 dimensions": ("avg_pool2d", partial(F.avg_pool2d, kernel_size=(2, 3)), (tensor(2, 4, 6, 6),)),
    "nearest": ("upsample_nearest2d", partial(F.interpolate, scale_factor=2.0), (tensor(2, 4, 6, 6),)),
    "bilinear": ("upsample_bilinear2d", partial(F.interpolate, size=(5, 9), mode="bilinear"), (tensor(2, 4, 6, 6),)),
    "attention": (FLASH, F.scaled_dot_product_attention, HEADS),
    "causal attention": (FLASH, causal, HEADS),
    "masked attention": (FLASH, F.scaled_dot_product_attention, (*HEADS, tensor(5, 5) > 0)),
    "attention with a learned mask": (None, F.scaled_dot_product_attention, (*HEADS, tensor(5, 5))),
}


def run(
    function: Callable[..., Any], args: tuple[Any, ...], *, change_strides: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the result, and the gradients of all tensors of floating point."""
    inputs = [a.clone().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in args]
    # Not leaves, so that they may have any strides.
    result = function(*map(_strided, inputs) if change_strides else inputs)
    grad = tensor(*result.shape, dtype=result.dtype, seed=3)
    result.backward(_strided(grad) if change_strides else grad)
    return result.detach(), [a.grad for a in inputs if isinstance(a, Tensor)]


def _strided(x: Any) -> Any:
    """Return a tensor of equal values whose first dimensions lie in another order in memory, as after a transposition."""
    if not isinstance(x, Tensor) or x.ndim < 2:
        return x
    first, second = (1, 2) if x.ndim > 3 else (0, 1)
    return x.transpose(first, second).contiguous().transpose(first, second)


def kernels_of(jitted: Any) -> list[str]:
    traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    names = [bsym.sym.name for trace in traces for bsym in trace.bound_symbols]
    return [name.removeprefix("torch_") for name in names if name.startswith("torch_")]


@pytest.mark.parametrize("name", CASES)
def test_a_function_that_is_kept_whole_returns_torchs_numbers(name: str) -> None:
    kernel, function, args = CASES[name]
    jitted = thunder.jit(lambda *a: function(*a), executors=("torch_kernels", *thunder.get_default_executors()))
    for dtype in (F64, torch.float32, BF16) if kernel else (F64,):
        of = tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        for change_strides in (False, True):
            run_it = partial(run, args=of, change_strides=change_strides)
            expected, grads = run_it(function)
            found, new = run_it(jitted)
            exact = {} if kernel is None else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(found, expected, **exact)
            torch.testing.assert_close(new, grads, **exact)
            if kernel is not None:
                assert kernel in kernels_of(jitted)
