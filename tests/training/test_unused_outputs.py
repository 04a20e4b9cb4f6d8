"""Outputs without gradient: parameters that no rank has used get none, and the others what the sum over ranks gives."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

from thunder_fsdp_sched import Init, Sharding, fsdp

import pytest
import thunder
import torch
from beside import Beside, compare_gradients
from models import Calling
from random_models import BlockSpec, ModelSpec
from ranks import Ranks, on_ranks
from scenario import whole_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from world import Action, Call, Mode, World
from world_replay import replay


class Heads(nn.Module):
    """Two outputs that share a layer. Their own parameters are in one bucket, and one more layer is in its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.trunk(x))
        return {"a": h @ self.a, "b": self.last(h @ self.b @ self.b.t()) * z, "h": h.detach()}


def _inputs(*seeds: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(hash(seeds) % 1000)
    x, z = (torch.randn(5, size, generator=generator, dtype=torch.float64) for size in (3, 2))
    return x, z.requires_grad_()


def _loss(outputs: dict[str, torch.Tensor], used: str) -> torch.Tensor:
    return sum(outputs[name].square().mean() for name in used)  # type: ignore[return-value]


def _models(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = Heads().double()
    return copy.deepcopy(module), thunder.jit(module, transforms=[fsdp(**options)])


A, B, BOTH = range(3)
WINDOWS = (
    *([(A, A)], [(A, B)], [(B, B)], [(A, A), (A, A)], [(B, A), (A, A)], [(A, A), (A, B)]),
    *([(A, B), (B, B), (BOTH, B)], [(B, A), (A, B)]),
)
"""Of each window, the micro-batches: which outputs the two ranks use."""


@pytest.mark.parametrize("options", [{"sharding_strategy": Sharding("zero2")}, {"accumulate": "sharded"}])
def test_what_no_rank_has_used_has_no_gradient(ranks: Ranks, options: dict[str, Any]) -> None:
    history: list[Action] = []
    for number, window in enumerate(WINDOWS):
        for micro_batch, used in enumerate(window, 1):
            mode = Mode(no_sync=micro_batch < len(window))
            history += [Action("forward", mode, used, seed=10 * number + micro_batch), Action("backward")]
        history += [Action("step"), Action("zero_grad", value=1)]
    calls = Call(outputs=(0,)), Call(outputs=(1,)), Call()
    options = {"sharding_strategy": Sharding(), **options}
    model = ModelSpec(3, (BlockSpec("linear", 1, False, True),), (), (), False)
    replay(
        ranks,
        World(model, options, calls=calls, optimizer="adamw", hooks=True, alike=True, histories=(tuple(history),)),
    )


@on_ranks(2)
def test_fsdp2_and_requests_of_single_gradients(rank: int) -> None:
    reference, model = _models()
    theirs = fully_shard(copy.deepcopy(reference))
    x, z = _inputs(0, rank)
    for net in (theirs, model):
        outputs = net(x, z)
        _loss(outputs, "a").backward(retain_graph=True)
        assert [name for name, param in net.named_parameters() if param.grad is None] == [
            "b",
            "last.weight",
            "last.bias",
        ]
        if net is model:  # FSDP2 has freed what a second backward needs
            _loss(outputs, "b").backward()
            assert all(param.grad is not None for param in net.parameters())
    params = [model.a, model.b]
    a, b = torch.autograd.grad(_loss(model(x, z), "a"), params, allow_unused=True)
    assert a is not None and b is None
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(_loss(model(x, z), "a"), params)


@dataclass
class Outputs:
    """As models of transformers return: a dataclass in another one."""

    a: torch.Tensor | None = None
    others: Any = None


class InDataclasses(Heads):
    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        outputs = super().forward(x, z)
        return Outputs(outputs["a"], Outputs(others=[outputs["b"], outputs["h"]]))


@pytest.mark.parametrize("used", ["a", "b"])
def test_outputs_in_dataclasses(used: str, one_rank: None) -> None:
    both = Beside(InDataclasses().double())
    for net in both.both:
        outputs = net(*_inputs(0))
        (outputs.a if used == "a" else outputs.others.others[0]).sum().backward()
        assert not outputs.others.others[1].requires_grad
    both.compare_gradients()


class Target(nn.Module):
    """A network whose target network is read through ``detach`` alone, and a scale that only a buffer depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        online, target = self.online(x), self.target(x)
        self.mean.copy_((online.detach() * self.scale).mean(0))
        return (online - target.detach()).square().mean()


@on_ranks(2)
def test_what_reaches_no_output_has_no_gradient(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    reference = Target().double()
    model = thunder.jit(copy.deepcopy(reference), transforms=[fsdp(bucketing_strategy="layer")])
    inputs = torch.linspace(-1, 1, 2 * world_size * 3, dtype=torch.float64).view(world_size, 2, 3)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.5) for m in (reference, model)]
    for micro_batches in (1, 2):
        for micro_batch in range(micro_batches):
            for of_rank in inputs:
                reference.mean = torch.zeros_like(reference.mean)  # eager mode would keep its graph
                (reference(of_rank) / world_size).backward()
            with model.no_sync() if micro_batch < micro_batches - 1 else contextlib.nullcontext():
                model(inputs[rank]).backward()
        without = [name for name, param in model.named_parameters() if param.grad is None]
        assert without == [name for name, param in reference.named_parameters() if param.grad is None]
        assert without == ["scale", "target.weight", "target.bias"]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole_of(ours), theirs.data, rtol=1e-11, atol=1e-11)


def test_traces_whose_inputs_reach_the_same_outputs_need_no_hooks(fake_ranks: None) -> None:
    for model in (nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))):
        jitted = thunder.jit(model, transforms=[fsdp()])
        jitted(torch.randn(4, 3))
        [guard] = [
            bsym
            for bsym in thunder.compile_stats(jitted).last_epilogue_traces[-1].bound_symbols
            if bsym.sym.name == "fsdp_guard_backward"
        ]
        assert "reached" not in guard.kwargs


class Tied(nn.Module):
    """Two outputs that read one parameter under two names, one of them in part without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        constant = torch.nn.functional.linear(x, self.first.weight.detach())
        return {"a": self.first(x), "b": self.second(x), "c": self.second(constant), "log": constant.mean()}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("ignored", [False, True])
def test_a_tied_parameter_has_a_gradient_if_an_output_that_reads_it_has_one(ignored: bool) -> None:
    torch.manual_seed(0)
    module = Tied().double()
    reference, x = copy.deepcopy(module), torch.randn(2, 3, dtype=torch.float64)
    model = thunder.jit(module, transforms=[fsdp(init=Init(ignored_params={module.first.weight} if ignored else ()))])
    for used in "a", "b", "c", "ab":
        outputs = [net(x) for net in (reference, model)]
        assert [[out.requires_grad for out in each.values()] for each in outputs] == [[True, True, True, False]] * 2
        for net, each in zip((reference, model), outputs, strict=True):
            net.zero_grad()
            _loss(each, used).backward()
        compare_gradients(model, reference)


def test_a_backward_that_reduces_nothing_returns_gradients_of_inputs(fake_ranks: None) -> None:
    dead = Calling(lambda self, x: (self.weight * 2, x.square().sum())[1], weight=nn.Parameter(torch.ones(4)))
    model, x = thunder.jit(dead, transforms=[fsdp()]), torch.randn(4, requires_grad=True)
    model(x).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
    assert all(p.grad is None for p in model.parameters())
