"""Compiled models on a virtual GPU: no races, no host waits, no copies, and no wait too many.

Each place of the code that orders a step, by a wait, barrier, event or ``record_stream``, is needed: some log without it has
a fault.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

from thunder_fsdp_sched import Init, Ranks, Sharding, fsdp, get_model_state_dict, get_optimizer_state_dict

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
from virtual_gpu import guard, histories
from virtual_gpu.clocks import check
from virtual_gpu.histories import TRANSPORTS, faults_after_interruption, interrupt, make_model, take_three_steps
from virtual_gpu.log import HOST, Access, Entry, Log, Stream
from virtual_gpu.mutations import Mutation, faults_without, mutations_of, site_of
from virtual_gpu.symmetric import Handle
from virtual_gpu.world import Rank, Result, run

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")


def assert_never_synchronizes(result: Result) -> None:
    """Fail if a host waited for its device in a step after the first."""
    __tracebackhide__ = True
    for log in result.logs:
        for entry in log.entries:
            later = entry.phase in ("forward 1", "backward 1", "forward 2", "backward 2")
            assert not (later and (entry.blocks or entry.kind == "sync_event")), str(entry)


_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "autocast": {},
}
_ORDINARY_RUNS = {*((transport, "zero3", "fp32") for transport in TRANSPORTS), ("all_to_all", "zero2", "bf16")}


@pytest.mark.parametrize(
    ("transport", "strategy", "precision"),
    [
        pytest.param(*case, marks=[] if case in _ORDINARY_RUNS else pytest.mark.long)
        for case in itertools.product(TRANSPORTS, ("zero3", "zero2"), _PRECISIONS)
    ],
)
def test_training_has_no_race_no_synchronization_and_copies_only_what_the_transport_does(
    transport: str, strategy: str, precision: str
) -> None:
    """One rank trains, or two where ranks or their collectives meet. The model has five buckets."""
    options = {"transport": transport, "sharding_strategy": strategy, **_PRECISIONS[precision]}
    ranks = None if transport in ("flat", "symmetric_memory") else [0]
    result = run(take_three_steps, precision, ranks=ranks, **options)
    result.assert_clean()
    assert_never_synchronizes(result)
    forward, backward = result.count("forward 2"), result.count("backward 2")
    if transport != "symmetric_memory":  # which pulls from peers, without collectives
        assert forward["collective"] == 5 and backward["collective"] == (7 if strategy == "zero3" else 5)
    if precision == "fp32" and transport not in ("all_reduce", "symmetric_memory"):
        assert forward["copy"] == backward["copy"] == 0


def _interleave_once(rank: Rank, **options: Any) -> int:
    """Train, once with two forwards before their backwards, and return how many collectives a step has by its schedule."""
    model = make_model(rank, **options)
    for step in range(4):
        with rank.phase(f"step {step}"):
            losses = [model(torch.randn(4, 8, device=rank.device)).sum() for _ in range(1 + (step == 2))]
            for loss in losses:
                loss.backward()
    [compiled] = model._lc_transforms[-1].compiled
    return sum(op.issues and op.travels for op in (*compiled.forward_schedule, *compiled.backward_schedule))


@pytest.mark.parametrize(
    "options",
    [
        {"sharding_strategy": "zero2"},
        pytest.param({"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, marks=pytest.mark.long),
        {"extends": True},
    ],
    ids=str,
)
def test_two_forwards_before_their_backwards_change_no_later_step(options: dict[str, Any]) -> None:
    result = run(_interleave_once, ranks=[0], **options)
    result.assert_clean()
    counts = [result.count(f"step {step}") for step in range(4)]
    for kind in ("kernel", "copy", "collective"):
        assert counts[1][kind] == counts[3][kind], kind
    assert counts[1]["collective"] == result.values[0] < counts[2]["collective"] / 2


def _use_two_streams(rank: Rank, **options: Any) -> None:
    """Run forwards and backwards on two streams that do not wait for each other, and once in a window."""
    model = make_model(rank, **options)
    main, side = torch.cuda.current_stream(rank.device), torch.cuda.Stream(rank.device)
    side.wait_stream(main)

    def forward(stream: torch.cuda.Stream, grad: bool = True) -> torch.Tensor:
        with torch.cuda.stream(stream), torch.set_grad_enabled(grad):
            return model(torch.randn(4, 8, device=rank.device)).sum()

    for is_in_window in (False, True, False):
        with model.no_sync() if is_in_window else nullcontext():
            losses = [(stream, forward(stream)) for stream in (main, side)]
            forward(side, grad=False)
            torch.zeros(1 << 16, device=rank.device)  # may be what the evaluation has freed
            for stream, loss in losses:
                with torch.cuda.stream(stream):
                    loss.backward()
    main.wait_stream(side)  # before the model is dropped


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"sharding_strategy": "zero2", "mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, marks=pytest.mark.long
        ),
        {"sharding_strategy": Sharding("zero3", release=True), "transport": "all_to_all"},
    ],
    ids=["kept casts", "released"],
)
def test_two_forwards_on_two_streams_do_not_overwrite_each_others_slots(options: dict[str, Any]) -> None:
    run(_use_two_streams, ranks=[0], **options).assert_clean()


_ORDINARY_SETUPS = {("flat", "fp32"), ("all_to_all", "fp32"), ("all_to_all", "interrupted")}

_NEEDLESS = {
    # There is no smaller workspace whose readers it could wait for.
    ("symmetric_memory", "bf16"): {
        ("host wait", "symmetric_memory.py:_reserve_workspace < symmetric_memory.py:allocate_together")
    },
    # Bytes are pulled and decoded on the same stream.
    ("symmetric_memory", "encoded"): {("wait", "works.py:wait < works.py:issue_then")},
}


@pytest.mark.parametrize(
    ("transport", "setup"),
    [
        pytest.param(t, s, marks=[] if (t, s) in _ORDINARY_SETUPS else pytest.mark.long)
        for t in TRANSPORTS
        for s in histories.setups_of(t)
    ],
)
def test_what_orders_a_step_is_needed_at_each_place(transport: str, setup: str) -> None:
    result = histories.run_history(transport, setup)
    result.assert_clean()
    places: dict[tuple[str, str], list[Mutation]] = defaultdict(list)
    for mutation in mutations_of(result.logs):
        # After an exception it is not known which of the others are still needed.
        if setup != "interrupted" or mutation.kind == "record_stream":
            places[mutation.kind, site_of(mutation.entry)].append(mutation)
    assert places
    needless = {
        place for place, found in places.items() if not any(faults_without(result.logs, each) for each in found)
    }
    assert needless == _NEEDLESS.get((transport, setup), set())


#
# The check itself
#


_STREAMS = {"A": Stream(0, 1), "B": Stream(0, 2), "C": Stream(1, 1), "H": HOST}


def _log(text: str, rank: int = 0) -> Log:
    """Return a log of steps, each written ``stream kind what``. A step reads or writes storage ``x``, or one half of it."""
    log = Log(rank, members={"left": (0, 1), "right": (0, 1)})
    for step in text.split(", "):
        stream, kind, *rest = step.split()
        more: dict[str, Any] = {"event": ord(rest[0][0]), "storage": ord(rest[0][0])} if rest else {}
        if kind == "collective":
            more = {"group": rest[0], "signature": rest[1:]}
        elif kind in ("reads", "writes", "fetches"):
            region = ({"x0": (0, 4), "x1": (4, 8)}.get(rest[0], (0, 8)),)
            more = {"accesses": [Access(ord("x"), region, kind == "writes")], "blocks": kind == "fetches"}
        log.add(kind, step, _STREAMS[stream], **more)
    return log


LOGS = [
    ("A reads x, B reads x", []),
    ("A writes x0, B writes x1", []),
    ("A writes x, B reads x", ["race"]),
    ("A reads x, B writes x1", ["race"]),
    ("A writes x, A record a, B wait_event a, B reads x", []),
    ("A record a, A writes x, B wait_event a, B reads x", ["race"]),
    # An access takes the place of an earlier one in what is compared only if whoever follows it follows both.
    ("A writes x, A reads x, B reads x", ["race"]),
    ("A writes x, A writes x0, B reads x1", ["race"]),
    ("A reads x, B reads x, B writes x", ["race"]),
    # The host.
    ("A writes x, H reads x", ["host race"]),
    ("A fetches x, H writes x", []),
    ("A writes x, A record a, H sync_event a, H reads x", []),
    ("A writes x, B sync_device, H writes x, C reads x", []),
    ("C writes x, B sync_device, A reads x", ["race"]),
    # Memory that streams give back and take.
    ("A alloc x, B writes x", ["race"]),
    ("A alloc x, A record a, B wait_event a, B writes x, A free x, A alloc y", ["reuse"]),
    ("A alloc x, A record a, B wait_event a, B writes x, B record_stream x, A free x, A alloc y", []),
    ("A alloc x, A record a, B wait_event a, B writes x, C record_stream x, A free x, A alloc y", ["reuse"]),
    ("A alloc x, A record a, B wait_event a, B writes x, A free x, B record b, A wait_event b, A alloc y", []),
]


@pytest.mark.parametrize(("text", "kinds"), LOGS)
def test_a_log_has_the_faults_that_a_gpu_could_show(text: str, kinds: list[str]) -> None:
    assert [fault.kind for fault in check([_log(text)])] == kinds


RANKS = [
    ("A collective left sum", "A collective left max", {"mismatch"}),
    ("A collective left, B collective right", "A collective right, B collective left", {"deadlock"}),
    ("A collective left", "A reads x", {"deadlock"}),
]


@pytest.mark.parametrize(("first", "second", "kinds"), RANKS)
def test_ranks_must_issue_the_same_collectives_in_one_order(first: str, second: str, kinds: set[str]) -> None:
    assert {fault.kind for fault in check([_log(first, 0), _log(second, 1)])} == kinds


#
# ``release``: memory is given back after its last use on every stream, and the kernels stay the same
#


def test_an_extension_exists_in_backward_only() -> None:
    never, result = three_steps(), three_steps(extends=True)
    kept, *extensions = lifetimes(result)
    assert kept[0].phase == "forward 0" and kept[1] is None
    assert [(a.phase, f.phase) for a, f in extensions if f is not None] == [(f"backward {n}",) * 2 for n in range(3)]
    assert work(result, "kernel", "copy", "collective") == work(never, "kernel", "copy", "collective")


def three_steps(transport: str = "all_to_all", sharding: Sharding = Sharding(), **options: Any) -> Result:  # noqa: B008
    result = run(take_three_steps, "fp32", ranks=[0], sharding_strategy=sharding, transport=transport, **options)
    result.assert_clean()
    assert_never_synchronizes(result)
    return result


def lifetimes(result: Result) -> list[tuple[Entry, Entry | None]]:
    """Return the entries that allocate and free the memory of each arena, in the order of the log."""
    [log] = result.logs
    freed = {e.storage: e for e in log.entries if e.kind == "free"}
    return [
        (entry, freed.get(entry.storage))
        for entry in log.entries
        if entry.kind == "alloc" and any(file.endswith("runtime/memory.py") for file, _, _ in entry.where)
    ]


def work(result: Result, *kinds: str) -> list[tuple[str, str, int]]:
    """Return what the last step runs, in the order of the log, with a number for each stream."""
    entries = [e for e in result.logs[0].entries if e.phase.endswith(" 2") and e.kind in kinds]
    numbers = {stream: number for number, stream in enumerate(dict.fromkeys(e.stream for e in entries))}
    return [(e.kind, e.name, numbers[e.stream]) for e in entries]


@pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=pytest.mark.long), "zero3"])
def test_a_step_takes_its_memory_again_and_runs_the_same_kernels(strategy: str) -> None:
    never, step = (three_steps(sharding=Sharding(strategy, release=release)) for release in (False, True))
    assert {alloc.phase for alloc, freed in lifetimes(never) if freed is None} == {"forward 0"}
    for alloc, freed in lifetimes(step):
        assert freed is not None and alloc.stream == freed.stream
        assert alloc.phase.split()[1] == freed.phase.split()[1], "it is kept from step to step"
    taken = [[alloc for alloc, _ in lifetimes(step) if alloc.phase.endswith(str(n))] for n in range(3)]
    assert len(taken[0]) == len(taken[1]) == len(taken[2]) > 0
    assert work(step, "kernel", "copy", "collective") == work(never, "kernel", "copy", "collective")


def test_memory_is_given_back_only_after_the_wait_for_its_last_use() -> None:
    result = three_steps("all_to_all", Sharding(release=True))
    waits = [m for m in mutations_of(result.logs) if m.kind == "wait" and m.entry.phase == "backward 1"]
    faults = [fault for wait in waits for fault in faults_without(result.logs, wait)]
    reused = [fault for fault in faults if fault.kind == "reuse" and "(uint8[" in fault.text]
    assert reused, "no wait orders the last use of an arena before the next allocation"


def _one_of_two(transport: str, rank: int) -> list[int] | None:
    """Return the ranks to run: one, or all if they access each other's memory."""
    return None if transport == "symmetric_memory" else [rank]


#
# Faults that only GPUs can show: devices
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


@pytest.mark.parametrize("bind_device", [False, True])
def test_a_twin_group_is_created_by_its_ranks_only(bind_device: bool) -> None:
    run(_train_with_twin_group, world_size=4, bind_device=bind_device).assert_clean()


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


def count_allocations(rank: Rank, autocast: bool, **options: Any) -> tuple[int, int, int]:
    """Return how often memory was shared with other ranks: after ``jit``, a first and a second evaluation."""
    model = make_model(rank, transport="symmetric_memory", **options)
    after_jit = len(rank.log.shared)
    evaluate(rank, model, autocast=autocast)
    first = len(rank.log.shared)
    with mock.patch.object(Handle, "get_buffer", side_effect=AssertionError("created a second time")):
        evaluate(rank, model, autocast=autocast)
    return after_jit, first, len(rank.log.shared)


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
    return len(rank.log.shared)


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
