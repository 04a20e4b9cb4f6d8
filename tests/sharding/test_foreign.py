"""Functions of other libraries on sharded models: they work on DTensors, or fail on all ranks."""

from __future__ import annotations

import copy
import itertools

from thunder_fsdp_sched import eager, fsdp, full_state_dict

import pytest
import thunder
import torch
from coded import coded
from ranks import on_ranks
from saving import assert_equal, fill
from scenario import whole_of
from thunder.core.transforms import add_transform
from thunder.distributed import checkpoint as thunder_checkpoint
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn


@on_ranks()
def test_state_dict_functions_of_torch_and_of_thunder_give_and_take_dtensors(rank: int) -> None:
    torch.manual_seed(0)
    nested = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 3)))
    for module in (nested, nn.Linear(4, 6)):
        jitted = thunder.jit(module, transforms=[fsdp()])
        trained = full_state_dict(jitted)
        parts = [part for part in module.modules() if list(part.parameters())]
        for owner, full in itertools.product((jitted, nn.ModuleDict({"net": jitted}), *parts), (False, True)):
            options = torch_state_dict.StateDictOptions(full_state_dict=full)
            state = copy.deepcopy(torch_state_dict.get_model_state_dict(owner, options=options))
            fill(owner, 0.0)
            torch_state_dict.set_model_state_dict(owner, state, options=options)
            assert_equal(full_state_dict(jitted), trained, type(owner))
        for owner in (jitted, *parts):
            theirs = thunder_checkpoint.StateDictOptions(full_state_dict=True)
            state = copy.deepcopy(thunder_checkpoint.get_model_state_dict(owner, theirs, rank))
            assert all(value.shape == value.full_tensor().shape for value in state.values())
            fill(owner, 0.0)
            thunder_checkpoint.load_model_state_dict(state, owner, theirs, rank)
            assert_equal(full_state_dict(jitted), trained, type(owner))
            with pytest.raises(ValueError, match="full_state_dict=False"):
                thunder_checkpoint.get_model_state_dict(owner, thunder_checkpoint.StateDictOptions(), rank)
        jitted(torch.randn(2, 4)).sum().backward()


@on_ranks()
def test_cuda_graphs_are_refused() -> None:
    for transforms in ([fsdp(), CUDAGraphTransform()], [CUDAGraphTransform(), fsdp()]):
        model = thunder.jit(nn.Linear(4, 6), transforms=transforms)
        with pytest.raises(ValueError, check=coded("trace.cuda-graphs-of-collectives", "CUDAGraphTransform")):
            model(torch.randn(2, 4))
    model = add_transform(thunder.jit(nn.Linear(4, 6), transforms=[fsdp()]), transform=CUDAGraphTransform())
    with pytest.raises(ValueError, check=coded("trace.cuda-graphs-of-collectives", "CUDAGraphTransform")):
        model(torch.randn(2, 4))


@on_ranks()
def test_ddp_refuses_shards_unless_it_ignores_them() -> None:
    with pytest.raises(TypeError, check=coded("module.sharded-module-in-ddp")):
        nn.parallel.DistributedDataParallel(thunder.jit(nn.Linear(4, 4), transforms=[fsdp()]), init_sync=False)
    for wrap in (nn.Sequential, lambda m: nn.Sequential(nn.Linear(4, 4), nn.Sequential(m))):
        model = thunder.jit(nn.Linear(4, 4, bias=False), transforms=[fsdp()])
        with pytest.raises((RuntimeError, NotImplementedError), check=coded("parameter.operator-needs-other-rows")):
            nn.parallel.DistributedDataParallel(wrap(model))
        unsynchronized = nn.parallel.DistributedDataParallel(wrap(model), init_sync=False)
        with pytest.raises(RuntimeError, check=coded("parameter.rows-mixed-with-other-tensor", "weight")):
            unsynchronized(torch.randn(2, 4)).sum().backward()
    holder = nn.Sequential(nn.Linear(4, 4), thunder.jit(nn.Linear(4, 4, bias=False), transforms=[fsdp()]))
    sharded = [name for name, _ in holder.named_parameters() if "_model" in name]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(holder, sharded)
    nn.parallel.DistributedDataParallel(holder)(torch.randn(2, 4)).sum().backward()
    assert all(p.grad is not None for p in holder.parameters())


#
# A batch norm that Thunder cannot trace: what the documentation recommends works
#


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@on_ranks()
def test_update_bn_runs_on_the_module_that_is_not_compiled() -> None:
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    plain, model = make(), make()
    update_bn(batches, plain)
    jitted = thunder.jit(model, transforms=[fsdp()])
    with eager(jitted) as module:
        update_bn(batches, module)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(jitted.get_buffer(name), buffer)
        assert buffer.any()
    jitted(batches[0]).sum().backward()


@on_ranks()
def test_averaged_models_average_shards_and_buffers() -> None:
    """A copy from before sharding is sharded like the model."""
    whole = make()
    averaging = {"multi_avg_fn": get_ema_multi_avg_fn(0.5), "use_buffers": True}
    averages = [AveragedModel(copy.deepcopy(whole), **averaging) for _ in range(2)]
    averages[0].module = thunder.jit(averages[0].module, transforms=[fsdp()])
    model = thunder.jit(copy.deepcopy(whole), transforms=[fsdp()])
    for step in range(3):
        for average, net in zip(averages, (model, whole), strict=True):
            with torch.no_grad():
                for tensor in (*net.parameters(), *net.buffers()):
                    tensor.copy_(tensor.mul(0.7).add(step + 1.0) if tensor.is_floating_point() else tensor + 1)
            average.update_parameters(net)
    ours, theirs = ({n: whole_of(v) for n, v in average.state_dict().items()} for average in averages)
    torch.testing.assert_close(ours, theirs)
