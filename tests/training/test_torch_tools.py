"""Functions of torch that work on DTensors, on sharded models, against FSDP2 on the same ranks."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.runtime.row_dtensor import RowDTensor

import pytest
import thunder
import torch
import torch.distributed.checkpoint as dcp
from models import Stack
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

TRANSPORTS = ["coalesced", "flat"]
"""With ``coalesced``, rows are cut like those of FSDP2, so bits are equal. Norms of other rows round differently."""

mostly_coalesced = pytest.mark.parametrize("transport", ["coalesced", pytest.param("flat", marks=pytest.mark.long)])


class _Both:
    """The same module sharded by this package and by FSDP2, with the same gradients."""

    def __init__(self, world_size: int, transport: str, optimizer: Any = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        module, theirs = Stack(2, width=8), Stack(2, width=8)
        theirs.load_state_dict(module.state_dict())
        self.mesh = init_device_mesh("cpu", (world_size,))
        self.theirs = fully_shard(theirs, mesh=self.mesh)
        self.ours = thunder.jit(module, transforms=[fsdp(transport=transport)])
        self.is_exact = transport == "coalesced"
        self.names = [name for name, _ in self.ours.named_parameters()]
        if optimizer is not None:
            self.optimizers = [optimizer(model.parameters()) for model in (self.ours, self.theirs)]

    def set_grads(self, seed: int = 1, spoiled_rank: int | None = None, rank: int = 0) -> None:
        torch.manual_seed(seed)
        for name in self.names:
            ours, theirs = self.ours.get_parameter(name), self.theirs.get_parameter(name)
            full = torch.randn(ours.shape)
            ours.grad = RowDTensor.wrap(ours.rows.of(full).clone(), ours.rows)
            theirs.grad = distribute_tensor(full, self.mesh, [Shard(0)])
        if spoiled_rank == rank:
            for model in (self.ours, self.theirs):
                next(p.grad.to_local() for p in model.parameters() if p.grad.to_local().numel())[:1] = math.inf

    def check(self, ours: Any, theirs: Any, what: str) -> None:
        ours, theirs = (v.full_tensor() if isinstance(v, DTensor) else v for v in (ours, theirs))
        if isinstance(ours, torch.Tensor):
            tolerance = {"rtol": 0, "atol": 0} if self.is_exact else {}
            torch.testing.assert_close(ours, theirs, **tolerance, msg=lambda text: f"{what}: {text}")
        else:
            assert ours == theirs, what

    def check_params(self) -> None:
        for name in self.names:
            ours, theirs = self.ours.get_parameter(name), self.theirs.get_parameter(name)
            assert isinstance(ours, DTensor) and ours.shape == theirs.shape
            self.check(ours, theirs, name)
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                self.check(ours.grad, theirs.grad, f"gradient of {name}")


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_clipping_gives_what_fsdp2_gives(world_size: int, transport: str) -> None:
    both = _Both(world_size, transport)
    for norm_type in (1.0, 2.0, math.inf):
        both.set_grads()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.3, norm_type) for m in (both.ours, both.theirs)]
        both.check(*norms, f"norm of order {norm_type}")
        both.check_params()
    both.set_grads(2)
    for model in (both.ours, both.theirs):
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    both.check_params()


OPTIMIZERS = {
    "foreach": lambda params: torch.optim.AdamW(params, 0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, 0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
}


class _Centralized(torch.optim.SGD):
    """An optimizer that computes over rows, and that nobody knows: gradients lose the mean of their columns."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad - param.grad.mean(0, keepdim=True) if param.ndim > 1 else param.grad
                param.sub_(grad, alpha=group["lr"])


@mostly_coalesced
@on_ranks(2)
def test_optimizers_give_what_they_give_with_fsdp2(world_size: int, transport: str) -> None:
    for make in (*OPTIMIZERS.values(), lambda params: _Centralized(params, 0.1)):
        both = _Both(world_size, transport, make)
        both.is_exact &= not isinstance(both.optimizers[0], _Centralized)  # whose means round differently
        for step in range(3):
            both.set_grads(step)
            for optimizer in both.optimizers:
                optimizer.step()
        both.check_params()


@mostly_coalesced
@on_ranks(2)
def test_averages_are_those_of_fsdp2(world_size: int, transport: str) -> None:
    both = _Both(world_size, transport, OPTIMIZERS["sgd"])
    for model in (both.ours, both.theirs):
        with pytest.raises((TypeError, AssertionError), match=r"copied|deepcopy"):
            AveragedModel(model)
    # A copy from before sharding is sharded like the model.
    torch.manual_seed(0)
    averages = [AveragedModel(Stack(2, width=8), multi_avg_fn=get_ema_multi_avg_fn(0.5)) for _ in range(2)]
    averages[1].load_state_dict(averages[0].state_dict())
    averages[0].module = thunder.jit(averages[0].module, transforms=[fsdp(transport=transport)])
    fully_shard(averages[1].module, mesh=both.mesh)
    for step in range(3):
        both.set_grads(step)
        for optimizer, average, model in zip(both.optimizers, averages, (both.ours, both.theirs), strict=True):
            optimizer.step()
            average.update_parameters(model)
    ours, theirs = (average.state_dict() for average in averages)
    assert ours.keys() == theirs.keys() and ours["n_averaged"] == 3
    for name, value in theirs.items():
        both.check(ours[name], value, name)
    name = both.names[0]
    assert not torch.equal(both.ours.get_parameter(name).full_tensor(), ours[f"module.{name}"].full_tensor())


@on_ranks(2)
def test_buffers_are_averaged_with_parameters() -> None:
    """EMA and SWA of a module with batch norms, beside the unsharded module."""
    for average_fn in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, {"avg_fn": lambda a, b, n: a * 0.5 + b * 0.5}):
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
        averages = [AveragedModel(copy.deepcopy(whole), use_buffers=True, **average_fn) for _ in range(2)]
        model = thunder.jit(copy.deepcopy(whole), transforms=[fsdp()])
        averages[0].module = thunder.jit(averages[0].module, transforms=[fsdp()])
        for step in range(3):
            for average, net in zip(averages, (model, whole), strict=True):
                torch.manual_seed(step)
                with torch.no_grad():
                    for tensor in (*net.parameters(), *net.buffers()):
                        tensor.copy_(torch.randn_like(tensor) if tensor.is_floating_point() else tensor + 1)
                average.update_parameters(net)
        ours, theirs = (average.state_dict() for average in averages)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            actual = ours[name].full_tensor() if isinstance(ours[name], DTensor) else ours[name]
            torch.testing.assert_close(actual, value, msg=name)


@mostly_coalesced
@on_ranks(2)
def test_scalers_skip_the_steps_that_they_skip_with_fsdp2(rank: int, world_size: int, transport: str) -> None:
    for scaler_class in (torch.amp.GradScaler, ShardedGradScaler):
        both = _Both(world_size, transport, OPTIMIZERS["sgd"])
        scalers = [scaler_class("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
        for step, spoiled_rank in enumerate([None, 1, None, None, 0]):
            both.set_grads(step, spoiled_rank, rank)
            for scaler, optimizer in zip(scalers, both.optimizers, strict=True):
                scaler.scale(torch.ones(()))
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            both.optimizers[0].zero_grad()
            both.optimizers[1].zero_grad()
            both.check_params()
        assert scalers[0].get_scale() == 4.0


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_state_dicts_are_exchanged_with_fsdp2(rank: int, world_size: int, transport: str, tmp_path: Path) -> None:
    both = _Both(world_size, transport, OPTIMIZERS["foreach"])
    both.set_grads()
    for optimizer in both.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for options in (
        None,
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True),
    ):
        (ours, our_state), (theirs, their_state) = (
            get_state_dict(model, optimizer, options=options)
            for model, optimizer in zip((both.ours, both.theirs), both.optimizers, strict=True)
        )
        assert ours.keys() == theirs.keys()
        if options is not None and options.cpu_offload and rank:  # only the first rank gets values
            continue
        assert our_state["state"].keys() == their_state["state"].keys()
        for name, value in theirs.items():
            both.check(ours[name], value, name)
        for name, values in their_state["state"].items():
            for key, value in values.items():
                both.check(our_state["state"][name][key], value, f"{key} of {name}")

    # Loaded: sharded, full on all ranks, and full on the first rank alone.
    for case in ("sharded", "full", "broadcast"):
        other = _Both(world_size, transport, OPTIMIZERS["foreach"], seed=3)
        loading = StateDictOptions(full_state_dict=case != "sharded", broadcast_from_rank0=case == "broadcast")
        saving = StateDictOptions(full_state_dict=case != "sharded", cpu_offload=case == "broadcast")
        model, optimizer = get_state_dict(both.theirs, both.optimizers[1], options=saving)
        assert bool(model) == (case != "broadcast" or rank == 0)
        if case == "sharded":
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
            model, optimizer = get_state_dict(other.ours, other.optimizers[0])
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
        model, optimizer = copy.deepcopy((model, optimizer))  # they share memory with what they were taken from
        if case == "sharded":
            with torch.no_grad():
                for param in other.ours.parameters():
                    param.zero_()
        set_model_state_dict(other.ours, model, options=loading)
        set_optimizer_state_dict(other.ours, other.optimizers[0], optimizer, options=loading)
        other.theirs, other.optimizers[1] = both.theirs, both.optimizers[1]
        other.check_params()
        other.set_grads(5)
        for each in other.optimizers:
            each.step()
            each.zero_grad()
        other.check_params()
    assert isinstance(next(iter(get_model_state_dict(other.ours).values())), DTensor)
