"""Ranks that differ on virtual GPUs: merged traces have no race and no host wait, and ranks issue the same collectives."""

from __future__ import annotations

import contextlib
import linecache
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import CommPolicy, Ranks, Sharding
from thunder_fsdp_sched.extras.ranks_differ import symbols
from thunder_fsdp_sched.extras.ranks_differ.start import DifferingStart

import pytest
import thunder
import torch
from models import ChosenBlocks
from profiles import LONG_ONLY
from ranks import Ranks as Workers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from virtual_gpu import guard
from virtual_gpu.clocks import check
from virtual_gpu.log import Entry
from virtual_gpu.together import run_together
from virtual_gpu.world import Rank

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")


Way = str | None
"""The blocks that a rank runs, in order; ``None`` without a batch."""

WAYS: tuple[tuple[Way, Way], ...] = (("01", "12"), ("", None), (None, "10"), ("01", "12"), ("01", "01"))
"""The blocks of even ranks in each step, and those of odd ranks."""


def make(rank: Rank, *, mesh: bool = False, **options: Any) -> Any:
    if mesh:
        with rank.outside():
            options["ranks"] = Ranks(mesh=init_device_mesh("cuda", (2, 2)))
    with torch.device(rank.device):
        module = ChosenBlocks(8, 8, 3)
    return thunder.jit(module, transforms=[tfs.fsdp(ranks_may_differ=True, **options)])


def loss_of(model: Any, rank: Rank, way: Way) -> torch.Tensor:
    if way is None:
        return tfs.without_batch(model)
    return model(torch.randn(4, 8, device=rank.device), way)


def update(model: Any, rank: Rank) -> None:
    with rank.phase("optimizer"), torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.sub_(param.grad)
                param.grad = None


def train(rank: Rank, windows: bool = True, **options: Any) -> int:
    """Train, also in windows, and evaluate; return how many merged traces ran."""
    model = make(rank, **options)
    begin = DifferingStart._begin_merged
    with mock.patch.object(DifferingStart, "_begin_merged", autospec=True, side_effect=begin) as merged:
        for step, ways in enumerate(WAYS):
            with rank.phase(f"forward {step}"):
                loss = loss_of(model, rank, ways[rank.rank % 2])
            with rank.phase(f"backward {step}"):
                loss.backward()
            update(model, rank)
        for ways in (WAYS[0], WAYS[2]) if windows else ():
            with model.no_sync(), rank.phase("accumulation"):
                loss_of(model, rank, ways[rank.rank % 2]).backward()
        with rank.phase("end of a window"):
            loss_of(model, rank, WAYS[1][rank.rank % 2]).backward()
        update(model, rank)
        with torch.no_grad(), rank.phase("evaluation"):
            loss_of(model, rank, WAYS[0][rank.rank % 2])
    return merged.call_count


OPTIONS: dict[str, dict[str, Any]] = {
    "zero3": {"sharding_strategy": "zero3"},
    "zero2, bf16 reduced in fp32": {
        "sharding_strategy": "zero2",
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    },
    "zero3, released": {"sharding_strategy": Sharding("zero3", release=True), "transport": "all_to_all"},
    "zero2, released": {"sharding_strategy": Sharding("zero2", release=True)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "offload, zero2": {"offload_policy": CPUOffloadPolicy(), "sharding_strategy": "zero2"},
    "two groups": {"ranks": Ranks(separate_reduce_scatter_group=True), "prefetch": 3},
    "encoded": {"comm_policy": CommPolicy("int8", "int8", block=4, error_feedback=True), "transport": "all_to_all"},
    "reduced in each micro-batch": {"accumulate": "sharded"},
    "hybrid": {"mesh": True},
}
_ORDINARY = ("zero2, bf16 reduced in fp32",)


@pytest.mark.parametrize("option", [pytest.param(o, marks=[] if o in _ORDINARY else [LONG_ONLY]) for o in OPTIONS])
def test_ranks_that_differ_have_no_race_and_no_synchronization(
    lone_workers: Callable[[int], Workers], option: str
) -> None:
    size = 4 if option == "hybrid" else 2
    result = run_together(lone_workers(size), train, **OPTIONS[option])
    result.assert_clean()
    # Ranks differ in all steps but the last, in the window and in the evaluation. But no rank communicates in a backward of
    # the window if all buckets are kept.
    assert result.values == tuple([2 * (len(WAYS) - 1) + 7 - 2 * ("zero2" in option)] * size)
    for log in result.logs:
        for entry in log.entries:
            # As in step 0. With offload, the host waits for copies of shards.
            if entry.phase in ("forward 3", "backward 3") and "offload" not in option:
                assert not entry.blocks and entry.kind != "sync_event", str(entry)


def use_another_stream(rank: Rank) -> list[tuple[bool, Any]]:
    """Run forward on a side stream; return the thread and the stream of each backward without a batch."""
    model, found = make(rank), []
    main, side = torch.cuda.current_stream(rank.device), torch.cuda.Stream(rank.device)
    post = DifferingStart.post

    def recorded(start: Any) -> None:
        if start.half == "backward":
            is_main = threading.current_thread() is threading.main_thread()
            found.append((is_main, torch.cuda.current_stream(rank.device) == side))
        post(start)

    with mock.patch.object(DifferingStart, "post", recorded):
        for ways in WAYS[1:3]:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                loss = loss_of(model, rank, ways[rank.rank])
            main.wait_stream(side)
            loss.backward()
            update(model, rank)
    return found


def test_backward_without_a_batch_runs_on_the_stream_of_its_forward_in_autograds_thread(
    lone_workers: Callable[[int], Workers],
) -> None:
    result = run_together(lone_workers(2), use_another_stream)
    result.assert_clean()
    without_batch = [result.values[1][0], result.values[0][-1]]
    assert without_batch == [(False, True)] * 2


#
# Faults that must be found
#


def waits_in(entry: Entry, statement: str) -> bool:
    """Return whether a statement of a trace waits for a collective there."""
    file, line, _ = entry.where[-1] if entry.where else ("", 0, "")
    return entry.name == "nccl wait" and f"{statement}(" in linecache.getline(file, line)


@pytest.mark.long  # as the mutations of `test_virtual_gpu`
def test_waits_for_served_collectives_are_needed(lone_workers: Callable[[int], Workers]) -> None:
    """At the end of a trace, because the rows are read then; and before a reduction in the slot of another one."""
    logs = run_together(lone_workers(2), train, windows=False).logs
    assert check(logs) == []
    for statement in ("fsdp_finish_served", "fsdp_serve_reduce"):
        without = [replace(log, entries=[e for e in log.entries if not waits_in(e, statement)]) for log in logs]
        assert any(fault.kind in ("race", "reuse") for fault in check(without)), statement


@contextlib.contextmanager
def served_into_the_first_slot() -> Iterator[None]:
    """Gather for others into the memory of the first slot, whatever is in it."""

    def serve(bucket: Any, slot: Any, *shards: Any, **options: Any) -> Any:
        return gather(bucket, slot.arena.slot(0, slot.nbytes), *shards, **options)

    gather = symbols.ops.all_gather
    with mock.patch.object(symbols, "ops", mock.Mock(wraps=symbols.ops, all_gather=serve)):
        yield


def train_with_a_wrong_slot(rank: Rank) -> None:
    with served_into_the_first_slot():
        train(rank, windows=False)


@pytest.mark.long  # `test_virtual_gpu` has mutations of gathers
def test_a_served_gather_into_a_slot_in_use_is_found(lone_workers: Callable[[int], Workers]) -> None:
    result = run_together(lone_workers(2), train_with_a_wrong_slot)
    assert any(fault.kind == "race" for fault in result.faults)
