"""Typical uses of a sharded model on a virtual GPU: precision, offload, meshes, groups, no_sync, exceptions and more."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import thunder_fsdp_sched
from thunder_fsdp_sched import CommPolicy, Sharding

import pytest
import torch
from random_models import BlockSpec, ModelSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from virtual_gpu import guard
from virtual_gpu.histories import TRANSPORTS, make_model, take_three_steps
from virtual_gpu.world import Rank, Result, run
from world import EVALUATION, WINDOW, Action, World
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
