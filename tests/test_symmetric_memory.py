"""Symmetric memory on a virtual GPU: one allocation per group, and tensors in peers' memory that are created once."""

from __future__ import annotations

from typing import Any
from unittest import mock

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from models import Stack
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from virtual_gpu import guard
from virtual_gpu.symmetric import Handle
from virtual_gpu.world import Rank, run

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")

BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def jit(rank: Rank, **options: Any) -> Any:
    """Return a jitted model of five buckets."""
    with torch.device(rank.device):
        module = Stack(3, width=8)
    return thunder.jit(module, transforms=[fsdp(transport="symmetric_memory", **options)])


def evaluate(rank: Rank, model: Any, *, autocast: bool = False) -> None:
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        model(torch.randn(4, 8, device=rank.device))


def number_of_rendezvous(rank: Rank) -> int:
    """Return the number of allocations that are shared with other ranks, without the workspace of reductions."""
    return len(rank.log.shared)


def count_allocations(rank: Rank, autocast: bool, **options: Any) -> tuple[int, int, int]:
    model = jit(rank, **options)
    after_jit = number_of_rendezvous(rank)
    evaluate(rank, model, autocast=autocast)
    first = number_of_rendezvous(rank)
    evaluate(rank, model, autocast=autocast)
    return after_jit, first, number_of_rendezvous(rank)


@pytest.mark.parametrize(
    ("options", "autocast", "counts"),
    [
        pytest.param({}, False, (1, 1, 1), id="fp32"),
        pytest.param({"sharding_strategy": "zero2"}, False, (1, 1, 1), id="zero2"),
        pytest.param(BF16, False, (0, 1, 1), id="bf16: casts only, when first needed"),
        pytest.param({}, True, (1, 2, 2), id="autocast: shards, and later their casts"),
    ],
)
def test_all_buckets_of_a_group_share_one_allocation(
    options: dict[str, Any], autocast: bool, counts: tuple[int, int, int]
) -> None:
    result = run(count_allocations, autocast, **options)
    result.assert_clean()
    assert result.values == [counts, counts]


def shard_over_a_mesh(rank: Rank) -> int:
    with rank.outside():
        mesh = init_device_mesh("cuda", (2, 2))
    evaluate(rank, jit(rank, mesh=mesh))
    return number_of_rendezvous(rank)


def test_each_group_of_a_mesh_has_one_allocation() -> None:
    result = run(shard_over_a_mesh, world_size=4)
    result.assert_clean()
    assert result.values == [1, 1, 1, 1]


def count_tensors_of_peers(rank: Rank) -> tuple[int, int]:
    model = jit(rank)
    requests = []
    get_buffer = Handle.get_buffer

    def counted(self: Handle, peer: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        requests.append((peer, storage_offset))
        return get_buffer(self, peer, sizes, dtype, storage_offset)

    with mock.patch.object(Handle, "get_buffer", counted):
        evaluate(rank, model)
        once = len(requests)
        evaluate(rank, model)
    assert len({offset for peer, offset in requests if peer == rank.rank}) == 5, "shards must be at different offsets"
    return once, len(requests)


def test_tensors_in_peers_memory_are_created_once_for_each_bucket() -> None:
    assert run(count_tensors_of_peers).values == [(10, 10), (10, 10)]


def write_one_shard(rank: Rank) -> None:
    model = jit(rank)
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
        pytest.raises(ValueError, match=r"512 bytes into an allocation of its pool.*TORCH_SYMMMEM_IMPLICIT_POOL=0"),
    ):
        jit(rank)


def test_memory_at_an_offset_in_its_handle_is_refused() -> None:
    # Peers' memory is addressed from the start of a handle's allocation. A pool that divides its segments adds an offset.
    run(begin_inside_a_segment)


def test_handles_of_torch_have_an_offset() -> None:
    assert isinstance(symmetric_memory._SymmetricMemory.offset, property)
