"""Runner of a world's histories: the same calls on the sharded model and on the unsharded one, compared after every call.

A gradient is the sum over the ranks that used a parameter, divided by the number of all ranks, and ``None`` where no rank
has used it. Hooks of a parameter run once on every rank for each gradient.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Iterator
from dataclasses import replace

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched.errors import code_of

import torch
from device import IS_CUDA
from garbage import drop_in_a_cycle
from world import WINDOW, Action, Mode
from world_run import PendingLoss, WorldRun


class Injected(Exception):
    """An error that a hook raises on purpose."""


def _raise(grad: torch.Tensor) -> None:
    raise Injected("injected")


class WorldRunner(WorldRun):
    """Runs actions: a method for each kind, on the sharded model as this rank, and on the unsharded ones as every rank.

    Attributes:
        other: the runner of the second model, or this one.
    """

    other: WorldRunner

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
        # Reading a gradient would end the overlap that the world is to check.
        self.compare_state(reads_gradients=action.kind != "backward" or not self.world.overlaps)

    def finish(self) -> None:
        """Compare unsharded parameters. A collective."""
        if self.world.experts is None and not self.have_parted:
            self._full_state(Action("full_state"))

    @contextlib.contextmanager
    def _expect_error(self, text: str) -> Iterator[None]:
        try:
            yield
        except (IndexError, RuntimeError, Injected) as error:
            if text not in str(error):
                raise
        else:
            self.fail(f"expected an exception with {text!r}, but none was raised")

    def _forward(self, action: Action) -> None:
        self._take_over()
        pending = self._prepare(self.rank, action)
        self._call_sharded(pending)
        for rank in range(self.world_size):
            expected = self._prepare(rank, action)
            self._call_unsharded(rank, expected)
            if rank == self.rank:
                self.close(pending.output, expected.output, "output")
            if action.mode.grad:
                self.expected_losses[rank].append(expected)
        if action.mode.grad:
            self.pending_losses.append(pending)

    def _fail_forward(self, action: Action) -> None:
        for rank in range(self.world_size):
            pending = self._prepare(rank, action)
            pending.inputs[1][self._position(pending, action.value)] += 1000
            if rank == self.rank:
                with self._expect_error("out of"):
                    self._call_sharded(pending)
            # Run it unsharded as well: a batch norm before the failing operator has updated its statistics.
            with contextlib.suppress(IndexError):
                self._call_unsharded(rank, pending)

    def _pick(self, action: Action) -> int | None:
        """Return the position of the loss to differentiate, or ``None`` in cases that ``world`` excludes."""
        if not self.pending_losses:
            return None
        pending = self.pending_losses[position := action.loss_index % len(self.pending_losses)]
        reads_old_statistics = self.world.norm and not pending.mode.training and pending.statistics != self.statistics
        if pending.scale != self.scale or reads_old_statistics:
            return None
        may_raise = pending.version != self.version or self._refusals(pending)
        return None if may_raise and (self.takes_over or not pending.is_alike) else position

    def _refusals(self, pending: PendingLoss) -> set[str]:
        """Return the codes with which backward may refuse a loss whose memory others have freed or overwritten."""
        is_last = pending.backwards == self.backwards
        is_alone = is_last and pending.forwards == self.forwards
        released = () if is_last or not self.world.options["sharding_strategy"].release else ("memory-released",)
        lost = () if is_alone or self.world.agrees else ("bucket-lost",)
        return {f"step.{what}-before-backward" for what in (*released, *lost)}

    def _backward(self, action: Action) -> None:
        if (position := self._pick(action)) is None:
            return
        actual, retain, done = self.pending_losses[position], bool(action.value), True
        picked = [of_rank[position] for of_rank in self.expected_losses]
        try:
            actual.loss.backward(retain_graph=retain)
        except RuntimeError as error:
            is_refused = code_of(error) in self._refusals(actual)
            if not is_refused and (actual.version == self.version or "modified" not in str(error)):
                raise
            done = False
        self.backwards += 1
        if not retain or not done:
            for losses in (self.pending_losses, *self.expected_losses):
                del losses[position]
        if not done:
            return
        for rank, pending in enumerate(picked):
            if pending.call is not None:
                try:
                    self.unsharded.backward({rank: pending.loss}, retain=retain)
                except RuntimeError as error:
                    self.fail(f"backward succeeded, but the unsharded model's fails: {error}")
                self._note_largest(rank)
        if actual.call is not None and actual.inputs[0].grad is not None:
            self.close(actual.inputs[0].grad, picked[self.rank].inputs[0].grad, "gradient of the input")
        if not actual.mode.no_sync:
            self._reduce()

    def _note_largest(self, rank: int) -> None:
        """Record the largest value among the unreduced gradients of a rank."""
        added = [0.0, *(g.abs().max().item() for g in self.unsharded.unreduced[rank].values() if g.numel())]
        self.largest_gradient = max(self.largest_gradient, *added)

    def _reduce(self) -> None:
        unreduced = self.unsharded.unreduced.values()
        factor = self.world.options.get("gradient_divide_factor")
        experts = {param for name, param in self.expected.items() if self.is_of_experts(name)}
        for of_rank in unreduced:
            for param in of_rank:
                divisor = self.world_size // 2 if param in experts else factor or self.world_size
                of_rank[param] = of_rank[param] * (self.world_size / divisor)
        with_gradient = {param for of_rank in unreduced for param in of_rank}
        names = [name for name, param in self.expected.items() if param in with_gradient]
        self.expected_hooks.update((name, kind) for name in names for kind in ("gradient", "added"))
        self.unsharded.reduce()

    def _drop(self, action: Action) -> None:
        if self.pending_losses:
            position = action.loss_index % len(self.pending_losses)
            for of_rank in self.expected_losses:
                del of_rank[position]
            drop_in_a_cycle(self.pending_losses.pop(position))

    def _discard(self, action: Action) -> None:
        tfs.discard_unreduced(self.model)
        self.unsharded.discard()

    def _lose(self, action: Action) -> None:
        """Let some ranks lose a bucket that forward has gathered."""
        buckets = self.transform.sharded.buckets
        if action.value >> self.rank & 1:
            bucket = buckets[action.seed // 20 % len(buckets)]
            bucket.private_slot.arena.contents.clear()

    def _fork(self, action: Action) -> None:
        """Let a forked process read parameters and end, as a worker of a data loader does."""
        if not (child := os.fork()):
            code = 1
            with contextlib.suppress(BaseException):
                code = int(not IS_CUDA and not all(param.to_local().isfinite().all() for param in self.params.values()))
            os._exit(code)
        if status := os.waitpid(child, 0)[1]:
            self.fail(f"a forked process ended with status {status}")

    def _fail_backward(self, action: Action) -> None:
        position, inside = self._pick(action), action.value >= 0
        if position is None:
            return
        actual = self.pending_losses[position]
        if not actual.is_alike or actual.version != self.version or self._refusals(actual):
            return  # another error
        if inside and (actual.mode.no_sync or any(self.unsharded.unreduced.values()) or 0 not in actual.call.outputs):
            return
        picked = [losses.pop(position) for losses in (*self.expected_losses, self.pending_losses)][:-1]
        self.backwards += action.value != -1  # whether the compiled backward runs
        if inside:
            actual.inputs[1].data[self._position(actual, action.value)] += 1000
        else:
            last = actual.output[actual.call.outputs[0]]
            (last if action.value == -1 else actual.inputs[0]).register_hook(_raise)
        with self._expect_error("out of" if inside else "injected"):
            actual.loss.backward()
        if action.value == -2:  # the compiled backward has run
            for rank, pending in enumerate(picked):
                self.unsharded.backward({rank: pending.loss})
            if not actual.mode.no_sync:
                self.unsharded.reduce()
        if action.value != -1:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.forget_hooks()

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
        name = names[action.value // 2 % len(names)]
        with torch.no_grad():
            self.expected[name].add_(0.01)
            with tfs.unsharded(self.model, name) if action.value % 2 else contextlib.nullcontext(self.model) as module:
                module.get_parameter(name).add_(0.01)
        self.version += 1

    def _scale(self, action: Action) -> None:
        factor = 2.0 if self.scale == 1 else 0.5
        for params in (self.params, self.expected, self.other_experts):
            for param in params.values():
                param.data.mul_(factor)
        self.scale *= factor

    def _freeze(self, action: Action) -> None:
        names = [name for name, trains in self.trainable.items() if trains and not name.startswith("head.")]
        if names:
            name = names[action.value % len(names)]
            for param in (self.params[name], self.expected[name]):
                param.requires_grad_(not param.requires_grad)

    def _full_state(self, action: Action) -> None:
        whole = [tfs.full_state_dict(self.model)]
        if action.value % 2:
            whole.append({name: value.clone() for name, value in tfs.stream_full_parameters(self.model)})
        for values in whole:
            for name, param in self.expected.items():
                self.close(values[name], param, f"{name}, whole")

    def _eager(self, action: Action) -> None:
        for rank in range(self.world_size):
            pending = self._prepare(rank, replace(action, mode=replace(action.mode, grad=False)))
            self._call_unsharded(rank, pending)
            if rank == self.rank:
                with tfs.eager(self.model, reshard_after_forward=False) as module, pending.entered():
                    output = module.train(pending.mode.training)(*pending.inputs, f"way_{pending.call.way}")
                self.close(output, pending.output, "output of eager")

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

    def _loop(self, action: Action) -> None:
        """Run the actions of each iteration of a loop over this rank's batches, which are numbers here."""
        own = [number for number, (forward, *_) in enumerate(action.body) if forward.calls[self.rank] is not None]
        batches = iter(own if self.world.alike else tfs.batches(self.model, own))
        for number, actions in enumerate([*action.body, ()]):
            batch, expected = next(batches, "the end"), number if number in own else None
            if batch != (expected if actions else "the end"):
                raise AssertionError(f"iteration {number} got batch {batch}, expected {expected}")
            for each in actions:
                self.run_action(each)

    def _disagree(self, action: Action) -> None:
        """Let one rank do something other than the others, so that all get an error at once."""
        is_lone, what = self.rank == action.value, action.what
        self.forget_losses()
        if what in ("backward", "skipped_step", "other_optimizer"):
            self._forward(action)
        if what in ("skipped_step", "other_optimizer"):
            self._backward(Action("backward"))
            self.have_parted = True
        params = [param for param in self.params.values() if param.requires_grad]
        if what == "skipped_step" and not is_lone:
            self.optimizers[0].step()
        if what == "other_optimizer":
            torch.optim.SGD(params[1:] if is_lone else params[:1], lr=0.01).step()
        modes = {"evaluation": Mode(training=False), "no_sync": WINDOW, "no_grad": Mode(grad=False)}
        mode = modes.get(what, action.mode) if is_lone else action.mode
        runner = self.other if is_lone and what == "other_model" else self
        try:
            if is_lone and what == "backward":
                self.pending_losses[-1].loss.backward()
            elif is_lone and what == "full_state":
                tfs.full_state_dict(self.model)
            else:
                runner._call_sharded(self._prepare(self.rank, replace(action, mode=mode)))
        except tfs.ScheduleDisagreement as error:
            if "did not come" in str(error):
                self.fail(f"expected an error at once, got one after the timeout: {error}")
        else:
            self.fail("expected ScheduleDisagreement, but nothing was raised")
        runner.model.train()
        self.forget_losses()
