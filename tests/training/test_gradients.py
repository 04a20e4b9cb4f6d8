"""Norms, clipping and scaling of sharded gradients."""

from __future__ import annotations

import dataclasses
import math

from thunder_fsdp_sched import Init, Ranks, ScheduleDisagreement, clip_grad_norm_, fsdp

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from models import FrozenParameters, Stack
from ranks import on_ranks
from recorded import Recorded
from saving import Everything
from scenario import Run, Scenario, each, everywhere, loss_of, whole_of
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

NORMS = [(2.0, 0.1), (1.0, 0.1), (math.inf, 0.01), (2.0, 1e6)]


def _clip_by_torch(run: Run) -> None:
    models = run.model, run.reference
    for step, norm_type in enumerate((1.0, 2.0, math.inf)):
        run.gradients(step)
        norms = [whole_of(nn.utils.clip_grad_norm_(model.parameters(), 0.3, norm_type)) for model in models]
        run.close(*norms, f"norm of order {norm_type}")
        run.step()
    run.gradients(9)
    for model in models:
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    run.step()


def _clip(run: Run) -> None:
    for step, (norm_type, max_norm) in enumerate(NORMS):
        run.gradients(step)  # without tracing
        theirs = nn.utils.clip_grad_norm_(run.reference.parameters(), max_norm, norm_type)
        with Recorded() as recorded:
            ours = clip_grad_norm_(run.model, max_norm, norm_type)
        assert recorded.collectives == ["allreduce_"], recorded.collectives
        assert ours.dtype == torch.float64 and not ours.ndim
        run.close(ours, theirs, "norm")
        assert len(set(everywhere(ours.item()))) == 1
        run.step()


SCENARIOS = {
    "everything": Scenario(lambda: Everything().double(), [_clip, _clip_by_torch], ranks=2),
    "frozen": Scenario(lambda: FrozenParameters().double(), [_clip], ranks=2),
    "ranks without rows": Scenario(lambda: Everything().double(), [_clip], ranks=4),
    "replicas": Scenario(lambda: Everything().double(), [_clip], {"ranks": (2, 2)}, ranks=4),
}


@each(SCENARIOS)
def test_gradients_are_clipped_by_their_norm_over_all_ranks(name: str) -> None:
    SCENARIOS[name].run()


@on_ranks(4)
def test_the_norm_counts_parameters_of_several_groups_once(rank: int, world_size: int) -> None:
    # Ranks 0 and 2 share parameters that have the same name as those of ranks 1 and 3. All ranks have the ignored ones.
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair = pairs[rank % 2]
    model = Stack(2).double()
    last = [name for name, _ in model.named_parameters() if name.startswith("last")]
    run = Run(
        model,
        ranks=Ranks(process_group_for=lambda name, param: pair if name.startswith("blocks.0") else None),
        init=Init(ignored_params=last),
    )
    run.forward()
    run.backward()
    for name in last:
        dist.all_reduce(run.model.get_parameter(name).grad, dist.ReduceOp.SUM)
    total = torch.zeros((), dtype=torch.float64)
    sharded = run.transform.sharded
    for name, param in run.model.named_parameters():
        squares = getattr(param.grad, "_local_tensor", param.grad).pow(2).sum()
        total += squares / (1 if name in sharded.locations else world_size)
    dist.all_reduce(total)
    torch.testing.assert_close(clip_grad_norm_(run.model, 1e9), total.sqrt(), rtol=1e-12, atol=0)


@on_ranks(2)
def test_nonfinite_gradients_raise_on_every_rank(rank: int) -> None:
    run = Run(Stack(2).double())
    run.micro_batch(no_sync=False)
    [name_of_nan] = [n for n, p in run.model.named_parameters() if n.startswith("blocks.1") and p.numel()][-1:]
    if rank == 1:
        run.model.get_parameter(name_of_nan).grad.to_local().view(-1)[-1] = math.nan
    before = {n: p.grad.clone() for n, p in run.model.named_parameters()}
    with pytest.raises(RuntimeError, check=coded("gradient.norm-not-finite", "2.0", "nan", "rank 1: blocks.1.")):
        clip_grad_norm_(run.model, 1.0, error_if_nonfinite=True)
    for name, param in run.model.named_parameters():
        torch.testing.assert_close(param.grad, before[name], rtol=0, atol=0, equal_nan=True)
    assert clip_grad_norm_(run.model, 1.0).isnan()
    for param in run.model.parameters():
        param.grad.fill_(1e200)
    with pytest.raises(RuntimeError, check=coded("gradient.norm-not-finite", "inf", "overflows torch.float64")):
        clip_grad_norm_(run.model, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, check=coded("gradient.norm-type-not-positive")):
        clip_grad_norm_(run.model, 1.0, 0)
    with pytest.raises(ValueError, check=coded("gradient.max-norm-negative", "-1.0")):
        clip_grad_norm_(run.model, -1.0)


@on_ranks(4)
def test_overflow_on_one_rank_makes_every_rank_skip_the_step(rank: int) -> None:
    # No rank shares a parameter with the ranks of the other pair, so only a scaler that asks all ranks can be right.
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = thunder.jit(
        Stack(1), transforms=[fsdp(ranks=Ranks(process_group_for=lambda name, param: pairs[rank // 2]))]
    )
    params = list(model.parameters())
    for fused in (False, True):
        for scaler in (torch.amp.GradScaler("cpu", init_scale=4.0), ShardedGradScaler("cpu", init_scale=4.0)):
            optimizer = torch.optim.AdamW(params, fused=fused)
            optimizer.zero_grad()
            scaler.scale(loss_of(model(torch.ones(2, 4)))).backward()
            if rank == 1:
                next(p.grad.to_local() for p in params if p.grad.to_local().numel()).view(-1)[0] = math.inf
            before = [p.detach().clone() for p in params]
            if not fused:  # the fused step of torch rejects what ShardedGradScaler.unscale_ has made on a CPU
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0
            assert all(torch.equal(p.to_local(), b.to_local()) for p, b in zip(params, before, strict=True))


@on_ranks(2)
def test_different_gradients_on_the_ranks_are_an_error(rank: int) -> None:
    model = thunder.jit(Stack(1), transforms=[fsdp()])
    loss_of(model(torch.ones(2, 4))).backward()
    if rank == 1:
        next(model.parameters()).grad = None
    for foreach in (True, False):
        with pytest.raises(ScheduleDisagreement, check=coded("ranks.actions-differ")):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)


@on_ranks(2)
def test_clipping_over_several_meshes_names_the_function_that_can(rank: int, world_size: int) -> None:
    alone = [dist.new_group([r]) for r in range(world_size)]
    pick = {"ranks": Ranks(process_group_for=lambda name, param: alone[rank] if name.endswith("bias") else None)}
    model = thunder.jit(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), transforms=[fsdp(**pick)])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for foreach in (True, False):
        with pytest.raises(RuntimeError, check=coded("parameter.value-missing-on-other-ranks", "0.bias")):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
    assert clip_grad_norm_(model, 1.0) > 0


@on_ranks(2)
def test_gradients_on_a_device_that_the_process_group_lacks_are_clipped_through_another(rank: int) -> None:
    """Pretend that the group has only NCCL, which cannot reduce CPU gradients, here those of ``ignored_params``."""
    names = [name for name, _ in Stack(1).named_parameters()]
    for norm_type in (2.0, math.inf):
        norms = []
        for backends in ("cpu:gloo", "cuda:nccl"):
            torch.manual_seed(0)
            model = thunder.jit(Stack(1).double(), transforms=[ours := fsdp(init=Init(ignored_params=names))])
            model(torch.full((2, 4), 1.0 + rank, dtype=torch.float64)).sum().backward()
            ours.sharded.world_group = dataclasses.replace(ours.sharded.world_group, backends=backends)
            with Recorded() as recorded:
                norms.append(clip_grad_norm_(model, 1.0, norm_type))
            assert len(recorded.collectives) == 1
        assert norms[0] == norms[1] > 0


#
# Broadcast gradients
#


class BroadcastGradients(nn.Module):
    """A model whose backward trace declares 0-dim gradients for 0-dim parameters, but computes broadcast ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 5))
        self.exponent = nn.Parameter(torch.tensor(0.5))
        self.angle = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = torch.ldexp(self.weight.transpose(0, 1), self.exponent)
        return x @ scaled * torch.sin(self.angle)

    def inputs(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (torch.randn(3, 5, generator=generator, dtype=torch.float64),)


@on_ranks(2)
def test_broadcast_gradients_of_scalars_are_summed_as_by_autograd() -> None:
    run = Run(BroadcastGradients().double())
    run.train(2)
    run.micro_batch(2)
    run.micro_batch(3, no_sync=False)
    run.step()


@on_ranks(2)
def test_the_error_of_a_gradient_with_another_shape_names_its_parameter() -> None:
    run = Run(BroadcastGradients().double())
    bucket, index = run.transform.sharded.locations["weight"]
    with pytest.raises(RuntimeError, check=coded("gradient.shape-does-not-fit", "weight", "(5,)", "(2, 5)")):
        bucket.sum_to_param(index, torch.ones(5))
