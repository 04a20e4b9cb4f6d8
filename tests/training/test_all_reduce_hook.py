"""The user's function that gets the reduced gradients of each bucket, bit for bit as in FSDP2."""

from __future__ import annotations

import re
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp, testing
from thunder_fsdp_sched.ir.schedule import read_program
from thunder_fsdp_sched.ir.symbols import fsdp_wait_grads
from thunder_fsdp_sched.ranks.deadlock import find_fault

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Stack
from ranks import on_ranks
from scenario import Run, fsdp2, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

WAIT = fsdp_wait_grads.name


@on_ranks(4)
def test_a_hook_that_averages_over_replicas_gives_the_gradients_of_fsdp2_and_of_hybrid_sharding() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    names: list[str] = []

    def average(name: str, gradients: torch.Tensor) -> None:
        names.append(name)
        dist.all_reduce(gradients, dist.ReduceOp.AVG, group=mesh.get_group("replicate"))

    def with_fsdp2(module: nn.Module) -> nn.Module:
        sharded = fsdp2(module, mesh=mesh["shard"])
        for part in sharded.modules():
            if isinstance(part, FSDPModule):
                part.set_all_reduce_hook(lambda gradients: average("theirs", gradients))
        return sharded

    run = Run(
        Stack(2, width=8, activation=torch.relu),
        others=[with_fsdp2, {"mesh": mesh, "all_reduce_hook": None}],
        oracle=None,
        dtype=torch.float32,
        mesh=mesh["shard"],
        all_reduce_hook=average,
    )
    run.train(2, batch=4)
    waits = run.transform.schedules[-1].backward.of("fsdp_wait_grads")
    assert [name for name in names if name != "theirs"] == 2 * [op.bucket for op in waits]
    assert all(op.reason.endswith(f"; then all_reduce_hook {average.__qualname__}") for op in waits)


class Parts(nn.Module):
    """Two layers. An argument says whether the second runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first.forward(x)
        return self.second.forward(x) if both else x


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
    x = torch.ones(3, 4) + rank
    grads = []
    for hook in (None, Hook()):
        torch.manual_seed(0)
        model = thunder.jit(Parts(), transforms=[fsdp(all_reduce_hook=hook)])
        with model.no_sync():
            loss_of(model(x, True)).backward()
        loss_of(model(x, False)).backward()  # reduces the second layer's gradients, which it does not have itself
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
    with pytest.raises(TypeError, match=r"all_reduce_hook: Hook must modify the gradients of bucket 'first' in place"):
        loss_of(model(x, False)).backward()
    hook.answers = False
    model.zero_grad()
    loss_of(model(x, False)).backward()
    assert model.first.weight.grad.full_tensor().any()

    hooks = [Hook(), loss_of]
    with pytest.raises(tfs.ScheduleDisagreement, match=r"(?s)fsdp.all_reduce_hook=.*Hook.*loss_of"):
        thunder.jit(Parts(), transforms=[fsdp(all_reduce_hook=hooks[rank])])


def test_verification_and_the_deadlock_proof_include_hooks() -> None:
    [compiled] = testing.compile_on_fake_ranks(lambda: (Stack(1), (torch.ones(2, 4),)), 2, all_reduce_hook=Hook())
    assert re.search(r"fsdp_wait_grads\(bucket_first, ft\d+, hook='Hook'\)", str(compiled.backward))
    [again] = testing.compile_on_fake_ranks(lambda: (Stack(1), (torch.ones(2, 4),)), 2, schedule=compiled.schedule)
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
