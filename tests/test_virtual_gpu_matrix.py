"""Typical uses of sharded models on virtual GPUs, also by ranks that differ or lose buckets: no race and no host wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import thunder_fsdp_sched
import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import CommPolicy, Sharding
from thunder_fsdp_sched.extras.ranks_differ.start import DifferingStart

import pytest
import thunder
import torch
from models import ChosenBlocks
from profiles import with_long
from random_models import BlockSpec, ModelSpec
from ranks import Ranks as Workers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from virtual_gpu import guard
from virtual_gpu.histories import TRANSPORTS, make_model, take_three_steps
from virtual_gpu.mutations import is_ours
from virtual_gpu.together import run_together
from virtual_gpu.world import Rank, Result, run
from world import EVALUATION, WINDOW, Action, Call, Mode, World
from world_draws import drawn
from world_virtual import run_histories

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")


def _double(bucket: str, gradients: torch.Tensor) -> None:
    gradients.mul_(2)


OPTIONS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "bf16 reduced in fp32": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "encoded": {"comm_policy": CommPolicy("int8", "int8", block=4)},
    "by module": {
        "sharding_strategy": lambda name, module: "zero2" if name == "blocks.0" else None,
        "prefetch": 3,
        "max_gathers_in_flight": 1,
        "gradient_divide_factor": lambda name, module: 3 if name == "blocks" else None,
        "all_reduce_hook": _double,
    },
}
for _name in ("zero3", "bf16 reduced in fp32"):
    OPTIONS[f"{_name}, released"] = {**OPTIONS[_name], "sharding_strategy": Sharding(release=True)}
OPTIONS["zero3, extended"] = {"extends": True}


def batch(rank: Rank) -> torch.Tensor:
    return torch.randn(4, 8, device=rank.device)


def update(model: Any) -> None:
    """Take a step of gradient descent on the device of the shards."""
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(param.grad)
            param.grad = None


def step(model: Any, rank: Rank) -> None:
    model(batch(rank)).sum().backward()
    update(model)


train = partial(take_three_steps, precision="fp32")

FORWARD, BACKWARD, STEP = Action("forward"), Action("backward"), (Action("step"), Action("zero_grad", value=1))
EVALUATION_ALONE, MICRO_BATCH = Action("forward", EVALUATION), (Action("forward", WINDOW), BACKWARD)

HISTORIES: dict[str, tuple[Action, ...]] = {
    "accumulate": (*MICRO_BATCH, *MICRO_BATCH, FORWARD, BACKWARD, *STEP) * 2,
    "interleave": (FORWARD, FORWARD, EVALUATION_ALONE, BACKWARD, BACKWARD, *STEP) * 2,
    "eager": (FORWARD, BACKWARD, *STEP, Action("eager"), Action("eager")) * 2,
    "whole values": (FORWARD, BACKWARD, *STEP, Action("full_state", value=1)) * 2,
}


def run_history(rank: Rank, name: str, **options: Any) -> None:
    """Run a history twice, the second time with the initial values, which are loaded."""
    linear, options = BlockSpec("linear", 1, False, True), {"sharding_strategy": Sharding(), **options}
    model = ModelSpec(8, (linear,) * 3, (), (), False)
    run_histories(rank, World(model, options, ways=((0, 1, 2),), alike=True, histories=(HISTORIES[name],) * 2))


def raise_exceptions(rank: Rank, **options: Any) -> None:
    """Interrupt forwards and backwards with exceptions at different lines, and then take ordinary steps."""
    model = make_model(rank, **options)
    step(model, rank)
    for after in (1, 2, 3, 4):
        with pytest.raises(_Error), _FailAfter(after):
            model(batch(rank))
    for after in (1, 4, 7):
        loss = model(batch(rank)).sum()
        with pytest.raises(_Error), _FailAfter(after):
            loss.backward()
    for _ in range(2):
        for param in model.parameters():
            param.grad = None
        step(model, rank)


class _Error(Exception):
    pass


class _FailAfter(TorchDispatchMode):
    """Raises at a matrix product, after ``products`` successful ones."""

    def __init__(self, products: int) -> None:
        super().__init__()
        self.products = products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm"):
            self.products -= 1
            if self.products < 0:
                raise _Error
        return func(*args, **(kwargs or {}))


def stream_weights(rank: Rank, **options: Any) -> None:
    """Keep copies of streamed parameters, stop early, and stream between forward and backward, and around another one."""
    model = make_model(rank, **options)
    for dtype in (torch.float32, torch.bfloat16):
        loss = model(batch(rank)).sum()
        kept = [tensor.clone() for _, tensor in thunder_fsdp_sched.stream_full_parameters(model, dtype)]
        loss.backward()
        update(model)
        for number, (_, tensor) in enumerate(thunder_fsdp_sched.stream_full_parameters(model, dtype)):
            kept[number].copy_(tensor)
            if number == 4:
                model(batch(rank)).sum().backward()
        next(thunder_fsdp_sched.stream_full_parameters(model, dtype))
        update(model)


def use_another_stream(rank: Rank, **options: Any) -> None:
    """Run forward on a side stream, backward and optimizer on the default stream."""
    model = make_model(rank, **options)
    main = torch.cuda.current_stream(rank.device)
    side = torch.cuda.Stream(rank.device)
    for _ in range(2):
        side.wait_stream(main)
        x = batch(rank)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            loss = model(x).sum()
        main.wait_stream(side)
        loss.backward()
        update(model)


def use_a_mesh(rank: Rank, **options: Any) -> None:
    with rank.outside():
        mesh = init_device_mesh("cuda", (2, 2))
    train(rank, ranks=mesh, **options)


def run_on_virtual_gpus(function: Callable[..., None], transport: str, options: dict[str, Any], **world: Any) -> Result:
    """Run as one rank, or as all ranks if they access each other's memory."""
    ranks = None if transport == "symmetric_memory" else [0]
    return run(partial(function, transport=transport, **options), **{"ranks": ranks, **world})


RUNS = [
    (train, "coalesced", "encoded"),
    (train, "coalesced", "by module"),
    (raise_exceptions, "all_to_all", "zero3, released"),
    pytest.param(raise_exceptions, "all_to_all", "zero3, extended", marks=pytest.mark.long),
    (partial(run_history, name="accumulate"), "all_to_all", "zero3, released"),
    (partial(run_history, name="interleave"), "all_to_all", "bf16 reduced in fp32, released"),
    (use_another_stream, "all_to_all", "zero3"),
    (partial(run_history, name="eager"), "all_to_all", "zero3"),
    (partial(run_history, name="whole values"), "all_to_all", "offload"),
    (stream_weights, "all_to_all", "offload"),
]


def _name_of(value: Any) -> str | None:
    return value.keywords.get("name") if isinstance(value, partial) else None


@pytest.mark.parametrize(("use", "transport", "option"), RUNS, ids=_name_of)
def test_every_use_with_options_has_no_fault(use: Callable[..., None], transport: str, option: str) -> None:
    run_on_virtual_gpus(use, transport, OPTIONS[option]).assert_clean()


_TRANSPORTS = ["flat", *(pytest.param(transport, marks=pytest.mark.long) for transport in TRANSPORTS[1:])]


@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_hybrid_sharding_has_no_fault(transport: str) -> None:
    run_on_virtual_gpus(use_a_mesh, transport, {}, world_size=4, ranks=range(4)).assert_clean()


@pytest.mark.parametrize(
    ("use", "transport"),
    [
        (train, "all_to_all"),
        pytest.param(train, "symmetric_memory", marks=pytest.mark.long),
        (partial(run_history, name="whole values"), "flat"),
    ],
)
def test_uses_while_another_device_is_current_have_no_fault(use: Callable[..., None], transport: str) -> None:
    ranks = None if transport == "symmetric_memory" else [1]  # rank 0 has the current device
    run_on_virtual_gpus(use, transport, {}, ranks=ranks, set_device=False).assert_clean()


def test_gathering_from_secondary_shards_has_no_fault() -> None:
    """Two of four ranks in one of two subgroups, which are split from the communicator of all ranks."""
    options = {"sharding_strategy": Sharding(secondary_ranks=2), "world_size": 4, "bind_device": True}
    result = run(train, ranks=[0, 1], transport="flat", **options)
    result.assert_clean()
    whole = run(train, transport="flat", world_size=4, ranks=[0])
    assert result.count()["collective"] == whole.count()["collective"], "as many collectives, within subgroups"


@pytest.mark.parametrize("seed", [None, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(16))])
def test_a_drawn_world_has_no_fault(seed: int | None) -> None:
    number = int(os.environ["WORLD_SEED"]) if seed is None else seed
    run(run_histories, drawn(number, ranks=2, histories=1, alike=True), ranks=[0]).assert_clean()


#
# Ranks that differ: merged traces
#

WAYS = ((0, 1), (1, 2), (), (1, 0))
"""The blocks that a call runs, in order."""

CALLS: tuple[tuple[int | None, int | None], ...] = ((0, 1), (2, None), (None, 3), (0, 1), (0, 0))
"""The calls of even ranks in each step, and those of odd ranks; ``None`` without a batch."""


def world_of(size: int = 2, *, replicas: bool = False, **options: Any) -> World:
    """Return a world whose ranks train, also in windows, and evaluate."""

    def forward(calls: tuple[int | None, ...], mode: Mode = Mode()) -> Action:  # noqa: B008
        return Action("forward", mode, calls * (size // 2))

    history = [action for calls in CALLS for action in (forward(calls), BACKWARD, *STEP)]
    for calls in (CALLS[0], CALLS[2]):
        history += [forward(calls, WINDOW), BACKWARD]
    history += [forward(CALLS[1]), BACKWARD, *STEP, forward(CALLS[0], EVALUATION)]
    linear, calls = BlockSpec("linear", 1, False, True), tuple(Call(way, 4) for way in range(len(WAYS)))
    model, options = ModelSpec(8, (linear,) * 3, (), (), False), {"sharding_strategy": Sharding(), **options}
    return World(model, options, ways=WAYS, calls=calls, replicas=replicas, histories=(tuple(history),))


def run_merged(rank: Rank, world: World) -> int:
    """Run the history of a world; return how many merged traces ran."""
    begin = DifferingStart._begin_merged
    with mock.patch.object(DifferingStart, "_begin_merged", autospec=True, side_effect=begin) as merged:
        run_histories(rank, world)
    return merged.call_count


DIFFERING: dict[str, dict[str, Any]] = {
    "zero2, bf16 reduced in fp32": {"sharding_strategy": Sharding("zero2"), **OPTIONS["bf16 reduced in fp32"]},
    "zero3, released": {**OPTIONS["zero3, released"], "transport": "all_to_all"},
    "hybrid": {"replicas": True},
}


@pytest.mark.parametrize("option", with_long(DIFFERING, "zero3, released", "hybrid"))
def test_ranks_that_differ_have_no_race_and_no_synchronization(
    lone_workers: Callable[[int], Workers], option: str
) -> None:
    size = 4 if option == "hybrid" else 2
    result = run_together(lone_workers(size), run_merged, world_of(size, **DIFFERING[option]))
    result.assert_clean()
    # Ranks differ in all steps but the last, in the window and in the evaluation. But no rank communicates in a backward of
    # the window if all buckets are kept.
    assert result.values == tuple([2 * (len(CALLS) - 1) + 7 - 2 * ("zero2" in option)] * size)
    for log in result.logs:
        for entry in log.entries:
            if entry.phase in ("12: forward", "13: backward") and is_ours(entry):  # as in step 0
                assert not entry.blocks and entry.kind != "sync_event", str(entry)


def use_a_side_stream(rank: Rank) -> list[tuple[bool, Any]]:
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
    result = run_together(lone_workers(2), use_a_side_stream)
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
def test_a_drawn_world_of_ranks_that_differ_has_no_fault(lone_workers: Callable[[int], Workers], seed: int) -> None:
    run_together(lone_workers(2), run_histories, drawn(seed, ranks=2, histories=1)).assert_clean()
