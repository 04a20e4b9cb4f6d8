"""Runs histories (``random_histories``) on a sharded model, and beside it on unsharded models of all ranks.

Each process plays all ranks on unsharded copies, :class:`world.World`: their batches and their own histories are known, so
no gradient has to travel, and the sharded model's process group carries nothing but its own traffic. After every call
outputs, buffers, and this rank's rows of parameters and gradients are compared, without communication, so that a rank
that comes late to one call is still late at the next.
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
from random_histories import Action, Life, LivedModel
from reference import loss_of
from unsharded_ranks import Live, World, batch_of, optimizer_of

__all__ = ["Pair"]


class Injected(Exception):
    """Raised by a hook."""


class Pair:
    """The sharded model of this rank beside the world of all.

    Attributes:
        mismatch: the first difference that was found; nothing is compared after it.
        parted: whether ranks called backward differently, so that gradients are no mean over all of them.
        misled: whether this rank was among those that called it, and nothing has told it.
    """

    def __init__(self, life: Life, rank: int, world_size: int, *, folder: Path, **options: Any) -> None:
        self.life, self.rank, self.world_size, self.folder = life, rank, world_size, folder
        model = LivedModel(life)
        self.world = World(life, copy.deepcopy(model), world_size)
        self.transform = fsdp(**options)
        self.sharded = thunder.jit(model, transforms=[self.transform])
        self.locations = {name: self.transform.sharded.locations[name] for name in self.world.params}
        self.params = {name: self.transform.sharded.shards[name] for name in self.locations}
        self.saves = 0
        self.reset()

    def reset(self) -> None:
        self.world.reset()
        with torch.no_grad():
            for name, param in self.params.items():
                param.requires_grad_(self.world.trainable[name]).copy_(self.local_rows(name, self.world.initial[name]))
                param.grad = None
            for name, value in self.world.initial_buffers.items():
                self.sharded.get_buffer(name).copy_(value)
        self.optimizer = optimizer_of(self.life, list(self.params.values()))
        self.live: list[Live] = []  # of this rank
        self.theirs: list[list[Live]] = [[] for _ in range(self.world_size)]  # of every rank, in the world
        self.mismatch: str | None = None
        self.parted = self.misled = False

    def local_rows(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        bucket, index = self.locations[name]
        return bucket.local_rows(index, whole)

    def fail(self, text: str) -> None:
        self.mismatch = self.mismatch or text

    def compare(self, what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        if self.mismatch or ours.shape != theirs.shape or not theirs.numel():
            return None if ours.shape == theirs.shape else self.fail(f"{what}: {ours.shape}, expected {theirs.shape}")
        ours, theirs = ours.detach().double(), theirs.detach().double()
        difference = (ours - theirs).abs().max().item()
        bound = self.life.tolerance * (1 + theirs.abs().max().item())
        if not difference <= bound:  # also if it is nan
            self.fail(f"{what}: off by {difference:.3g}, {bound:.1g} allowed\n{ours}\nexpected\n{theirs}")
        return None

    def compare_state(self) -> None:
        """Compares this rank's rows of parameters and gradients, and its buffers."""
        if self.parted:
            return
        for name, theirs in self.world.params.items():
            ours = self.params[name]
            self.compare(f"parameter {name}", ours, self.local_rows(name, theirs))
            if (ours.grad is None) != (theirs.grad is None):
                self.fail(f"gradient of {name}: {ours.grad}, expected {theirs.grad}")
            elif ours.grad is not None and theirs.grad is not None:
                self.compare(f"gradient of {name}", ours.grad, self.local_rows(name, theirs.grad))
        for name, buffer in self.world.models[self.rank].named_buffers():
            self.compare(f"buffer {name}", self.sharded.get_buffer(name), buffer)

    def do(self, actions: Sequence[Action | None]) -> None:
        """Does what each rank does at one position of its history: this rank on the sharded model, all in the world.

        Raises:
            Exception: what the sharded model raises where it must not.
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
        """Compares whole parameters: a collective, also for a rank whose history ended early."""
        self._full_state([Action("full_state")] * self.world_size)

    # Each kind of action: this rank's on the sharded model first, then everybody's in the world.

    def _forward(self, actions: Sequence[Action | None]) -> None:
        mine = actions[self.rank]
        live = None if mine is None else self._live(self.rank, mine)
        if live is not None:
            self.sharded.train(live.mode.training)
            with self._mode(live):
                live.output = self.sharded(*live.inputs, live.mode.flag)
                live.loss = loss_of(live.output.double())
        for rank, action in enumerate(actions):
            if action is None:
                continue
            theirs = self._live(rank, action)
            with torch.set_grad_enabled(theirs.mode.grad):
                theirs.output = self.world.call(rank, theirs.inputs, theirs.mode)
                theirs.loss = loss_of(theirs.output.double())
            if rank == self.rank and live is not None:
                self.compare("output", live.output, theirs.output)
                if live.mode.grad:
                    self.live.append(live)
            if theirs.mode.grad:
                self.theirs[rank].append(theirs)

    def _live(self, rank: int, action: Action) -> Live:
        live = Live(self.life.modes[action.mode], self.world)
        live.inputs = batch_of(self.world.models[rank], action, live.mode, rank)
        live.inputs[0].requires_grad_(live.mode.grad)
        return live

    @contextlib.contextmanager
    def _mode(self, live: Live) -> Iterator[None]:
        with self.sharded.no_sync() if live.mode.no_sync else contextlib.nullcontext():
            with torch.set_grad_enabled(live.mode.grad):
                yield

    def _fail_forward(self, actions: Sequence[Action | None]) -> None:
        for rank, action in enumerate(actions):
            if action is None:
                continue
            live = self._live(rank, action)
            live.inputs[1][self._position(live, action.value)] += 1000
            if rank == self.rank:
                self.sharded.train(live.mode.training)
                with self._expected("out of"), self._mode(live):
                    self.sharded(*live.inputs, live.mode.flag)
            with contextlib.suppress(IndexError):  # a batch norm before it has written its statistics
                self.world.call(rank, live.inputs, live.mode)

    def _position(self, live: Live, wanted: int) -> int:
        return min(wanted, len(self.life.other if live.mode.flag else self.life.model.order))

    @contextlib.contextmanager
    def _expected(self, text: str) -> Iterator[None]:
        try:
            yield
        except (IndexError, RuntimeError, Injected) as error:
            if text not in str(error):
                raise
        else:
            self.fail(f"no exception, expected one: {text}")

    def _pick(self, rank: int, action: Action) -> Live | None:
        """The loss to differentiate, or none: see what histories leave out, in ``random_histories``."""
        of_rank = self.theirs[rank]
        live = of_rank[action.which % len(of_rank)] if of_rank else None
        if live is None or live.scale != self.world.scale:
            return None
        read_statistics = self.life.norm and not live.mode.training
        return None if read_statistics and live.statistics != self.world.statistics else live

    def _backward(self, actions: Sequence[Action | None]) -> None:
        picked = [None if action is None else self._pick(rank, action) for rank, action in enumerate(actions)]
        mine, action = picked[self.rank], actions[self.rank]
        done, ours = True, None
        if mine is not None and action is not None:
            position = self.theirs[self.rank].index(mine)
            ours = self.live[position]
            try:
                ours.loss.backward(retain_graph=bool(action.value))
            except RuntimeError as error:
                if mine.version == self.world.version or "modified" not in str(error):
                    raise
                done = False
            if not action.value or not done:
                self.live.pop(position)
        synced = 0
        for rank, (live, other) in enumerate(zip(picked, actions, strict=True)):
            if live is None or other is None:
                continue
            if not other.value or not done:
                self.theirs[rank].remove(live)
            if not done:
                continue
            try:
                self.world.accumulate(rank, self.world.grads(live.loss, retain=bool(other.value)))
            except RuntimeError as error:
                self.fail(f"backward passed, but unsharded it fails: {error}")
            synced += not live.mode.no_sync
        if ours is not None and mine is not None and done and ours.inputs[0].grad is not None:
            self.compare("gradient of the input", ours.inputs[0].grad, mine.inputs[0].grad)
        if synced == self.world_size:
            self.world.reduce()
        elif synced:
            self.parted = True
            self.misled = mine is not None and not mine.mode.no_sync

    def _fail_backward(self, actions: Sequence[Action | None]) -> None:
        action = _same(actions)
        theirs = self._pick(self.rank, action)
        if theirs is None or theirs.version != self.world.version:
            return
        inside, position = action.value >= 0, self.theirs[self.rank].index(theirs)
        if inside and (theirs.mode.no_sync or any(self.world.unreduced)):
            return
        ours = self.live.pop(position)
        if inside:
            ours.inputs[1].data[self._position(ours, action.value)] += 1000
        else:
            (ours.output if action.value == -1 else ours.inputs[0]).register_hook(_raise)
        with self._expected("out of" if inside else "injected"):
            ours.loss.backward()
        for rank, of_rank in enumerate(self.theirs):
            live = of_rank.pop(position)
            if action.value == -2:  # the compiled backward has run
                self.world.accumulate(rank, self.world.grads(live.loss, retain=False))
        if action.value == -2 and not theirs.mode.no_sync:
            self.world.reduce()
        if action.value != -1:
            for optimizer in (self.optimizer, self.world.optimizer):
                optimizer.zero_grad()

    def _zero_grad(self, actions: Sequence[Action | None]) -> None:
        for optimizer in (self.optimizer, self.world.optimizer):
            optimizer.zero_grad(set_to_none=bool(_same(actions).value))

    def _step(self, actions: Sequence[Action | None]) -> None:
        if _same(actions).value:
            self._clip(actions)
        if self.misled:
            self.fail("an optimizer step with gradients of a backward that not all ranks have called")
        self.optimizer.step()
        self.world.optimizer.step()
        self.world.version += 1

    def _clip(self, actions: Sequence[Action | None]) -> None:
        theirs = torch.nn.utils.clip_grad_norm_(self.world.params.values(), 0.05)
        if actions[self.rank] is not None:
            ours = tfs.clip_grad_norm_(self.sharded, 0.05)
            if not self.parted:
                self.compare("norm of gradients", ours, theirs)
        self.parted |= None in actions

    def _add(self, actions: Sequence[Action | None]) -> None:
        names = list(self.params)
        name = names[_same(actions).value % len(names)]
        with torch.no_grad():
            for param in (self.params[name], self.world.params[name]):
                param.add_(0.01)
        self.world.version += 1

    def _scale(self, actions: Sequence[Action | None]) -> None:
        _same(actions)
        factor = 2.0 if self.world.scale == 1 else 0.5
        for param in [*self.params.values(), *self.world.params.values()]:
            param.data.mul_(factor)
        self.world.scale *= factor

    def _full_state(self, actions: Sequence[Action | None]) -> None:
        if actions[self.rank] is not None:
            whole = full_state_dict(self.sharded)
            if not self.parted:
                for name, param in self.world.params.items():
                    self.compare(f"{name} of full_state_dict", whole[name], param)

    def _eager(self, actions: Sequence[Action | None]) -> None:
        for rank, action in enumerate(actions):
            if action is None:
                continue
            live, ours = self._live(rank, action), None
            if rank == self.rank:
                with tfs.eager(self.sharded, reshard_after_forward=False) as module:
                    ours = module.train(live.mode.training)(*live.inputs, live.mode.flag)
            with torch.no_grad():
                theirs = self.world.call(rank, live.inputs, live.mode)
            if ours is not None:
                self.compare("output of eager", ours, theirs)

    def _save(self, actions: Sequence[Action | None]) -> None:
        if self.world.save():
            self.saves += 1
            extra = {"save": self.saves}
            tfs.save_checkpoint(self.folder / str(self.saves), self.sharded, self.optimizer, extra=extra)

    def _load(self, actions: Sequence[Action | None]) -> None:
        if self.world.can_load():
            folder = self.folder / str(self.saves)
            extra = tfs.load_checkpoint(folder, self.sharded, self.optimizer, extra={"save": 0})
            if extra != {"save": self.saves}:
                self.fail(f"extra of the checkpoint: {extra}, expected save {self.saves}")
            self.world.load()

    def _freeze(self, actions: Sequence[Action | None]) -> None:
        names = [name for name, trains in self.world.trainable.items() if trains and not name.startswith("head.")]
        if names:
            name = names[_same(actions).value % len(names)]
            for param in (self.params[name], self.world.params[name]):
                param.requires_grad_(not param.requires_grad)


def _raise(grad: torch.Tensor) -> None:
    raise Injected("injected")


def _same(actions: Sequence[Action | None]) -> Action:
    """The action of all ranks that have not ended."""
    [action] = {action for action in actions if action is not None}
    return action
