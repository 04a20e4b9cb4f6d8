"""Dropped models release their threads, descriptors, groups and memory, and the number of cached shapes is limited."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from typing import Any
from unittest import mock

from thunder_fsdp_sched import Ranks, fsdp, transform, without_batch

import pytest
import shared_memory
import thunder
import torch
import torch.distributed as dist
from coded import coded
from device import BACKEND
from models import Halves, Stack
from pipeline_patches import replacing
from ranks import on_ranks
from thunder.core.symbol import BoundSymbol
from torch.distributed.fsdp import MixedPrecisionPolicy

RECENT = 4
"""The compilations whose traces are kept, as docs/compiling.md says."""


def _resources() -> dict[str, Any]:
    gc.collect()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "groups": [group.group_name for group in dist.distributed_c10d._world.pg_names],
        "bytes": sum(o.untyped_storage().nbytes() for o in gc.get_objects() if isinstance(o, torch.Tensor)),
    }


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts through /proc")
@on_ranks(2)
def test_dropped_models_release_all_resources() -> None:
    pair = dist.new_group([0, 1])
    for options in (
        {"ranks": Ranks(process_group=pair, separate_reduce_scatter_group=True)},
        {"transport": "all_to_all", "sharding_strategy": "zero2"},
    ):
        seen, refs = [], []
        for _ in range(2):
            ours = fsdp(**options)
            model = thunder.jit(Stack(1).double(), transforms=[ours])
            model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
            refs += [weakref.ref(o) for o in (ours, model, ours.sharded.buckets[0], ours.sharded.buckets[0].arena)]
            del ours, model
            seen.append(_resources())
        for later in seen[1:]:  # the first model also creates what all share; leftovers of earlier tests may disappear
            assert later["groups"] == seen[0]["groups"] and later["bytes"] <= seen[0]["bytes"], seen
            assert later["threads"] <= seen[0]["threads"] and later["descriptors"] <= seen[0]["descriptors"], seen
        assert not [ref() for ref in refs if ref() is not None]
    before = _resources()
    dist.destroy_process_group(pair)
    del pair
    after = _resources()
    ended = set(before["groups"]) - set(after["groups"])
    assert len(ended) == 3, "a group's companion and its control channel must be destroyed with it"
    assert after["threads"] < before["threads"] and after["descriptors"] < before["descriptors"]
    if BACKEND == "gloo":  # nothing may keep the connections of a group, with its three threads
        assert after["threads"] <= before["threads"] - 3 * len(ended), (before, after)


@on_ranks(2)
def test_dropped_models_whose_ranks_differ_release_their_memory(rank: int) -> None:
    x = torch.ones(2, 4)
    for use in ("alike", "branches", "without a batch"):
        ours = fsdp(ranks_may_differ=True)
        model = thunder.jit(Halves(4), transforms=[ours])
        loss = without_batch(model) if rank == 1 and use == "without a batch" else model(x, rank == 0 or use == "alike")
        loss.sum().backward()
        bucket = ours.sharded.buckets[0]
        refs = [weakref.ref(o) for o in (ours, model, bucket, bucket.arena, bucket.shard)]
        del ours, model, bucket, loss
        gc.collect()
        assert not [ref() for ref in refs if ref() is not None], use


@on_ranks(2)
def test_groups_created_to_level_group_counts_are_destroyed(rank: int) -> None:
    known = len(dist.distributed_c10d._world.pg_names)
    if rank == 0:
        mine = [dist.new_group([0], use_local_synchronization=True) for _ in range(2)]
    model = thunder.jit(Stack(1), transforms=[fsdp(ranks=Ranks(separate_reduce_scatter_group=True))])
    del model
    # Only the default group's companion and control channel, and none of the groups created to level the counts.
    made = [g.group_desc for g in dist.distributed_c10d._world.pg_names][known:]
    assert len(made) <= 2 + (2 if rank == 0 else 0), made
    if rank == 0:
        for group in mine:
            dist.destroy_process_group(group)
    # There are fewer groups now than when the last one was named. Its name must not be reused, even after it was
    # destroyed, because the addresses of its ranks stay in the store.
    for _ in range(3):
        passing = dist.new_group([0, 1])
        thunder.jit(Stack(1), transforms=[fsdp(ranks=passing)])
        dist.destroy_process_group(passing)
    other = dist.new_group([0, 1])
    thunder.jit(Stack(1), transforms=[fsdp(ranks=other)])
    another = dist.new_group([0, 1])
    dist.destroy_process_group(other)
    thunder.jit(Stack(1), transforms=[fsdp(ranks=Ranks(process_group=another, separate_reduce_scatter_group=True))])
    dist.destroy_process_group(another)


@on_ranks(2)
def test_the_oldest_shapes_are_evicted_after_a_warning(rank: int) -> None:
    ours = fsdp()
    model = thunder.jit(torch.nn.Sequential(torch.nn.Linear(4, 4)), transforms=[ours])
    with mock.patch.multiple(transform, WARN_COMPILED=2, MAX_COMPILED=4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in range(1, 7):
                model(torch.ones(batch, 4)).sum().backward()
        texts = [str(w.message) for w in caught if "sets of input shapes" in str(w.message)]
        assert len(texts) == 1 and "float32[3, 4]" in texts[0] and "symbolic values" in texts[0], texts
        assert [str(c.call).split(" (")[0] for c in ours.compiled] == [f"inputs float32[{n}, 4]" for n in (3, 4, 5, 6)]
        assert len(thunder.compile_stats(model).interpreter_cache) == 4
        misses = thunder.compile_stats(model).cache_misses
        # The evicted shape must be compiled again on rank 1, which does not wait for rank 0 although it compiles alone.
        model(torch.ones(6 if rank == 0 else 1, 4)).sum().backward()
        assert thunder.compile_stats(model).cache_misses == misses + rank


@on_ranks(1)
def test_a_further_shape_keeps_its_program_and_no_traces() -> None:
    ours = fsdp()
    model = thunder.jit(Stack(2), transforms=[ours])

    def compile_for(batches: range) -> int:
        """Compile, and return how many bound symbols there are then."""
        for batch in batches:
            model(torch.ones(batch, 4)).sum().backward()
        gc.collect()
        return sum(isinstance(each, BoundSymbol) for each in gc.get_objects())

    compile_for(range(1, RECENT + 1))
    first, *_, last = ours.compiled
    memory = last.predict_memory(others=[first])
    counts = [compile_for(range(batch, batch + 1)) for batch in range(RECENT + 1, RECENT + 4)]
    assert counts[2] - counts[1] < 10, counts  # of about 800 that a compilation makes
    with pytest.raises(AttributeError, check=coded("trace.compiled-traces-dropped", "inputs float32[1, 4]")):
        _ = first.forward
    assert (forgotten := last.predict_memory(others=[first])).fixed == memory.fixed
    assert forgotten.tensors == memory.tensors
    assert len(ours.schedules) == len(ours.compiled) == RECENT + 3 and all(s.backward for s in ours.schedules)
    misses = thunder.compile_stats(model).cache_misses
    model(torch.ones(1, 4)).sum().backward()
    assert thunder.compile_stats(model).cache_misses == misses


@on_ranks(1)
def test_a_search_finds_what_a_window_has_accumulated_whose_traces_were_forgotten() -> None:
    ours = fsdp(prefetch="auto")
    model = thunder.jit(Stack(1), transforms=[ours])
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    for batch in range(2, RECENT + 3):
        model(torch.ones(batch, 4)).sum().backward()
    assert all(compiled.choice for compiled in ours.compiled)


@on_ranks(2)
def test_a_failed_compile_leaves_no_traces() -> None:
    ours = fsdp()
    model = thunder.jit(Stack(1).double(), transforms=[ours])

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("in a pass")

    for name in ("insert_unshard", "verify", "bucket_communication"):
        with replacing(name, refuse), pytest.raises(ArithmeticError):
            model(torch.ones(2, 4, dtype=torch.float64))
        assert ours.compiled == [] and ours.schedules == []
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert len(ours.compiled) == 1 and ours.schedules[0].backward is not None
    with torch.no_grad():
        model(torch.ones(3, 4, dtype=torch.float64))
    assert len(ours.compiled) == 2 and ours.schedules[1].backward is None


@on_ranks(2)
def test_shared_memory_is_unmapped_with_its_buckets_and_group() -> None:
    transport = shared_memory.register()
    handles: weakref.WeakSet[Any] = weakref.WeakSet()
    rendezvous = transport.memory.rendezvous

    def spy(tensor: torch.Tensor, group: str) -> Any:
        handles.add(handle := rendezvous(tensor, group))
        return handle

    transport.memory.rendezvous = spy
    pair = dist.new_group([0, 1])

    def make(group: dist.ProcessGroup, **options: Any) -> torch.nn.Module:
        ours = fsdp(transport="shared_files", ranks=group, **options)
        return thunder.jit(Stack(1).double(), transforms=[ours])

    def step(model: torch.nn.Module) -> None:
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()

    model = make(pair)
    step(model)
    assert len(handles) == 1, "all buckets must share one allocation"
    del model
    gc.collect()
    assert not len(handles), "the allocation must be freed with the buckets"

    model = make(pair, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64))
    assert not len(handles), "nothing may be allocated before the first step: no rank reads the shards in float64"
    step(model)
    assert len(handles) == 1
    dist.destroy_process_group(pair)
    del pair
    gc.collect()
    assert not len(handles), "the allocation must be freed with the group"
