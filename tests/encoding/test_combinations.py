"""Encoded buckets with other options: windows, precision, meshes, offload, scalers, eager, exact values, checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import CommPolicy, fsdp
from thunder_fsdp_sched.transports.encoded import Encoded

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Stack
from ranks import on_ranks
from scenario import Run, everywhere, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from twins import AllKinds, Twins

P = CommPolicy
GATHERS, BOTH = P(gather="int8", block=8), P(gather="int8", reduce="int8", block=8)
FEEDBACK = P(gather="int8", reduce="int4", block=8, error_feedback=True)


def _mesh() -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


def _groups() -> dict[str, Any]:
    group = dist.new_group([0, 1])
    return {"process_group_for": lambda name, param: group if name.startswith("blocks.0") else None}


# The number of ranks, the options, and the dtype of parameters.
Options = dict[str, Any] | Callable[[], dict[str, Any]]
COMBINATIONS: dict[str, tuple[int, Options, torch.dtype]] = {
    "mixed precision": (2, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, torch.float32),
    "autocast": (2, {"sharding_strategy": "zero2"}, torch.float32),
    "offload": (2, {"offload_policy": CPUOffloadPolicy()}, torch.float64),
    "hybrid": (4, _mesh, torch.float64),
    "secondary": (4, {"reshard_after_forward": 2}, torch.float64),
    "groups": (2, _groups, torch.float64),
    "windows": (2, {"accumulate": "sharded", "sharding_strategy": "zero2"}, torch.float64),
    "released windows": (2, {"accumulate": "unsharded", "release": "bucket", "prefetch": "auto"}, torch.float64),
}
_LONG = ("groups", "released windows", "secondary")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in _LONG)) for n in COMBINATIONS])
@on_ranks(lambda name: COMBINATIONS[name][0])
def test_gathers_give_decoded_values_with_other_options(rank: int, world_size: int, name: str) -> None:
    _, options, dtype = COMBINATIONS[name]
    twins = Twins(lambda: Stack(2), GATHERS, dtype, **(options() if callable(options) else options))
    precision = torch.autocast("cpu", torch.bfloat16) if name == "autocast" else nullcontext()
    for step in range(3):
        with precision:
            if step == 1:  # a window of three micro-batches
                twins.backward(10, rank, no_sync=True)
                twins.backward(11, rank, no_sync=True)
            twins.backward(step, rank)
        twins.compare_gradients(0 if world_size == 2 or name == "hybrid" else 1e-12)
        twins.step()


@pytest.mark.parametrize("name", ["offload", "hybrid", pytest.param("groups", marks=pytest.mark.long)])
@on_ranks(lambda name: COMBINATIONS[name][0])
def test_reductions_keep_the_bound_with_other_options(rank: int, name: str) -> None:
    _, options, dtype = COMBINATIONS[name]
    twins = Twins(lambda: Stack(2), BOTH, dtype, **(options() if callable(options) else options))
    twins.backward(0, rank)
    assert 0.2 < twins.check_reductions(0, rank) <= 1.001


@on_ranks(2)
def test_other_ways_to_run_the_same_step_give_the_same_bits(tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [
        {"sharding_strategy": "zero2", "transport": "all_to_all"},
        {"prefetch": 0, "release": "bucket"},
        {"max_memory": "1MB", "cluster": "h100-sxm"},
        {"separate_reduce_scatter_group": True, "release": "step", "prefetch": "auto"},
        {"offload_policy": CPUOffloadPolicy(), "accumulate": "sharded"},
    ]
    make = lambda: Stack(1).double()  # noqa: E731
    torch.manual_seed(0)
    run = Run(make(), others=others, oracle=None, comm_policy=FEEDBACK, transport="flat")
    run.train(2)
    run.micro_batch(5, no_sync=False)
    run.clip()
    run.step()
    run.transform.save_schedules(tmp_path / "step.json")
    torch.manual_seed(0)
    replayed = Run(make(), oracle=None, comm_policy=FEEDBACK, transport="flat", schedule=tmp_path / "step.json")
    replayed.train(2)
    replayed.micro_batch(5, no_sync=False)
    replayed.clip()
    replayed.step()
    for value, other in zip(run.model.parameters(), replayed.model.parameters(), strict=True):
        assert torch.equal(value.to_local(), other.to_local())
    norm = torch.stack([p.full_tensor().norm() for p in run.model.parameters()]).norm()
    for param in run.model.parameters():
        param.grad = param.detach().clone()
    torch.testing.assert_close(tfs.clip_grad_norm_(run.model, 1.0), norm)


@pytest.mark.parametrize("accumulate", ["sharded", "unsharded"])
@on_ranks(2)
def test_a_window_encodes_each_reduction_once(rank: int, accumulate: str) -> None:
    twins = Twins(lambda: Stack(1), P(reduce="int8", block=4), accumulate=accumulate)
    windowed, model = tfs.fsdp, twins.models[0]
    reductions: list[int] = []
    real = Encoded.reduce_scatter

    def count(self: Encoded, *args: Any) -> Any:
        reductions.append(1)
        return real(self, *args)

    with mock.patch.object(Encoded, "reduce_scatter", count):
        twins.backward(0, rank, no_sync=True)
        twins.backward(1, rank)
    assert len(reductions) == len(twins.buckets) * (2 if accumulate == "sharded" else 1) and windowed is tfs.fsdp
    window = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    model.zero_grad()
    for step in range(2):
        loss_of(model(*twins.inputs(step, rank))).backward()
    for name, param in model.named_parameters():
        if accumulate == "sharded":
            assert torch.equal(param.grad.full_tensor(), window[name]), name
        else:
            largest = max(1.0, float(param.grad.full_tensor().abs().max()))
            torch.testing.assert_close(window[name], param.grad.full_tensor(), rtol=0, atol=largest / 60)


@on_ranks(2)
def test_error_feedback_adds_what_rounding_has_lost(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = thunder.jit(AllKinds().double(), transforms=[transform := fsdp(comm_policy=FEEDBACK)])
    lost: dict[Any, torch.Tensor] = {}
    expected: list[torch.Tensor] = []
    actual: list[torch.Tensor] = []
    segments: list[Callable[[torch.Tensor], list[torch.Tensor]]] = []
    real = Encoded.reduce_scatter

    def simulate(self: Encoded, bucket: Any, unsharded: Any, shard: torch.Tensor) -> Any:
        if (wire := bucket.spec.reduce_wire) is not None:
            layout = bucket.spec.layout
            flat = unsharded.flat.clone()
            inside = torch.zeros_like(flat)
            for view in layout.unsharded_views(inside):
                view.fill_(1)
            flat = torch.where(inside > 0, flat, 0.0) + lost.get(bucket, 0.0)
            sent = torch.empty(world_size, wire.nbytes, dtype=torch.uint8)
            seen = torch.zeros_like(flat)
            for values, call in ((flat, wire.encode), (seen, None)):
                rows = [s.view(world_size, -1) for s in layout.unsharded_segments(values)]
                call(rows, sent) if call else wire.decode(sent, rows)
            lost[bucket] = flat - seen
            of_ranks = torch.stack([of_rank[rank] for of_rank in everywhere(sent)])
            own = torch.zeros_like(shard)
            wire.decode_mean(of_ranks, [s[None] for s in layout.shard_segments(own)])
            expected.append(own)
            actual.append(shard)
            segments.append(layout.shard_segments)
        return real(self, bucket, unsharded, shard)

    with mock.patch.object(Encoded, "reduce_scatter", simulate):
        for step in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + rank), dtype=torch.float64)
            loss_of(model(x)).backward()
            for one, other, split in zip(expected, actual, segments, strict=True):
                assert all(map(torch.equal, split(one), split(other)))  # what is between them is undefined
            for kept in (expected, actual, segments):
                kept.clear()
            assert lost and all(torch.equal(bucket.feedback, value) for bucket, value in lost.items())
            assert all(value.any() for value in lost.values())
            model.zero_grad()
    assert {b for b in transform.sharded.buckets if b.spec.reduce_wire and b.spec.requires_grad} == set(lost)


@on_ranks(2)
def test_a_scaler_skips_an_overflow_on_all_ranks_and_feedback_stays_finite(rank: int) -> None:
    for reduce in ("bfloat16", "float8_e4m3fn", "int8", "int4"):
        torch.manual_seed(0)
        policy = P(gather="mxfp8", reduce=reduce, block=8, error_feedback=True)
        model = thunder.jit(Stack(1), transforms=[transform := fsdp(comm_policy=policy)])
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + rank))
            if step == 1 and rank == 1:
                x[0, 0] = math.inf
            before = [p.detach().clone() for p in model.parameters()]
            scaler.scale(loss_of(model(x))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            same = [torch.equal(p.to_local(), b.to_local()) for p, b in zip(model.parameters(), before, strict=True)]
            assert all(same) if step == 1 else not all(same)
            assert scaler.get_scale() == (4.0 if step == 0 else 2.0)
            assert all(b.feedback.isfinite().all() for b in transform.sharded.buckets if b.spec.reduce_wire)


class Called(nn.Sequential):
    """Modules that are called, so that ``eager`` gathers their parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@on_ranks(2)
def test_eager_computes_with_decoded_values_and_other_functions_give_exact_ones(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    exact = {name: value.clone() for name, value in AllKinds().double().state_dict().items()}
    outputs = []
    for one in Twins(Called, BOTH).models:
        with tfs.eager(one) as module, torch.no_grad():
            outputs.append(module(torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)))
    assert torch.equal(*outputs)
    model, twin = Twins(AllKinds, GATHERS).models
    differ = {name for name, value in tfs.full_state_dict(twin).items() if not torch.equal(value, exact[name])}
    assert differ == {
        "mix",
        "embedding.weight",
        "head.weight",
        *(f"blocks.{n}.{layer}.weight" for n in (0, 1) for layer in ("up", "down")),
    }
    for name, value in tfs.full_state_dict(model).items():
        assert torch.equal(value, exact[name]), name
    for name, value in tfs.stream_full_parameters(model):
        assert torch.equal(value, exact[name]), name
    with tfs.unsharded(model) as module:
        for name, value in module.named_parameters():
            assert torch.equal(value, exact[name]), name
    tfs.save_checkpoint(tmp_path, model)
    other = thunder.jit(AllKinds().double(), transforms=[fsdp()])
    tfs.load_checkpoint(tmp_path, other)
    for name, value in tfs.full_state_dict(other).items():
        assert torch.equal(value, exact[name]), name


def _trained(model: nn.Module, steps: range, rank: int) -> list[torch.Tensor]:
    for step in steps:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + rank), dtype=torch.float64)
        loss_of(model(x)).backward()
        for param in model.parameters():
            if param.grad is not None:
                with torch.no_grad():
                    param.sub_(0.1 * param.grad)
                param.grad = None
    return [param.full_tensor() for param in model.parameters()]


@on_ranks(3)
def test_error_feedback_is_saved_and_continues_on_as_many_ranks(rank: int, tmp_path: Path) -> None:
    group = dist.new_group([0, 1])

    def make(seed: int, **options: Any) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        transform = fsdp(comm_policy=FEEDBACK, **options)
        return thunder.jit(AllKinds().double(), transforms=[transform]), transform

    def load(path: Path, seed: int, **options: Any) -> tuple[Any, Any, list[str]]:
        model, transform = make(seed, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tfs.load_checkpoint(path, model)
        return model, transform, [str(w.message) for w in caught if "error feedback" in str(w.message)]

    if rank < 2:
        model, transform = make(0, process_group=group)
        tfs.save_checkpoint(tmp_path / "untrained", model)
        _trained(model, range(2), rank)
        tfs.save_checkpoint(tmp_path / "two", model)
        other, loaded, messages = load(tmp_path / "two", 0, process_group=group)
        assert not messages
        assert any(b.feedback.any() for b in loaded.sharded.buckets if b.spec.reduce_wire)
        assert all(map(torch.equal, _trained(model, range(2, 4), rank), _trained(other, range(2, 4), rank)))
        assert not load(tmp_path / "untrained", 1, process_group=group)[2]
        _, _, messages = load(tmp_path / "two", 1, process_group=group, bucketing_strategy="none")
        assert len(messages) == (rank == 0)
    dist.barrier()
    model, transform = make(2)
    _trained(model, range(1), rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tfs.load_checkpoint(tmp_path / "two", model)
    messages = [str(w.message) for w in caught if "error feedback" in str(w.message)]
    assert len(messages) == (rank == 0)
    for message in messages:
        assert "error feedback (comm_policy) starts from zero" in message and "of another number of ranks" in message
    assert not any(b.feedback.any() for b in transform.sharded.buckets if b.spec.reduce_wire)
