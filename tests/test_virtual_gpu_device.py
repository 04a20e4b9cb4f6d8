"""Tests of the virtual GPU: it reports faults exactly where CUDA and NCCL do not order accesses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import init_device_mesh
from virtual_gpu import guard
from virtual_gpu.log import covers, overlap, region_of
from virtual_gpu.world import Rank, Result, run

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")


def run_on_one_rank(function: Callable[[Rank], object]) -> Result:
    """Run a function as the only rank."""
    return run(function, world_size=1)


def fault_kinds(result: Result) -> list[str]:
    """Return the kinds of all faults."""
    return sorted({fault.kind for fault in result.faults})


#
# Regions
#


def region_of_tensor(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    return region_of(tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.element_size())


def test_a_region_holds_the_bytes_that_a_view_covers() -> None:
    whole = torch.empty(4, 6)
    assert region_of_tensor(whole) == region_of_tensor(whole.t()) == ((0, 96),)
    assert region_of_tensor(whole[1:3]) == ((24, 72),)
    assert region_of_tensor(whole[:, 1:3]) == ((4, 12), (28, 36), (52, 60), (76, 84))
    assert region_of_tensor(whole[:, ::2][:1]) == ((0, 4), (8, 12), (16, 20))
    assert region_of_tensor(whole[0].expand(5, 6)) == ((0, 24),)
    assert region_of_tensor(whole[:0]) == ()


def test_interleaved_columns_do_not_overlap() -> None:
    whole = torch.empty(4, 6)
    left, right = region_of_tensor(whole[:, :3]), region_of_tensor(whole[:, 3:])
    assert not overlap(left, right)
    assert overlap(left, region_of_tensor(whole[1]))
    assert covers(region_of_tensor(whole), left)
    assert not covers(left, region_of_tensor(whole))


#
# Streams, events, host
#


def test_a_write_races_with_a_read_on_another_stream() -> None:
    def race(rank: Rank) -> None:
        x = torch.zeros(8, device=rank.device)
        side = torch.cuda.Stream(rank.device)
        side.wait_stream(torch.cuda.current_stream(rank.device))
        with torch.cuda.stream(side):
            x.add_(1)
        x.mul(2)

    assert fault_kinds(run_on_one_rank(race)) == ["race"]


@pytest.mark.parametrize("way", ["stream", "event", "synchronize", "event synchronize"])
def test_waiting_for_a_stream_orders_later_work(way: str) -> None:
    def ordered(rank: Rank) -> None:
        main, side = torch.cuda.current_stream(rank.device), torch.cuda.Stream(rank.device)
        x = torch.zeros(8, device=rank.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.add_(1)
            done = torch.cuda.Event()
            done.record()
        if way == "stream":
            main.wait_stream(side)
        elif way == "event":
            main.wait_event(done)
        elif way == "synchronize":
            torch.cuda.synchronize(rank.device)
        else:
            done.synchronize()
        x.mul(2)

    result = run_on_one_rank(ordered)
    result.assert_clean()
    assert result.count()["syncs"] == way.endswith("synchronize")


def test_an_event_orders_only_work_before_its_record() -> None:
    def late(rank: Rank) -> None:
        main, side = torch.cuda.current_stream(rank.device), torch.cuda.Stream(rank.device)
        x = torch.zeros(8, device=rank.device)
        side.wait_stream(main)
        done = side.record_event()
        with torch.cuda.stream(side):
            x.add_(1)
        main.wait_event(done)
        x.mul(2)

    assert fault_kinds(run_on_one_rank(late)) == ["race"]


def test_waiting_for_the_stream_of_another_device_orders_nothing() -> None:
    def other(rank: Rank) -> None:
        x = torch.zeros(8, device="cuda:3")
        side = torch.cuda.Stream("cuda:3")
        side.wait_stream(torch.cuda.current_stream())  # the stream of the current device, 0
        with torch.cuda.stream(side):
            x.add_(1)

    assert fault_kinds(run_on_one_rank(other)) == ["race"]


def test_different_bytes_of_one_buffer_do_not_race() -> None:
    def apart(rank: Rank) -> None:
        x = torch.zeros(4, 6, device=rank.device)
        side = torch.cuda.Stream(rank.device)
        side.wait_stream(torch.cuda.current_stream(rank.device))
        with torch.cuda.stream(side):
            x[:, :3].add_(1)
        x[:, 3:].add_(1)

    run_on_one_rank(apart).assert_clean()


def test_a_backward_runs_on_the_stream_of_its_forward() -> None:
    def differentiate(rank: Rank) -> None:
        main, side = torch.cuda.current_stream(rank.device), torch.cuda.Stream(rank.device)
        weight = torch.ones(8, device=rank.device, requires_grad=True)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            loss = (weight * 2).sum()
        main.wait_stream(side)
        with rank.phase("backward"):
            loss.backward()
        weight.grad.mul_(2)

    result = run_on_one_rank(differentiate)
    result.assert_clean()  # autograd's engine waits for streams itself
    assert any(e.stream.number for e in result.logs[0].entries if e.phase == "backward" and e.kind == "kernel")


#
# Memory
#


def test_memory_freed_while_another_stream_uses_it_is_a_fault() -> None:
    def drop(rank: Rank, keep: str) -> None:
        main, side = torch.cuda.current_stream(rank.device), torch.cuda.Stream(rank.device)
        x = torch.zeros(8, device=rank.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x * 2
        if keep == "record_stream":
            x.record_stream(side)
        elif keep == "wait":
            main.wait_stream(side)
        kept = x if keep == "reference" else None
        del x
        torch.ones(8, device=rank.device)
        del y, kept

    assert fault_kinds(run(drop, "", world_size=1)) == ["reuse"]
    for keep in ("record_stream", "wait", "reference"):
        run(drop, keep, world_size=1).assert_clean()


def test_new_memory_may_still_be_in_use_by_its_stream() -> None:
    def use(rank: Rank, wait: bool) -> None:
        x = torch.empty(8, device=rank.device)
        side = torch.cuda.Stream(rank.device)
        if wait:
            side.wait_stream(torch.cuda.current_stream(rank.device))
        with torch.cuda.stream(side):
            x.zero_()

    assert fault_kinds(run(use, False, world_size=1)) == ["race"]
    run(use, True, world_size=1).assert_clean()


@pytest.mark.parametrize("pin_memory", [True, False])
def test_pinned_memory_overwritten_during_a_copy_is_a_fault(pin_memory: bool) -> None:
    def upload(rank: Rank) -> None:
        source = torch.zeros(8, pin_memory=pin_memory)
        assert source.is_pinned() is pin_memory
        copy = torch.empty(8, device=rank.device).copy_(source, non_blocking=True)
        source.add_(1)
        del copy

    result = run_on_one_rank(upload)
    assert fault_kinds(result) == (["host race"] if pin_memory else [])
    assert result.count()["syncs"] == (not pin_memory)


def test_reading_pinned_memory_before_a_copy_to_it_has_finished_is_a_fault() -> None:
    def download(rank: Rank, wait: bool) -> None:
        on_host = torch.zeros(8).pin_memory()
        on_host.copy_(torch.ones(8, device=rank.device), non_blocking=True)
        if wait:
            torch.cuda.current_stream(rank.device).synchronize()
        on_host.sum()

    assert fault_kinds(run(download, False, world_size=1)) == ["host race"]
    run(download, True, world_size=1).assert_clean()


def test_reading_a_number_from_the_device_is_a_synchronization() -> None:
    result = run_on_one_rank(lambda rank: torch.ones(8, device=rank.device).sum().item())
    assert result.count()["syncs"] == 1


#
# Collectives
#


def gather(rank: Rank, wait: bool = True) -> torch.Tensor:
    own = torch.zeros(8, device=rank.device)
    whole = torch.empty(8 * rank.world_size, device=rank.device)
    work = dist.all_gather_into_tensor(whole, own, async_op=True)
    if wait:
        work.wait()
    return whole * 2


def test_reading_the_result_of_a_collective_without_a_wait_is_a_race() -> None:
    run(gather).assert_clean()
    assert fault_kinds(run(gather, wait=False)) == ["race"]


def test_a_synchronous_collective_runs_on_the_current_stream() -> None:
    def reduce(rank: Rank) -> None:
        x = torch.zeros(8, device=rank.device)
        dist.all_reduce(x)
        x.mul_(2)

    result = run(reduce)
    result.assert_clean()
    assert [e.stream.number for e in result.logs[1].entries if e.kind == "collective"] == [0]


def test_an_asynchronous_collective_keeps_its_tensors_until_the_wait() -> None:
    def issue(rank: Rank, drop: bool) -> None:
        whole = torch.empty(16, device=rank.device)
        work = dist.all_gather_into_tensor(whole, torch.zeros(8, device=rank.device), async_op=True)
        if drop:
            del work
        torch.ones(8, device=rank.device)

    run(issue, False).assert_clean()
    assert fault_kinds(run(issue, True)) == ["reuse"]


def test_collectives_of_different_sizes_are_a_mismatch() -> None:
    def differ(rank: Rank) -> None:
        x = torch.zeros(8 + 8 * rank.rank, device=rank.device)
        dist.all_reduce(x)

    assert fault_kinds(run(differ)) == ["mismatch"]


def test_a_missing_collective_on_one_rank_is_a_deadlock() -> None:
    def less(rank: Rank) -> None:
        for _ in range(2 - rank.rank):
            dist.all_reduce(torch.zeros(8, device=rank.device))

    assert fault_kinds(run(less)) == ["deadlock"]


def test_collectives_of_two_groups_in_different_orders_are_a_deadlock() -> None:
    def cross(rank: Rank) -> None:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        for group in groups if rank.rank else reversed(groups):
            dist.all_reduce(torch.zeros(8, device=rank.device), group=group)

    assert fault_kinds(run(cross)) == ["deadlock"]


def test_each_group_has_its_own_stream() -> None:
    def two(rank: Rank) -> None:
        other = dist.new_group([0, 1])
        for group in (None, other):
            dist.all_reduce(torch.zeros(8, device=rank.device), group=group, async_op=True).wait()

    streams = [e.stream for e in run(two).logs[0].entries if e.kind == "collective"]
    assert len(set(streams)) == 2


@pytest.mark.parametrize("local", [False, True])
def test_splitting_a_communicator_needs_all_of_its_ranks(local: bool) -> None:
    def split(rank: Rank) -> None:
        if rank.rank < 2 or not local:
            dist.new_group([0, 1], use_local_synchronization=local)

    result = run(split, world_size=4, bind_device=True)
    assert fault_kinds(result) == (["deadlock"] if local else [])
    assert [sum(e.kind == "split" for e in log.entries) for log in result.logs] == [
        1,
        1,
        *([0, 0] if local else [1, 1]),
    ]


def test_a_mesh_has_groups_for_its_rows_and_columns() -> None:
    def reduce(rank: Rank) -> list[list[int]]:
        with rank.outside():
            mesh = init_device_mesh("cuda", (2, 2))
        for dim in range(2):
            dist.all_reduce(torch.zeros(8, device=rank.device), group=mesh.get_group(dim))
        return [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(2)]

    result = run(reduce, world_size=4)
    result.assert_clean()
    assert result.values == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]


#
# Symmetric memory
#


def pull(rank: Rank, barriers: tuple[bool, bool], signals: bool = False) -> None:
    """Write this rank's memory, read the peer's, and write this rank's memory again."""
    own = symmetric_memory.empty(8, device=rank.device)
    handle = symmetric_memory.rendezvous(own, dist.group.WORLD)
    own.fill_(rank.rank)
    peer = 1 - rank.rank

    def meet(number: int) -> None:
        if signals:
            handle.put_signal(peer, number)
            handle.wait_signal(peer, number)
        elif barriers[number]:
            handle.barrier(number)

    meet(0)
    torch.empty(8, device=rank.device).copy_(handle.get_buffer(peer, (8,), own.dtype))
    meet(1)
    own.fill_(7)


@pytest.mark.parametrize("missing", [(False, True), (True, False)])
def test_peers_race_without_a_barrier(missing: tuple[bool, bool]) -> None:
    run(pull, (True, True)).assert_clean()
    run(pull, (False, False), signals=True).assert_clean()
    assert fault_kinds(run(pull, missing)) == ["race"]


def test_all_replaced_attributes_of_torch_are_restored() -> None:
    before = (torch.cuda.Stream, torch.cuda.current_stream, torch.Tensor.data_ptr, symmetric_memory.rendezvous)
    run_on_one_rank(lambda rank: None)
    assert before == (torch.cuda.Stream, torch.cuda.current_stream, torch.Tensor.data_ptr, symmetric_memory.rendezvous)
    assert not torch.cuda.is_available() and not dist.is_initialized()
    assert torch.accelerator.current_accelerator() is None
