"""``stream_full_parameters``: whole parameters, bucket by bucket, on all ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import time
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp

import pytest
import shared_memory
import thunder
import torch
import torch.distributed as dist
from coded import coded
from internals import slot_bytes
from memory_count import Tracker
from models import Calling, Experts, Stack
from ranks import on_ranks
from saving import Everything
from scenario import Run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy


class MoreKinds(Everything):
    """A module with more kinds of parameters: empty, transposed, of rank 3, of several dtypes. It is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.packed = nn.Parameter(torch.randn(8, 4).t())
        self.codes = nn.Parameter(torch.randint(99, (5,)), requires_grad=False)
        self.experts = nn.Parameter(torch.randn(3, 2, 5))
        self.norm = nn.LayerNorm(4, dtype=torch.float16)


DTYPES = (None, torch.bfloat16, torch.float64, torch.float8_e4m3fn)

OPTIONS: list[dict[str, Any]] = [
    {"init": tfs.Init(ignored_params=["experts", "embedding.weight"])},
    {"transport": "coalesced", "bucketing_strategy": "layer"},
    {"transport": "all_reduce", "sharding_strategy": "zero2"},
    {"transport": "shared_files", "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    {"ranks": "hybrid", "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    {"offload_policy": CPUOffloadPolicy(pin_memory=False), "bucketing_strategy": "none"},
]


def _same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    views = [t.detach().contiguous().flatten().view(torch.uint8) for t in (ours, theirs)]
    return ours.shape == theirs.shape and ours.dtype == theirs.dtype and torch.equal(*views)


@on_ranks(2)
def test_every_parameter_is_given_once_and_bit_equal(world_size: int) -> None:
    shared_memory.register()
    for options in OPTIONS:
        if options.get("ranks") == "hybrid":
            options["ranks"] = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(1)
        plain = MoreKinds()
        model = thunder.jit(copy.deepcopy(plain), transforms=[fsdp(**options)])
        expected = dict(plain.named_parameters())
        for dtype in DTYPES:
            given = {}
            for name, tensor in tfs.stream_full_parameters(model, dtype):
                assert name not in given and type(tensor) is torch.Tensor and not tensor.requires_grad
                given[name] = tensor.clone()
            assert given.keys() == expected.keys()
            for name, param in expected.items():
                wanted = param if dtype is None or not param.is_floating_point() else param.to(dtype)
                assert _same_bits(given[name], wanted), (options, dtype, name)
        adapters = [name for name, _ in tfs.stream_full_parameters(model, trainable_only=True)]
        assert sorted(adapters) == sorted(name for name, param in expected.items() if param.requires_grad)


@on_ranks(4)
def test_parameters_of_several_groups_and_of_replicas_are_given(rank: int) -> None:
    members = [dist.new_group([0, 2], group_desc="experts"), dist.new_group([1, 3], group_desc="experts")]
    torch.manual_seed(1)
    plain = Experts(rank % 2, width=6 + rank % 2)
    for mesh in (None, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))):

        def group_for(name: str, param: Any) -> Any:
            return members[rank % 2] if name.startswith("expert") else None

        model = thunder.jit(
            copy.deepcopy(plain), transforms=[fsdp(ranks=tfs.Ranks(mesh=mesh, process_group_for=group_for))]
        )
        given = {name: tensor.clone() for name, tensor in tfs.stream_full_parameters(model, torch.bfloat16)}
        assert list(given)[-2:] == ["expert.weight", "expert.bias"], "buckets of some ranks only must come last"
        for name, param in plain.named_parameters():
            assert _same_bits(given.pop(name), param.to(torch.bfloat16))
        assert not given


TOKENS = 512
"""At least the bytes by which ranks agree on their next gather, in host memory."""


def growing() -> nn.Module:
    """Return blocks of different sizes, so that the largest bucket is not next to the second largest."""
    blocks = nn.ModuleList(nn.Linear(64, width) for width in (8, 128, 16, 96, 100))
    return Calling(lambda self, x: sum(block.forward(x).sum() for block in self.blocks), blocks=blocks)


@on_ranks(2)
def test_peak_memory_is_two_successive_buckets_or_that_of_the_training_step(world_size: int) -> None:
    model = thunder.jit(growing(), transforms=[transform := fsdp(transport="flat")])
    arena = transform.sharded.buckets[0].arena
    for dtype in (torch.float32, torch.bfloat16):
        sizes = [slot_bytes(bucket, dtype) for bucket in transform.plan]
        limit = max(map(sum, itertools.pairwise(sizes)))
        assert limit < sum(sorted(sizes)[-2:])
        # Two are in use; gloo's thread may release a third a little later.
        three = max(map(sum, zip(sizes, sizes[1:], sizes[2:], strict=False)))
        casts = three // world_size if dtype is torch.bfloat16 else 0
        gc.collect()
        with Tracker() as tracker:
            numel = sum(tensor.numel() for _, tensor in tfs.stream_full_parameters(model, dtype))
        assert numel == sum(p.numel() for p in growing().parameters())
        assert limit <= tracker.peak <= limit + casts + TOKENS, (dtype, limit, tracker.peak)
        assert arena._memory is None
        deadline = time.monotonic() + 10
        while tracker.bytes_now() > TOKENS and time.monotonic() < deadline:
            time.sleep(0.001)
        assert tracker.bytes_now() <= TOKENS, "memory that was allocated must be freed"
    model(torch.randn(2, 64)).backward()
    memory = arena._memory
    assert memory is not None and memory.numel() >= limit
    with Tracker([memory]) as tracker:
        for _ in tfs.stream_full_parameters(model, torch.bfloat16):
            assert arena._memory is None
    assert tracker.peak <= memory.nbytes + casts + TOKENS
    assert arena._memory is memory, "the model must have its memory back"


def _check_stream(run: Run, **options: Any) -> None:
    expected = tfs.full_state_dict(run.model)
    names = []
    for name, tensor in tfs.stream_full_parameters(run.model, **options):
        assert _same_bits(tensor, expected[name]), name
        names.append(name)
    assert names == list(expected)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@on_ranks(2)
def test_training_goes_on_around_and_inside_of_streams(strategy: str) -> None:
    run = Run(Stack(2).double(), sharding_strategy=strategy)
    names = []
    expected = tfs.full_state_dict(run.model)
    nested = zip(
        tfs.stream_full_parameters(run.model), tfs.stream_full_parameters(run.model, torch.float32), strict=True
    )
    with contextlib.closing(tfs.stream_full_parameters(run.model)) as early:
        next(early)
        for (name, tensor), (other, rounded) in nested:
            names.append(name)
            if len(names) in (2, 5):  # a training step has other memory in the meantime
                run.micro_batch(no_sync=False)
                for model in run.every:
                    model.zero_grad()
            assert _same_bits(tensor, expected[name]) and _same_bits(rounded, expected[other].float())
    assert len(names) == len(expected)
    run.train(steps=1)


@on_ranks(2)
def test_ranks_that_stop_early_or_ask_for_different_things_get_errors(rank: int) -> None:
    run = Run(Stack(3).double())
    model = run.model

    def first(count: int) -> None:
        for number, _ in enumerate(tfs.stream_full_parameters(model), 1):
            if number == count:
                break

    for count in (1, 2, 3, 99):
        first(count)
    first(1 + rank)  # in the same bucket
    with pytest.raises(ArithmeticError):
        for _ in tfs.stream_full_parameters(model):
            raise ArithmeticError("a failing consumer")
    never_started = tfs.stream_full_parameters(model)
    del never_started
    # Rank 0 stops in the first bucket, rank 1 goes on: both learn of it in the next thing that they do together.
    sides = coded(
        "ranks.actions-differ",
        "rank 0: the whole state dict",
        "rank 1: stream_full_parameters(dtype=None): gathering blocks.1 as torch.float64",
    )
    with pytest.raises(tfs.ScheduleDisagreement, check=sides):
        first(1) if rank == 0 else first(99)
        tfs.full_state_dict(model)
    refusal = coded("ranks.actions-differ", "(dtype=torch.float32)", "(dtype=None)")
    with pytest.raises(tfs.ScheduleDisagreement, check=refusal):
        next(tfs.stream_full_parameters(model, torch.float32 if rank == 0 else None))
    with pytest.raises(RuntimeError, check=coded("step.parameters-changed-during-gathers", "blocks.1")):
        for name, _ in tfs.stream_full_parameters(model):
            if name == "first.weight":
                with torch.no_grad():
                    model.get_parameter("blocks.1.up.weight").mul_(1)
    for dtype, error, code in (
        ("bfloat16", TypeError, "parameter.stream-dtype-of-wrong-type"),
        (torch.int8, ValueError, "parameter.stream-dtype-not-floating-point"),
    ):
        with pytest.raises(error, check=coded(code, dtype)):
            tfs.stream_full_parameters(model, dtype)
    run.train(steps=1)
    _check_stream(run)
