"""Encoded buckets with other options: windows, precision, meshes, offload, scalers, eager, exact values, checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import CommPolicy, fsdp
from thunder_fsdp_sched.extras.low_precision.encoded import Encoded

import pytest
import shared_memory
import thunder
import torch
import torch.distributed as dist
from coded import coded
from device import DEVICE, SHARED_MEMORY
from hypothesis import strategies as st
from models import Stack
from random_models import RandomModel, cases, draw_numbered, examples, options_of
from ranks import on_ranks
from scenario import Run, do, everywhere, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from twins import AllKinds, Twins

P = CommPolicy
GATHERS, BOTH = P(gather="int8", block=8), P(gather="int8", reduce="int8", block=8)
REDUCES = P(reduce="int8", block=8, error_feedback=True)
FEEDBACK = P(gather="int8", reduce="int8", block=8, error_feedback=True)


def _mesh() -> dict[str, Any]:
    return {"ranks": init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("replicate", "shard"))}


COMBINATIONS: dict[str, tuple[int, Callable[[], dict[str, Any]], torch.dtype]] = {
    "mixed precision": (2, lambda: {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, torch.float32),
    "hybrid": (4, _mesh, torch.float64),
}
"""The number of ranks, the options, and the dtype of parameters."""


@pytest.mark.device
@pytest.mark.parametrize("name", COMBINATIONS)
@on_ranks(lambda name: COMBINATIONS[name][0])
def test_values_are_decoded_ones_with_other_options(rank: int, name: str) -> None:
    _, options, dtype = COMBINATIONS[name]
    twins = Twins(lambda: Stack(2), GATHERS, dtype, **options())
    for step in range(3):
        if step == 1:  # a window of three micro-batches
            twins.backward(10, rank, no_sync=True)
            twins.backward(11, rank, no_sync=True)
        twins.backward(step, rank)
        twins.compare_gradients()
        twins.step()
    if name == "hybrid":
        twins = Twins(lambda: Stack(2), BOTH, dtype, **options())
        twins.backward(0, rank)
        assert 0.2 < twins.check_reductions(0, rank) <= 1.001


def _train(run: Run) -> Run:
    for action in (do.train(2), do.micro_batch(5, no_sync=False), do.clip(), do.step()):
        action(run)
    return run


@on_ranks(2)
def test_other_ways_to_run_the_same_step_give_the_same_bits(tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [
        {"sharding_strategy": "zero2", "transport": "all_to_all"},
        {"prefetch": 0, "sharding_strategy": tfs.Sharding(release=True)},
        {"offload_policy": CPUOffloadPolicy(), "accumulate": "sharded"},
    ]
    options = {"oracle": None, "comm_policy": FEEDBACK, "transport": "flat"}
    models = [Stack(1).double()]
    models.append(copy.deepcopy(models[0]))
    run = _train(Run(models[0], others=others, **options))
    run.transform.save_schedules(tmp_path / "step.json")
    replayed = _train(Run(models[1], schedule=tmp_path / "step.json", **options))
    for value, other in zip(run.model.parameters(), replayed.model.parameters(), strict=True):
        assert torch.equal(value.to_local(), other.to_local())
        value.grad = value.detach().clone()
    norm = torch.stack([p.full_tensor().norm() for p in run.model.parameters()]).norm()
    torch.testing.assert_close(tfs.clip_grad_norm_(run.model, 1.0), norm)


@on_ranks(2)
def test_error_feedback_adds_what_rounding_has_lost(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = thunder.jit(AllKinds().double(), transforms=[transform := fsdp(comm_policy=FEEDBACK)])
    lost: dict[Any, torch.Tensor] = {}
    results: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    real = Encoded.reduce_scatter

    def simulate(self: Encoded, bucket: Any, unsharded: Any, shard: torch.Tensor) -> Any:
        if (wire := bucket.spec.reduce_wire) is not None:
            layout = bucket.spec.layout
            flat, seen = torch.zeros(2, layout.unsharded_numel, dtype=torch.float64)
            for view, own in zip(layout.unsharded_views(flat), unsharded.tensors, strict=True):
                view.copy_(own)
            flat += lost.get(bucket, 0.0)
            sent = torch.empty(world_size, wire.nbytes, dtype=torch.uint8)
            wire.encode([s.view(world_size, -1) for s in layout.unsharded_segments(flat)], sent)
            wire.decode(sent, [s.view(world_size, -1) for s in layout.unsharded_segments(seen)])
            lost[bucket] = flat - seen
            of_ranks = torch.stack([of_rank[rank] for of_rank in everywhere(sent)])
            own = torch.zeros_like(shard)
            wire.decode_mean(of_ranks, [s[None] for s in layout.shard_segments(own)])
            results.append((layout.shard_segments(own), layout.shard_segments(shard)))
        return real(self, bucket, unsharded, shard)

    with mock.patch.object(Encoded, "reduce_scatter", simulate):
        for step in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + rank), dtype=torch.float64)
            loss_of(model(x)).backward()
            for own, shard in results:  # what is between segments is undefined
                assert all(map(torch.equal, own, shard))
            results.clear()
            assert lost and all(torch.equal(bucket.feedback.lost, value) for bucket, value in lost.items())
            assert all(value.any() for value in lost.values())
            model.zero_grad()
    assert {b for b in transform.sharded.buckets if b.spec.reduce_wire and b.spec.requires_grad} == set(lost)


@on_ranks(2)
def test_eager_computes_with_decoded_values_and_other_functions_give_exact_ones(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    exact = {name: value.clone() for name, value in AllKinds().double().state_dict().items()}
    outputs = []
    # Modules that are called, so that `eager` gathers their parameters.
    for one in Twins(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), BOTH).models:
        with tfs.eager(one) as module, torch.no_grad():
            outputs.append(module(torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)))
    assert torch.equal(*outputs)
    model, twin = Twins(AllKinds, GATHERS).models
    differ = {name for name, value in tfs.full_state_dict(twin).items() if not torch.equal(value, exact[name])}
    layers = (f"blocks.{number}.{layer}.weight" for number in (0, 1) for layer in ("up", "down"))
    assert differ == {"mix", "embedding.weight", "head.weight", *layers}
    tfs.save_checkpoint(model, tmp_path)
    other = thunder.jit(AllKinds().double(), transforms=[fsdp()])
    tfs.load_checkpoint(other, tmp_path)
    found = [*tfs.full_state_dict(model).items(), *tfs.full_state_dict(other).items()]
    found += [(name, value.clone()) for name, value in tfs.stream_full_parameters(model)]
    with tfs.unsharded(model) as module:
        found += [(name, value.detach().clone()) for name, value in module.named_parameters()]
    assert all(torch.equal(value, exact[name]) for name, value in found) and len(found) > 40


@on_ranks(2)
def test_error_feedback_starts_from_zero_after_loading(rank: int, tmp_path: Path) -> None:
    model = thunder.jit(AllKinds().double(), transforms=[transform := fsdp(comm_policy=FEEDBACK)])
    loss_of(model(torch.ones(3, 4, dtype=torch.float64) + rank)).backward()
    tfs.save_checkpoint(model, tmp_path / "0")
    buckets = [bucket for bucket in transform.sharded.buckets if "feedback" in vars(bucket)]
    assert any(bucket.feedback.lost.any() for bucket in buckets)
    tfs.load_checkpoint(model, tmp_path / "0")
    assert not any(bucket.feedback.lost.any() for bucket in buckets)


#
# Error feedback stands for gradients that were asked for, in units of the loss
#


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
@on_ranks(2)
def test_a_scaler_which_changes_the_unit_of_errors_is_refused(rank: int, kind: type[torch.amp.GradScaler]) -> None:
    model, scaler = thunder.jit(Stack(1), transforms=[fsdp(comm_policy=REDUCES)]), kind("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(loss_of(model(torch.ones(3, 4)))).backward()
    with pytest.raises(RuntimeError, check=coded("encoding.error-feedback-with-grad-scaler")):
        scaler.step(optimizer)


@on_ranks(2)
def test_infinite_gradients_leave_finite_errors(rank: int) -> None:
    model = thunder.jit(Stack(1), transforms=[transform := fsdp(comm_policy=REDUCES)])
    loss_of(model(torch.full((3, 4), math.inf if rank else 1.0))).backward()
    lost = [bucket.feedback.lost for bucket in transform.sharded.buckets if bucket.spec.reduce_wire]
    assert lost and all(errors.isfinite().all() for errors in lost)


@on_ranks(2)
def test_gradients_that_were_not_asked_for_leave_error_feedback_as_it_is(rank: int) -> None:
    torch.manual_seed(0)
    rule = lambda name, param: "all"  # noqa: E731
    model = thunder.jit(
        AllKinds().double(), transforms=[transform := fsdp(comm_policy=REDUCES, bucketing_strategy=rule)]
    )
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64, requires_grad=True)
    loss_of(model(x)).backward()
    buckets = [b for b in transform.sharded.buckets if b.spec.reduce_wire and b.spec.requires_grad]

    def changed() -> set[str]:
        """Return the names of the parameters whose feedback has changed since the previous call."""
        nonlocal before
        after = {
            spec.name: view.clone()
            for b in buckets
            for spec, view in zip(b.spec.params, b.spec.layout.unsharded_views(b.feedback.lost), strict=True)
        }
        names = {name for name, value in after.items() if not torch.equal(before.get(name, value), value)}
        before = after
        return names

    before: dict[str, torch.Tensor] = {}
    assert not changed()
    for _ in range(2):
        assert torch.autograd.grad(loss_of(model(x)), x)[0].any()
        assert not changed()
    weight, other = model.blocks[0].up.weight, model.head.weight
    loss_of(model(x)).backward(inputs=[weight])
    assert changed() == {"blocks.0.up.weight"}
    torch.autograd.grad(loss_of(model(x)), [other])
    assert changed() == {"embedding.weight"}  # tied
    loss_of(model(x)).backward()
    assert len(changed()) > 4


def check(twins: Twins, rank: int, world_size: int, steps: int = 2) -> float:
    """Train both models and return the largest error of a gradient, as a share of its bound."""
    share, reduces = 0.0, any(b.spec.reduce_wire is not None for b in twins.buckets)
    for step in range(steps):
        twins.backward(step, rank)
        if reduces:
            share = max(share, twins.check_reductions(step, rank))
        else:  # more than two ranks add up in an order that depends on the offset
            single = twins.dtype is torch.float32 or any(b.spec.dtype is torch.float32 for b in twins.buckets)
            twins.compare_gradients(0 if world_size == 2 else 1e-5 if single else 1e-12)
        twins.step()
    return share


# Formats of gathers and reductions, the transport, and the elements of a block.
ROWS: dict[str, tuple[str | None, str, str, int]] = {
    "int8, int8": ("int8", "int8", "all_to_all", 6),
    "bfloat16 reductions": (None, "bfloat16", SHARED_MEMORY, 128),
}


@pytest.mark.device
@pytest.mark.parametrize("name", ROWS)
@on_ranks(lambda name: 3 if name == "int8, int8" else 2)
def test_every_kind_of_parameter_has_decoded_values_and_gradients_within_bounds(
    rank: int, world_size: int, name: str
) -> None:
    shared_memory.register()
    gather, reduce, transport, block = ROWS[name]
    policy = P(gather=gather, reduce=reduce, block=block, min_ndim=0)
    # The empty parameter is alone in a bucket.
    twins = Twins(AllKinds, policy, sharding_strategy="zero2", transport=transport, bucketing_strategy="none")
    assert 0.2 < check(twins, rank, world_size) <= 1.001


POLICIES = st.builds(
    P,
    gather=st.sampled_from([None, "bfloat16", "int8"]),
    reduce=st.sampled_from(["bfloat16", "int8", None]),
    block=st.sampled_from([2, 4, 6, 32, 128]),
    min_ndim=st.sampled_from([0, 1, 2]),
    exempt=st.sampled_from([(), (), ("head",), ("blocks.0",)]),
)


@pytest.mark.device
@examples(0, 100)
@on_ranks(lambda number: 2 + number % 2)
def test_random_models_have_decoded_values_and_gradients_within_bounds(rank: int, world_size: int, number: int) -> None:
    case, policy = draw_numbered(st.tuples(cases(numeric=True), POLICIES), 1000 + number)
    options: dict[str, Any] = options_of(case, partial(dist.new_group, list(range(world_size))), world_size)
    if options["transport"] == "all_reduce":
        options["transport"] = "auto"
    model = RandomModel(case.model)
    if any(p.requires_grad for p in model.parameters()):
        twins = Twins(lambda: model, policy, None, **options)
        check(twins, rank, world_size)
