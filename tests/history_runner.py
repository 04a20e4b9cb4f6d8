"""Runner of random histories: the same calls on the sharded model and on the unsharded one, compared after every call.

:class:`HistoryRunner` takes a scenario of ``random_histories`` and runs its histories action by action. Its comparisons do
not communicate, which keeps a delayed rank delayed until the next call, and note a difference instead of raising it, so
that the other ranks are not left alone in a collective.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched.errors import code_of

import torch
import torch.distributed as dist
from device import DEVICE
from garbage import Collecting, drop_in_a_cycle
from random_histories import Action, Mode, Scenario, ScenarioModel
from random_models import RandomModel
from scenario import Run, loss_of


class Injected(Exception):
    """An error that a hook raises on purpose."""


@dataclass(eq=False)
class PendingLoss:
    """A loss whose backward may still run, with the state of the parameters at its forward."""

    mode: Mode
    inputs: tuple[torch.Tensor, ...]
    version: int
    scale: float
    statistics: int
    backwards: int
    output: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    loss: torch.Tensor = field(default_factory=lambda: torch.empty(0))


def _optimizer(scenario: Scenario, params: Any) -> torch.optim.Optimizer:
    if scenario.optimizer == "adamw":
        # A large eps, so that gradients that are only rounding errors cause small updates.
        return torch.optim.AdamW(params, lr=0.01, eps=1e-3)
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


class HistoryRunner(Run):
    """This rank's sharded model and the unsharded models of all ranks, driven by the same actions.

    Attributes:
        make_model: makes the model of a scenario.
        mismatch: the first difference found; nothing is compared after it.
        version: number of parameter updates that autograd can detect.
        scale: product of the factors by which ``.data`` was multiplied.
        statistics: number of forwards that have updated running statistics.
        backwards: number of backwards, each of which frees the memory of unsharded parameters if ``release`` says so.
    """

    make_model: Callable[[Any], RandomModel] = ScenarioModel

    def __init__(self, scenario: Scenario, *, folder: Path, **options: Any) -> None:
        self.scenario, self.folder, self.saves, self.world_size = scenario, folder, 0, dist.get_world_size()
        optimizer = partial(_optimizer, scenario)
        super().__init__(self.make_model(scenario), tolerance=scenario.tolerance, optimizer=optimizer, **options)
        self.expected = dict(self.reference.named_parameters())
        self.params = {name: self.model.get_parameter(name) for name in self.expected}
        self.trainable = {name: param.requires_grad for name, param in self.expected.items()}
        self.collecting = Collecting(self.transform.sharded.buckets)
        self.pending_losses: list[PendingLoss] = []  # this rank's, of the sharded model
        self.reset()

    def reset(self) -> None:
        for params in (self.params, self.expected):
            for name, param in params.items():
                param.requires_grad_(self.trainable[name])
        super().reset()
        drop_in_a_cycle(self.pending_losses)
        self.pending_losses = []
        self.expected_losses: list[list[PendingLoss]] = [[] for _ in range(self.world_size)]  # unsharded, by rank
        self.mismatch: str | None = None
        self.largest_gradient = 0.0
        self.version, self.scale, self.statistics, self.backwards = 0, 1.0, 0, 0
        self.saved: Any = None

    def fail(self, text: str) -> None:
        self.mismatch = self.mismatch or text

    def close(self, actual: Any, expected: Any, what: str, *, tolerance: float | None = None) -> None:
        """Note the first difference that is larger than the tolerance allows for the largest value."""
        if self.mismatch or (actual.shape == expected.shape and not expected.numel()):
            return
        actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
        largest = max(expected.abs().max().item(), self.largest_term_of(what))
        bound = self.tolerance * (1 + largest)
        try:
            torch.testing.assert_close(actual, expected, rtol=0, atol=bound)
        except AssertionError as error:
            self.fail(f"{what}: {error}\n{actual}\nexpected\n{expected}")

    def largest_term_of(self, what: str) -> float:
        """Return the largest term of a sum: a gradient may be a small sum of large ones, each of which has been rounded."""
        return self.largest_gradient if what.startswith("gradient of") else 0.0

    def compare_state(self) -> None:
        """Compare this rank's rows of parameters and gradients, and its buffers."""
        for name, expected in self.expected.items():
            self.close(self.params[name].to_local(), self.rows(name, expected), f"parameter {name}")
        try:
            self.compare_gradients()
        except AssertionError as error:  # a gradient that is there on one side only
            self.fail(str(error))
        for name, buffer in self.reference.named_buffers():
            self.close(self.model.get_buffer(name), buffer, f"buffer {name}")

    def run_action(self, action: Action) -> None:
        """Run an action: on the sharded model as this rank, and on the unsharded models as every rank.

        Raises:
            Exception: the sharded model raised an error that the action does not provoke.
        """
        if action.slow == self.rank:
            time.sleep(0.02)
        self.collecting.after(action.collects[self.rank] if action.collects else -1)
        getattr(self, f"_{action.kind}")(action)
        self.collecting.after(-1)
        self.compare_state()

    def finish(self) -> None:
        """Compare unsharded parameters. A collective."""
        self._full_state(Action("full_state"))

    def _prepare(self, rank: int, action: Action) -> PendingLoss:
        mode = self.scenario.modes[action.mode]
        inputs = self.make_inputs(torch.Generator().manual_seed(1000 * action.seed + rank), mode.batch)
        inputs = tuple(x.to(DEVICE) for x in inputs)
        inputs[0].requires_grad_(mode.grad)
        return PendingLoss(mode, inputs, self.version, self.scale, self.statistics, self.backwards)

    def _call_unsharded(self, rank: int, pending: PendingLoss) -> torch.Tensor:
        """Return the output of one rank's forward, under the mixed precision policy of the scenario."""
        mode, policy = pending.mode, self.scenario.options.get("mp_policy")
        model = self.unsharded.models[rank].train(mode.training)
        self.statistics += mode.training
        if policy is None or policy.param_dtype is None:
            return model(*pending.inputs, mode.flag)
        named = {name: param.to(policy.param_dtype) for name, param in self.expected.items()}
        cast = pending.inputs[0].to(policy.param_dtype)
        return torch.func.functional_call(model, named, (cast, *pending.inputs[1:], mode.flag))

    @contextlib.contextmanager
    def _mode(self, pending: PendingLoss) -> Iterator[None]:
        with self.model.no_sync() if pending.mode.no_sync else contextlib.nullcontext():
            with torch.set_grad_enabled(pending.mode.grad):
                yield

    @contextlib.contextmanager
    def _expect_error(self, text: str) -> Iterator[None]:
        try:
            yield
        except (IndexError, RuntimeError, Injected) as error:
            if text not in str(error):
                raise
        else:
            self.fail(f"expected an exception with {text!r}, but none was raised")

    # One method for each kind of action: first on the sharded model, then as every rank on the unsharded ones.

    def _forward(self, action: Action) -> None:
        pending = self._prepare(self.rank, action)
        self.model.train(pending.mode.training)
        with self._mode(pending):
            pending.output = self.model(*pending.inputs, pending.mode.flag)
            pending.loss = loss_of(pending.output.double())
        for rank in range(self.world_size):
            expected = self._prepare(rank, action)
            with torch.set_grad_enabled(expected.mode.grad):
                expected.output = self._call_unsharded(rank, expected)
                expected.loss = loss_of(expected.output.double())
            if rank == self.rank:
                self.close(pending.output, expected.output, "output")
            if expected.mode.grad:
                self.expected_losses[rank].append(expected)
        if pending.mode.grad:
            self.pending_losses.append(pending)

    def _fail_forward(self, action: Action) -> None:
        for rank in range(self.world_size):
            pending = self._prepare(rank, action)
            pending.inputs[1][self._position(pending, action.value)] += 1000
            if rank == self.rank:
                self.model.train(pending.mode.training)
                with self._expect_error("out of"), self._mode(pending):
                    self.model(*pending.inputs, pending.mode.flag)
            # Run it unsharded as well: a batch norm before the failing operator has updated its statistics.
            with contextlib.suppress(IndexError):
                self._call_unsharded(rank, pending)

    def _position(self, pending: PendingLoss, wanted: int) -> int:
        return min(wanted, len(self.scenario.other if pending.mode.flag else self.scenario.model.order))

    def _pick(self, action: Action) -> int | None:
        """Return the position of the loss to differentiate, or ``None`` in cases that ``random_histories`` excludes."""
        of_rank = self.expected_losses[self.rank]
        if not of_rank:
            return None
        pending = of_rank[position := action.loss_index % len(of_rank)]
        reads_old_statistics = (
            self.scenario.norm and not pending.mode.training and pending.statistics != self.statistics
        )
        return None if pending.scale != self.scale or reads_old_statistics else position

    def _backward(self, action: Action) -> None:
        position = self._pick(action)
        if position is None:
            return
        mine, actual, done = self.expected_losses[self.rank][position], self.pending_losses[position], True
        try:
            actual.loss.backward(retain_graph=bool(action.value))
        except RuntimeError as error:
            is_freed = self.backwards > mine.backwards and code_of(error) == "step.memory-released-before-backward"
            if not is_freed and (mine.version == self.version or "modified" not in str(error)):
                raise
            done = False
        self.backwards += 1
        picked = [of_rank[position] for of_rank in self.expected_losses]
        if not action.value or not done:
            for losses in (self.pending_losses, *self.expected_losses):
                del losses[position]
        if not done:
            return
        for rank, pending in enumerate(picked):
            try:
                self.unsharded.backward({rank: pending.loss}, retain=bool(action.value))
            except RuntimeError as error:
                self.fail(f"backward succeeded, but the unsharded model's fails: {error}")
            self._note_largest(rank)
        if actual.inputs[0].grad is not None:
            self.close(actual.inputs[0].grad, mine.inputs[0].grad, "gradient of the input")
        if not mine.mode.no_sync:
            self.unsharded.reduce()

    def _note_largest(self, rank: int) -> None:
        """Note the largest value among the gradients of a rank that are not reduced yet."""
        added = [0.0, *(g.abs().max().item() for g in self.unsharded.unreduced[rank].values() if g.numel())]
        self.largest_gradient = max(self.largest_gradient, *added)

    def _drop(self, action: Action) -> None:
        if self.pending_losses:
            position = action.loss_index % len(self.pending_losses)
            for of_rank in self.expected_losses:
                del of_rank[position]
            drop_in_a_cycle(self.pending_losses.pop(position))

    def _fail_backward(self, action: Action) -> None:
        position = self._pick(action)
        if position is None or (expected := self.expected_losses[self.rank][position]).version != self.version:
            return
        if self.backwards > expected.backwards and self.scenario.options["sharding_strategy"].release:
            return  # another error: its memory has been freed
        inside = action.value >= 0
        if inside and (expected.mode.no_sync or any(self.unsharded.unreduced.values())):
            return
        actual = self.pending_losses.pop(position)
        self.backwards += action.value != -1  # whether the compiled backward runs
        if inside:
            actual.inputs[1].data[self._position(actual, action.value)] += 1000
        else:
            (actual.output if action.value == -1 else actual.inputs[0]).register_hook(_raise)
        with self._expect_error("out of" if inside else "injected"):
            actual.loss.backward()
        for rank, of_rank in enumerate(self.expected_losses):
            pending = of_rank.pop(position)
            if action.value == -2:  # the compiled backward has run
                self.unsharded.backward({rank: pending.loss})
        if action.value == -2 and not expected.mode.no_sync:
            self.unsharded.reduce()
        if action.value != -1:
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    def _zero_grad(self, action: Action) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=bool(action.value))

    def _step(self, action: Action) -> None:
        if action.value:
            self._clip(action)
        for optimizer in self.optimizers:
            optimizer.step()
        self.version += 1

    def _clip(self, action: Action) -> None:
        expected = torch.nn.utils.clip_grad_norm_(self.expected.values(), 0.05)
        self.close(tfs.clip_grad_norm_(self.model, 0.05), expected, "norm of gradients")

    def _add(self, action: Action) -> None:
        names = list(self.params)
        name = names[action.value % len(names)]
        with torch.no_grad():
            self.expected[name].add_(0.01)
            if action.seed % 2:
                self.params[name].add_(0.01)
            else:
                with tfs.unsharded(self.model, name) as module:
                    module.get_parameter(name).add_(0.01)
        self.version += 1

    def _scale(self, action: Action) -> None:
        factor = 2.0 if self.scale == 1 else 0.5
        for param in [*self.params.values(), *self.expected.values()]:
            param.data.mul_(factor)
        self.scale *= factor

    def _full_state(self, action: Action) -> None:
        whole, streamed = tfs.full_state_dict(self.model), {}
        if action.seed % 2 == 0:
            streamed = {name: value.clone() for name, value in tfs.stream_full_parameters(self.model)}
        for name, param in self.expected.items():
            self.close(whole[name], param, f"{name} of full_state_dict")
            if streamed:
                self.close(streamed[name], param, f"{name} of stream_full_parameters")

    def _eager(self, action: Action) -> None:
        for rank in range(self.world_size):
            pending = self._prepare(rank, action)
            with torch.no_grad():
                expected = self._call_unsharded(rank, pending)
            if rank == self.rank:
                with tfs.eager(self.model, reshard_after_forward=False) as module:
                    actual = module.train(pending.mode.training)(*pending.inputs, pending.mode.flag)
                self.close(actual, expected, "output of eager")

    def _with_state(self) -> set[str]:
        return {name for name, param in self.expected.items() if self.optimizers[1].state.get(param)}

    def _save(self, action: Action) -> None:
        if {name for name, param in self.expected.items() if param.requires_grad} <= self._with_state():
            values = {name: param.detach().clone() for name, param in self.expected.items()}
            self.saved = values, copy.deepcopy(self.optimizers[1].state_dict()), self._with_state()
            self.saves += 1
            extra = {"save": self.saves}
            tfs.save_checkpoint(self.model, self.folder / str(self.saves), self.optimizers[0], extra=extra)

    def _load(self, action: Action) -> None:
        """Load what was saved with state for the parameters that have optimizer state now."""
        if self.saved is None or self.saved[2] != self._with_state():
            return
        folder = self.folder / str(self.saves)
        extra = tfs.load_checkpoint(self.model, folder, self.optimizers[0], extra={"save": 0})
        if extra != {"save": self.saves}:
            self.fail(f"extra of the checkpoint: {extra}, expected save {self.saves}")
        values, state, _ = self.saved
        with torch.no_grad():
            for name, param in self.expected.items():
                param.copy_(values[name])
        self.optimizers[1].load_state_dict(copy.deepcopy(state))
        self.version += 1

    def _freeze(self, action: Action) -> None:
        names = [name for name, trains in self.trainable.items() if trains and not name.startswith("head.")]
        if names:
            name = names[action.value % len(names)]
            for param in (self.params[name], self.expected[name]):
                param.requires_grad_(not param.requires_grad)


def _raise(grad: torch.Tensor) -> None:
    raise Injected("injected")
