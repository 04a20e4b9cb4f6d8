"""Refusals: functions of other libraries that would mistake rows for whole parameters, and modules without a trace."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import eager, fsdp, full_state_dict

import pytest
import thunder
import torch
from ranks import on_ranks
from saving import assert_equal, fill
from thunder.core.transforms import add_transform
from thunder.distributed import checkpoint as thunder_checkpoint
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import parametrizations, remove_weight_norm, spectral_norm, weight_norm
from torch.optim.swa_utils import update_bn

REFUSED = "sharded by thunder_fsdp_sched"


def _assert_refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(RuntimeError, match=REFUSED):
        call(*args, **kwargs)


@on_ranks()
def test_state_dict_functions_of_torch_work_and_those_of_thunder_refuse_sharded_models(rank: int) -> None:
    torch.manual_seed(0)
    nested = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 3)))
    for module in (nested, nn.Linear(4, 6)):
        unsharded = copy.deepcopy(module.state_dict())
        jitted = thunder.jit(module, transforms=[fsdp()])
        trained = full_state_dict(jitted)
        parts = [part for part in module.modules() if list(part.parameters())]
        for owner, full in itertools.product((jitted, nn.ModuleDict({"net": jitted}), *parts), (False, True)):
            options = torch_state_dict.StateDictOptions(full_state_dict=full)
            state = copy.deepcopy(torch_state_dict.get_model_state_dict(owner, options=options))
            fill(owner, 0.0)
            torch_state_dict.set_model_state_dict(owner, state, options=options)
            assert_equal(full_state_dict(jitted), trained, type(owner))
            for rank0_only in (False, True):
                theirs = thunder_checkpoint.StateDictOptions(full_state_dict=full, rank0_only=rank0_only)
                _assert_refused(thunder_checkpoint.get_model_state_dict, owner, theirs, rank)
                _assert_refused(thunder_checkpoint.load_model_state_dict, dict(unsharded), owner, theirs, rank)
        jitted(torch.randn(2, 4)).sum().backward()

    # The functions still work on modules that are not sharded.
    plain = nn.Linear(4, 6)
    options = torch_state_dict.StateDictOptions(full_state_dict=True)
    assert torch_state_dict.get_model_state_dict(plain, options=options).keys() == {"weight", "bias"}
    assert thunder_checkpoint.get_model_state_dict(plain, thunder_checkpoint.StateDictOptions(True), rank)


@on_ranks()
def test_cuda_graphs_are_refused() -> None:
    for transforms in ([fsdp(), CUDAGraphTransform()], [CUDAGraphTransform(), fsdp()]):
        model = thunder.jit(nn.Linear(4, 6), transforms=transforms)
        with pytest.raises(ValueError, match="CUDAGraphTransform would capture the collectives"):
            model(torch.randn(2, 4))
    model = add_transform(thunder.jit(nn.Linear(4, 6), transforms=[fsdp()]), transform=CUDAGraphTransform())
    with pytest.raises(ValueError, match="CUDAGraphTransform would capture the collectives"):
        model(torch.randn(2, 4))


class _WithReshard(nn.Linear):
    def reshard(self) -> str:
        return "its own"


@on_ranks()
def test_methods_of_fsdp2_name_their_replacements() -> None:
    model = thunder.jit(_WithReshard(4, 6), transforms=[fsdp()])
    assert model.reshard() == "its own" and hasattr(model, "reshard")
    assert not any(hasattr(model, name) for name in ("unshard", "set_requires_gradient_sync", "nothing"))
    for call, instead in (
        (lambda: model.set_requires_gradient_sync(False), r"with model\.no_sync\(\):"),
        (lambda: model.set_reshard_after_forward(True, recurse=False), r"sharding_strategy='zero2' or 'zero3'"),
        (lambda: model.unshard(async_op=True), r"with tfs\.unsharded\(model, \.\.\.\)"),
        (lambda: model.set_post_optim_event(None), r"table of methods under 'From FSDP2'"),
    ):
        with pytest.raises(AttributeError, match=instead):
            call()


@on_ranks()
def test_a_call_under_torch_compile_is_refused() -> None:
    model = thunder.jit(nn.Linear(4, 6), transforms=[fsdp()])
    with pytest.raises(RuntimeError, match=r"leave torch\.compile out, because Thunder compiles the module"):
        torch.compile(model, backend="eager")(torch.randn(2, 4))
    outside = torch.compiler.disable(lambda x: model(x))
    assert torch.compile(lambda x: outside(x) + 1, backend="eager")(torch.randn(2, 4)).shape == (2, 6)


@on_ranks()
def test_ddp_refuses_shards_unless_it_ignores_them() -> None:
    for wrap in (lambda m: m, nn.Sequential, lambda m: nn.Sequential(nn.Linear(4, 4), nn.Sequential(m))):
        model = thunder.jit(nn.Linear(4, 4, bias=False), transforms=[fsdp()])
        with pytest.raises(RuntimeError, match=r"DistributedDataParallel would copy|needs rows of other ranks|c10d"):
            nn.parallel.DistributedDataParallel(wrap(model))(torch.randn(2, 4))
    holder = nn.Sequential(nn.Linear(4, 4), thunder.jit(nn.Linear(4, 4, bias=False), transforms=[fsdp()]))
    sharded = [name for name, _ in holder.named_parameters() if "_model" in name]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(holder, sharded)
    nn.parallel.DistributedDataParallel(holder)(torch.randn(2, 4)).sum().backward()
    assert all(p.grad is not None for p in holder.parameters())


#
# Modules that Thunder cannot trace: what the errors recommend works
#


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
