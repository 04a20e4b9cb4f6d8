"""Ranks that differ, or that lose buckets, on virtual GPUs: no race and no host wait, and they issue the same collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import Sharding
from thunder_fsdp_sched.extras.ranks_differ.start import DifferingStart

import pytest
import thunder
import torch
from models import ChosenBlocks
from profiles import with_long
from random_models import BlockSpec, ModelSpec
from ranks import Ranks as Workers
from torch.distributed.fsdp import MixedPrecisionPolicy
from virtual_gpu import guard
from virtual_gpu.histories import make_model
from virtual_gpu.mutations import is_ours
from virtual_gpu.together import run_together
from virtual_gpu.world import Rank
from world import EVALUATION, WINDOW, Action, Call, Mode, World
from world_draws import drawn
from world_virtual import run_histories

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")


WAYS = ((0, 1), (1, 2), (), (1, 0))
"""The blocks that a call runs, in order."""

CALLS: tuple[tuple[int | None, int | None], ...] = ((0, 1), (2, None), (None, 3), (0, 1), (0, 0))
"""The calls of even ranks in each step, and those of odd ranks; ``None`` without a batch."""

STEP, WINDOW_OF = (Action("backward"), Action("step"), Action("zero_grad", value=1)), (CALLS[0], CALLS[2])


def world_of(size: int = 2, *, windows: bool = True, replicas: bool = False, **options: Any) -> World:
    """Return a world whose ranks train, also in windows, and evaluate."""

    def forward(calls: tuple[int | None, ...], mode: Mode = Mode()) -> Action:  # noqa: B008
        return Action("forward", mode, calls * (size // 2))

    history = [action for calls in CALLS for action in (forward(calls), *STEP)]
    for calls in WINDOW_OF if windows else ():
        history += [forward(calls, WINDOW), Action("backward")]
    history += [forward(CALLS[1]), *STEP, forward(CALLS[0], EVALUATION)]
    linear, calls = BlockSpec("linear", 1, False, True), tuple(Call(way, 4) for way in range(len(WAYS)))
    model, options = ModelSpec(8, (linear,) * 3, (), (), False), {"sharding_strategy": Sharding(), **options}
    return World(model, options, ways=WAYS, calls=calls, replicas=replicas, histories=(tuple(history),))


def train(rank: Rank, world: World) -> int:
    """Run the history of a world; return how many merged traces ran."""
    begin = DifferingStart._begin_merged
    with mock.patch.object(DifferingStart, "_begin_merged", autospec=True, side_effect=begin) as merged:
        run_histories(rank, world)
    return merged.call_count


OPTIONS: dict[str, dict[str, Any]] = {
    "zero2, bf16 reduced in fp32": {
        "sharding_strategy": Sharding("zero2"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    },
    "zero3, released": {"sharding_strategy": Sharding("zero3", release=True), "transport": "all_to_all"},
    "hybrid": {"replicas": True},
}


@pytest.mark.parametrize("option", with_long(OPTIONS, "zero3, released", "hybrid"))
def test_ranks_that_differ_have_no_race_and_no_synchronization(
    lone_workers: Callable[[int], Workers], option: str
) -> None:
    size = 4 if option == "hybrid" else 2
    result = run_together(lone_workers(size), train, world_of(size, **OPTIONS[option]))
    result.assert_clean()
    # Ranks differ in all steps but the last, in the window and in the evaluation. But no rank communicates in a backward of
    # the window if all buckets are kept.
    assert result.values == tuple([2 * (len(CALLS) - 1) + 7 - 2 * ("zero2" in option)] * size)
    for log in result.logs:
        for entry in log.entries:
            if entry.phase in ("12: forward", "13: backward") and is_ours(entry):  # as in step 0
                assert not entry.blocks and entry.kind != "sync_event", str(entry)


def use_another_stream(rank: Rank) -> list[tuple[bool, Any]]:
    """Run forward on a side stream; return the thread and the stream of each backward without a batch."""
    with torch.device(rank.device):
        model, found = thunder.jit(ChosenBlocks(8, 8, 3), transforms=[tfs.fsdp(ranks_may_differ=True)]), []
    main, side = torch.cuda.current_stream(rank.device), torch.cuda.Stream(rank.device)
    post = DifferingStart.post

    def recorded(start: Any) -> None:
        if start.half == "backward":
            is_main = threading.current_thread() is threading.main_thread()
            found.append((is_main, torch.cuda.current_stream(rank.device) == side))
        post(start)

    with mock.patch.object(DifferingStart, "post", recorded):
        for way in (("", None), (None, "10")):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                given = torch.randn(4, 8, device=rank.device), way[rank.rank]
                loss = tfs.without_batch(model) if way[rank.rank] is None else model(*given)
            main.wait_stream(side)
            loss.backward()
    return found


def test_backward_without_a_batch_runs_on_the_stream_of_its_forward_in_autograds_thread(
    lone_workers: Callable[[int], Workers],
) -> None:
    result = run_together(lone_workers(2), use_another_stream)
    result.assert_clean()
    without_batch = [result.values[1][0], result.values[0][-1]]
    assert without_batch == [(False, True)] * 2


LOSERS = ((), (0,), (1,), (0, 1))
"""The ranks that lose a kept bucket before backward, in each step."""


def lose_buckets(rank: Rank) -> list[str]:
    """Take steps in which ranks lose a bucket; return the first statements of this package in forward."""
    model = make_model(rank, sharding_strategy="zero2", prefetch=0)
    transform = model._lc_transforms[-1]
    for step, losers in enumerate(LOSERS):
        loss = model(torch.randn(4, 8, device=rank.device)).sum()
        if rank.rank in losers:
            transform.sharded.buckets[-1].private_slot.arena.contents.clear()
        with rank.phase(f"backward {step}"):
            loss.backward()
    names = [bsym.sym.name for bsym in transform.compiled[-1].forward.bound_symbols]
    return [name for name in names if name.startswith("fsdp_")][:4]


def test_ranks_gather_again_what_one_has_lost_and_agree_while_they_gather(
    lone_workers: Callable[[int], Workers],
) -> None:
    result = run_together(lone_workers(2), lose_buckets)
    result.assert_clean()
    usual, *more = (result.count(f"backward {step}")["collective"] for step in range(len(LOSERS)))
    assert more == [usual + 1] * 3
    assert result.values == (["fsdp_agree", "fsdp_all_gather", "fsdp_agreed", "fsdp_wait_params"],) * 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(16))
def test_a_drawn_world_has_no_fault(lone_workers: Callable[[int], Workers], seed: int) -> None:
    run_together(lone_workers(2), run_histories, drawn(seed, ranks=2, histories=1)).assert_clean()
