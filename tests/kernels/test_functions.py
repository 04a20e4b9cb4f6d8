"""Functions that are kept whole return torch's own numbers, for all dtypes and strides, and save no more than torch does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.kernels.functions import with_kernels

import pytest
import thunder
import torch
from torch import Tensor
from torch.nn import functional as F

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def tensor(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


LABELS = torch.tensor([4, 0, -100, 3])
IMAGES = LABELS[:, None, None].expand(4, 2, 3)
HEADS = tuple(tensor(2, 3, 5, 8, seed=seed) for seed in range(3))
FLASH = "scaled_dot_product_flash_attention_for_cpu"
causal = partial(F.scaled_dot_product_attention, is_causal=True, scale=0.3)
summed = partial(F.nll_loss, reduction="sum", ignore_index=3)
CASES: dict[str, tuple[str | None, Callable[..., Any], tuple[Any, ...]]] = {
    "layer norm": ("native_layer_norm", F.layer_norm, (tensor(6, 3, 8), (8,), tensor(8), tensor(8, seed=1))),
    "group norm": ("native_group_norm", F.group_norm, (tensor(2, 6, 5), 3, tensor(6), tensor(6, seed=1))),
    "gelu": ("gelu", F.gelu, (tensor(6, 8),)),
    "gelu by tanh": ("gelu", partial(F.gelu, approximate="tanh"), (tensor(6, 8),)),
    "silu": ("silu", F.silu, (tensor(6, 8),)),
    "mish": ("mish", F.mish, (tensor(6, 8),)),
    "elu": ("elu", partial(F.elu, alpha=1.3), (tensor(6, 8),)),
    "selu": ("elu", F.selu, (tensor(6, 8),)),
    "celu": ("celu", partial(F.celu, alpha=1.3), (tensor(6, 8),)),
    "hardshrink": ("hardshrink", F.hardshrink, (tensor(6, 8),)),
    "hardsigmoid": ("hardsigmoid", F.hardsigmoid, (tensor(6, 8) * 3,)),
    "softshrink": ("softshrink", F.softshrink, (tensor(6, 8),)),
    "relu": ("relu", F.relu, (tensor(6, 8),)),
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
    "cross entropy": ("nll_loss_forward", F.cross_entropy, (tensor(4, 5), LABELS)),
    "cross entropy of images": ("nll_loss2d_forward", F.cross_entropy, (tensor(4, 5, 2, 3), IMAGES)),
    "negative log-likelihood": ("nll_loss_forward", summed, (tensor(4, 5, dtype=F32), LABELS.clamp(min=0))),
    "logsumexp": ("logsumexp", partial(torch.logsumexp, dim=(0,)), (tensor(6, 5),)),
    "average of 1 dimension": ("avg_pool2d", partial(F.avg_pool1d, kernel_size=2), (tensor(2, 4, 6),)),
    "average of 2 dimensions": ("avg_pool2d", partial(F.avg_pool2d, kernel_size=(2, 3)), (tensor(2, 4, 6, 6),)),
    "bilinear": ("upsample_bilinear2d", partial(F.interpolate, size=(5, 9), mode="bilinear"), (tensor(2, 4, 6, 6),)),
    "attention": (FLASH, F.scaled_dot_product_attention, HEADS),
    "causal attention": (FLASH, causal, HEADS),
    "masked attention": (FLASH, F.scaled_dot_product_attention, (*HEADS, tensor(5, 5) > 0)),
    "a product and a sum": ("addmm", torch.addmm, (tensor(5), tensor(4, 3), tensor(3, 5, seed=1))),
    "a product": ("mm", Tensor.mm, (tensor(4, 3), tensor(3, 5, seed=1))),
    "deconvolution": ("convolution", F.conv_transpose2d, (tensor(2, 3, 4, 4), tensor(3, 2, 3, 3, seed=1), None, 2)),
    "itself": (None, torch.positive, (tensor(6, 5),)),
    "attention with a learned mask": (None, F.scaled_dot_product_attention, (*HEADS, tensor(5, 5))),
}


EXECUTORS = ("torch_kernels", "torch_gradients", *thunder.get_default_executors())


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


def casts_of(jitted: Any) -> list[str]:
    traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    return [str(bsym) for trace in traces for bsym in trace.bound_symbols if bsym.sym.name == "to"]


@pytest.mark.parametrize("name", CASES)
def test_a_function_that_is_kept_whole_returns_torchs_numbers(name: str) -> None:
    kernel, function, args = CASES[name]
    jitted = thunder.jit(lambda *a: function(*a), executors=EXECUTORS)
    for dtype in (F64, torch.float32, BF16) if kernel else (F64,):
        of = tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        for change_strides in (False, True):
            run_it = partial(run, args=of, change_strides=change_strides)
            expected, grads = run_it(function)
            found, new = run_it(jitted)
            # Autograd chooses by strides which of two products, that of transposed factors or its transpose, is a gradient.
            is_exact = kernel is not None and not (change_strides and kernel in ("addmm", "mm"))
            exact = {"rtol": 0, "atol": 0} if is_exact else {}
            torch.testing.assert_close(found, expected, **exact)
            torch.testing.assert_close(new, grads, **exact)
            if kernel is not None:
                assert kernel in kernels_of(jitted)


def test_what_torch_checks_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="singular"):
        thunder.jit(lambda a: torch.linalg.inv(a), executors=EXECUTORS)(torch.zeros(3, 3, requires_grad=True))


def test_gradients_under_autocast_are_thunders_own() -> None:
    a, w = tensor(4, 4, dtype=F32).requires_grad_(), tensor(4, 4, dtype=F32, seed=1).requires_grad_()
    jitted = thunder.jit(lambda a, w: a + torch.mm(a + torch.mm(a, w), w), executors=EXECUTORS)
    with torch.autocast("cpu", BF16):
        result = jitted(a, w)
    result.sum().backward()
    assert a.grad is not None and w.grad is not None and not kernels_of(jitted)


def test_a_result_whose_gradients_are_undefined_requires_one() -> None:
    jitted = thunder.jit(lambda a: torch.linalg.vector_norm(a, 0), executors=EXECUTORS)
    assert jitted(torch.ones(3, requires_grad=True)).requires_grad


OPERANDS: dict[str, tuple[Any, Any]] = {
    "bfloat16": (tensor(4, 3, dtype=BF16).abs(), tensor(4, 3, dtype=BF16, seed=1).abs()),
    "float16": (tensor(4, 3, dtype=F16).abs(), tensor(4, 3, dtype=F16, seed=1).abs()),
    "both": (tensor(3, dtype=BF16).abs(), tensor(3, dtype=F16, seed=1).abs()),
    "with float32": (tensor(3, dtype=BF16).abs(), tensor(3, dtype=F32, seed=1).abs()),
    "float32 without dimensions": (tensor(3, dtype=BF16).abs(), tensor(dtype=F32, seed=1).abs()),
    "without dimensions": (tensor(dtype=BF16).abs(), tensor(3, dtype=F32, seed=1).abs()),
    "with more dimensions": (tensor(4, 3, dtype=F16).abs(), tensor(3, dtype=BF16, seed=1).abs()),
    "integers": (tensor(3, dtype=BF16).abs(), torch.arange(1, 4)),
    "a number": (tensor(3, dtype=BF16).abs(), 0.3),
    "a number first": (0.3, tensor(3, dtype=BF16).abs()),
    "an integer first": (2, tensor(3, dtype=BF16).abs()),
}
ON_EACH_DEVICE = ["torch_elementwise", *thunder.get_default_executors()]
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    **{name: getattr(torch, name) for name in ("abs", "cos", "erf", "exp", "log", "neg", "reciprocal", "rsqrt", "sin")},
    **{name: getattr(torch, name) for name in ("sqrt", "square", "tanh")},
    "mean": torch.mean,
    "mean of a dimension": partial(torch.mean, dim=-1, keepdim=True),
    "sum": torch.sum,
    "sum in float64": partial(torch.sum, dtype=F64),
    "power": lambda a: a**3,
    "power of a number": lambda a: 2**a,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_functions_of_two_bytes_an_element_return_torchs_numbers_without_casts(name: str) -> None:
    function = ELEMENTWISE[name]
    of_two = name in ("add", "sub", "mul", "div")
    operands = (
        OPERANDS
        if of_two
        else {"bfloat16": (tensor(4, 3, dtype=BF16).abs(),), "float16": (tensor(4, 3, dtype=F16).abs(),)}
    )
    jitted = thunder.jit(lambda *a: function(*a), executors=ON_EACH_DEVICE)
    for kind, args in operands.items():
        for change_strides in (False, True):
            expected, grads = run(function, args, change_strides=change_strides)
            found, new = run(jitted, args, change_strides=change_strides)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=kind)
            torch.testing.assert_close(new, grads, rtol=0, atol=0, msg=kind)
            assert kernels_of(jitted), kind
            assert not casts_of(jitted), kind


@pytest.mark.parametrize("name", ["gelu", "hardswish", "leaky relu", "silu"])
def test_activations_are_kept_whole_on_each_device(name: str) -> None:
    kernel, function, args = CASES[name]
    jitted = thunder.jit(lambda *a: function(*a), executors=ON_EACH_DEVICE)
    torch.testing.assert_close(
        run(jitted, args, change_strides=True), run(function, args, change_strides=True), rtol=0, atol=0
    )
    assert kernels_of(jitted) == [f"{kernel}", f"{kernel}_backward"]


def _sums(a: Tensor) -> Tensor:
    return (a * a).sum() * a.sum(-1, keepdim=True) * a.mean() * a / a.mean() * (a**2) * 2**a


def test_a_trace_calls_each_overload_of_an_operator() -> None:
    jitted = thunder.jit(_sums, executors=ON_EACH_DEVICE)
    args = ((tensor(3, 4, dtype=BF16) / 4).abs(),)
    for _ in range(2):
        expected, found = run(_sums, args, change_strides=False), run(jitted, args, change_strides=False)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
        # Gradients of a value that is read several times are added in another order.
        torch.testing.assert_close(found[1], expected[1], rtol=0.02, atol=0.02)


def test_a_power_of_zero_has_a_gradient_of_zeros() -> None:
    jitted = thunder.jit(lambda a: a**0, executors=ON_EACH_DEVICE)
    _, (grad,) = run(jitted, (tensor(3, dtype=BF16),), change_strides=False)
    assert grad is not None and not grad.any()


def test_complex_numbers_stay_thunders_own() -> None:
    jitted = thunder.jit(lambda a: (a * 1j).real, executors=ON_EACH_DEVICE)
    assert not jitted(tensor(3, dtype=BF16)).any()


def test_an_operand_without_dimensions_does_not_decide_the_device() -> None:
    jitted = thunder.jit(lambda s, a: s * a, executors=ON_EACH_DEVICE)
    jitted(tensor(dtype=BF16), torch.empty(3, dtype=BF16, device="meta"))
    (product,) = [b.output for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.name == "torch_mul"]
    assert product.device.type == "meta"


def test_other_dtypes_stay_thunders_own() -> None:
    """An ``alpha`` does, too, for which Thunder has another dtype than torch: of ``torch.sub(a, integers, alpha=0.5)``."""
    jitted = thunder.jit(lambda a, b: a * b - a, executors=ON_EACH_DEVICE)
    run(jitted, (tensor(3, dtype=F32), tensor(3, dtype=F32)), change_strides=False)
    assert not kernels_of(jitted)
    scaled = thunder.jit(partial(torch.sub, alpha=0.5), executors=ON_EACH_DEVICE)
    run(scaled, (tensor(dtype=BF16), torch.arange(3)), change_strides=False)
    assert not kernels_of(scaled)


def test_an_executor_that_fuses_gets_the_elementwise_operators() -> None:
    defaults = thunder.get_default_executors()
    fusing, partly = map(thunder.extend.get_executor, ("torchcompile", "torchcompile_cat"))
    added = {each.name for each in with_kernels(defaults, {"cuda"})} - {each.name for each in defaults}
    assert added == {"torch_elementwise", "torch_gradients"}
    assert [each.name for each in with_kernels([fusing, *defaults], {"cuda"})][:2] == [fusing.name, "torch_gradients"]
    assert "torch_elementwise" in [each.name for each in with_kernels([partly, *defaults], {"cuda"})]
