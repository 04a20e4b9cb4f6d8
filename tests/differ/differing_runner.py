"""Runner of histories of ranks that differ: the gradients are those of the unsharded model on the batches of all ranks.

A gradient is the sum over the ranks that used a parameter, divided by the number of all ranks, and ``None`` where no rank
has used it. Hooks of a parameter run once on every rank for each gradient.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs

import torch
from device import DEVICE
from histories import Call, DifferingModel, DifferingScenario, RankAction
from history_runner import HistoryRunner, PendingLoss
from scenario import everywhere, loss_of


class DifferingRunner(HistoryRunner):
    """This rank's sharded model and the unsharded models of all ranks, driven by histories in which ranks differ.

    Attributes:
        hooked: how often each hook of a parameter has run; ``expected_hooks``: how often it should have.
        parts: whether ranks have stepped other parameters, so that there is no expected value.
        taken_over: the version at which the unsharded model has last taken over parameters, if values are inexact.
    """

    make_model = DifferingModel
    scenario: DifferingScenario

    def __init__(self, scenario: DifferingScenario, *, folder: Path, **options: Any) -> None:
        self.hooked: Counter[tuple[str, str]] = Counter()
        self.expected_hooks: Counter[tuple[str, str]] = Counter()
        super().__init__(scenario, folder=folder, **options)
        self.other_experts = self._separate_experts()
        if scenario.hooks:
            for name, param in self.params.items():
                if param.requires_grad:
                    param.register_hook(lambda grad, name=name: self.hooked.update([(name, "gradient")]))
                    param.register_post_accumulate_grad_hook(
                        lambda p, name=name: self.hooked.update([(name, "accumulated")])
                    )

    def _separate_experts(self) -> dict[str, torch.nn.Parameter]:
        """Give the unsharded models of the other half of the ranks their own experts, and return them by their names."""
        others: dict[str, torch.nn.Parameter] = {}
        for name, param in self.expected.items():
            if self.is_of_experts(name):
                others[name] = torch.nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
                owner, _, leaf = name.rpartition(".")
                for rank in set(range(self.world_size)) - set(half_of(self.rank, self.world_size)):
                    setattr(self.unsharded.models[rank].get_submodule(owner), leaf, others[name])
        return others

    def is_of_experts(self, name: str) -> bool:
        return name.startswith(f"blocks.{self.scenario.experts}.")

    def reset(self) -> None:
        super().reset()
        self.hooked.clear()
        self.expected_hooks.clear()
        self.taken_over = -1
        self.parts = False

    def close(self, actual: Any, expected: Any, what: str, **options: Any) -> None:
        if not isinstance(actual, tuple):
            return super().close(actual, expected, what, **options)
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            super().close(one, other, f"{what} {number}", **options)

    def largest_term_of(self, what: str) -> float:
        """Return the largest term of a sum. A step adds gradients with few bits, times 0.02 / (1 - 0.9), to parameters."""
        is_parameter = not what.startswith(("gradient", "output"))
        return (
            0.2 * self.largest_gradient if self.scenario.is_inexact and is_parameter else super().largest_term_of(what)
        )

    def compare_state(self) -> None:
        if self.parts:
            return
        super().compare_state()
        if self.scenario.hooks and self.hooked != self.expected_hooks:
            more, fewer = self.hooked - self.expected_hooks, self.expected_hooks - self.hooked
            self.fail(f"hooks that ran too often: {dict(more)}, not often enough: {dict(fewer)}")

    def _call(self, rank: int, action: RankAction) -> Call | None:
        number = action.calls[rank]
        return None if number is None else self.scenario.calls[number]

    def _prepare(self, rank: int, action: RankAction) -> PendingLoss:
        """Prepare a rank's forward. Without a batch, it has no inputs."""
        call, mode = self._call(rank, action), self.scenario.modes[action.mode]
        if call is None:
            return PendingLoss(mode, (), self.version, self.scale, self.statistics, self.backwards)
        x, *_ = self.make_inputs(torch.Generator().manual_seed(1000 * action.seed + rank), call.batch)
        x = x.to(DEVICE).requires_grad_(mode.grad)
        mode = replace(mode, batch=call.batch, flag=f"way_{call.way}")
        return PendingLoss(mode, (x,), self.version, self.scale, self.statistics, self.backwards)

    def _loss(self, rank: int, action: RankAction, pending: PendingLoss) -> torch.Tensor:
        return loss_of([pending.output[number].double() for number in self._call(rank, action).outputs])

    def _autocast(self, rank: int, action: RankAction) -> AbstractContextManager[None]:
        call = self._call(rank, action)
        return torch.autocast(DEVICE.type, torch.bfloat16) if call is not None and call.autocast else nullcontext()

    def _take_over(self) -> None:
        """Give the unsharded model what it does not compute, after each step.

        That are the experts of other ranks, and if values are inexact, the parameters of the sharded model, so that rounding
        does not add up.
        """
        if self.taken_over == self.version:
            return
        self.taken_over = self.version
        whole = tfs.full_state_dict(self.model) if self.scenario.is_inexact else {}
        others = everywhere({name: self.expected[name].detach() for name in self.other_experts})
        with torch.no_grad():
            for name, param in self.expected.items() if whole else ():
                param.copy_(whole[name])
            for name, param in self.other_experts.items():
                param.copy_(others[(self.rank + self.world_size // 2) % self.world_size][name])

    def _forward(self, action: RankAction) -> None:
        self._take_over()
        pending = self._prepare(self.rank, action)
        self.model.train(pending.mode.training)
        with self._mode(pending):
            if pending.inputs:
                with self._autocast(self.rank, action):
                    pending.output = self.model(*pending.inputs, pending.mode.flag)
                pending.loss = self._loss(self.rank, action, pending)
            else:
                pending.loss = tfs.without_batch(self.model)
        for rank in range(self.world_size):
            expected = self._prepare(rank, action)
            if expected.inputs:
                with torch.set_grad_enabled(expected.mode.grad):
                    with self._autocast(rank, action):
                        expected.output = self._call_unsharded(rank, expected)
                    expected.loss = self._loss(rank, action, expected)
                if rank == self.rank:
                    self.close(pending.output, expected.output, "output")
            if expected.mode.grad:
                self.expected_losses[rank].append(expected)
        if pending.mode.grad:
            self.pending_losses.append(pending)

    def _pick(self, action: RankAction) -> int | None:
        """Return the position of the loss to differentiate, the same on all ranks, or ``None`` in excluded cases."""
        if not self.pending_losses:
            return None
        pending = self.pending_losses[position := action.loss_index % len(self.pending_losses)]
        is_freed = self.scenario.options["sharding_strategy"].release and pending.backwards != self.backwards
        return None if is_freed or pending.version != self.version else position

    def _backward(self, action: RankAction) -> None:
        position = self._pick(action)
        if position is None:
            return
        retain = bool(action.value)
        actual = self.pending_losses[position]
        actual.loss.backward(retain_graph=retain)
        self.backwards += 1
        picked = [of_rank[position] for of_rank in self.expected_losses]
        if not retain:
            for losses in (self.pending_losses, *self.expected_losses):
                del losses[position]
        for rank, pending in enumerate(picked):
            if pending.inputs:
                self.unsharded.backward({rank: pending.loss}, retain=retain)
                self._note_largest(rank)
        if actual.inputs and (picked[self.rank].inputs[0].grad is not None):
            self.close(actual.inputs[0].grad, picked[self.rank].inputs[0].grad, "gradient of the input")
        if not actual.mode.no_sync:
            self._reduce()

    def _reduce(self) -> None:
        unreduced = self.unsharded.unreduced.values()
        factor = self.scenario.options.get("gradient_divide_factor")
        experts = {param for name, param in self.expected.items() if self.is_of_experts(name)}
        for of_rank in unreduced:
            for param in of_rank:
                divisor = self.world_size // 2 if param in experts else factor or self.world_size
                of_rank[param] = of_rank[param] * (self.world_size / divisor)
        with_gradient = {param for of_rank in unreduced for param in of_rank}
        names = [name for name, param in self.expected.items() if param in with_gradient]
        self.expected_hooks.update((name, kind) for name in names for kind in ("gradient", "accumulated"))
        self.unsharded.reduce()

    def _discard(self, action: RankAction) -> None:
        tfs.discard_unreduced(self.model)
        self.unsharded.discard()

    def _loop(self, action: RankAction) -> None:
        own = [number for number, actions in enumerate(action.body) if actions[0].calls[self.rank] is not None]
        batches = iter(own if self.scenario.alike else tfs.batches(self.model, own))
        for number, actions in enumerate(action.body):
            batch = next(batches, "nothing")
            expected = number if number in own else None
            if batch != expected:
                raise AssertionError(f"iteration {number} got batch {batch}, expected {expected}")
            for each in actions:
                self.run_action(each)
        if (left := next(batches, "nothing")) != "nothing":
            raise AssertionError(f"iteration {len(action.body)} got batch {left}, expected the end of all ranks")

    # Disagreements: rank ``value`` does something else than the others, so all get an error at once.

    @contextlib.contextmanager
    def _disagree(self) -> Iterator[None]:
        try:
            yield
        except tfs.ScheduleDisagreement as error:
            if "did not come" in str(error):
                self.fail(f"expected an error at once, got one after the timeout: {error}")
        else:
            self.fail("expected ScheduleDisagreement, but nothing was raised")
        self.model.train()

    def _forget(self) -> None:
        self.pending_losses.clear()
        for of_rank in self.expected_losses:
            of_rank.clear()

    def _forward_alone(self, action: RankAction) -> None:
        """Run the forward of an action on the sharded model alone, with gradients."""
        pending = self._prepare(self.rank, action)
        if not pending.inputs:
            tfs.without_batch(self.model)
            return
        with self._autocast(self.rank, action):
            self.model(*pending.inputs, pending.mode.flag)

    def _disagree_evaluation(self, action: RankAction) -> None:
        self._forget()
        self.model.train(self.rank != action.value)
        with self._disagree():
            self._forward_alone(action)

    def _disagree_no_sync(self, action: RankAction) -> None:
        self._forget()
        with self._disagree(), self.model.no_sync() if self.rank == action.value else nullcontext():
            self._forward_alone(action)

    def _disagree_no_grad(self, action: RankAction) -> None:
        self._forget()
        with self._disagree(), torch.set_grad_enabled(self.rank != action.value):
            self._forward_alone(action)

    def _disagree_backward(self, action: RankAction) -> None:
        self._forget()
        self._forward(replace(action, kind="forward"))
        with self._disagree():
            if self.rank == action.value:
                self.pending_losses[-1].loss.backward()
            else:
                self._forward_alone(action)
        self._forget()

    def _disagree_other_model(self, action: RankAction) -> None:
        other = self.other if self.rank == action.value else self
        self._forget()
        with self._disagree():
            other._forward_alone(action)
        other.model.train()

    def _disagree_full_state(self, action: RankAction) -> None:
        self._forget()
        with self._disagree():
            if self.rank == action.value:
                tfs.full_state_dict(self.model)
            else:
                self._forward_alone(action)

    def _disagree_skipped_step(self, action: RankAction) -> None:
        self._forget()
        forward = replace(action, kind="forward")
        self._forward(forward)
        self._backward(RankAction("backward", loss_index=-1))
        self.parts = True
        if self.rank != action.value:
            self.optimizers[0].step()
        with self._disagree():
            self._forward_alone(forward)

    def _disagree_other_optimizer(self, action: RankAction) -> None:
        self._forget()
        params = [param for param in self.params.values() if param.requires_grad]
        forward = replace(action, kind="forward")
        optimizers = [torch.optim.SGD(part, lr=0.01) for part in (params[:1], params[1:])]
        self._forward(forward)
        self._backward(RankAction("backward", loss_index=-1))
        self.parts = True
        optimizers[self.rank == action.value].step()
        with self._disagree():
            self._forward_alone(forward)


def half_of(rank: int, world_size: int) -> range:
    """Return the half of the ranks to which a rank belongs."""
    first = rank // (world_size // 2) * (world_size // 2)
    return range(first, first + world_size // 2)
