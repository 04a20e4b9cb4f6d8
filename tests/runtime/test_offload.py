"""Offload: shards stay on the CPU, are copied for gathers, and gradients are copied back. The device is a CPU as well."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from thunder_fsdp_sched import clip_grad_norm_, fsdp, full_state_dict, load_checkpoint, save_checkpoint
from thunder_fsdp_sched.runtime import shard_source
from thunder_fsdp_sched.transports.symmetric_memory import SymmetricMemory

import pytest
import thunder
import torch
from models import Stack
from ranks import Ranks, on_ranks
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard


def _model() -> Stack:
    torch.manual_seed(1)
    return Stack(2, activation=torch.relu)


def _inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    """Train on two halves of each batch, the first under ``no_sync``, with clipping. Return the norms of the gradients."""
    norms = []
    for step in steps:
        with model.no_sync():
            model(_inputs(step, rank)).square().mean().backward()
        model(_inputs(step + 100, rank)).square().mean().backward()
        norms.append(clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _offload(rank: int, world_size: int, strategy: str, policy: MixedPrecisionPolicy, folder: Path | None) -> None:
    results = []
    for offload in (OffloadPolicy(), CPUOffloadPolicy()):
        options = dict(sharding_strategy=strategy, mp_policy=policy, device="cpu")
        model = thunder.jit(_model(), transforms=[transform := fsdp(offload_policy=offload, **options)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with mock.patch.object(
            shard_source.OffloadedShardSource,
            "shard",
            autospec=True,
            side_effect=shard_source.OffloadedShardSource.shard,
        ) as loaded:
            norms = _train(rank, model, optimizer, range(2))
        assert bool(loaded.call_count) == isinstance(offload, CPUOffloadPolicy)
        if folder is not None:
            save_checkpoint(folder / type(offload).__name__, model, optimizer)
            load_checkpoint(folder / "OffloadPolicy", model, optimizer)
        norms += _train(rank, model, optimizer, range(2, 4))
        for bucket in transform.sharded.buckets:
            assert bucket.spec.comm.offload == isinstance(offload, CPUOffloadPolicy)
            assert all(p.device.type == "cpu" for p in bucket.params)
        results.append((norms, full_state_dict(model)))
    (norms, state), (offloaded_norms, offloaded) = results
    assert norms == offloaded_norms
    for name, value in state.items():
        assert torch.equal(value, offloaded[name]), name
    assert "shards on the CPU" in transform.plan["blocks.0"].comm.reason


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [
        ("zero3", MixedPrecisionPolicy()),
        ("zero2", MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    ],
    ids=["zero3", "zero2-bfloat16"],
)
def test_offloaded_shards_give_the_same_bits(
    ranks: Ranks, tmp_path: Path, strategy: str, policy: MixedPrecisionPolicy
) -> None:
    ranks.run(_offload, strategy, policy, tmp_path if strategy == "zero3" else None)


@on_ranks(2)
def test_offloaded_parameters_are_bit_equal_to_those_of_fsdp2(rank: int) -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    ours = thunder.jit(_model(), transforms=[fsdp(offload_policy=policy)])
    theirs = _model()
    for block in theirs.blocks:
        fully_shard(block, offload_policy=policy)
    fully_shard(theirs, offload_policy=policy)
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(_inputs(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = full_state_dict(ours)
    for name, param in theirs.named_parameters():
        assert torch.equal(state[name], param.full_tensor()), name


@on_ranks(2)
def test_no_copy_of_a_shard_outlives_its_gather(rank: int) -> None:
    model = thunder.jit(_model(), transforms=[transform := fsdp(offload_policy=CPUOffloadPolicy())])
    sent = []
    load = shard_source.OffloadedShardSource.shard

    def spy(self: shard_source.OffloadedShardSource, *, again: bool) -> torch.Tensor:
        alive = sum(torch.UntypedStorage._expired(ref) is False for ref in sent)
        assert alive <= 2, "more copies of shards than gathers in flight"
        copy = load(self, again=again)
        sent.append(copy.untyped_storage()._weak_ref())
        return copy

    with mock.patch.object(shard_source.OffloadedShardSource, "shard", spy):
        for step in range(2):
            model(_inputs(step, rank)).square().mean().backward()
    assert len(sent) > len(transform.plan)
    assert all(torch.UntypedStorage._expired(ref) for ref in sent)


def test_invalid_offload_policies_are_refused(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match="offload_policy: expected a CPUOffloadPolicy"):
        fsdp(offload_policy=True)
    ranks.run(_symmetric_memory_is_refused)


def _symmetric_memory_is_refused(rank: int, world_size: int) -> None:
    with (
        mock.patch.object(SymmetricMemory, "check"),  # which would refuse a machine without GPUs
        pytest.raises(ValueError, match="offload_policy keeps them on the CPU"),
    ):
        policy = CPUOffloadPolicy()
        thunder.jit(_model(), transforms=[fsdp(transport="symmetric_memory", offload_policy=policy)])
