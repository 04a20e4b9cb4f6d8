"""One seeded world: a model, how it is sharded, and histories of calls, as data to paste into a test.

    python tests/world.py --ranks 2 --seeds 0:500             # ranks differ
    python tests/world.py --ranks 2 --seeds 0:500 --alike     # all ranks run the same blocks

A *call* says what one rank does with its batch: the blocks that it runs, in which order, on how many rows, and whether
under autocast. A *history* is a sequence of :class:`Action` values, such as forward, backward or an optimizer step. In each
forward every rank makes a call of its own, or none, because it has no batch. ``world_draws`` draws worlds by seeds, and
``world_runner`` runs them beside the unsharded model. They exclude the following:

- *Exceptions on some ranks*: the others wait for them until the timeout. Actions that raise are therefore drawn for
  ranks that make the same call: injected failures, backward after parameters have changed since its forward, and
  backward of a loss whose memory an earlier backward has released.
- *Backward while parameters differ from those of its forward because* ``.data`` *was changed*: torch itself then mixes old
  activations with new weights. Once the change has been undone, backward runs and must be correct.
- *Float32 parameters, and 0-dim values used twice*: random models in ``test_world`` have these; Thunder fails on those.
- *Gradients right after an exception inside backward*: autograd does not say which gradients have been computed. They are
  then set to ``None``, as a user has to do. No failure is injected into a backward under ``no_sync``, or while there are
  unreduced gradients: some of the accumulated gradients would be lost, and no call clears the others.
- *Checkpoints with running statistics*: only one rank's are saved, by design.
- *Loading optimizer state for other parameters than were saved*: the optimizer must hold state for the same ones.
- *Backward that uses running statistics which another forward has updated since*: plain Thunder and torch differ.
- *Batches of different sizes on the ranks of an alike world with a batch norm*: traces for n rows have the constant
  n / (n - 1), so ranks disagree, with an error that names ``ranks_may_differ``.
- *Batch norm in bfloat16*: plain Thunder fails. *Layer norm in bfloat16*: cancellation leaves no useful tolerance.
- *Local actions on some ranks only* (a step, ``zero_grad``, in-place changes): there is no expected result. Some of them
  end a history, to see that the ranks notice; see ``world_draws.DISAGREEMENTS``.
- *Ranks that do not agree in steps* (``agree``) *but do different things*, or use other outputs: see ``fsdp(agree=...)``.
- *Whole values of experts*, which each half of the ranks shards on its own: no rank has them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).parents[1] / "examples"))
    os.environ.setdefault("THUNDER_FSDP_SCHED_CHECK_PASSES", "1")

import thunder_fsdp_sched  # noqa: F401  before thunder

import torch
from random_models import Case, ModelSpec, RandomModel
from torch import nn


class _Brief:
    """A dataclass that prints only values that are not the defaults."""

    def __repr__(self) -> str:
        shown = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


@dataclass(frozen=True, repr=False)
class Mode(_Brief):
    """The way in which forward is called."""

    training: bool = True
    no_sync: bool = False
    grad: bool = True


WINDOW = Mode(no_sync=True)
"""The mode of the micro-batches of a window, which a forward in the usual mode ends."""

EVALUATION = Mode(training=False, grad=False)


@dataclass(frozen=True, repr=False)
class Call(_Brief):
    """A call of the model with a batch. Thunder compiles each once in each mode.

    Attributes:
        way: index into ``World.ways``.
        batch: its number of rows.
        autocast: whether forward runs under ``torch.autocast`` in bfloat16.
        outputs: the outputs that the loss uses. Parameters that it does not reach get no gradient.
    """

    way: int = 0
    batch: int = 3
    autocast: bool = False
    outputs: tuple[int, ...] = (0, 1)

    @property
    def program(self) -> tuple[int, bool]:
        """The way and the precision, which are the same on all ranks of an alike world."""
        return self.way, self.autocast


@dataclass(frozen=True, repr=False)
class Action(_Brief):
    """One call of a history.

    Attributes:
        kind: the name of a method of ``world_runner.WorldRunner``, after its underscore.
        mode: of a forward.
        calls: by rank, index into ``World.calls``, or ``None`` for a rank without a batch. If empty, all make the first.
        loss_index: index into the losses whose backward has not run yet.
        value: an argument whose meaning depends on the kind; see ``world_draws.PHRASES``.
        seed: the seed of the inputs.
        model_index: 0 for the first model, 1 for the second.
        slow: a rank that is delayed before this call, so that the others' collectives stay in flight.
        collects: for each rank, where it collects garbage: before this call (0), in its n-th gather or reduction, or not at
            all (-1). Python does it at other times, too.
        what: the disagreement.
        body: of a loop over ``batches``, the actions of each iteration. Each begins with a forward.
    """

    kind: str
    mode: Mode = Mode()
    calls: tuple[int | None, ...] = ()
    loss_index: int = -1
    value: int = 0
    seed: int = 0
    model_index: int = 0
    slow: int | None = None
    collects: tuple[int, ...] = ()
    what: str = ""
    body: tuple[tuple[Action, ...], ...] = ()

    @property
    def is_alike(self) -> bool:
        """Whether all ranks make the same call with a batch."""
        return None not in self.calls and len(set(self.calls)) <= 1

    @property
    def is_final(self) -> bool:
        """Whether ranks cannot go on after it."""
        return self.what in ("skipped_step", "other_optimizer")


@dataclass(frozen=True, repr=False)
class World(_Brief):
    """One model or two alike, how they are sharded and trained, and the histories to run one after the other.

    Attributes:
        ways: orders of blocks, one of which each call runs.
        calls: the calls from which histories choose.
        norm: whether there is a batch norm, whose running statistics forward updates.
        optimizer: "sgd" or "adamw".
        second: whether actions alternate between two models.
        freezable: whether histories freeze and unfreeze parameters.
        hooks: whether hooks of parameters are counted.
        overlaps: "late" if the optimizer steps while the last reductions of backward are in flight, and "early" if its steps
            also begin the first gathers of the next forward.
        secondary: see :class:`random_models.Case`.
        replicas: whether there is a mesh of two replicas.
        experts: index of a block whose parameters each half of the ranks shards on its own.
        alike: whether all ranks run the same blocks, so that ``ranks_may_differ`` is not given. Their batches may have other
            numbers of rows, and their losses use other outputs.
    """

    model: ModelSpec
    options: dict[str, Any] = field(hash=False)
    groups: tuple[int, ...] = ()
    ways: tuple[tuple[int, ...], ...] = ((0,),)
    calls: tuple[Call, ...] = (Call(),)
    norm: bool = False
    optimizer: str = "sgd"
    second: bool = False
    freezable: bool = False
    hooks: bool = False
    overlaps: str = ""
    secondary: int | None = None
    replicas: bool = False
    experts: int | None = None
    alike: bool = False
    histories: tuple[tuple[Action, ...], ...] = ()

    @property
    def case(self) -> Case:
        return Case(self.model, self.options, self.groups, secondary=self.secondary)

    @property
    def agrees(self) -> bool:
        """Whether ranks agree in each step."""
        return "agree" not in self.options

    @property
    def tolerance(self) -> float:
        """Relative to the largest value: see :meth:`world_runner.WorldRunner.close`."""
        policy = self.options.get("mp_policy")
        lowest = {dtype for dtype in (policy.param_dtype, policy.reduce_dtype) if dtype} if policy else set()
        if self.options.get("comm_policy") or any(call.autocast for call in self.calls) or torch.bfloat16 in lowest:
            return 0.06
        return 1e-4 if lowest else 1e-9

    @property
    def is_inexact(self) -> bool:
        """Whether values have so few bits that the unsharded model takes over the parameters after each step."""
        return self.tolerance > 0.01


class WorldModel(RandomModel):
    """A random model, each call of which chooses the blocks to run. Its second output needs only the first of them.

    Before each block, ``index`` selects the rows of the batch. It counts from zero and changes nothing, unless a test
    writes an index out of range: then forward fails, or backward if the test wrote through ``.data`` after forward.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world.model)
        for number, way in enumerate(world.ways):
            setattr(self, f"way_{number}", way)
        self.positions = 1 + max(map(len, world.ways))
        self.norm = nn.BatchNorm1d(world.model.width).double() if world.norm else None
        self.side = nn.Linear(world.model.width, 2).double()

    def inputs(self, generator: torch.Generator, batch: int = 3) -> tuple[torch.Tensor, ...]:
        return (*super().inputs(generator, batch), torch.arange(batch).repeat(self.positions, 1))

    def forward(self, x: torch.Tensor, index: torch.Tensor, way: str) -> tuple[torch.Tensor, torch.Tensor]:
        side, position = None, 0
        for number in getattr(self, way):
            x = self.blocks[number].forward(x.index_select(0, index[position]))
            position += 1
            if side is None:
                side = self.side.forward(x)
        if side is None:
            side = self.side.forward(x)
        if self.norm is not None:
            x = self.norm.forward(x)
        return self.end(x.index_select(0, index[position])), side


if __name__ == "__main__":
    from world_replay import main

    main()
