"""What goes wrong on GPUs alone, on virtual ones: devices without an index, current devices, offloaded shards, NCCL."""

from __future__ import annotations

import gc
import itertools
import time
from datetime import timedelta
from typing import Any
from unittest import mock

from thunder_fsdp_sched import clip_grad_norm_, fsdp, get_model_state_dict, get_optimizer_state_dict
from thunder_fsdp_sched.private_api import timeout_of
from thunder_fsdp_sched.runtime.memory import InFlight
from thunder_fsdp_sched.tools.profiler import measure

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Stack
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils import dlpack
from virtual_gpu import guard
from virtual_gpu.world import Rank, run

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=guard.missing() or "it can run")

SIDE_STREAMS = ("staged", "all_to_all", "symmetric_memory")


def _jit(rank: Rank, **options: Any) -> torch.nn.Module:
    with rank.device:
        module = Stack(3, width=32)
    return thunder.jit(module, transforms=[fsdp(**options)])


def _train(rank: Rank, steps: int = 2, **options: Any) -> torch.nn.Module:
    model = _jit(rank, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(4, 32, device=rank.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


#
# Devices
#


def _without_an_index(rank: Rank) -> None:
    for device in ("cuda", torch.device("cuda")):
        model = thunder.jit(Stack(1, width=32), transforms=[ours := fsdp(device=device)])
        assert {bucket.device for bucket in ours.plan} == {rank.device}
        assert {p.device for p in model.parameters()} == {rank.device}
        model(torch.ones(4, 32, device=rank.device)).sum().backward()


def test_a_device_without_an_index_is_the_current_one_of_each_rank() -> None:
    run(_without_an_index).assert_clean()


@pytest.mark.parametrize("transport", SIDE_STREAMS)
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_streams_are_those_of_the_parameters_device_whatever_the_current_one_is(transport: str, strategy: str) -> None:
    run(_train, transport=transport, sharding_strategy=strategy, set_device=False).assert_clean()


def _measure(rank: Rank, **options: Any) -> None:
    # Which collectives take longest decides what is run next, on all ranks alike. A power of two makes differences exact.
    ticks = itertools.count()
    with mock.patch.object(time, "perf_counter", lambda: next(ticks) * 2.0**-20):
        measure(_jit(rank, **options), torch.ones(4, 32, device=rank.device), repeats=1)


@pytest.mark.parametrize("transport", ["flat", *SIDE_STREAMS])
def test_measuring_orders_what_it_starts(transport: str) -> None:
    run(_measure, transport=transport, set_device=False).assert_clean()


#
# Offloaded shards
#


def _offloaded(rank: Rank) -> None:
    with rank.device:
        module = Stack(2, width=32)
    model = thunder.jit(module, transforms=[ours := fsdp(offload_policy=CPUOffloadPolicy())])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model(torch.ones(4, 32, device=rank.device)).sum().backward()
    optimizer.step()
    with unset_fake_temporarily(), mock.patch.object(dlpack, "from_dlpack", lambda view: view):  # a mesh has real ranks
        state = get_model_state_dict(model)
        saved = get_optimizer_state_dict(model, optimizer)["state"]
    assert any(isinstance(entry, DTensor) for entry in state.values())
    pieces = {name: entry.to_local() for name, entry in state.items()}
    for name, param in model.named_parameters():
        assert pieces[name].device.type == "cpu", name
        assert pieces[name].untyped_storage().data_ptr() == param.untyped_storage().data_ptr(), name
    for name, param in model.named_parameters():
        entry = saved[name]["exp_avg"].to_local()
        own = optimizer.state[param]["exp_avg"]
        assert entry.untyped_storage().data_ptr() == own.untyped_storage().data_ptr(), name
    assert all(bucket.comm.pin_memory for bucket in ours.plan)


def test_entries_of_a_state_dict_share_the_memory_of_offloaded_shards() -> None:
    run(_offloaded).assert_clean()


def _written_on_the_host(rank: Rank, write: str) -> None:
    model = _jit(rank, offload_policy=CPUOffloadPolicy())
    x = torch.ones(4, 32, device=rank.device)
    for frozen in (False, True):
        model.requires_grad_(not frozen)
        with torch.set_grad_enabled(write != "after inference"):
            out = model(x.requires_grad_())
        if write == "after backward":
            with model.no_sync():
                out.sum().backward()
        for param in model.parameters():
            param.data.fill_(1.0)


@pytest.mark.parametrize("write", ["after inference", "after forward", "after backward"])
def test_an_offloaded_shard_may_be_written_whenever_the_user_has_control(write: str) -> None:
    run(_written_on_the_host, write).assert_clean()


def _clip(rank: Rank) -> None:
    model = _jit(rank, offload_policy=CPUOffloadPolicy(), bucketing_strategy="block")
    model(torch.ones(4, 32, device=rank.device)).sum().backward()
    with rank.phase("clip"):
        clip_grad_norm_(model, 1.0)


def test_clipping_offloaded_gradients_copies_norms_once_a_bucket() -> None:
    result = run(_clip)
    result.assert_clean()
    buckets = 5  # first, three blocks, last
    assert result.count("clip")["copy"] == buckets + 1, "and the scale back to the CPU"


#
# Process groups
#


def _broadcast(rank: Rank) -> None:
    module = Stack(1, width=32)
    module.register_buffer("counter", torch.zeros(3))
    with rank.phase("jit"):
        thunder.jit(module, transforms=[fsdp(device="cuda", broadcast_from=1)])


def test_a_module_on_the_cpu_is_broadcast_from_the_gpu_if_nccl_is_all_there_is() -> None:
    result = run(_broadcast)
    result.assert_clean()
    assert result.count("jit")["collective"] == len(list(Stack(1).parameters())) + 1  # and the buffer


def _on_the_cpu(rank: Rank, broadcast_from: int | None) -> None:
    with pytest.raises(
        ValueError, match=r"parameter 'first\.weight' would be sent from the CPU.*'cuda:nccl' only.*device="
    ):
        thunder.jit(Stack(1, width=32), transforms=[fsdp(broadcast_from=broadcast_from)])


@pytest.mark.parametrize("broadcast_from", [None, 0])
def test_shards_on_the_cpu_are_refused_before_anything_is_sent_if_nccl_is_all_there_is(
    broadcast_from: int | None,
) -> None:
    assert not run(_on_the_cpu, broadcast_from).count()["collective"]


def _backends(rank: Rank, backend: str) -> None:
    group = dist.new_group(list(range(rank.world_size)), backend=backend)
    with rank.device:
        module = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 7, bias=False))
    thunder.jit(module, transforms=[ours := fsdp(process_group=group, bucketing_strategy=lambda *_: "all")])
    assert {bucket.comm.transport for bucket in ours.plan} == {"coalesced"}


@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl", "cpu:fake,cuda:nccl"])
def test_the_backend_is_that_of_the_parameters_device(backend: str) -> None:
    run(_backends, backend)


def _with_twins(rank: Rank) -> Any:
    """Train over ranks 0 and 1 of all; return the group and its twin."""
    options = dist.distributed_c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    pair = dist.new_group([0, 1], pg_options=options, timeout=timedelta(seconds=77))
    if rank.rank > 1:
        return None
    with rank.device:
        module = Stack(2, width=32)
    model = thunder.jit(module, transforms=[ours := fsdp(process_group=pair, separate_reduce_scatter_group=True)])
    model(torch.ones(4, 32, device=rank.device)).sum().backward()
    return pair, ours.sharded.buckets[0].ranks.reductions.process_group


def _options_of_twins(rank: Rank) -> None:
    pair, twin = _with_twins(rank)
    assert twin is not pair
    assert twin.options.is_high_priority_stream
    assert timeout_of(twin) == timedelta(seconds=77)
    assert pair.options.group_name == pair.group_name != twin.options.group_name, "each has options of its own"


def test_a_twin_group_has_the_options_of_the_group() -> None:
    run(_options_of_twins).assert_clean()


def _only_members(rank: Rank) -> None:
    _with_twins(rank)


@pytest.mark.parametrize("bind_device", [False, True])
def test_a_twin_group_is_made_by_its_members_alone(bind_device: bool) -> None:
    run(_only_members, world_size=4, bind_device=bind_device).assert_clean()


#
# Streams
#


class _Interrupted(Exception):
    pass


def _dropped(rank: Rank, transport: str, calls: int) -> None:
    """A step ends at one of its waits, and everything is dropped."""
    with rank.device:
        module = Stack(3, width=32)
    model = thunder.jit(module, transforms=[fsdp(transport=transport, audit=False)])
    x = torch.ones(4, 32, device=rank.device)
    model(x).sum().backward()
    wait, waits = InFlight.wait, itertools.count(1)

    def interrupted(flight: InFlight) -> None:
        if next(waits) == calls:
            raise _Interrupted
        wait(flight)

    with mock.patch.object(InFlight, "wait", interrupted), pytest.raises(_Interrupted):
        model(x).sum().backward()
    del model, module
    gc.collect()
    for _ in range(3):
        torch.zeros(1 << 16, device=rank.device)


@pytest.mark.parametrize("calls", [3, 10], ids=["forward", "backward"])
@pytest.mark.parametrize("transport", SIDE_STREAMS)
def test_memory_that_a_side_stream_still_uses_is_not_handed_out_after_an_exception(transport: str, calls: int) -> None:
    faults = run(_dropped, transport, calls).faults
    # NCCL's watchdog keeps the tensors of works that are never waited for; the virtual GPU does not.
    assert not [fault for fault in faults if "unordered with collective" not in fault.text], faults


def _low_precision(rank: Rank, transport: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with rank.device:
        module = Stack(3, width=32)
    model = thunder.jit(module, transforms=[fsdp(transport=transport, mp_policy=policy)])
    for phase in ("first", "later"):
        with rank.phase(f"{phase} forward"):
            loss = model(torch.ones(4, 32, device=rank.device)).sum()
        with rank.phase(f"{phase} backward"):
            loss.backward()


def test_gradients_in_another_dtype_are_copied_by_one_kernel_a_bucket() -> None:
    result = run(_low_precision, "flat")
    result.assert_clean()
    names = [entry.name for entry in result.logs[0].entries if entry.phase == "later backward"]
    assert names.count("_foreach_copy_") == 5 and "copy_" not in names
