"""Offload: shards stay on the CPU, are copied for gathers, and gradients are copied back. The device is a CPU as well."""

from __future__ import annotations

import time
from functools import partial
from unittest import mock

from thunder_fsdp_sched import Init, fsdp
from thunder_fsdp_sched.extras import shard_offload as shard_source
from thunder_fsdp_sched.transports import find_transport

import pytest
import thunder
import torch
from coded import coded
from device import DEVICE
from models import Stack
from ranks import on_ranks
from scenario import Run, Scenario, do, each, fsdp2
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy


def _model() -> Stack:
    torch.manual_seed(1)
    return Stack(2, activation=torch.relu)


def _check_loads(run: Run) -> None:
    """Run forward and backward, which copy shards to the device, and clip, where gradients are."""
    load = shard_source.OffloadedShardSource.shard
    with mock.patch.object(shard_source.OffloadedShardSource, "shard", autospec=True, side_effect=load) as loaded:
        run.micro_batch(0)
        run.micro_batch(1, no_sync=False)
    assert loaded.call_count
    run.clip(0.5)
    run.step()


def _check_offloaded(run: Run) -> None:
    for bucket in run.transform.sharded.buckets:
        assert bucket.spec.comm.offload
        assert all(p.device.type == "cpu" for p in bucket.params)
    assert "shards on the CPU" in run.transform.plan["blocks.0"].comm.reason


OFFLOADED = {"offload_policy": CPUOffloadPolicy(), "init": Init(device=DEVICE), "dtype": torch.float32}
# A GPU and the CPU, where the optimizer of offloaded shards runs, round differently.
_with_adamw = partial(
    Scenario,
    _model,
    oracle=None,
    others_tolerance=1e-6 if DEVICE.type == "cuda" else 0,
    optimizer=partial(torch.optim.AdamW, lr=1e-2),
)
SCENARIOS = {
    "resident": _with_adamw(
        [_check_loads, _check_offloaded, do.save_and_load(), _check_loads],
        OFFLOADED,
        [{"offload_policy": OffloadPolicy()}],
    ),
    "FSDP2": _with_adamw([do.train()], OFFLOADED, [partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False))]),
}


@each(SCENARIOS)
def test_offloaded_shards_give_the_same_bits(name: str) -> None:
    SCENARIOS[name].run()


@on_ranks(2)
def test_no_copy_of_a_shard_outlives_its_gather() -> None:
    model = thunder.jit(_model(), transforms=[transform := fsdp(offload_policy=CPUOffloadPolicy())])
    sent = []
    load = shard_source.OffloadedShardSource.shard

    def check_alive(at_most: int) -> None:
        deadline = time.monotonic() + 60  # gloo's thread lets go of its tensors after it has reported the end
        while sum(not torch.UntypedStorage._expired(ref) for ref in sent) > at_most:
            assert time.monotonic() < deadline, "a copy of a shard outlives its gather"
            time.sleep(0.01)

    def spy(self: shard_source.OffloadedShardSource, *, reuse_cast: bool) -> torch.Tensor:
        check_alive(at_most=2)  # gathers in flight
        copy = load(self, reuse_cast=reuse_cast)
        sent.append(copy.untyped_storage()._weak_ref())
        return copy

    with mock.patch.object(shard_source.OffloadedShardSource, "shard", spy):
        for step in range(2):
            model(torch.ones(5, 4) + step).square().mean().backward()
    assert len(sent) > len(transform.plan)
    check_alive(at_most=0)


@on_ranks()
def test_invalid_offload_policies_are_refused() -> None:
    with (
        mock.patch.object(find_transport("symmetric_memory"), "check"),  # which would refuse a machine without GPUs
        pytest.raises(ValueError, check=coded("transport.shards-on-cpu")),
    ):
        thunder.jit(_model(), transforms=[fsdp(transport="symmetric_memory", offload_policy=CPUOffloadPolicy())])
