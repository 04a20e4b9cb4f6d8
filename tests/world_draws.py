"""Draws worlds with hypothesis: models, options, and histories of phrases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from thunder_fsdp_sched import CommPolicy

import torch
from device import IS_CUDA
from hypothesis import strategies as st
from random_models import ModelSpec, cases, draw_numbered
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from world import EVALUATION, WINDOW, Action, Call, Mode, World

PHRASES: dict[tuple[str, ...], int] = {
    ("forward", "backward"): 6,  # backward: of one loss; value 1 retains the graph
    ("forward", "backward", "step", "zero_grad"): 8,  # step: value 1 clips first; zero_grad: value 1 sets to None
    ("forward",): 2,  # in any mode
    ("backward",): 2,
    ("step",): 1,
    ("zero_grad",): 1,
    ("evaluate",): 2,
    ("forward", "evaluate", "backward"): 2,
    ("forward", "forward", "backward", "backward"): 2,
    ("forward", "retained", "backward"): 2,
    ("forward", "retained", "evaluate", "backward"): 1,
    ("forward", "drop"): 2,  # leave a loss, whose backward never runs, to the garbage collector
    ("forward", "lose", "backward"): 2,  # some ranks lose a gathered bucket; the bits of value say which ranks
    ("forward", "fork", "backward"): 1,
    ("micro_batch", "last_batch", "step", "zero_grad"): 3,  # a window: forward and backward of each
    ("micro_batch", "micro_batch", "last_batch", "step", "zero_grad"): 4,
    ("micro_batch", "evaluate", "last_batch", "step"): 1,
    ("micro_batch", "lose", "micro_batch", "last_batch"): 1,
    ("micro_batch", "micro_batch"): 1,  # left for a later window
    ("micro_batch", "discard"): 1,
    ("micro_batch", "add", "micro_batch", "last_batch"): 3,
    ("micro_batch", "scale", "micro_batch", "scale", "last_batch"): 2,
    ("micro_batch", "step", "micro_batch", "last_batch"): 1,
    ("forward_of_window", "retained", "backward", "last_batch", "step", "zero_grad"): 1,
    ("forward_of_window", "forward", "backward", "backward"): 1,
    ("forward_of_window", "evaluate", "backward", "last_batch"): 1,
    ("loop",): 5,  # a loop over `batches`
    ("fail_forward",): 2,  # an operator before block `value` fails at run time
    ("forward", "fail_forward", "backward"): 2,
    # A hook raises before (value -1) or after (-2) the compiled backward, or an operator inside it fails.
    ("forward", "fail_backward"): 3,
    ("fail_backward",): 1,
    ("add",): 1,  # add to one parameter in place, if value is odd inside `unsharded`
    ("forward", "add", "backward"): 1,
    ("scale",): 1,  # scale all parameters through .data, as an EMA swap does: by 2, or back
    ("scale", "forward", "scale"): 2,
    ("forward", "scale", "forward", "scale", "backward"): 2,
    ("forward", "scale", "evaluate", "scale", "backward"): 2,
    ("scale", "eager", "scale"): 1,
    ("eager",): 1,
    ("clip",): 1,
    ("full_state",): 1,  # if value is odd followed by `stream_full_parameters`
    ("save",): 2,  # save a checkpoint
    ("load",): 2,
    ("freeze",): 2,  # freeze or unfreeze one parameter
}
"""Short sequences of words that are drawn together, with the weight of each."""

_MODES = {"forward_of_window": WINDOW, "micro_batch": WINDOW, "last_batch": Mode(), "evaluate": EVALUATION}
"""The modes of words that are a forward; a micro-batch goes on with its backward."""

_WHOLE = frozenset({"save", "load", "clip", "eager", "full_state"})
"""Actions that need whole parameters."""

_WITH_OPTION = ("evaluation", "skipped_step", "other_optimizer")
"""Disagreements that plain ``fsdp()`` does not detect."""

_WITHOUT_BATCH = ("evaluation", "no_sync", "no_grad")
"""Disagreements in which ranks may have no batch."""

DISAGREEMENTS = (*_WITHOUT_BATCH, "backward", "full_state", "other_model", "skipped_step", "other_optimizer")
"""Actions of one rank, whose number is the value, while the others run forward."""

KINDS = ("plain",) * 5 + ("norm", "policy", "encoded", "autocast", "second", "freezable")


def drawn(seed: int, *, ranks: int, histories: int, alike: bool = False) -> World:
    """Return the world of a seed. With another version of hypothesis or of ``world_draws``, it is another one."""
    return draw_numbered(worlds(ranks, histories, alike), seed)


@st.composite
def worlds(draw: Any, world_size: int, histories: int, alike: bool) -> World:
    """Draw a world."""
    case = draw(cases(numeric=True, least=2, most=4))
    kind = draw(st.sampled_from([*KINDS, "experts", "experts"] if world_size == 4 else KINDS))
    options, model = dict(case.options), case.model
    # Autocast leaves float64 as it is.
    blocks = tuple(replace(block, double=kind != "autocast") for block in model.blocks)
    if kind in ("policy", "autocast"):
        blocks = tuple(replace(block, kind="mlp") if block.kind == "norm" else block for block in blocks)
    model = replace(model, blocks=blocks, tied=() if kind == "experts" else model.tied)
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
    if alike and draw(st.integers(0, 3)) == 0:
        options["agree"] = draw(st.sampled_from(["compile", "never"]))
    if draw(st.integers(0, 3)):
        del options["debug"]  # without repeated tracing, compiling takes several times as long
    if draw(st.integers(0, 3)) == 0:
        options["bucketing_strategy"] = 1 << 14  # all blocks in one bucket
    number = st.integers(0, len(model.blocks) - 1)
    ways = draw(st.lists(st.lists(number, max_size=4).map(tuple), min_size=2, max_size=4, unique=True))
    call = st.builds(
        Call,
        way=st.integers(0, len(ways) - 1),
        batch=st.sampled_from([3, 3, 3, 2]),
        autocast=st.booleans() if kind == "autocast" else st.just(False),
        # Without agreement, parameters that no output uses would get zeros.
        outputs=st.just((0, 1)) if "agree" in options else st.sampled_from([(0, 1), (0, 1), (0,), (1,)]),
    )
    calls = draw(st.lists(call, min_size=1 + (not alike), max_size=3, unique_by=lambda call: call.program))
    calls[0] = replace(calls[0], autocast=kind == "autocast")  # otherwise the values of float32 would be exact
    if alike and kind != "norm" and draw(st.booleans()):
        calls.append(replace(calls[0], batch=5 - calls[0].batch))
    sharding = options["sharding_strategy"]
    may_gather_early = alike and "agree" not in options and not (sharding.release or sharding.reshard_after_backward)
    world = World(
        without_scalars_used_twice(model, ways),
        options,
        () if kind == "experts" else case.groups,
        tuple(ways),
        # Losses that use other outputs as well need no further compilation.
        tuple(dict.fromkeys(call for one in calls for call in (one, replace(one, outputs=(0, 1))))),
        norm=kind == "norm",
        optimizer="sgd" if kind in ("policy", "encoded", "autocast") else draw(st.sampled_from(["sgd", "adamw"])),
        second=kind == "second",
        freezable=kind == "freezable",
        hooks=kind != "freezable" and draw(st.booleans()),
        overlaps=draw(st.sampled_from(["", "late", "early"] if may_gather_early else ["", "late"])),
        secondary=case.secondary if alike else None,  # `ranks_may_differ` refuses it
        replicas=world_size == 4 and kind != "experts" and draw(st.booleans()),
        experts=draw(number) if kind == "experts" else None,
        alike=alike,
    )
    return _Histories(draw, world, world_size).added(histories)


def without_scalars_used_twice(model: ModelSpec, ways: list[tuple[int, ...]]) -> ModelSpec:
    """Replace 0-dim parameters that are used twice: Thunder computes wrong gradients for them, even unsharded."""
    twice = {number for way in ways for number in way if way.count(number) > 1}
    blocks = [
        replace(block, kind="linear") if block.kind == "scale" and index in twice else block
        for index, block in enumerate(model.blocks)
    ]
    return replace(model, blocks=tuple(blocks))


class _Histories:
    """Draws the histories of a world."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], world: World, world_size: int) -> None:
        self.draw, self.world, self.world_size = draw, world, world_size
        mode = st.builds(Mode, training=st.booleans() if world.norm else st.just(True), no_sync=..., grad=...)
        other = [draw(mode)] if len(world.calls) == 1 and draw(st.booleans()) else []
        self.has_windows = draw(st.integers(0, 2)) > 0
        self.modes = [Mode(), Mode(), Mode(), EVALUATION, *[WINDOW] * self.has_windows, *other]

    def added(self, histories: int) -> World:
        """Return the world with histories, the last of which may end with a disagreement."""
        drawn = [self.history() for _ in range(histories)]
        last = self.one_of(None, *DISAGREEMENTS)
        is_noticed = self.world.agrees and not (self.world.alike and last in _WITH_OPTION)
        if last and is_noticed and (last != "other_model" or self.world.second):
            forward = self.forward(500, Mode(), everywhere=last not in _WITHOUT_BATCH)
            disagree = replace(forward, kind="disagree", what=last, value=self.number(0, self.world_size - 1))
            drawn[-1] = (*drawn[-1], disagree)
        return replace(self.world, histories=tuple(drawn))

    def number(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def one_of(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def happens(self, one_in: int) -> bool:
        return self.number(1, one_in) == 1

    def history(self, phrases: int = 6) -> tuple[Action, ...]:
        without = set() if self.world.freezable else {"freeze"}
        if self.world.norm:
            without |= {"save", "load"}
        if self.world.experts is not None:
            without |= _WHOLE
        if not self.world.agrees:
            without |= {"lose"}  # the others would not gather it again
        if not self.has_windows:
            without |= {"micro_batch", "forward_of_window"}
        if IS_CUDA:
            without |= {"fail_forward", "fail_backward"}  # an index out of range ends the CUDA context
        weights = {phrase: n for phrase, n in PHRASES.items() if not without & set(phrase)}
        phrase = st.sampled_from([phrase for phrase, weight in weights.items() for _ in range(weight)])
        history: list[Action] = []
        for word in (word for phrase in self.draw(st.lists(phrase, min_size=3, max_size=phrases)) for word in phrase):
            history += map(self.disturbed, self.actions(word, 20 * len(history)))
        return tuple(history)

    def disturbed(self, action: Action) -> Action:
        """Return an action before which a rank may be delayed, and within which ranks may collect garbage."""
        if self.happens(3 if action.kind.startswith("fail") else 12):
            action = replace(action, slow=self.number(0, self.world_size - 1))
        if self.happens(4):
            action = replace(action, collects=tuple(self.number(-1, 4) for _ in range(self.world_size)))
        return action

    def actions(self, word: str, seed: int) -> list[Action]:
        """Draw the actions of a word."""
        if word == "loop":
            return [self.loop(seed)]
        if word in _MODES:
            forward = self.forward(seed, _MODES[word])
            return [forward, Action("backward", model_index=forward.model_index)][: 1 + word.endswith("batch")]
        if word == "forward":
            return [self.forward(seed, self.one_of(*self.modes))]
        if word in ("fail_forward", "eager"):
            alike = word == "fail_forward"
            forward = self.forward(seed, self.one_of(*self.modes), everywhere=True, alike=alike)
            return [replace(forward, kind=word, value=self.number(0, 4))]
        if word == "retained":
            word, value = "backward", 1
        else:
            value = {
                "backward": lambda: self.one_of(0, 0, 0, 1),
                "fail_backward": lambda: self.number(-2, 4),
                "lose": lambda: self.number(1, (1 << self.world_size) - 1),
                "step": lambda: self.number(0, int(self.world.experts is None)),
                "zero_grad": lambda: self.number(0, 1),
                "full_state": lambda: self.number(0, 1),
                "add": lambda: self.number(0, 7),
                "freeze": lambda: self.number(0, 3),
            }.get(word, lambda: 0)()
        index = self.one_of(-1, -1, 0, 1) if word in ("backward", "fail_backward", "drop") else -1
        return [Action(word, value=value, seed=seed, loss_index=index, model_index=self.model_index())]

    def model_index(self) -> int:
        return self.number(0, 1) if self.world.second else 0

    def forward(self, seed: int, mode: Mode, *, everywhere: bool = False, alike: bool = False) -> Action:
        """Draw a forward. ``everywhere``: every rank has a batch."""
        size, last = self.world_size, len(self.world.calls) - 1
        calls: tuple[int | None, ...] = (self.number(0, last),) * size
        if not (alike or self.happens(5)):
            calls = tuple(self.one_of(*self.beside(calls[0])) for _ in range(size))
        if not (alike or self.world.alike or everywhere) and self.happens(2):
            ended = self.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
            if self.happens(20):
                ended = set(range(size))
            calls = tuple(None if rank in ended else call for rank, call in enumerate(calls))
        return Action("forward", mode, calls, seed=seed, model_index=self.model_index())

    def beside(self, number: int) -> list[int]:
        """Return the calls that ranks may make beside this one: in alike worlds, those that run the same blocks."""
        calls = self.world.calls
        if not self.world.agrees:  # one that compiles would wait for the others
            return [number]
        return [n for n, call in enumerate(calls) if not self.world.alike or call.program == calls[number].program]

    def loop(self, seed: int) -> Action:
        """Draw a loop over loaders of different lengths, with windows of some micro-batches and an evaluation in between."""
        lengths = [self.number(0, 4) for _ in range(self.world_size)]
        if self.world.alike:
            lengths = lengths[:1] * self.world_size
        window = self.one_of(1, 1, 2, 3) if self.has_windows else 1
        evaluates = self.number(0, 4)
        body: list[tuple[Action, ...]] = []
        for number in range(max(lengths)):
            is_last = (number + 1) % window == 0
            forward = self.forward(seed + number, Mode() if is_last else WINDOW, everywhere=True)
            calls = tuple(call if number < lengths[rank] else None for rank, call in enumerate(forward.calls))
            actions = [replace(forward, calls=calls, model_index=0), Action("backward")]
            if number == evaluates:
                actions.append(replace(self.forward(seed + 10, EVALUATION), model_index=0))
            if is_last:
                clips, sets_to_none = self.number(0, int(self.world.experts is None)), self.number(0, 1)
                actions += [Action("step", value=clips), Action("zero_grad", value=sets_to_none)]
            body.append(tuple(actions))
        return Action("loop", seed=seed, body=tuple(body), model_index=self.model_index())
