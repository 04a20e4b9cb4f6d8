"""Lives of a model that hypothesis makes up: which calls come in which order, as data that can be pasted into a test.

``lives.py`` runs them. What a history leaves out, and why:

- *Backward while parameters differ from those of its forward through* ``.data``: torch itself mixes old activations with new
  weights then. After the change is undone backward runs, and has to be right.
- *Float32 parameters and 0-dim values used twice*: ``test_random_models`` has the first; Thunder fails on the second.
- *Gradients right after an exception inside a backward*: autograd does not say which have arrived. Gradients are set to
  ``None`` then, as a user has to. With gradients of ``no_sync`` outstanding nothing fails inside a backward, nor under
  ``no_sync``: part of what is accumulated would be lost or kept, and no call clears it.
- *Checkpoints with running statistics*: one rank's are saved, by design.
- *Checkpoints with state of some parameters only*: the optimizer has to have the state that was saved.
- *Backward through running statistics that another forward has written since*: plain Thunder and torch differ.
- *Batch norm in bfloat16*: plain Thunder fails. *Layer norm in bfloat16*: it cancels, no useful tolerance is left.
- *What is local to a rank, on some ranks only* (a step, ``zero_grad``, changes in place): there is nothing to compare with.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from random_models import Case, ModelSpec, RandomModel, cases
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["Action", "Deviation", "Life", "LivedModel", "Mode", "deviating", "lives", "numbered"]

Value = TypeVar("Value")

QUIET = settings(phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck), database=None)


def numbered(strategy: st.SearchStrategy[Value], number: int) -> Value:
    """The value that a strategy has for a number.

    Hypothesis alone would try variants of what it has tried, and the simplest value first. Each model is compiled, so that
    a shorter history is not sought by it either, but by ``test_random_histories``.
    """
    values: list[Value] = []

    @seed(number)
    @settings(QUIET, max_examples=2)
    @given(strategy)
    def draw(value: Value) -> None:
        values.append(value)

    draw()
    return values[-1]


@dataclass(frozen=True)
class Mode:
    """How a forward is called; Thunder compiles each mode once."""

    batch: int = 3
    flag: bool = False
    training: bool = True
    no_sync: bool = False
    grad: bool = True


@dataclass(frozen=True, repr=False)
class Action:
    """One call of a history.

    Attributes:
        kind: see :data:`PHRASES`.
        mode: index into the modes of the life.
        which: which of the losses that are still to be differentiated.
        value: the kind's own argument.
        seed: of the inputs.
        who: the first or the second model.
        slow: a rank that comes late to this call, so that collectives of the others stay in flight.
    """

    kind: str
    mode: int = 0
    which: int = 0
    value: int = 0
    seed: int = 0
    who: int = 0
    slow: int | None = None

    def __repr__(self) -> str:
        given = [f"{f.name}={v!r}" for f in fields(self)[1:] if (v := getattr(self, f.name)) != f.default]
        return f"Action({', '.join([repr(self.kind), *given])})"


PHRASES: dict[tuple[str, ...], int] = {
    ("forward",): 4,  # calls the compiled model; without gradients if its mode says so
    ("backward",): 4,  # differentiates a loss; value 1: and keeps the graph
    ("forward", "backward"): 5,
    ("forward", "backward", "step", "zero_grad"): 4,  # value 1: after clipping; value 1: to None
    ("step",): 1,
    ("zero_grad",): 1,
    ("fail_forward",): 2,  # an operator fails at run time, before block `value`
    ("forward", "fail_forward", "backward"): 2,
    (
        "fail_backward",
    ): 2,  # a hook raises before (-1) or after (-2) the compiled backward, or an operator in its middle
    ("add",): 1,  # to one parameter, in place
    ("scale",): 1,  # all parameters through .data, as an EMA swap does: by 2, or back
    ("scale", "forward", "scale"): 2,
    ("forward", "scale", "forward", "scale", "backward"): 2,
    ("scale", "eager", "scale"): 1,
    ("clip",): 1,
    ("full_state",): 1,
    ("save",): 1,  # a checkpoint
    ("load",): 1,
    ("freeze",): 2,  # or unfreeze one parameter
}
"""Actions that are drawn together, and how often."""

COLLECTIVE = ("forward", "backward", "clip", "full_state", "eager")
"""Kinds in which ranks communicate; where one rank does something else, it is one of these."""


@dataclass(frozen=True)
class Life:
    """A model (or two), how it is sharded and trained, and the histories that it goes through one after the other.

    Attributes:
        other: the order of blocks if the model is called with ``flag``.
        norm: whether there is a batch norm, whose statistics forward writes.
        optimizer: "sgd" or "adamw".
        second: whether a second model takes turns.
        freezable: whether parameters are frozen and unfrozen.
    """

    model: ModelSpec
    options: dict[str, Any] = field(hash=False)
    groups: tuple[int, ...] = ()
    other: tuple[int, ...] = (0,)
    norm: bool = False
    optimizer: str = "sgd"
    second: bool = False
    freezable: bool = False
    modes: tuple[Mode, ...] = (Mode(),)
    histories: tuple[tuple[Action, ...], ...] = ()

    @property
    def case(self) -> Case:
        return Case(self.model, self.options, self.groups)

    @property
    def tolerance(self) -> float:
        """Of a difference, relative to the largest element and absolute; see :meth:`lives.Pair.compare`."""
        policy = self.options.get("mp_policy")
        lowest = {dtype for dtype in (policy.param_dtype, policy.reduce_dtype) if dtype} if policy else set()
        return 0.06 if torch.bfloat16 in lowest else 1e-4 if lowest else 1e-9


@dataclass(frozen=True)
class Deviation:
    """Rank ``rank`` does ``instead`` at position ``at`` of a history, and nothing if that is ``None``; or ends there."""

    rank: int
    at: int
    instead: Action | None = None
    ends: bool = False

    def history_of(self, rank: int, history: tuple[Action, ...]) -> tuple[Action | None, ...]:
        if rank != self.rank:
            return history
        if self.ends:
            return (*history[: self.at], *[None] * (len(history) - self.at))
        return (*history[: self.at], self.instead, *history[self.at + 1 :])


class LivedModel(RandomModel):
    """A random model with a branch and with operators that can be made to fail at run time.

    Before each block rows are selected by ``index``, which gives them unchanged as long as it counts from zero. An index
    out of range fails in forward, or in backward if it is changed through ``.data`` after forward.
    """

    def __init__(self, life: Life) -> None:
        super().__init__(life.model)
        self.other = life.other
        self.norm = nn.BatchNorm1d(life.model.width).double() if life.norm else None

    @property
    def positions(self) -> int:
        return max(len(self.order), len(self.other)) + 1

    def inputs(self, generator: torch.Generator, batch: int = 3) -> tuple[torch.Tensor, ...]:
        return (*super().inputs(generator, batch), torch.arange(batch).repeat(self.positions, 1))

    def forward(self, x: torch.Tensor, index: torch.Tensor, flag: bool = False) -> torch.Tensor:
        position = 0
        for number in self.other if flag else self.order:
            x = self.blocks[number].forward(x.index_select(0, index[position]))
            position += 1
        if self.norm is not None:
            x = self.norm.forward(x)
        return self.end(x.index_select(0, index[position]))


@st.composite
def lives(draw: Any, *, histories: int, world_size: int, phrases: int = 6, deviating: bool = False) -> Life:
    case = draw(cases(numeric=True))
    model = replace(case.model, blocks=tuple(replace(b, double=True) for b in case.model.blocks))
    options = dict(case.options)
    kinds = ["plain"] if deviating else ["plain", "plain", "plain", "second", "freezable", "norm", "policy"]
    kind = draw(st.sampled_from(kinds))
    if kind == "policy":
        policy = draw(st.sampled_from([(torch.bfloat16, torch.float32), (torch.float32, None), (None, torch.float32)]))
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=policy[0], reduce_dtype=policy[1])
        model = replace(model, blocks=tuple(replace(b, kind="mlp") if b.kind == "norm" else b for b in model.blocks))
    number = st.integers(0, len(model.blocks) - 1)
    other = tuple(draw(st.lists(number, min_size=1, max_size=3)))
    model, other = _without_scalars_used_twice(model, other)
    mode = st.builds(
        Mode,
        batch=st.sampled_from([3, 3, 2]),
        flag=st.booleans(),
        training=st.sampled_from([True, True, False]) if kind == "norm" else st.just(True),
        no_sync=st.sampled_from([False, False, True]),
        grad=st.sampled_from([True, True, False]),
    )
    few = 1 if deviating or kind in ("second", "freezable") else 3
    modes = (Mode(), *draw(st.lists(mode, min_size=few, max_size=few, unique=True)))
    life = Life(
        model,
        options,
        case.groups,
        other,
        norm=kind == "norm",
        optimizer="sgd" if kind == "policy" else draw(st.sampled_from(["sgd", "adamw"])),
        second=kind == "second",
        freezable=kind == "freezable",
        modes=modes,
    )
    drawn = [draw(_history(life, world_size, deviating, phrases)) for _ in range(histories)]
    return replace(life, histories=tuple(drawn))


def _without_scalars_used_twice(model: ModelSpec, other: tuple[int, ...]) -> tuple[ModelSpec, tuple[int, ...]]:
    """Thunder computes wrong gradients for 0-dim parameters that are used twice, without sharding, too."""
    blocks = [
        replace(block, kind="linear") if block.kind == "scale" and other.count(index) > 1 else block
        for index, block in enumerate(model.blocks)
    ]
    return replace(model, blocks=tuple(blocks)), other


@st.composite
def _history(draw: Any, life: Life, world_size: int, deviating: bool, phrases: int) -> tuple[Action, ...]:
    without = {"freeze"} if not life.freezable else set()
    if life.norm or deviating:
        without |= {"save", "load"}
    if deviating:
        without |= {"fail_backward"}  # it needs the same losses on all ranks
    weights = {phrase: n for phrase, n in PHRASES.items() if not without & set(phrase)}
    phrase = st.sampled_from([phrase for phrase, weight in weights.items() for _ in range(weight)])
    drawn = draw(st.lists(phrase, min_size=phrases // 2, max_size=phrases))
    kinds = [kind for phrase in drawn for kind in phrase]
    return tuple(draw(_action(kind, life, world_size, seed)) for seed, kind in enumerate(kinds))


@st.composite
def _action(draw: Any, kind: str, life: Life, world_size: int, seed: int) -> Action:
    action = Action(kind, seed=seed)
    if kind in ("forward", "fail_forward", "eager"):
        action = replace(action, mode=draw(st.integers(0, len(life.modes) - 1)))
    if kind in ("backward", "fail_backward"):
        action = replace(action, which=draw(st.sampled_from([-1, -1, 0, 1])))
    positions = len(life.model.order) + 1
    values = {
        "backward": st.sampled_from([0, 0, 0, 1]),
        "fail_forward": st.integers(0, positions - 1),
        "fail_backward": st.integers(-2, positions - 1),
        "step": st.integers(0, 1),
        "zero_grad": st.integers(0, 1),
        "add": st.integers(0, 3),
        "freeze": st.integers(0, 3),
    }
    if kind in values:
        action = replace(action, value=draw(values[kind]))
    if life.second:
        action = replace(action, who=draw(st.integers(0, 1)))
    if draw(st.integers(0, 2 if kind.startswith("fail") else 11)) == 0:
        action = replace(action, slow=draw(st.integers(0, world_size - 1)))
    return action


@st.composite
def deviating(draw: Any, *, world_size: int) -> tuple[Life, Deviation]:
    """A life of one history in which one rank skips an action that communicates, does another one, or stops early."""
    life = draw(lives(histories=1, world_size=world_size, phrases=4, deviating=True))
    [history] = life.histories
    if draw(st.integers(0, 3)):  # all traces are compiled and agreed on before
        warm = [Action("forward", mode=mode, seed=90 + mode) for mode in range(len(life.modes))]
        backward = [Action("backward", which=-1) for mode in life.modes if mode.grad]
        history = (*warm, *backward, *history)
    history = (*history, Action("forward"), Action("backward", which=-1))
    rank, at = draw(st.integers(0, world_size - 1)), draw(_places(history))
    instead: Action | None = None
    ends = False
    kind = draw(st.sampled_from(["skips", "ends", "other mode", "other mode", "other", "other"]))
    if kind == "ends":
        ends = True
    elif kind == "other mode":
        instead = Action("forward", mode=draw(st.integers(0, len(life.modes) - 1)), seed=at)
    elif kind == "other":
        instead = draw(_action(draw(st.sampled_from(COLLECTIVE)), life, world_size, at))
    return replace(life, histories=(history,)), Deviation(rank, at, instead, ends)


def _places(history: tuple[Action, ...]) -> Any:
    return st.sampled_from([at for at, action in enumerate(history) if action.kind in COLLECTIVE])
