"""Runner of random histories: the same calls on the sharded model and on unsharded copies, compared after every call.

Use it to check that some order of calls leaves the sharded model with the values of an unsharded one:
:class:`HistoryRunner` takes a scenario of ``random_histories`` and runs its histories action by action.

Each process simulates all ranks with :class:`unsharded_ranks.UnshardedRanks`. It knows every rank's batches and history and
computes every rank's gradients itself, so only the sharded model communicates. The comparison of outputs, buffers, and this
rank's rows of parameters and gradients does not communicate either, which keeps a delayed rank delayed until the next call.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp, full_state_dict

import thunder
import torch
from random_histories import Action, Scenario, ScenarioModel
from reference import loss_of
from unsharded_ranks import PendingLoss, UnshardedRanks, batch_of, optimizer_of

__all__ = ["HistoryRunner"]


class Injected(Exception):
    """An error that a hook raises on purpose."""


class HistoryRunner:
    """This rank's sharded model and the unsharded models of all ranks, driven by the same actions.

    Attributes:
        mismatch: the first difference found; nothing is compared after it.
        gradients_diverged: whether only some ranks called a backward that reduces, so that there is no mean to compare with.
        unnoticed_divergence: whether this rank called such a backward and got no error.
    """

    def __init__(self, scenario: Scenario, rank: int, world_size: int, *, folder: Path, **options: Any) -> None:
        self.scenario, self.rank, self.world_size, self.folder = scenario, rank, world_size, folder
        model = ScenarioModel(scenario)
        self.unsharded = UnshardedRanks(scenario, copy.deepcopy(model), world_size)
        self.transform = fsdp(**options)
        self.sharded = thunder.jit(model, transforms=[self.transform])
        self.locations = {name: self.transform.sharded.locations[name] for name in self.unsharded.params}
        self.params = {name: self.transform.sharded.shards[name] for name in self.locations}
        self.saves = 0
        self.reset()

    def reset(self) -> None:
        self.unsharded.reset()
        with torch.no_grad():
            for name, param in self.params.items():
                param.requires_grad_(self.unsharded.trainable[name])
                param.to_local().copy_(self.local_rows(name, self.unsharded.initial[name]))
                param.grad = None
            for name, value in self.unsharded.initial_buffers.items():
                self.sharded.get_buffer(name).copy_(value)
        self.optimizer = optimizer_of(self.scenario, list(self.params.values()))
        self.pending_losses: list[PendingLoss] = []  # this rank's, of the sharded model
        self.expected_losses: list[list[PendingLoss]] = [[] for _ in range(self.world_size)]  # unsharded, by rank
        self.mismatch: str | None = None
        self.gradients_diverged = self.unnoticed_divergence = False

    def local_rows(self, name: str, unsharded_value: torch.Tensor) -> torch.Tensor:
        bucket, index = self.locations[name]
        return bucket.local_rows(index, unsharded_value)

    def fail(self, text: str) -> None:
        self.mismatch = self.mismatch or text

    def compare(self, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        if self.mismatch or actual.shape != expected.shape or not expected.numel():
            return (
                None
                if actual.shape == expected.shape
                else self.fail(f"{what}: {actual.shape}, expected {expected.shape}")
            )
        actual, expected = actual.detach().double(), expected.detach().double()
        difference = (actual - expected).abs().max().item()
        bound = self.scenario.tolerance * (1 + expected.abs().max().item())
        if not difference <= bound:  # true for nan as well
            self.fail(f"{what}: off by {difference:.3g}, {bound:.1g} allowed\n{actual}\nexpected\n{expected}")
        return None

    def compare_state(self) -> None:
        """Compare this rank's rows of parameters and gradients, and its buffers."""
        if self.gradients_diverged:
            return
        for name, expected in self.unsharded.params.items():
            actual = self.params[name]
            self.compare(f"parameter {name}", actual.to_local(), self.local_rows(name, expected))
            if (actual.grad is None) != (expected.grad is None):
                self.fail(f"gradient of {name}: {actual.grad}, expected {expected.grad}")
            elif actual.grad is not None and expected.grad is not None:
                self.compare(f"gradient of {name}", actual.grad.to_local(), self.local_rows(name, expected.grad))
        for name, buffer in self.unsharded.models[self.rank].named_buffers():
            self.compare(f"buffer {name}", self.sharded.get_buffer(name), buffer)

    def run_actions(self, actions: Sequence[Action | None]) -> None:
        """Run one action for each rank: this rank's on the sharded model, and all of them on the unsharded models.

        Raises:
            Exception: the sharded model raised an error that the action does not provoke.
        """
        mine = actions[self.rank]
        if mine is not None and mine.slow == self.rank:
            time.sleep(0.02)
        together = [None if action is None else replace(action, slow=None) for action in actions]
        for kind in sorted({action.kind for action in together if action is not None}):
            act: Callable[[list[Action | None]], None] = getattr(self, f"_{kind}")
            act([action if action is not None and action.kind == kind else None for action in together])
        self.compare_state()

    def finish(self) -> None:
        """Compare unsharded parameters. A collective: a rank whose history ended early must call it as well."""
        self._full_state([Action("full_state")] * self.world_size)

    # One method for each kind of action: first this rank's on the sharded model, then every rank's on the unsharded ones.

    def _forward(self, actions: Sequence[Action | None]) -> None:
        mine = actions[self.rank]
        pending = None if mine is None else self._prepare(self.rank, mine)
        if pending is not None:
            self.sharded.train(pending.mode.training)
            with self._mode(pending):
                pending.output = self.sharded(*pending.inputs, pending.mode.flag)
                pending.loss = loss_of(pending.output.double())
        for rank, action in enumerate(actions):
            if action is None:
                continue
            expected = self._prepare(rank, action)
            with torch.set_grad_enabled(expected.mode.grad):
                expected.output = self.unsharded.call(rank, expected.inputs, expected.mode)
                expected.loss = loss_of(expected.output.double())
            if rank == self.rank and pending is not None:
                self.compare("output", pending.output, expected.output)
                if pending.mode.grad:
                    self.pending_losses.append(pending)
            if expected.mode.grad:
                self.expected_losses[rank].append(expected)

    def _prepare(self, rank: int, action: Action) -> PendingLoss:
        pending = PendingLoss(self.scenario.modes[action.mode], self.unsharded)
        pending.inputs = batch_of(self.unsharded.models[rank], action, pending.mode, rank)
        pending.inputs[0].requires_grad_(pending.mode.grad)
        return pending

    @contextlib.contextmanager
    def _mode(self, pending: PendingLoss) -> Iterator[None]:
        with self.sharded.no_sync() if pending.mode.no_sync else contextlib.nullcontext():
            with torch.set_grad_enabled(pending.mode.grad):
                yield

    def _fail_forward(self, actions: Sequence[Action | None]) -> None:
        for rank, action in enumerate(actions):
            if action is None:
                continue
            pending = self._prepare(rank, action)
            pending.inputs[1][self._position(pending, action.value)] += 1000
            if rank == self.rank:
                self.sharded.train(pending.mode.training)
                with self._expect_error("out of"), self._mode(pending):
                    self.sharded(*pending.inputs, pending.mode.flag)
            # Run it unsharded as well: a batch norm before the failing operator has updated its statistics.
            with contextlib.suppress(IndexError):
                self.unsharded.call(rank, pending.inputs, pending.mode)

    def _position(self, pending: PendingLoss, wanted: int) -> int:
        return min(wanted, len(self.scenario.other if pending.mode.flag else self.scenario.model.order))

    @contextlib.contextmanager
    def _expect_error(self, text: str) -> Iterator[None]:
        try:
            yield
        except (IndexError, RuntimeError, Injected) as error:
            if text not in str(error):
                raise
        else:
            self.fail(f"expected an exception with {text!r}, but none was raised")

    def _pick(self, rank: int, action: Action) -> PendingLoss | None:
        """Return the loss to differentiate, or ``None`` in cases that ``random_histories`` excludes."""
        of_rank = self.expected_losses[rank]
        pending = of_rank[action.loss_index % len(of_rank)] if of_rank else None
        if pending is None or pending.scale != self.unsharded.scale:
            return None
        read_statistics = self.scenario.norm and not pending.mode.training
        return None if read_statistics and pending.statistics != self.unsharded.statistics else pending

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
                if mine.version == self.unsharded.version or "modified" not in str(error):
                    raise
                done = False
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
                self.unsharded.accumulate(rank, self.unsharded.grads(pending.loss, retain=bool(other.value)))
            except RuntimeError as error:
                self.fail(f"backward succeeded, but the unsharded model's fails: {error}")
            synced += not pending.mode.no_sync
        if actual is not None and mine is not None and done and actual.inputs[0].grad is not None:
            self.compare("gradient of the input", actual.inputs[0].grad, mine.inputs[0].grad)
        if synced == self.world_size:
            self.unsharded.reduce()
        elif synced:
            self.gradients_diverged = True
            self.unnoticed_divergence = mine is not None and not mine.mode.no_sync

    def _fail_backward(self, actions: Sequence[Action | None]) -> None:
        action = _same(actions)
        expected = self._pick(self.rank, action)
        if expected is None or expected.version != self.unsharded.version:
            return
        inside, position = action.value >= 0, self.expected_losses[self.rank].index(expected)
        if inside and (expected.mode.no_sync or any(self.unsharded.unreduced)):
            return
        actual = self.pending_losses.pop(position)
        if inside:
            actual.inputs[1].data[self._position(actual, action.value)] += 1000
        else:
            (actual.output if action.value == -1 else actual.inputs[0]).register_hook(_raise)
        with self._expect_error("out of" if inside else "injected"):
            actual.loss.backward()
        for rank, of_rank in enumerate(self.expected_losses):
            pending = of_rank.pop(position)
            if action.value == -2:  # the compiled backward has run
                self.unsharded.accumulate(rank, self.unsharded.grads(pending.loss, retain=False))
        if action.value == -2 and not expected.mode.no_sync:
            self.unsharded.reduce()
        if action.value != -1:
            for optimizer in (self.optimizer, self.unsharded.optimizer):
                optimizer.zero_grad()

    def _zero_grad(self, actions: Sequence[Action | None]) -> None:
        for optimizer in (self.optimizer, self.unsharded.optimizer):
            optimizer.zero_grad(set_to_none=bool(_same(actions).value))

    def _step(self, actions: Sequence[Action | None]) -> None:
        if _same(actions).value:
            self._clip(actions)
        if self.unnoticed_divergence:
            self.fail("optimizer step with gradients of a backward that only some ranks have called")
        self.optimizer.step()
        self.unsharded.optimizer.step()
        self.unsharded.version += 1

    def _clip(self, actions: Sequence[Action | None]) -> None:
        expected = torch.nn.utils.clip_grad_norm_(self.unsharded.params.values(), 0.05)
        if actions[self.rank] is not None:
            actual = tfs.clip_grad_norm_(self.sharded, 0.05)
            if not self.gradients_diverged:
                self.compare("norm of gradients", actual, expected)
        self.gradients_diverged |= None in actions

    def _add(self, actions: Sequence[Action | None]) -> None:
        names, action = list(self.params), _same(actions)
        name = names[action.value % len(names)]
        with torch.no_grad():
            self.unsharded.params[name].add_(0.01)
            if None in actions or action.seed % 2:
                self.params[name].add_(0.01)
            else:
                with tfs.unsharded(self.sharded, name) as module:
                    module.get_parameter(name).add_(0.01)
        self.unsharded.version += 1

    def _scale(self, actions: Sequence[Action | None]) -> None:
        _same(actions)
        factor = 2.0 if self.unsharded.scale == 1 else 0.5
        for param in [*self.params.values(), *self.unsharded.params.values()]:
            param.data.mul_(factor)
        self.unsharded.scale *= factor

    def _full_state(self, actions: Sequence[Action | None]) -> None:
        if (mine := actions[self.rank]) is not None:
            unsharded_value = full_state_dict(self.sharded)
            streamed = {}
            if mine.seed % 2 == 0:
                streamed = {name: value.clone() for name, value in tfs.stream_full_parameters(self.sharded)}
            if not self.gradients_diverged:
                for name, param in self.unsharded.params.items():
                    self.compare(f"{name} of full_state_dict", unsharded_value[name], param)
                    if streamed:
                        self.compare(f"{name} of stream_full_parameters", streamed[name], param)

    def _eager(self, actions: Sequence[Action | None]) -> None:
        for rank, action in enumerate(actions):
            if action is None:
                continue
            pending, actual = self._prepare(rank, action), None
            if rank == self.rank:
                with tfs.eager(self.sharded, reshard_after_forward=False) as module:
                    actual = module.train(pending.mode.training)(*pending.inputs, pending.mode.flag)
            with torch.no_grad():
                expected = self.unsharded.call(rank, pending.inputs, pending.mode)
            if actual is not None:
                self.compare("output of eager", actual, expected)

    def _save(self, actions: Sequence[Action | None]) -> None:
        if self.unsharded.save():
            self.saves += 1
            extra = {"save": self.saves}
            tfs.save_checkpoint(self.folder / str(self.saves), self.sharded, self.optimizer, extra=extra)

    def _load(self, actions: Sequence[Action | None]) -> None:
        if self.unsharded.can_load():
            folder = self.folder / str(self.saves)
            extra = tfs.load_checkpoint(folder, self.sharded, self.optimizer, extra={"save": 0})
            if extra != {"save": self.saves}:
                self.fail(f"extra of the checkpoint: {extra}, expected save {self.saves}")
            self.unsharded.load()

    def _freeze(self, actions: Sequence[Action | None]) -> None:
        names = [name for name, trains in self.unsharded.trainable.items() if trains and not name.startswith("head.")]
        if names:
            name = names[_same(actions).value % len(names)]
            for param in (self.params[name], self.unsharded.params[name]):
                param.requires_grad_(not param.requires_grad)


def _raise(grad: torch.Tensor) -> None:
    raise Injected("injected")


def _same(actions: Sequence[Action | None]) -> Action:
    """Return the action that is the same on all ranks whose history has not ended."""
    [action] = {action for action in actions if action is not None}
    return action
