"""Runner of random histories: the same calls on the sharded model and on the unsharded one, compared after every call.

:class:`HistoryRunner` takes a scenario of ``random_histories`` and runs its histories action by action. It is a ``Run`` in
which ranks may act differently: it knows every rank's history, so that only the sharded model communicates. Its comparisons
do not communicate either, which keeps a delayed rank delayed until the next call, and note a difference instead of raising
it, so that the other ranks are not left alone in a collective.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs

import torch
import torch.distributed as dist
from device import DEVICE
from garbage import Collecting, drop_in_a_cycle
from random_histories import Action, Mode, Scenario, ScenarioModel
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
        mismatch: the first difference found; nothing is compared after it.
        gradients_diverged: whether only some ranks called a backward that reduces, so that there is no mean to compare with.
        unnoticed_divergence: whether this rank called such a backward and got no error.
        version: number of parameter updates that autograd can detect.
        scale: product of the factors by which ``.data`` was multiplied.
        statistics: number of forwards that have updated running statistics.
        backwards: number of backwards, each of which frees the memory of unsharded parameters if ``release`` says so.
    """

    def __init__(self, scenario: Scenario, *, folder: Path, **options: Any) -> None:
        self.scenario, self.folder, self.saves, self.world_size = scenario, folder, 0, dist.get_world_size()
        optimizer = partial(_optimizer, scenario)
        super().__init__(ScenarioModel(scenario), tolerance=scenario.tolerance, optimizer=optimizer, **options)
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
        self.gradients_diverged = self.unnoticed_divergence = False
        self.version, self.scale, self.statistics, self.backwards = 0, 1.0, 0, 0
        self.saved: Any = None

    def fail(self, text: str) -> None:
        self.mismatch = self.mismatch or text

    def close(self, actual: Any, expected: Any, what: str, *, tolerance: float | None = None) -> None:
        """Note the first difference that is larger than the tolerance allows for the largest value."""
        if self.mismatch or (actual.shape == expected.shape and not expected.numel()):
            return
        actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
        # A gradient may be the small sum of large ones, each of which has been rounded.
        largest = max(expected.abs().max().item(), self.largest_gradient if what.startswith("gradient of") else 0.0)
        bound = self.tolerance * (1 + largest)
        try:
            torch.testing.assert_close(actual, expected, rtol=0, atol=bound)
        except AssertionError as error:
            self.fail(f"{what}: {error}\n{actual}\nexpected\n{expected}")

    def compare_state(self) -> None:
        """Compare this rank's rows of parameters and gradients, and its buffers."""
        if self.gradients_diverged:
            return
        for name, expected in self.expected.items():
            self.close(self.params[name].to_local(), self.rows(name, expected), f"parameter {name}")
        try:
            self.compare_gradients()
        except AssertionError as error:  # a gradient that is there on one side only
            self.fail(str(error))
        for name, buffer in self.reference.named_buffers():
            self.close(self.model.get_buffer(name), buffer, f"buffer {name}")

    def run_actions(self, actions: Sequence[Action | None]) -> None:
        """Run one action for each rank: this rank's on the sharded model, and all of them on the unsharded models.

        Raises:
            Exception: the sharded model raised an error that the action does not provoke.
        """
        mine = actions[self.rank]
        if mine is not None and mine.slow == self.rank:
            time.sleep(0.02)
        self.collecting.after(mine.collects[self.rank] if mine is not None and mine.collects else -1)
        together = [None if action is None else replace(action, slow=None, collects=()) for action in actions]
        for kind in sorted({action.kind for action in together if action is not None}):
            act: Callable[[list[Action | None]], None] = getattr(self, f"_{kind}")
            act([action if action is not None and action.kind == kind else None for action in together])
        self.collecting.after(-1)
        self.compare_state()

    def finish(self) -> None:
        """Compare unsharded parameters. A collective: a rank whose history ended early must call it as well."""
        self._full_state([Action("full_state")] * self.world_size)

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

    # One method for each kind of action: first this rank's on the sharded model, then every rank's on the unsharded ones.

    def _forward(self, actions: Sequence[Action | None]) -> None:
        mine = actions[self.rank]
        pending = None if mine is None else self._prepare(self.rank, mine)
        if pending is not None:
            self.model.train(pending.mode.training)
            with self._mode(pending):
                pending.output = self.model(*pending.inputs, pending.mode.flag)
                pending.loss = loss_of(pending.output.double())
        for rank, action in enumerate(actions):
            if action is None:
                continue
            expected = self._prepare(rank, action)
            with torch.set_grad_enabled(expected.mode.grad):
                expected.output = self._call_unsharded(rank, expected)
                expected.loss = loss_of(expected.output.double())
            if rank == self.rank and pending is not None:
                self.close(pending.output, expected.output, "output")
                if pending.mode.grad:
                    self.pending_losses.append(pending)
            if expected.mode.grad:
                self.expected_losses[rank].append(expected)

    def _fail_forward(self, actions: Sequence[Action | None]) -> None:
        for rank, action in enumerate(actions):
            if action is None:
                continue
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

    def _pick(self, rank: int, action: Action) -> PendingLoss | None:
        """Return the loss to differentiate, or ``None`` in cases that ``random_histories`` excludes."""
        of_rank = self.expected_losses[rank]
        pending = of_rank[action.loss_index % len(of_rank)] if of_rank else None
        if pending is None or pending.scale != self.scale:
            return None
        read_statistics = self.scenario.norm and not pending.mode.training
        return None if read_statistics and pending.statistics != self.statistics else pending

    def _backward(self, actions: Sequence[Action | None]) -> None:
        picked = [None if action is None else self._pick(rank, action) for rank, action in enumerate(actions)]
        mine, action = picked[self.rank], actions[self.rank]
        done, actual = True, None
        if mine is not None and action is not None:
            position = self.expected_losses[self.rank].index(mine)
            actual = self.pending_losses[position]
            try:
                actual.loss.backward(retain_graph=bool(action.value))
            except RuntimeError as error:
                is_freed = self.backwards > mine.backwards and "was freed after another backward" in str(error)
                if not is_freed and (mine.version == self.version or "modified" not in str(error)):
                    raise
                done = False
            self.backwards += 1
            if not action.value or not done:
                self.pending_losses.pop(position)
        synced = 0
        for rank, (pending, other) in enumerate(zip(picked, actions, strict=True)):
            if pending is None or other is None:
                continue
            if not other.value or not done:
                self.expected_losses[rank].remove(pending)
            if not done:
                continue
            try:
                self.unsharded.backward({rank: pending.loss}, retain=bool(other.value))
            except RuntimeError as error:
                self.fail(f"backward succeeded, but the unsharded model's fails: {error}")
            added = [0.0, *(g.abs().max().item() for g in self.unsharded.unreduced[rank].values() if g.numel())]
            self.largest_gradient = max(self.largest_gradient, *added)
            synced += not pending.mode.no_sync
        if actual is not None and mine is not None and done and actual.inputs[0].grad is not None:
            self.close(actual.inputs[0].grad, mine.inputs[0].grad, "gradient of the input")
        if synced == self.world_size:
            self.unsharded.reduce()
        elif synced:
            self.gradients_diverged = True
            self.unnoticed_divergence = mine is not None and not mine.mode.no_sync

    def _drop(self, actions: Sequence[Action | None]) -> None:
        for rank, action in enumerate(actions):
            of_rank = self.expected_losses[rank]
            if action is None or not of_rank:
                continue
            position = action.loss_index % len(of_rank)
            of_rank.pop(position)
            if rank == self.rank:
                drop_in_a_cycle(self.pending_losses.pop(position))

    def _fail_backward(self, actions: Sequence[Action | None]) -> None:
        action = _same(actions)
        expected = self._pick(self.rank, action)
        if expected is None or expected.version != self.version:
            return
        if self.backwards > expected.backwards and self.scenario.options["sharding_strategy"].release:
            return  # another error: its memory has been freed
        inside, position = action.value >= 0, self.expected_losses[self.rank].index(expected)
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

    def _zero_grad(self, actions: Sequence[Action | None]) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=bool(_same(actions).value))

    def _step(self, actions: Sequence[Action | None]) -> None:
        if _same(actions).value:
            self._clip(actions)
        if self.unnoticed_divergence:
            self.fail("optimizer step with gradients of a backward that only some ranks have called")
        for optimizer in self.optimizers:
            optimizer.step()
        self.version += 1

    def _clip(self, actions: Sequence[Action | None]) -> None:
        expected = torch.nn.utils.clip_grad_norm_(self.expected.values(), 0.05)
        if actions[self.rank] is not None:
            actual = tfs.clip_grad_norm_(self.model, 0.05)
            if not self.gradients_diverged:
                self.close(actual, expected, "norm of gradients")
        self.gradients_diverged |= None in actions

    def _add(self, actions: Sequence[Action | None]) -> None:
        names, action = list(self.params), _same(actions)
        name = names[action.value % len(names)]
        with torch.no_grad():
            self.expected[name].add_(0.01)
            if None in actions or action.seed % 2:
                self.params[name].add_(0.01)
            else:
                with tfs.unsharded(self.model, name) as module:
                    module.get_parameter(name).add_(0.01)
        self.version += 1

    def _scale(self, actions: Sequence[Action | None]) -> None:
        _same(actions)
        factor = 2.0 if self.scale == 1 else 0.5
        for param in [*self.params.values(), *self.expected.values()]:
            param.data.mul_(factor)
        self.scale *= factor

    def _full_state(self, actions: Sequence[Action | None]) -> None:
        if (mine := actions[self.rank]) is not None:
            unsharded_value = tfs.full_state_dict(self.model)
            streamed = {}
            if mine.seed % 2 == 0:
                streamed = {name: value.clone() for name, value in tfs.stream_full_parameters(self.model)}
            if not self.gradients_diverged:
                for name, param in self.expected.items():
                    self.close(unsharded_value[name], param, f"{name} of full_state_dict")
                    if streamed:
                        self.close(streamed[name], param, f"{name} of stream_full_parameters")

    def _eager(self, actions: Sequence[Action | None]) -> None:
        for rank, action in enumerate(actions):
            if action is None:
                continue
            pending, actual = self._prepare(rank, action), None
            if rank == self.rank:
                with tfs.eager(self.model, reshard_after_forward=False) as module:
                    actual = module.train(pending.mode.training)(*pending.inputs, pending.mode.flag)
            with torch.no_grad():
                expected = self._call_unsharded(rank, pending)
            if actual is not None:
                self.close(actual, expected, "output of eager")

    def _with_state(self) -> set[str]:
        return {name for name, param in self.expected.items() if self.optimizers[1].state.get(param)}

    def _save(self, actions: Sequence[Action | None]) -> None:
        if {name for name, param in self.expected.items() if param.requires_grad} <= self._with_state():
            values = {name: param.detach().clone() for name, param in self.expected.items()}
            self.saved = values, copy.deepcopy(self.optimizers[1].state_dict()), self._with_state()
            self.saves += 1
            extra = {"save": self.saves}
            tfs.save_checkpoint(self.model, self.folder / str(self.saves), self.optimizers[0], extra=extra)

    def _load(self, actions: Sequence[Action | None]) -> None:
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

    def _freeze(self, actions: Sequence[Action | None]) -> None:
        names = [name for name, trains in self.trainable.items() if trains and not name.startswith("head.")]
        if names:
            name = names[_same(actions).value % len(names)]
            for param in (self.params[name], self.expected[name]):
                param.requires_grad_(not param.requires_grad)


def _raise(grad: torch.Tensor) -> None:
    raise Injected("injected")


def _same(actions: Sequence[Action | None]) -> Action:
    """Return the action that is the same on all ranks whose history has not ended."""
    [action] = {action for action in actions if action is not None}
    return action
