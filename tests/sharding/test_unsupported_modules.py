"""Modules that Thunder cannot trace are refused by name, and what the errors recommend works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import eager, fsdp

import pytest
import thunder
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import parametrizations, remove_weight_norm, spectral_norm, weight_norm
from torch.optim.swa_utils import update_bn


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("function", "remove"),
    [
        (weight_norm, "remove_weight_norm"),
        (spectral_norm, "remove_spectral_norm"),
        (parametrizations.weight_norm, "remove_parametrizations"),
        (parametrizations.spectral_norm, "remove_parametrizations"),
        (parametrizations.orthogonal, "remove_parametrizations"),
    ],
)
def test_a_parameter_that_torch_computes_is_refused(
    fake_ranks: None, function: Callable[..., Any], remove: str
) -> None:
    model = make()
    function(model[0])
    with pytest.raises(NotImplementedError, match=rf"module '0': .*{function.__name__} .*{remove}.*'0'.*'weight'"):
        thunder.jit(model, transforms=[fsdp()])
    if function is weight_norm:
        remove_weight_norm(model[0])
        thunder.jit(model, transforms=[fsdp()])


@on_ranks()
def test_update_bn_runs_on_the_module_that_is_not_compiled() -> None:
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    plain, model = make(), make()
    update_bn(batches, plain)
    jitted = thunder.jit(model, transforms=[fsdp()])
    with pytest.raises(NotImplementedError, match=r"module '1' \(BatchNorm1d\) has momentum=None.*eager"):
        update_bn(batches, jitted)
    model[1].momentum = 0.1
    with eager(jitted) as module:
        update_bn(batches, module)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(jitted.get_buffer(name), buffer)
        assert buffer.any()
    jitted(batches[0]).sum().backward()


@on_ranks()
def test_a_batch_norm_in_two_dtypes_is_refused_and_can_compute_in_the_higher_one() -> None:
    low, x = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32), torch.randn(8, 4)
    jitted = thunder.jit(make(), transforms=[fsdp(mp_policy=low)])
    error = r"module '1' \(BatchNorm1d\) has parameters in torch.bfloat16 and running statistics in torch.float32"
    with pytest.raises(NotImplementedError, match=error), jitted.no_sync():
        jitted(x)
    model = make()
    policy = lambda name, module: MixedPrecisionPolicy() if isinstance(module, nn.BatchNorm1d) else low  # noqa: E731
    jitted = thunder.jit(model, transforms=[fsdp(mp_policy=policy)])
    with jitted.no_sync():
        jitted(x).sum().backward()
    jitted(x).sum().backward()
    assert model[1].running_mean.any() and model[1].running_mean.dtype == torch.float32
    assert all(param.grad is not None for param in model.parameters())
