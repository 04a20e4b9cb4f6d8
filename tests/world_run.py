"""A world's sharded model on one rank, and the unsharded models of all ranks: their calls and comparisons.

Comparisons do not communicate, so a delayed rank stays delayed until the next call. They record a difference instead of
raising it, so that the other ranks are not left alone in a collective.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs

import torch
import torch.distributed as dist
from device import DEVICE
from garbage import Collecting, drop_in_a_cycle
from scenario import Run, everywhere, loss_of
from world import Action, Call, Mode, World, WorldModel


@dataclass(eq=False)
class PendingLoss:
    """A loss whose backward may still run, with the state of the parameters at its forward.

    Attributes:
        call: ``None`` for a rank without a batch, which has no inputs.
        is_alike: whether all ranks make this call.
    """

    mode: Mode
    call: Call | None
    is_alike: bool
    version: int
    scale: float
    statistics: int
    backwards: int
    forwards: int = 0
    inputs: tuple[torch.Tensor, ...] = ()
    output: tuple[torch.Tensor, ...] = ()
    loss: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run forward in its mode, and under autocast if the call asks for it."""
        casts = self.call is not None and self.call.autocast
        with torch.set_grad_enabled(self.mode.grad), torch.autocast(DEVICE.type, torch.bfloat16, enabled=casts):
            yield

    def set_output(self, output: tuple[torch.Tensor, ...]) -> None:
        self.output = output
        self.loss = loss_of([output[number].double() for number in self.call.outputs])


def _optimizer(world: World, params: Any) -> torch.optim.Optimizer:
    if world.optimizer == "adamw":
        # A large eps, so that gradients that are only rounding errors cause small updates.
        return torch.optim.AdamW(params, lr=0.01, eps=1e-3)
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def half_of(rank: int, world_size: int) -> range:
    """Return the half of the ranks to which a rank belongs."""
    first = rank // (world_size // 2) * (world_size // 2)
    return range(first, first + world_size // 2)


class WorldRun(Run):
    """This rank's sharded model and the unsharded models of all ranks, driven by the same actions.

    Attributes:
        other: the runner of the second model, or this one.
        mismatch: the first difference found; nothing is compared after it.
        version: number of parameter updates that autograd can detect.
        scale: product of the factors by which ``.data`` was multiplied.
        statistics: number of forwards that have updated running statistics.
        backwards: number of backwards, each of which frees the memory of unsharded parameters if ``release`` says so.
        forwards: number of forwards of the sharded model, each of which may overwrite buckets that an earlier one has
            gathered.
        hooked: how often each hook of a parameter has run; ``expected_hooks``: how often it should have.
        have_parted: whether ranks have stepped other parameters, so that there is no expected value.
        taken_over: the version at which the unsharded model has last taken over parameters.
    """

    def __init__(self, world: World, *, folder: Path, **options: Any) -> None:
        self.world, self.folder, self.saves, self.world_size = world, folder, 0, dist.get_world_size()
        self.hooked: Counter[tuple[str, str]] = Counter()
        self.expected_hooks: Counter[tuple[str, str]] = Counter()
        super().__init__(WorldModel(world), tolerance=world.tolerance, optimizer=partial(_optimizer, world), **options)
        self.expected = dict(self.reference.named_parameters())
        self.params = {name: self.model.get_parameter(name) for name in self.expected}
        self.trainable = {name: param.requires_grad for name, param in self.expected.items()}
        self.collecting = Collecting(self.transform.sharded.buckets)
        self.pending_losses: list[PendingLoss] = []  # this rank's, of the sharded model
        self.other = self
        self.other_experts = self._separate_experts()
        self.takes_over = world.is_inexact or bool(self.other_experts)
        for name, param in self.params.items() if world.hooks else ():
            if param.requires_grad:
                param.register_hook(lambda grad, name=name: self.hooked.update([(name, "gradient")]))
                param.register_post_accumulate_grad_hook(lambda p, name=name: self.hooked.update([(name, "added")]))
        self.reset()

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
        return name.startswith(f"blocks.{self.world.experts}.")

    def use(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().use(optimizer)
        if self.world.overlaps:
            tfs.overlap_step(self.model, self.optimizers[0], gather_early=self.world.overlaps == "early")

    def reset(self) -> None:
        for params in (self.params, self.expected):
            for name, param in params.items():
                param.requires_grad_(self.trainable[name])
        super().reset()
        drop_in_a_cycle(self.pending_losses)
        self.forget_losses()
        self.mismatch: str | None = None
        self.largest_gradient = 0.0
        self.version, self.scale, self.statistics, self.backwards, self.forwards, self.taken_over = 0, 1.0, 0, 0, 0, -1
        self.saved: Any = None
        self.have_parted = False
        self.forget_hooks()

    def forget_losses(self) -> None:
        self.pending_losses = []
        self.expected_losses: list[list[PendingLoss]] = [[] for _ in range(self.world_size)]  # unsharded, by rank

    def forget_hooks(self) -> None:
        self.hooked.clear()
        self.expected_hooks.clear()

    #
    # Comparisons
    #

    def fail(self, text: str) -> None:
        self.mismatch = self.mismatch or text

    def close(self, actual: Any, expected: Any, what: str, *, tolerance: float | None = None) -> None:
        """Record the first difference that is larger than the tolerance allows for the largest value."""
        if isinstance(actual, tuple):
            for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
                self.close(one, other, f"{what} {number}")
            return
        if self.mismatch or (actual.shape == expected.shape and not expected.numel()):
            return
        actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
        bound = self.tolerance * (1 + max(expected.abs().max().item(), self.largest_term_of(what)))
        try:
            torch.testing.assert_close(actual, expected, rtol=0, atol=bound)
        except AssertionError as error:
            self.fail(f"{what}: {error}\n{actual}\nexpected\n{expected}")

    def largest_term_of(self, what: str) -> float:
        """Return the largest term of a sum: a gradient may be a small sum of large ones, each of which has been rounded.

        A step adds gradients with few bits, times 0.02 / (1 - 0.9), to parameters.
        """
        if what.startswith("gradient of"):
            return self.largest_gradient
        return 0.2 * self.largest_gradient if self.world.is_inexact and not what.startswith("output") else 0.0

    def compare_state(self, *, reads_gradients: bool = True) -> None:
        """Compare this rank's rows of parameters and gradients, its buffers, and how often hooks have run."""
        if self.have_parted:
            return
        for name, expected in self.expected.items():
            self.close(self.params[name].to_local(), self.rows(name, expected), f"parameter {name}")
        try:
            if reads_gradients:
                self.compare_gradients()
        except AssertionError as error:  # a gradient that exists on one side only
            self.fail(str(error))
        for name, buffer in self.reference.named_buffers():
            self.close(self.model.get_buffer(name), buffer, f"buffer {name}")
        if self.world.hooks and self.hooked != self.expected_hooks:
            more, fewer = self.hooked - self.expected_hooks, self.expected_hooks - self.hooked
            self.fail(f"hooks that ran too often: {dict(more)}, not often enough: {dict(fewer)}")

    #
    # Forwards of one model
    #

    def _prepare(self, rank: int, action: Action) -> PendingLoss:
        number = action.calls[rank] if action.calls else 0
        call = None if number is None else self.world.calls[number]
        state = self.version, self.scale, self.statistics, self.backwards
        pending = PendingLoss(action.mode, call, action.is_alike, *state)
        if call is not None:
            generator = torch.Generator().manual_seed(1000 * action.seed + rank)
            pending.inputs = tuple(x.to(DEVICE) for x in self.make_inputs(generator, call.batch))
            pending.inputs[0].requires_grad_(action.mode.grad)
        return pending

    def _position(self, pending: PendingLoss, wanted: int) -> int:
        """Return the position of a block in a call, at most that of the last."""
        return min(wanted, len(self.world.ways[pending.call.way]))

    def _call_sharded(self, pending: PendingLoss) -> None:
        self.model.train(pending.mode.training)
        self.forwards += 1
        pending.forwards = self.forwards
        with self.model.no_sync() if pending.mode.no_sync else contextlib.nullcontext(), pending.entered():
            if pending.call is None:
                pending.loss = tfs.without_batch(self.model)
            else:
                pending.set_output(self.model(*pending.inputs, f"way_{pending.call.way}"))

    def _call_unsharded(self, rank: int, pending: PendingLoss) -> None:
        """Run one rank's forward, under the mixed precision policy of the world."""
        if pending.call is None:
            return
        model, policy = self.unsharded.models[rank].train(pending.mode.training), self.world.options.get("mp_policy")
        self.statistics += pending.mode.training
        (x, *others), params = (*pending.inputs, f"way_{pending.call.way}"), {}
        with pending.entered():
            if policy is not None and policy.param_dtype is not None:
                params = {name: param.to(policy.param_dtype) for name, param in self.expected.items()}
                x = x.to(policy.param_dtype)
            pending.set_output(torch.func.functional_call(model, params, (x, *others)))

    def _take_over(self) -> None:
        """Give the unsharded model the values that it does not compute, after each step.

        These are the experts of other ranks and, if values are inexact, the parameters of the sharded model, so that
        rounding errors do not add up.
        """
        if self.taken_over == self.version or not self.takes_over:
            return
        self.taken_over = self.version
        whole = tfs.full_state_dict(self.model) if self.world.is_inexact else {}
        others = everywhere({name: self.expected[name].detach() for name in self.other_experts})
        with torch.no_grad():
            for name, param in self.expected.items() if whole else ():
                param.copy_(whole[name])
            for name, param in self.other_experts.items():
                param.copy_(others[(self.rank + self.world_size // 2) % self.world_size][name])
