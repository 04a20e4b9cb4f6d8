"""Random scenarios from hypothesis: a model, how it is sharded, and histories of calls, as data to paste into a test.

A *history* is a sequence of :class:`Action` values, such as forward, backward or an optimizer step. ``history_runner`` runs
it. Histories exclude the following:

- *Backward while parameters differ from those of its forward because* ``.data`` *was changed*: torch itself then mixes old
  activations with new weights. Once the change has been undone, backward runs and must be correct.
- *Float32 parameters, and 0-dim values used twice*: ``test_random_models`` covers the first; Thunder fails on the second.
- *Gradients right after an exception inside backward*: autograd does not say which gradients have been computed. They are
  then set to ``None``, as a user has to do. No failure is injected into a backward under ``no_sync``, or while there are
  unreduced gradients: some of the accumulated gradients would be lost, and no call clears the others.
- *Checkpoints with running statistics*: only one rank's are saved, by design.
- *Loading optimizer state for other parameters than were saved*: the optimizer must hold state for the same ones.
- *Backward that uses running statistics which another forward has updated since*: plain Thunder and torch differ.
- *Batch norm in bfloat16*: plain Thunder fails. *Layer norm in bfloat16*: cancellation leaves no useful tolerance.
- *Local actions on some ranks only* (a step, ``zero_grad``, in-place changes): there is no expected result.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from device import IS_CUDA
from hypothesis import strategies as st
from random_models import Case, ModelSpec, RandomModel, cases
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class Mode:
    """The way in which forward is called. Thunder compiles each mode once."""

    batch: int = 3
    flag: bool = False
    training: bool = True
    no_sync: bool = False
    grad: bool = True


WINDOW = Mode(no_sync=True)
"""The mode of the micro-batches of a window, which a forward in the usual mode ends."""


@dataclass(frozen=True, repr=False)
class Action:
    """One call of a history.

    Attributes:
        kind: see :data:`PHRASES`.
        mode: index into ``Scenario.modes``.
        loss_index: index into the losses whose backward has not run yet.
        value: an argument whose meaning depends on the kind; see :data:`PHRASES`.
        seed: the seed of the inputs.
        model_index: 0 for the first model, 1 for the second.
        slow: a rank that is delayed before this call, so that the others' collectives stay in flight.
        collects: for each rank, where it collects garbage: before this call (0), in its n-th gather or reduction, or not at
            all (-1). Python does it at other times, too.
    """

    kind: str
    mode: int = 0
    loss_index: int = 0
    value: int = 0
    seed: int = 0
    model_index: int = 0
    slow: int | None = None
    collects: tuple[int, ...] = ()

    def __repr__(self) -> str:
        given = [f"{f.name}={v!r}" for f in fields(self)[1:] if (v := getattr(self, f.name)) != f.default]
        return f"{type(self).__name__}({', '.join([repr(self.kind), *given])})"


PHRASES: dict[tuple[str, ...], int] = {
    ("forward",): 4,  # call the compiled model; under no_grad if `mode.grad` is false
    ("backward",): 4,  # of one loss; value 1 retains the graph
    ("forward", "backward"): 5,
    ("forward", "backward", "step", "zero_grad"): 4,  # step: value 1 clips first; zero_grad: value 1 sets to None
    ("step",): 1,
    ("zero_grad",): 1,
    ("forward", "drop"): 2,  # leave a loss, whose backward never runs, to the garbage collector
    ("fail_forward",): 2,  # an operator before block `value` fails at run time
    ("forward", "fail_forward", "backward"): 2,
    # A hook raises before (value -1) or after (-2) the compiled backward, or an operator inside it fails.
    ("fail_backward",): 2,
    ("add",): 1,  # add to one parameter in place, in half of the cases inside `unsharded`
    ("scale",): 1,  # scale all parameters through .data, as an EMA swap does: by 2, or back
    ("scale", "forward", "scale"): 2,
    ("forward", "scale", "forward", "scale", "backward"): 2,
    ("scale", "eager", "scale"): 1,
    ("clip",): 1,
    ("full_state",): 1,  # in half of the cases followed by `stream_full_parameters`
    ("save",): 1,  # save a checkpoint
    ("load",): 1,
    ("freeze",): 2,  # freeze or unfreeze one parameter
    ("micro_batch", "micro_batch", "last_batch", "step", "zero_grad"): 4,  # a window: forward and backward of each
    ("micro_batch", "add", "micro_batch", "last_batch"): 1,
    ("micro_batch", "scale", "micro_batch", "scale", "last_batch"): 1,
}
"""Short sequences of actions that are drawn together, with the weight of each."""


@dataclass(frozen=True)
class Scenario:
    """One model or two, how they are sharded and trained, and the histories to run one after the other.

    Attributes:
        other: the order of blocks when the model is called with ``flag``.
        norm: whether there is a batch norm, whose running statistics forward updates.
        optimizer: "sgd" or "adamw".
        second: whether actions alternate between two models.
        freezable: whether histories freeze and unfreeze parameters.
        secondary: see :class:`random_models.Case`.
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
    secondary: int | None = None

    @property
    def case(self) -> Case:
        return Case(self.model, self.options, self.groups, secondary=self.secondary)

    @property
    def tolerance(self) -> float:
        """The relative and absolute tolerance of :meth:`history_runner.HistoryRunner.compare`."""
        policy = self.options.get("mp_policy")
        lowest = {dtype for dtype in (policy.param_dtype, policy.reduce_dtype) if dtype} if policy else set()
        return 0.06 if torch.bfloat16 in lowest else 1e-4 if lowest else 1e-9


class ScenarioModel(RandomModel):
    """A random model with a branch, and with operators that a test can make fail at run time.

    Before each block, ``index`` selects the rows of the batch. It counts from zero and changes nothing, unless a test
    writes an index out of range: then forward fails, or backward if the test wrote through ``.data`` after forward.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.model)
        self.other = scenario.other
        self.norm = nn.BatchNorm1d(scenario.model.width).double() if scenario.norm else None

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
def scenarios(draw: Any, *, histories: int, world_size: int, phrases: int = 6) -> Scenario:
    case = draw(cases(numeric=True))
    model = replace(case.model, blocks=tuple(replace(b, double=True) for b in case.model.blocks))
    options = dict(case.options)
    kind = draw(st.sampled_from(["plain", "plain", "plain", "second", "freezable", "norm", "policy"]))
    if kind == "policy":
        policy = draw(st.sampled_from([(torch.bfloat16, torch.float32), (torch.float32, None), (None, torch.float32)]))
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=policy[0], reduce_dtype=policy[1])
        model = replace(model, blocks=tuple(replace(b, kind="mlp") if b.kind == "norm" else b for b in model.blocks))
    number = st.integers(0, len(model.blocks) - 1)
    other = tuple(draw(st.lists(number, min_size=1, max_size=3)))
    model, other = without_scalars_used_twice(model, other)
    mode = st.builds(
        Mode,
        batch=st.sampled_from([3, 3, 2]),
        flag=st.booleans(),
        training=st.sampled_from([True, True, False]) if kind == "norm" else st.just(True),
        no_sync=st.sampled_from([False, False, True]),
        grad=st.sampled_from([True, True, False]),
    )
    few = 1 if kind in ("second", "freezable") else 3
    modes = (Mode(), *draw(st.lists(mode, min_size=few, max_size=few, unique=True)))
    if draw(st.booleans()):
        modes = (Mode(), WINDOW, *modes[2:])
    scenario = Scenario(
        model,
        options,
        case.groups,
        other,
        norm=kind == "norm",
        optimizer="sgd" if kind == "policy" else draw(st.sampled_from(["sgd", "adamw"])),
        second=kind == "second",
        freezable=kind == "freezable",
        modes=modes,
        secondary=case.secondary,
    )
    drawn = [draw(_history(scenario, world_size, phrases)) for _ in range(histories)]
    return replace(scenario, histories=tuple(drawn))


def without_scalars_used_twice(model: ModelSpec, other: tuple[int, ...]) -> tuple[ModelSpec, tuple[int, ...]]:
    """Replace 0-dim parameters that are used twice: Thunder computes wrong gradients for them, even unsharded."""
    blocks = [
        replace(block, kind="linear") if block.kind == "scale" and other.count(index) > 1 else block
        for index, block in enumerate(model.blocks)
    ]
    return replace(model, blocks=tuple(blocks)), other


@st.composite
def _history(draw: Any, scenario: Scenario, world_size: int, phrases: int) -> tuple[Action, ...]:
    without = {"freeze"} if not scenario.freezable else set()
    if scenario.norm:
        without |= {"save", "load"}
    if WINDOW not in scenario.modes:
        without |= {"micro_batch"}
    if IS_CUDA:
        without |= {"fail_forward", "fail_backward"}  # an index out of range ends the CUDA context
    weights = {phrase: n for phrase, n in PHRASES.items() if not without & set(phrase)}
    phrase = st.sampled_from([phrase for phrase, weight in weights.items() for _ in range(weight)])
    drawn = draw(st.lists(phrase, min_size=phrases // 2, max_size=phrases))
    history: list[Action] = []
    for kind in (kind for phrase in drawn for kind in phrase):
        if kind in ("micro_batch", "last_batch"):
            forward = draw(_action("forward", scenario, world_size, len(history)))
            history.append(replace(forward, mode=scenario.modes.index(WINDOW if kind == "micro_batch" else Mode())))
            history.append(Action("backward", loss_index=-1, model_index=forward.model_index))
        else:
            history.append(draw(_action(kind, scenario, world_size, len(history))))
    return tuple(history)


@st.composite
def _action(draw: Any, kind: str, scenario: Scenario, world_size: int, seed: int) -> Action:
    action = Action(kind, seed=seed)
    if kind in ("forward", "fail_forward", "eager"):
        action = replace(action, mode=draw(st.integers(0, len(scenario.modes) - 1)))
    if kind in ("backward", "fail_backward", "drop"):
        action = replace(action, loss_index=draw(st.sampled_from([-1, -1, 0, 1])))
    positions = len(scenario.model.order) + 1
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
    if scenario.second:
        action = replace(action, model_index=draw(st.integers(0, 1)))
    if draw(st.integers(0, 2 if kind.startswith("fail") else 11)) == 0:
        action = replace(action, slow=draw(st.integers(0, world_size - 1)))
    if draw(st.integers(0, 2)) == 0:
        action = replace(action, collects=tuple(draw(st.integers(-1, 4)) for _ in range(world_size)))
    return action
