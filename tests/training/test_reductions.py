"""Gradient divide factors and all-reduce hooks, bit for bit as in FSDP2."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from internals import find_fault, fsdp_wait_grads, read_program
from models import Halves, Stack, compile_model
from ranks import on_ranks
from scenario import Run, fsdp2, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

WAIT = fsdp_wait_grads.name

#
# The factor
#


def _fsdp2_that_sums(module: nn.Module) -> nn.Module:
    sharded = fsdp2(module)
    for part in _wrapped(sharded):
        part.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, which FSDP2 would use
    return sharded


def _wrapped(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def _with_fsdp2(**options: Any) -> Run:
    model = Stack(2, width=8, activation=torch.relu)
    return Run(model, others=[_fsdp2_that_sums], oracle=None, dtype=torch.float32, **options)


def _set_theirs(run: Run, factor: float, below: str = "") -> None:
    for part in _wrapped(run.models[1].get_submodule(below)):
        part.set_gradient_divide_factor(factor)


def _below(prefix: str, factor: float) -> Callable[[str, torch.nn.Module], float | None]:
    return lambda name, module: factor if name == prefix else None


@on_ranks(2)
def test_gradients_are_divided_by_any_factor_as_in_fsdp2(rank: int, world_size: int) -> None:
    run = _with_fsdp2(gradient_divide_factor=3.0)
    _set_theirs(run, 3.0)
    run.train(1)
    tfs.set_gradient_divide_factor(run.model, 1.0)
    _set_theirs(run, 1.0)
    run.train(1)
    tfs.set_gradient_divide_factor(run.model, 0.7, module_name="blocks")
    _set_theirs(run, 0.7, below="blocks")
    run.train(1)
    assert len(run.transform.compiled) == 1, "the factor must not be part of a trace"
    assert [bucket.options.gradient_divide_factor for bucket in run.transform.plan] == [1.0, 0.7, 0.7, 1.0]
    run.micro_batch(3)
    run.train(1)

    tfs.set_gradient_divide_factor(run.model, None)
    _set_theirs(run, float(world_size))
    run.train(1)
    refusal = coded("ranks.actions-differ", "set_gradient_divide_factor", "to 1.0", "to 2.0")
    with pytest.raises(tfs.ScheduleDisagreement, check=refusal):
        tfs.set_gradient_divide_factor(run.model, rank + 1)
    run.train(1)

    run = _with_fsdp2(gradient_divide_factor=_below("blocks.1", 5.0), bucketing_strategy="none")
    _set_theirs(run, float(world_size))
    _set_theirs(run, 5.0, below="blocks.1")
    run.train(1)


@on_ranks(4)
def test_gradients_of_experts_are_divided_by_a_factor_of_their_own(rank: int) -> None:
    """Parameters that are sharded over fewer ranks get the mean over all ranks' batches by a factor of their own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    of_experts = groups[rank // 2]
    grads = []
    for factor in (None, 4.0):
        torch.manual_seed(0)
        model = Stack(2)
        options = {
            "ranks": tfs.Ranks(
                process_group_for=lambda name, param: of_experts if name.startswith("blocks.1.") else None
            )
        }
        transform = fsdp(gradient_divide_factor=_below("blocks.1", factor) if factor else None, **options)
        sharded = thunder.jit(model, transforms=[transform])
        (x,) = model.inputs(torch.Generator().manual_seed(rank))
        loss_of(sharded(x.float())).backward()
        grads.append({name: param.grad.to_local().clone() for name, param in sharded.named_parameters()})
    for name, mean in grads[0].items():
        assert torch.equal(grads[1][name], mean / 2 if name.startswith("blocks.1.") else mean), name


def test_parameters_with_other_factors_are_in_other_buckets() -> None:
    compiled = compile_model(lambda: Stack(1).double(), gradient_divide_factor=_below("blocks.0.up", 1.5))
    assert [op.bucket for op in compiled.schedule.backward.of("fsdp_reduce_scatter")] == [
        "last",
        "blocks.0.divided_by_ranks",
        "blocks.0",
        "first",
    ]


@on_ranks(2)
def test_a_bucket_is_not_divided_in_part() -> None:
    ours = thunder.jit(Stack(1), transforms=[fsdp()])
    with pytest.raises(ValueError, check=coded("gradient.bucket-shared-with-other-modules", "blocks.0.down.weight")):
        tfs.set_gradient_divide_factor(ours, 2.0, module_name="blocks.0.up")
    with pytest.raises(ValueError, check=coded("gradient.no-sharded-parameter-below-module", "block")):
        tfs.set_gradient_divide_factor(ours, 2.0, module_name="block")
    with pytest.raises(ValueError, check=coded("option.expected-positive-number", "-1")):
        tfs.set_gradient_divide_factor(ours, -1)


#
# all_reduce_hook
#


@on_ranks(4)
def test_a_hook_that_averages_over_replicas_gives_the_gradients_of_fsdp2_and_of_hybrid_sharding() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    names: list[str] = []

    def average(name: str, gradients: torch.Tensor) -> None:
        names.append(name)
        dist.all_reduce(gradients, dist.ReduceOp.AVG, group=mesh.get_group("replicate"))

    def with_fsdp2(module: nn.Module) -> nn.Module:
        sharded = fsdp2(module, mesh=mesh["shard"])
        for part in _wrapped(sharded):
            part.set_all_reduce_hook(lambda gradients: average("theirs", gradients))
        return sharded

    run = Run(
        Stack(2, width=8, activation=torch.relu),
        others=[with_fsdp2, {"ranks": mesh, "all_reduce_hook": None}],
        oracle=None,
        dtype=torch.float32,
        ranks=mesh["shard"],
        all_reduce_hook=average,
    )
    run.train(2, batch=4)
    waits = run.transform.schedules[-1].backward.of("fsdp_wait_grads")
    assert [name for name in names if name != "theirs"] == 2 * [op.bucket for op in waits]
    assert all(op.reason.endswith(f"; then all_reduce_hook {average.__qualname__}") for op in waits)


class Hook:
    """A hook that doubles gradients, or fails."""

    fails = answers = False

    def __call__(self, name: str, gradients: torch.Tensor) -> Any:
        if self.fails:
            raise ArithmeticError("the hook failed")
        gradients.mul_(2)
        return gradients if self.answers else None


@on_ranks(2)
def test_a_hook_gets_accumulated_gradients_and_its_errors_leave_the_model_usable(rank: int) -> None:
    x = torch.ones(3, 4).double() + rank
    grads = []
    for hook in (None, Hook()):
        torch.manual_seed(0)
        model = thunder.jit(Halves(4).double(), transforms=[fsdp(all_reduce_hook=hook)])
        with model.no_sync():
            loss_of(model(x, True)).backward()
        loss_of(model(x, False)).backward()  # reduces the first block's gradients, which it does not have itself
        grads.append({name: param.grad.full_tensor() for name, param in model.named_parameters()})
    assert isinstance(hook, Hook)
    for name, grad in grads[0].items():
        assert torch.equal(2 * grad, grads[1][name]), name

    model.zero_grad()
    hook.fails = True
    with pytest.raises(ArithmeticError, match="the hook failed"):
        loss_of(model(x, False)).backward()
    hook.fails, hook.answers = False, True
    model.zero_grad()
    with pytest.raises(TypeError, check=coded("gradient.hook-returned-value", "Hook", "blocks.1")):
        loss_of(model(x, False)).backward()
    hook.answers = False
    model.zero_grad()
    loss_of(model(x, False)).backward()
    assert model.blocks[1].weight.grad.full_tensor().any()


def test_verification_and_the_deadlock_proof_include_hooks() -> None:
    compiled = compile_model(lambda: Stack(1).double(), all_reduce_hook=Hook())
    assert re.search(r"fsdp_wait_grads\(bucket_first, ft\d+, hook='Hook'\)", str(compiled.backward))
    again = compile_model(lambda: Stack(1).double(), schedule=compiled.schedule)
    reasons = [op.reason.partition("; then all_reduce_hook Hook") for op in compiled.schedule.backward.of(WAIT)]
    assert [part[2] or part[1] for part in reasons] == 3 * ["; then all_reduce_hook Hook"]
    assert [op.reason for op in again.schedule.backward.of(WAIT)] == [part[0] for part in reasons], "without a hook"
    program = read_program(compiled.backward)
    assert find_fault({0: program, 1: program}) == ""
    hooked = [i for i, action in enumerate(program) if action.line.startswith("all_reduce_hook Hook ")]
    assert len(hooked) == 2 * 3
    other = list(program)
    first, second = hooked[0], hooked[2]
    other[first : first + 2], other[second : second + 2] = program[second : second + 2], program[first : first + 2]
    assert "all_reduce_hook Hook" in find_fault({0: program, 1: other})
