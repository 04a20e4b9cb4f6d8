"""Unsharded models of all ranks in one process: the expected values for ``history_runner``.

Use :class:`UnshardedRanks` to compute without communication what a sharded model must hold after any order of calls,
including those in which ranks make different calls.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from random_histories import Action, Mode, Scenario, ScenarioModel

__all__ = ["PendingLoss", "UnshardedRanks", "batch_of", "optimizer_of"]


class PendingLoss:
    """A loss whose backward may still run, with the state of the parameters at its forward."""

    def __init__(self, mode: Mode, world: UnshardedRanks) -> None:
        self.mode, self.version, self.scale, self.statistics = mode, world.version, world.scale, world.statistics
        self.inputs: tuple[torch.Tensor, ...] = ()
        self.output = self.loss = torch.empty(0)


def optimizer_of(scenario: Scenario, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if (
        scenario.optimizer == "adamw"
    ):  # a large eps, so that gradients that are only rounding errors cause small updates
        return torch.optim.AdamW(params, lr=0.01, eps=1e-3)
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def batch_of(model: ScenarioModel, action: Action, mode: Mode, rank: int) -> tuple[torch.Tensor, ...]:
    return model.inputs(torch.Generator().manual_seed(1000 * action.seed + rank), mode.batch)


class UnshardedRanks:
    """One unsharded model for each rank. They share parameters, and each has its own buffers.

    Attributes:
        version: number of parameter updates that autograd can detect.
        scale: product of the factors by which ``.data`` was multiplied.
        statistics: number of forwards that have updated running statistics.
        unreduced: unreduced gradients, by rank and parameter name.
    """

    def __init__(self, scenario: Scenario, model: ScenarioModel, world_size: int) -> None:
        self.scenario, self.world_size = scenario, world_size
        self.models = [copy.deepcopy(model, {id(p): p for p in model.parameters()}) for _ in range(world_size)]
        self.params = dict(self.models[0].named_parameters())
        self.initial = {name: p.detach().clone() for name, p in self.params.items()}
        self.initial_buffers = {name: b.clone() for name, b in model.named_buffers()}
        self.trainable = {name: p.requires_grad for name, p in self.params.items()}
        self.optimizer = optimizer_of(scenario, list(self.params.values()))
        self.reset()

    def reset(self) -> None:
        with torch.no_grad():
            for name, param in self.params.items():
                param.requires_grad_(self.trainable[name]).copy_(self.initial[name])
                param.grad = None
            for model in self.models:
                for name, buffer in model.named_buffers():
                    buffer.copy_(self.initial_buffers[name])
        self.optimizer = optimizer_of(self.scenario, list(self.params.values()))
        self.version, self.scale, self.statistics = 0, 1.0, 0
        self.unreduced: list[dict[str, torch.Tensor]] = [{} for _ in range(self.world_size)]
        self.saved: Any = None

    def call(self, rank: int, inputs: tuple[torch.Tensor, ...], mode: Mode) -> torch.Tensor:
        """Return the output of one rank's forward, under the mixed precision policy of the scenario."""
        model, policy = self.models[rank].train(mode.training), self.scenario.options.get("mp_policy")
        self.statistics += mode.training
        if policy is None or policy.param_dtype is None:
            return model(*inputs, mode.flag)
        named = {name: p.to(policy.param_dtype) for name, p in self.params.items()}
        cast = inputs[0].to(policy.param_dtype)
        return torch.func.functional_call(model, named, (cast, *inputs[1:], mode.flag))

    def grads(self, loss: torch.Tensor, *, retain: bool) -> dict[str, torch.Tensor]:
        """Return the gradients of one rank's loss by name, without changing ``.grad``.

        Raises:
            RuntimeError: autograd refuses to run this backward.
        """
        kept = {name: param.grad for name, param in self.params.items()}
        try:
            for param in self.params.values():
                param.grad = None
            loss.backward(retain_graph=retain)
            return {name: p.grad for name, p in self.params.items() if p.grad is not None}
        finally:
            for name, param in self.params.items():
                param.grad = kept[name]

    def accumulate(self, rank: int, grads: dict[str, torch.Tensor]) -> None:
        into = self.unreduced[rank]
        for name, grad in grads.items():
            into[name] = into[name] + grad if name in into else grad

    def reduce(self) -> None:
        """Add the mean of the unreduced gradients over ranks to ``.grad``."""
        for name, param in self.params.items():
            terms = [of_rank[name] for of_rank in self.unreduced if name in of_rank]
            if terms:
                mean = sum(terms) / self.world_size
                param.grad = mean if param.grad is None else param.grad + mean
        self.unreduced = [{} for _ in range(self.world_size)]

    def _with_state(self) -> set[str]:
        return {name for name, param in self.params.items() if self.optimizer.state.get(param)}

    def save(self) -> bool:
        """Save parameters and optimizer state, unless a trainable parameter has no state yet; return whether it saved."""
        trains = {name for name, param in self.params.items() if param.requires_grad}
        if not trains <= self._with_state():
            return False
        values = {name: param.detach().clone() for name, param in self.params.items()}
        self.saved = values, copy.deepcopy(self.optimizer.state_dict()), self._with_state()
        return True

    def can_load(self) -> bool:
        """Return whether there is something saved, with state for the parameters that have optimizer state now."""
        return self.saved is not None and self.saved[2] == self._with_state()

    def load(self) -> None:
        values, state, _ = self.saved
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(values[name])
        self.optimizer.load_state_dict(copy.deepcopy(state))
        self.version += 1
