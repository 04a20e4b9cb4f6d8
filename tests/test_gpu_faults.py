"""Faults that only GPUs can show, tested on virtual ones: device indices, current devices, offloaded shards, NCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

from thunder_fsdp_sched import Init, Ranks, fsdp, get_model_state_dict, get_optimizer_state_dict

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from models import Stack
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from virtual_gpu import guard
from virtual_gpu.histories import faults_after_interruption, interrupt, make_model, take_three_steps
from virtual_gpu.symmetric import Handle
from virtual_gpu.world import Rank, run

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=guard.missing() or "nothing is missing")


def _one_of_two(transport: str, rank: int) -> list[int] | None:
    """Return the ranks to run: one, or all if they access each other's memory."""
    return None if transport == "symmetric_memory" else [rank]


#
# Devices
#


def _without_an_index(rank: Rank) -> None:
    for device in ("cuda", torch.device("cuda")):
        model = thunder.jit(Stack(1, width=32), transforms=[ours := fsdp(init=Init(device=device))])
        assert {bucket.device for bucket in ours.plan} == {rank.device}
        assert {p.device for p in model.parameters()} == {rank.device}
        model(torch.ones(4, 32, device=rank.device)).sum().backward()


def test_a_device_without_an_index_means_each_ranks_current_device() -> None:
    run(_without_an_index).assert_clean()


#
# Offloaded shards
#


def _check_entries_of_offloaded_shards(rank: Rank) -> None:
    with rank.device:
        module = Stack(2, width=32)
    model = thunder.jit(module, transforms=[ours := fsdp(offload_policy=CPUOffloadPolicy())])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model(torch.ones(4, 32, device=rank.device)).sum().backward()
    optimizer.step()
    # A mesh stores its ranks in real tensors.
    with unset_fake_temporarily():
        state = get_model_state_dict(model)
        saved = get_optimizer_state_dict(model, optimizer)["state"]
    assert any(hasattr(entry, "to_local") for entry in state.values())
    for name, param in model.named_parameters():
        entries = [(state[name], param), (saved[name]["exp_avg"], optimizer.state[param]["exp_avg"])]
        for entry, own in entries:
            tensors = entry.to_local(), own.to_local()
            addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors]
            assert addresses[0] == addresses[1] or not tensors[1].numel(), name
        assert state[name].to_local().device.type == "cpu", name
    assert all(bucket.comm.pin_memory for bucket in ours.plan)


def test_state_dict_entries_share_the_memory_of_offloaded_shards() -> None:
    run(_check_entries_of_offloaded_shards).assert_clean()


def _write_offloaded_shards(rank: Rank, write: str) -> None:
    model = make_model(rank, width=32, offload_policy=CPUOffloadPolicy())
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


@pytest.mark.parametrize("write", ["after inference", "after backward"])
def test_offloaded_shards_may_be_written_after_every_call(write: str) -> None:
    run(_write_offloaded_shards, write, ranks=[0]).assert_clean()


#
# Process groups
#


def _broadcast_module(rank: Rank) -> None:
    module = Stack(1, width=32)
    module.register_buffer("counter", torch.zeros(3))
    with rank.phase("jit"):
        thunder.jit(module, transforms=[fsdp(init=Init(device="cuda", broadcast_from=1))])


def test_a_module_on_the_cpu_is_broadcast_through_the_gpu_if_there_is_only_nccl() -> None:
    result = run(_broadcast_module)
    result.assert_clean()
    # One for each parameter, one for the buffer.
    assert result.count("jit")["collective"] == len(list(Stack(1).parameters())) + 1


def _shard_on_the_cpu(rank: Rank, broadcast_from: int | None) -> None:
    with pytest.raises(
        ValueError, check=coded("transport.no-backend-for-device", "parameter 'first.weight'", "CPU", "cuda:nccl")
    ):
        thunder.jit(Stack(1, width=32), transforms=[fsdp(init=Init(broadcast_from=broadcast_from))])


@pytest.mark.parametrize("broadcast_from", [None, 0])
def test_shards_on_the_cpu_are_refused_before_anything_is_sent_if_there_is_only_nccl(
    broadcast_from: int | None,
) -> None:
    assert not run(_shard_on_the_cpu, broadcast_from).count()["collective"]


def _shard_with_backend(rank: Rank, backend: str) -> None:
    group = dist.new_group(list(range(rank.world_size)), backend=backend)
    with rank.device:
        module = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 7, bias=False))
    thunder.jit(module, transforms=[ours := fsdp(ranks=group, bucketing_strategy=lambda *_: "all")])
    assert {bucket.comm.transport for bucket in ours.plan} == {"coalesced"}


@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl", "cpu:fake,cuda:nccl"])
def test_transports_are_chosen_for_the_backend_of_the_parameters_device(backend: str) -> None:
    run(_shard_with_backend, backend)


def _train_with_twin_group(rank: Rank) -> Any:
    """Train over ranks 0 and 1; return their group and its twin, which communicates reductions."""
    options = dist.distributed_c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    pair = dist.new_group([0, 1], pg_options=options, timeout=timedelta(seconds=77))
    if rank.rank > 1:
        return None
    with rank.device:
        module = Stack(2, width=32)
    model = thunder.jit(
        module, transforms=[ours := fsdp(ranks=Ranks(process_group=pair, separate_reduce_scatter_group=True))]
    )
    model(torch.ones(4, 32, device=rank.device)).sum().backward()
    return pair, ours.sharded.buckets[0].ranks.reductions.process_group


def _check_options_of_twin_group(rank: Rank) -> None:
    pair, twin = _train_with_twin_group(rank)
    assert twin is not pair
    assert twin.options.is_high_priority_stream
    assert twin.options._timeout == timedelta(seconds=77)
    assert pair.options.group_name == pair.group_name != twin.options.group_name, (
        "the groups must not share an options object"
    )


def test_a_twin_group_has_the_options_of_the_group() -> None:
    run(_check_options_of_twin_group).assert_clean()


def _create_twin_group(rank: Rank) -> None:
    _train_with_twin_group(rank)


@pytest.mark.parametrize("bind_device", [False, True])
def test_a_twin_group_is_created_by_its_ranks_only(bind_device: bool) -> None:
    run(_create_twin_group, world_size=4, bind_device=bind_device).assert_clean()


#
# Streams
#


# At some wait of forward or backward.
@pytest.mark.parametrize(("transport", "at"), [("all_to_all", 3), ("symmetric_memory", 10)])
def test_memory_in_use_by_a_side_stream_is_not_reused_after_an_exception(transport: str, at: int) -> None:
    result = run(interrupt, at=at, transport=transport, ranks=_one_of_two(transport, 0))
    assert not faults_after_interruption(result)


def test_gradients_in_another_dtype_are_copied_by_one_kernel_per_bucket() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    result = run(take_three_steps, "fp32", ranks=[0], transport="flat", mp_policy=policy)
    result.assert_clean()
    names = [entry.name for entry in result.logs[0].entries if entry.phase == "backward 2"]
    assert names.count("_foreach_copy_") == 5 and "copy_" not in names


#
# Symmetric memory: one allocation per group, and tensors in peers' memory that are created once
#


BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def evaluate(rank: Rank, model: Any, *, autocast: bool = False) -> None:
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        model(torch.randn(4, 8, device=rank.device))


def number_of_rendezvous(rank: Rank) -> int:
    """Return the number of allocations that are shared with other ranks, without the workspace of reductions."""
    return len(rank.log.shared)


def count_allocations(rank: Rank, autocast: bool, **options: Any) -> tuple[int, int, int]:
    model = make_model(rank, transport="symmetric_memory", **options)
    after_jit = number_of_rendezvous(rank)
    evaluate(rank, model, autocast=autocast)
    first = number_of_rendezvous(rank)
    with mock.patch.object(Handle, "get_buffer", side_effect=AssertionError("created a second time")):
        evaluate(rank, model, autocast=autocast)
    return after_jit, first, number_of_rendezvous(rank)


@pytest.mark.parametrize(
    ("options", "autocast", "counts"),
    [
        pytest.param({}, False, (2, 2, 2), id="fp32"),
        pytest.param(BF16, False, (0, 2, 2), id="bf16: casts only, when first needed"),
        pytest.param({}, True, (2, 3, 3), id="autocast: shards, and later their casts"),
    ],
)
def test_all_buckets_of_a_group_share_one_allocation(
    options: dict[str, Any], autocast: bool, counts: tuple[int, int, int]
) -> None:
    """One for the workspace of reductions, with the first, and one for the shards, or for their casts."""
    result = run(count_allocations, autocast, **options)
    result.assert_clean()
    assert result.values == [counts, counts]


def shard_over_a_mesh(rank: Rank) -> int:
    with rank.outside():
        mesh = init_device_mesh("cuda", (2, 2))
    evaluate(rank, make_model(rank, transport="symmetric_memory", ranks=mesh))
    return number_of_rendezvous(rank)


def test_each_group_of_a_mesh_has_one_allocation() -> None:
    result = run(shard_over_a_mesh, world_size=4, ranks=[0, 1])  # which shard over the same group
    result.assert_clean()
    assert result.values == [2, 2], "shards, and the workspace of reductions"


def write_one_shard(rank: Rank) -> None:
    model = make_model(rank, transport="symmetric_memory")
    params = list(model.parameters())
    versions = [p._version for p in params]
    with torch.no_grad():
        params[0].add_(1)
    assert [p._version for p in params] == [versions[0] + 1, *versions[1:]]


def test_a_write_to_one_shard_does_not_change_the_version_of_others() -> None:
    run(write_one_shard).assert_clean()


def begin_inside_a_segment(rank: Rank) -> None:
    with (
        mock.patch.object(Handle, "offset", 512, create=True),
        pytest.raises(ValueError, check=coded("transport.shards-inside-torch-pool", "512")),
    ):
        make_model(rank, transport="symmetric_memory")


def test_memory_at_an_offset_in_its_handle_is_refused() -> None:
    # Peers' memory is addressed from the start of a handle's allocation. A pool that divides its segments adds an offset.
    run(begin_inside_a_segment)
