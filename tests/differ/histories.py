"""Random histories of ranks that differ, from hypothesis, as data to paste into a test; and a command that runs many.

    python tests/differ/histories.py --ranks 2 --seeds 0:500

A *call* says what one rank does with its batch: the blocks that it runs, in which order, on how many rows, and whether under
autocast. In each forward every rank makes a call of its own, or none, because it has no batch. ``differing_runner`` runs
histories. They exclude the following, besides what ``random_histories`` excludes:

- *Backward after parameters have changed since its forward*: autograd raises an error on the ranks with a batch.
- *Backward of a loss whose memory an earlier backward has released*: it raises an error on the ranks with a batch.
- *Exceptions on some ranks*: the others wait for them until the timeout.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests / "differ"), str(tests), str(tests.parent / "examples")]
    os.environ.setdefault("THUNDER_FSDP_SCHED_CHECK_PASSES", "1")

from thunder_fsdp_sched import CommPolicy

import torch
from hypothesis import strategies as st
from random_histories import WINDOW, Action, Mode, Scenario, without_scalars_used_twice
from random_models import RandomModel, cases
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

EVALUATION = Mode(training=False, grad=False)


@dataclass(frozen=True)
class Call:
    """A call of the model with a batch.

    Attributes:
        way: index into ``DifferingScenario.ways``.
        batch: its number of rows.
        autocast: whether forward runs under ``torch.autocast`` in bfloat16.
        outputs: the outputs that the loss uses. Parameters that it does not reach get no gradient.
    """

    way: int
    batch: int = 3
    autocast: bool = False
    outputs: tuple[int, ...] = (0, 1)


@dataclass(frozen=True, repr=False)
class RankAction(Action):
    """An action in which ranks may differ.

    Attributes:
        calls: by rank, index into ``DifferingScenario.calls``, or ``None`` for a rank without a batch.
        body: of a loop over ``batches``, the actions of each iteration. Each begins with a forward.
    """

    calls: tuple[int | None, ...] = ()
    body: tuple[tuple[RankAction, ...], ...] = ()


@dataclass(frozen=True)
class DifferingScenario(Scenario):
    """One model, how it is sharded and trained, and histories of ranks that differ.

    Attributes:
        ways: orders of blocks, one of which each call runs.
        calls: those that histories choose from. Thunder compiles each once in each mode.
        hooks: whether hooks of parameters are counted.
        replicas: whether there is a mesh of two replicas.
        experts: index of a block whose parameters each half of the ranks shards on its own.
        alike: whether all ranks make the same calls, so that the option is not needed.
    """

    ways: tuple[tuple[int, ...], ...] = ()
    calls: tuple[Call, ...] = ()
    hooks: bool = False
    replicas: bool = False
    experts: int | None = None
    alike: bool = False

    @property
    def tolerance(self) -> float:
        """Relative to the largest value: see :attr:`is_inexact`."""
        if self.options.get("comm_policy") or any(call.autocast for call in self.calls):
            return 0.06
        return super().tolerance

    @property
    def is_inexact(self) -> bool:
        """Whether values have so few bits that the unsharded model takes over the parameters after each step."""
        return self.tolerance > 0.01


class DifferingModel(RandomModel):
    """A random model, each call of which chooses the blocks to run. Its second output needs only the first of them."""

    def __init__(self, scenario: DifferingScenario) -> None:
        super().__init__(scenario.model)
        for number, way in enumerate(scenario.ways):
            setattr(self, f"way_{number}", way)
        self.norm = nn.BatchNorm1d(scenario.model.width).double() if scenario.norm else None
        self.side = nn.Linear(scenario.model.width, 2).double()

    def forward(self, x: torch.Tensor, way: str) -> tuple[torch.Tensor, torch.Tensor]:
        side = None
        for number in getattr(self, way):
            x = self.blocks[number].forward(x)
            if side is None:
                side = self.side.forward(x)
        if side is None:
            side = self.side.forward(x)
        if self.norm is not None:
            x = self.norm.forward(x)
        return self.end(x), side


PHRASES: dict[tuple[str, ...], int] = {
    ("forward", "backward"): 4,
    ("forward", "backward", "step", "zero_grad"): 6,
    ("forward", "evaluate", "backward"): 2,
    ("evaluate",): 2,
    ("forward", "forward", "backward", "backward"): 2,
    ("forward", "retained", "backward"): 2,
    ("forward", "retained", "evaluate", "backward"): 1,
    ("forward", "drop"): 1,
    ("micro_batch", "last_batch", "step", "zero_grad"): 2,
    ("micro_batch", "micro_batch", "last_batch", "step", "zero_grad"): 3,
    ("micro_batch", "evaluate", "last_batch", "step"): 1,
    ("micro_batch", "micro_batch"): 1,  # left for a later window
    ("micro_batch", "discard"): 1,
    ("forward_of_window", "retained", "backward", "last_batch", "step", "zero_grad"): 1,
    ("forward_of_window", "forward", "backward", "backward"): 1,
    ("forward_of_window", "evaluate", "backward", "last_batch"): 1,
    ("loop",): 5,  # a loop over `batches`
    ("step",): 1,
    ("zero_grad",): 1,
    ("clip",): 1,
    ("add",): 1,
    ("eager",): 1,
    ("full_state",): 1,
    ("save",): 2,
    ("load",): 2,
    ("freeze",): 2,
}
"""Short sequences of actions that are drawn together, with the weight of each."""

DISAGREEMENTS = (
    "evaluation",
    "no_sync",
    "no_grad",
    "backward",
    "full_state",
    "other_model",
    "skipped_step",
    "other_optimizer",
)
"""Actions of one rank while the others run forward."""

_WITH_OPTION = ("evaluation", "skipped_step", "other_optimizer")
"""Disagreements that plain ``fsdp()`` does not detect."""

_WITHOUT_BATCH = ("evaluation", "no_sync", "no_grad")
"""Disagreements in which ranks may have no batch."""

_UNTIL_RESET = ("skipped_step", "other_optimizer")
"""Disagreements after which ranks never agree again."""


@st.composite
def differing_scenarios(
    draw: Any, *, histories: int, world_size: int, phrases: int = 6, alike: bool = False
) -> DifferingScenario:
    case = draw(cases(numeric=True, least=2, most=4))
    kinds = ["plain"] * 5 + ["norm", "policy", "encoded", "autocast", "second", "freezable"]
    kind = draw(st.sampled_from([*kinds, "experts", "experts"] if world_size == 4 else kinds))
    options, model = dict(case.options), case.model
    double = kind != "autocast"  # which leaves float64 as it is
    blocks = tuple(replace(block, double=double) for block in model.blocks)
    if kind in ("policy", "autocast"):
        blocks = tuple(replace(block, kind="mlp") if block.kind == "norm" else block for block in blocks)
    model = replace(model, blocks=blocks)
    if kind == "policy":
        policy = draw(st.sampled_from([(torch.bfloat16, torch.float32), (torch.float32, None), (None, torch.float32)]))
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=policy[0], reduce_dtype=policy[1])
    if kind == "encoded":
        options["comm_policy"] = CommPolicy(
            gather=draw(st.sampled_from([None, "bfloat16"])), reduce="int8", block=8, error_feedback=draw(st.booleans())
        )
        options["transport"] = draw(st.sampled_from(["auto", "flat", "all_to_all"]))  # others cannot send it
    if draw(st.integers(0, 4)) == 0:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if draw(st.integers(0, 11)) == 0:
        options["max_memory"] = 1 << 30
    if draw(st.integers(0, 5)) == 0:
        options["sharding_strategy"] = replace(options["sharding_strategy"], reshard_after_backward=True)
    if kind != "experts" and draw(st.integers(0, 4)) == 0:
        options["gradient_divide_factor"] = draw(st.sampled_from([1.0, 3.0]))
    del options["debug"]  # without repeated tracing, compiling takes several times as long
    if draw(st.integers(0, 3)) == 0:
        options["bucketing_strategy"] = 1 << 14  # all blocks in one bucket
    number = st.integers(0, len(model.blocks) - 1)
    ways = draw(st.lists(st.lists(number, max_size=4).map(tuple), min_size=2, max_size=4, unique=True))
    for way in ways:
        model, _ = without_scalars_used_twice(model, way)
    call = st.builds(
        Call,
        way=st.integers(0, len(ways) - 1),
        batch=st.sampled_from([3, 3, 3, 2]),
        autocast=st.booleans() if kind == "autocast" else st.just(False),
        outputs=st.sampled_from([(0, 1), (0, 1), (0,), (1,)]),
    )
    if kind == "experts":
        model = replace(model, tied=())
    scenario = DifferingScenario(
        model,
        options,
        () if kind == "experts" else case.groups,
        norm=kind == "norm",
        optimizer="sgd" if kind in ("policy", "encoded", "autocast") else draw(st.sampled_from(["sgd", "adamw"])),
        modes=(Mode(), EVALUATION, WINDOW)[: draw(st.sampled_from([2, 3, 3]))],
        ways=tuple(ways),
        calls=_with_outputs(
            draw(st.lists(call, min_size=2, max_size=3, unique_by=lambda call: (call.way, call.autocast)))
        ),
        second=kind == "second",
        freezable=kind == "freezable",
        hooks=kind != "freezable" and draw(st.booleans()),
        replicas=world_size == 4 and kind != "experts" and draw(st.booleans()),
        experts=draw(number) if kind == "experts" else None,
        alike=alike,
    )
    drawn = [draw(_history(scenario, world_size, phrases)) for _ in range(histories)]
    last = draw(st.sampled_from([None, *DISAGREEMENTS]))
    if last and not (alike and last in _WITH_OPTION) and (last != "other_model" or scenario.second):
        drawn[-1] = (*drawn[-1], draw(_disagreement(scenario, world_size, last)))
    return replace(scenario, histories=tuple(drawn))


def _with_outputs(calls: list[Call]) -> tuple[Call, ...]:
    """Return calls whose losses use other outputs as well, which need no further compilation."""
    return tuple(dict.fromkeys(call for one in calls for call in (one, replace(one, outputs=(0, 1)))))


@st.composite
def _history(draw: Any, scenario: DifferingScenario, world_size: int, phrases: int) -> tuple[RankAction, ...]:
    without = {"freeze"} if not scenario.freezable else set()
    if scenario.norm:
        without |= {"save", "load"}
    if scenario.experts is not None:
        without |= {"save", "load", "clip", "eager", "full_state"}
    if WINDOW not in scenario.modes:
        without |= {"micro_batch", "forward_of_window"}
    weights = {phrase: n for phrase, n in PHRASES.items() if not without & set(phrase)}
    phrase = st.sampled_from([phrase for phrase, weight in weights.items() for _ in range(weight)])
    drawn = draw(st.lists(phrase, min_size=phrases // 2, max_size=phrases))
    history: list[RankAction] = []
    for kind in (kind for phrase in drawn for kind in phrase):
        history += draw(_actions(kind, scenario, world_size, 20 * len(history)))
    return tuple(history)


@st.composite
def _actions(draw: Any, kind: str, scenario: DifferingScenario, world_size: int, seed: int) -> list[RankAction]:
    """Draw the actions for a word of a phrase."""
    if kind in ("micro_batch", "last_batch"):
        forward = draw(_forward(scenario, world_size, seed, WINDOW if kind == "micro_batch" else Mode()))
        return [forward, RankAction("backward", loss_index=-1, model_index=forward.model_index)]
    if kind == "loop":
        return [draw(_loop(scenario, world_size, seed))]
    if kind == "forward_of_window":
        return [draw(_forward(scenario, world_size, seed, WINDOW))]
    if kind == "evaluate":
        return [draw(_forward(scenario, world_size, seed, EVALUATION))]
    if kind == "forward":
        action = draw(_forward(scenario, world_size, seed, Mode()))
    elif kind == "eager":
        action = replace(draw(_forward(scenario, world_size, seed, EVALUATION, everywhere=True)), kind=kind)
    elif kind == "retained":
        action = RankAction("backward", loss_index=-1, value=1)
    else:
        values = {
            "step": st.integers(0, int(scenario.experts is None)),
            "zero_grad": st.integers(0, 1),
            "add": st.integers(0, 3),
            "freeze": st.integers(0, 3),
        }
        action = RankAction(kind, value=draw(values[kind]) if kind in values else 0, seed=seed)
    if scenario.second:
        action = replace(action, model_index=draw(st.integers(0, 1)))
    if kind in ("backward", "drop"):
        action = replace(action, loss_index=draw(st.sampled_from([-1, -1, 0])))
    if draw(st.integers(0, 11)) == 0:
        action = replace(action, slow=draw(st.integers(0, world_size - 1)))
    if draw(st.integers(0, 5)) == 0:
        action = replace(action, collects=tuple(draw(st.integers(-1, 4)) for _ in range(world_size)))
    return [action]


@st.composite
def _forward(
    draw: Any, scenario: DifferingScenario, world_size: int, seed: int, mode: Mode, *, everywhere: bool = False
) -> RankAction:
    """Draw a forward. ``everywhere``: every rank has a batch."""
    call = st.integers(0, len(scenario.calls) - 1)
    if scenario.alike or draw(st.integers(0, 4)) == 0:
        calls = (draw(call),) * world_size
    else:
        calls = tuple(draw(call) for _ in range(world_size))
    if not (scenario.alike or everywhere) and draw(st.integers(0, 1)) == 0:
        ended = draw(st.sets(st.integers(0, world_size - 1), max_size=world_size - 1))
        if draw(st.integers(0, 19)) == 0:
            ended = set(range(world_size))
        calls = tuple(None if rank in ended else call for rank, call in enumerate(calls))
    model_index = draw(st.integers(0, 1)) if scenario.second else 0
    return RankAction("forward", mode=scenario.modes.index(mode), seed=seed, calls=calls, model_index=model_index)


@st.composite
def _loop(draw: Any, scenario: DifferingScenario, world_size: int, seed: int) -> RankAction:
    """Draw a loop over loaders of different lengths, with windows of some micro-batches and an evaluation in between."""
    lengths = [draw(st.integers(0, 4)) for _ in range(world_size)]
    if scenario.alike:
        lengths = lengths[:1] * world_size
    window = draw(st.sampled_from([1, 1, 2, 3])) if WINDOW in scenario.modes else 1
    evaluates = draw(st.integers(0, 4))
    body: list[tuple[RankAction, ...]] = []
    for number in range(max(lengths)):
        is_last = (number + 1) % window == 0
        forward = draw(_forward(scenario, world_size, seed + number, Mode() if is_last else WINDOW, everywhere=True))
        calls = tuple(call if number < lengths[rank] else None for rank, call in enumerate(forward.calls))
        actions = [replace(forward, calls=calls, model_index=0), RankAction("backward", loss_index=-1)]
        if number == evaluates:
            actions.append(replace(draw(_forward(scenario, world_size, seed + 10, EVALUATION)), model_index=0))
        if is_last:
            clips, sets_to_none = draw(st.integers(0, int(scenario.experts is None))), draw(st.integers(0, 1))
            actions += [RankAction("step", value=clips), RankAction("zero_grad", value=sets_to_none)]
        body.append(tuple(actions))
    return RankAction(
        "loop", seed=seed, body=tuple(body), model_index=draw(st.integers(0, 1)) if scenario.second else 0
    )


@st.composite
def _disagreement(draw: Any, scenario: DifferingScenario, world_size: int, kind: str) -> RankAction:
    forward = draw(_forward(scenario, world_size, 500, Mode(), everywhere=kind not in _WITHOUT_BATCH))
    return replace(forward, kind=f"disagree_{kind}", value=draw(st.integers(0, world_size - 1)))


def is_final(action: RankAction) -> bool:
    """Return whether ranks cannot go on after an action."""
    return action.kind.removeprefix("disagree_") in _UNTIL_RESET


if __name__ == "__main__":
    from replaying import main

    main()
