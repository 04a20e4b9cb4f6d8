"""The number that sums of gradients are divided by, bit for bit as in FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp, testing

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Stack
from ranks import on_ranks
from reference import loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


class _Both:
    """The same model, sharded by this package and by FSDP2."""

    def __init__(self, rank: int, mesh: Any, **options: Any) -> None:
        self.rank = rank
        # ReLU, because Thunder decomposes the backward of tanh, which rounds differently from eager torch.
        self.model = Stack(2, width=8, activation=torch.relu)
        self.theirs = copy.deepcopy(self.model)
        for block in self.theirs.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.theirs, mesh=mesh)
        for module in self._wrapped():
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, which FSDP2 would use
        self.transform = fsdp(mesh=mesh, **options)
        self.ours = thunder.jit(self.model, transforms=[self.transform])

    def _wrapped(self) -> Iterator[FSDPModule]:
        return (module for module in self.theirs.modules() if isinstance(module, FSDPModule))

    def set_theirs(self, factor: float, below: str = "") -> None:
        for module in self.theirs.get_submodule(below).modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)

    def backward(self, step: int) -> None:
        (x,) = self.model.inputs(torch.Generator().manual_seed(10 * step + self.rank), batch=4)
        for model in (self.ours, self.theirs):
            loss_of(model(x.float())).backward()

    def compare(self, step: int) -> None:
        """Check that gradients have equal bits after a backward, and drop them."""
        self.backward(step)
        theirs = dict(self.theirs.named_parameters())
        for name, param in self.ours.named_parameters():
            assert torch.equal(param.grad.full_tensor(), theirs[name].grad.full_tensor()), (step, name)
        for model in (self.ours, self.theirs):
            model.zero_grad()


def _below(prefix: str, factor: float) -> Callable[[str, torch.nn.Module], float | None]:
    return lambda name, module: factor if name == prefix else None


@on_ranks(2)
def test_gradients_are_divided_by_any_factor_as_in_fsdp2(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    both = _Both(rank, mesh, gradient_divide_factor=3.0)
    both.set_theirs(3.0)
    both.compare(0)
    tfs.set_gradient_divide_factor(both.ours, 1.0)
    both.set_theirs(1.0)
    both.compare(1)
    tfs.set_gradient_divide_factor(both.ours, 0.7, module_name="blocks")
    both.set_theirs(0.7, below="blocks")
    both.compare(2)
    assert len(both.transform.compiled) == 1, "the factor must not be part of a trace"
    assert [bucket.divide_factor for bucket in both.transform.plan] == [1.0, 0.7, 0.7, 1.0]

    for module in both._wrapped():
        module.set_requires_gradient_sync(False)
    with both.ours.no_sync():
        both.backward(3)
    for module in both._wrapped():
        module.set_requires_gradient_sync(True)
    both.compare(4)

    tfs.set_gradient_divide_factor(both.ours, None)
    both.set_theirs(float(world_size))
    both.compare(5)

    with pytest.raises(tfs.ScheduleDisagreement, match=r"(?s)set_gradient_divide_factor.*to 1\.0.*to 2\.0"):
        tfs.set_gradient_divide_factor(both.ours, rank + 1)
    both.compare(6)

    both = _Both(rank, mesh, gradient_divide_factor=_below("blocks.1", 5.0), bucketing_strategy="none")
    both.set_theirs(float(world_size))
    both.set_theirs(5.0, below="blocks.1")
    both.compare(0)


def _compare_with_replicas(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both = _Both(rank, mesh, gradient_divide_factor=3.0)
    both.set_theirs(3.0)
    both.compare(0)
    tfs.set_gradient_divide_factor(both.ours, 4)  # the mean
    both.set_theirs(4.0)
    both.compare(1)


def _divide_experts(rank: int, world_size: int) -> None:
    """Parameters that are sharded over fewer ranks get the mean over all ranks' batches by a factor of their own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    of_experts = groups[rank // 2]
    grads = []
    for factor in (None, 4.0):
        torch.manual_seed(0)
        model = Stack(2)
        options = {"process_group_for": lambda name, param: of_experts if name.startswith("blocks.1.") else None}
        transform = fsdp(gradient_divide_factor=_below("blocks.1", factor) if factor else None, **options)
        sharded = thunder.jit(model, transforms=[transform])
        (x,) = model.inputs(torch.Generator().manual_seed(rank))
        loss_of(sharded(x.float())).backward()
        grads.append({name: param.grad.to_local().clone() for name, param in sharded.named_parameters()})
    for name, mean in grads[0].items():
        assert torch.equal(grads[1][name], mean / 2 if name.startswith("blocks.1.") else mean), name


@on_ranks(4)
def test_gradients_of_replicas_and_of_experts_are_divided_by_any_factor_as_in_fsdp2(rank: int, world_size: int) -> None:
    _compare_with_replicas(rank, world_size)
    _divide_experts(rank, world_size)


def test_parameters_with_other_factors_are_in_other_buckets() -> None:
    [compiled] = testing.compile_on_fake_ranks(
        lambda: (Stack(1), (torch.ones(2, 4),)), 2, gradient_divide_factor=_below("blocks.0.up", 1.5)
    )
    assert [op.bucket for op in compiled.schedule.backward.of("fsdp_reduce_scatter")] == [
        "last",
        "blocks.0.divided_by_ranks",
        "blocks.0",
        "first",
    ]


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf"), "2", True])
def test_a_factor_must_be_a_positive_number(factor: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="gradient_divide_factor: expected a positive number or None"):
        fsdp(gradient_divide_factor=factor)


@on_ranks(2)
def test_a_bucket_is_not_divided_in_part() -> None:
    ours = thunder.jit(Stack(1), transforms=[fsdp()])
    with pytest.raises(
        ValueError, match=r"bucket 'blocks\.0' also has 'blocks\.0\.down\.weight', .*not below 'blocks\.0"
    ):
        tfs.set_gradient_divide_factor(ours, 2.0, module_name="blocks.0.up")
    with pytest.raises(ValueError, match="no parameter below 'block' is sharded"):
        tfs.set_gradient_divide_factor(ours, 2.0, module_name="block")
    with pytest.raises(ValueError, match="expected a positive number or None, got -1"):
        tfs.set_gradient_divide_factor(ours, -1)
