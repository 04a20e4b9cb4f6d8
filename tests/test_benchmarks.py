"""The evaluation code of the benchmarks: GPU traces, rounds of measurements, and the memory of a step."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.planning.clusters import cluster
from thunder_fsdp_sched.planning.cost import AnalyticCost
from thunder_fsdp_sched.runtime.views import with_own_storage
from thunder_fsdp_sched.transports.base import labelled

import gpu
import memory
import memory_tables
import pytest
import systems
import torch
import torch.distributed as dist
import windows
from analysis import LiveMemory
from forked import run_python
from gpu_trace import (
    Activity,
    Collective,
    collectives,
    contention,
    counts,
    exposed,
    first_difference,
    idle,
    read,
    seconds_in,
    split,
)
from models import byte_gpt
from paced_kernels import PacedKernels
from profiles import LONG_ONLY
from ranks import Ranks
from recomputing import RecomputingShape
from torch.testing._internal.distributed.fake_pg import FakeStore


def kernel(name: str, start: float, end: float, stream: int = 7, category: str = "kernel") -> Activity:
    return Activity(name, category, stream, start, end)


GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_reading_a_trace_gives_the_activities_of_a_gpu_in_seconds() -> None:
    arguments = {"device": 0, "stream": 7, "grid": [4, 1, 1], "block": [128, 1, 1]}
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 2e6, "dur": 5e5, "args": arguments},
            {
                "ph": "X",
                "cat": "gpu_memcpy",
                "name": "Memcpy DtoD",
                "ts": 1e6,
                "dur": 1e5,
                "args": {"device": 0, "stream": 9},
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": "of another GPU",
                "ts": 0,
                "dur": 1,
                "args": {"device": 1, "stream": 7},
            },
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1, "args": {}},
            {"ph": "i", "cat": "kernel", "name": "no duration", "ts": 0},
        ]
    }
    copy, gemm = read(trace, 0)
    assert copy == Activity("Memcpy DtoD", "gpu_memcpy", 9, 1.0, 1.1)
    assert gemm == Activity("gemm", "kernel", 7, 2.0, 2.5, "[4, 1, 1][128, 1, 1]")
    assert len(read(trace)) == 3


def test_communication_is_nccl_kernels_and_activities_on_other_streams() -> None:
    gemm, copy = kernel("gemm", 0, 5), kernel("Memcpy DtoD", 5, 6, category="gpu_memcpy")
    gather, same_stream = kernel(GATHER, 0, 9, stream=20), kernel(GATHER, 6, 7)
    pull = kernel("Memcpy PtoP", 1, 2, stream=24, category="gpu_memcpy")
    compute, communication = split([gemm, copy, gather, same_stream, pull])
    assert compute == [gemm, copy]
    assert communication == [gather, same_stream, pull]
    assert counts(compute, communication) == {"kernels": 1, "communication_kernels": 2, "copies": 2}


@pytest.mark.parametrize(
    ("compute", "communication", "seconds"),
    [
        ([], [], 0),
        ([(0, 4)], [(1, 3)], 0),
        ([(0, 2)], [(1, 5)], 3),
        ([(0, 2), (3, 4)], [(1, 5)], 2),  # in the gap between two kernels, and after them
        ([(2, 3)], [(0, 4), (1, 5)], 4),  # overlapping collectives count once
        ([(0, 3), (1, 2)], [(2, 4)], 1),  # overlapping kernels count once
    ],
)
def test_exposed_is_the_time_of_communication_without_compute(
    compute: list[tuple[float, float]], communication: list[tuple[float, float]], seconds: float
) -> None:
    assert exposed([kernel("gemm", *c) for c in compute], [kernel(GATHER, *c) for c in communication]) == seconds


def test_idle_is_the_time_between_activities() -> None:
    assert idle([kernel("a", 1, 2), kernel("b", 4, 5), kernel("c", 4, 7)]) == 2
    assert idle([]) == 0


def test_contention_compares_a_kernel_with_itself_without_a_collective() -> None:
    without_collective = [kernel("gemm", 0, 1), kernel("gemm", 1, 2), kernel("norm", 2, 3)]
    during_collective = [kernel("gemm", 10, 11.5), kernel("other", 12, 13)]
    partly = kernel("gemm", 18.5, 28)  # is not counted
    communication = [kernel(GATHER, 10, 20, stream=20)]
    assert contention([*without_collective, *during_collective, partly], communication) == 1.5
    assert contention(without_collective, communication) is None


def test_an_activity_has_the_innermost_label_around_its_launch(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with labelled("fsdp_all_gather(blocks.0)"):
            torch.ones(4).add_(1)
            with labelled("fsdp_cast(blocks.0)"):
                torch.ones(4).mul_(2)
        torch.ones(4).div_(2)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    launched = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op" and e["name"] in _LABELLED]
    for number, event in enumerate(list(launched)):  # as if each operator had launched a kernel
        call = {**event, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": number}}
        kernel = {**event, "cat": "kernel", "args": {"device": 0, "stream": 7, "correlation": number}}
        trace["traceEvents"] += [call, kernel]
    found = {activity.name: activity for activity in read(trace, 0)}
    assert {name: found[name].label for name in _LABELLED} == _LABELLED
    assert found["aten::add_"].issued <= found["aten::add_"].start
    assert found["aten::div_"].issued == 0.0


_LABELLED = {"aten::add_": "fsdp_all_gather(blocks.0)", "aten::mul_": "fsdp_cast(blocks.0)", "aten::div_": ""}


def test_a_collective_lasts_from_its_first_activity_to_its_last() -> None:
    def copy(start: float, end: float, label: str, issued: float) -> Activity:
        return Activity("Memcpy PtoP", "gpu_memcpy", 24, start, end, "", label, issued)

    gather, again = "fsdp_all_gather(a)", 9.0
    activities = [
        copy(1, 2, gather, 0.5),
        copy(4, 5, gather, 0.5),
        copy(3, 4, "fsdp_reduce_scatter(b)", 0.7),
        copy(12, 13, gather, again),
        copy(0, 1, "fsdp_cast(a)", 0.1),
        copy(0, 1, "", 0.0),
    ]
    assert collectives(activities) == [
        Collective("fsdp_all_gather", "a", 1, 5),
        Collective("fsdp_reduce_scatter", "b", 3, 4),
        Collective("fsdp_all_gather", "a", 12, 13),
    ]
    assert str(collectives(activities)[1]) == "fsdp_reduce_scatter(b)"
    assert seconds_in(activities) == 5


def test_orders_are_compared_up_to_their_first_difference() -> None:
    assert first_difference(["a", "b"], ["a", "b"]) == ""
    assert first_difference(["a", "b", "c"], ["a", "c", "b"]) == "number 2: predicted b, ran c"
    assert first_difference(["a", "b"], ["a"]) == "b did not run"
    assert first_difference(["a"], ["a", "b"]) == "b was not predicted"


@pytest.mark.parametrize("arguments", [[], pytest.param(["first"], marks=LONG_ONLY), ["first", "--cases", "flat"]])
def test_without_a_gpu_the_gpu_benchmark_says_so_and_exits_with_zero(arguments: list[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    script = Path(__file__).parents[1] / "benchmarks/gpu.py"
    done = run_python("-W", "ignore", script, *arguments, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: no GPU here")


#
# benchmarks/gpu.py
#


def test_systems_are_measured_in_groups_that_begin_with_their_baseline() -> None:
    names = ["compute", *gpu.systems()]
    created = gpu.groups(names, 4)
    assert max(map(len, created)) == 4
    assert {name for group in created for name in group} == set(names)
    assert {group[0] for group in created} == {"ours zero2", "ours zero3"}
    assert all(gpu.strategy_of(name) == gpu.strategy_of(group[0]) for group in created for name in group)
    others = [name for group in created for name in group[1:]]
    assert len(others) == len(set(others)) == len(names) - 2
    assert gpu.groups(["ours zero3"], 4) == [["ours zero3"]]
    assert gpu.groups(["DDP"], 2) == [["ours zero3", "DDP"]]


def test_a_system_is_compared_with_the_rounds_of_its_own_group() -> None:
    results = gpu.Results(figures={name: {"peak": 1} for name in ("ours zero3", "a", "b")})
    results.add({"ours zero3": [1.0, 1.0], "a": [2.0, 2.0]}, "ours zero3")
    results.add({"ours zero3": [3.0, 3.0], "b": [2.0, 2.0]}, "ours zero3")  # the GPU has become slower
    figures = gpu.summarized(results)
    assert figures["a"]["ours"] == 0.5
    assert figures["b"]["ours"] == 1.5
    assert "ours" not in figures["ours zero3"]
    assert figures["ours zero3"]["seconds"] == 2.0
    assert (figures["ours zero3"]["least"], figures["ours zero3"]["most"]) == (1.0, 3.0)


def test_at_least_two_systems_must_be_measured_together() -> None:
    assert gpu.parse(["--together", "2"]).together == 2
    with pytest.raises(SystemExit):
        gpu.parse(["--together", "1"])


class _Event:
    """A stand-in for ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return 2.0


def _without_attention(shape: systems.Shape) -> torch.nn.Module:
    return byte_gpt(shape)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for the functions of ``torch.cuda`` that ``gpu.py`` uses, for its model, and a group of one rank."""
    monkeypatch.setattr(systems.Shape, "model", _without_attention)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_group_is_measured_and_systems_that_do_not_run_are_named(
    fake_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of ``gpu.py`` except the numbers that come from a GPU."""
    pytest.importorskip("matplotlib")
    arguments = gpu.parse(["--blocks", "1", "--width", "64", "--rounds", "3", "--save", str(tmp_path)])
    shape = systems.Shape(1, 64, 8, 2)
    makes: dict[str, Any] = {"ours zero3": partial(systems.ours, sharding_strategy="zero3")}
    makes["ours zero3 symmetric_memory"] = partial(systems.ours, transport="symmetric_memory")
    makes["FSDP2 zero3"] = partial(systems.fsdp2, reshard=True)
    makes["compute"] = systems.unsharded
    results = gpu.Results()
    gpu.run_group(makes, arguments, shape, shape.tokens(), results)
    assert list(results.seconds) == ["ours zero3", "FSDP2 zero3", "compute"]
    assert results.seconds["compute"] == [0.002] * 3
    assert results.ratios == {"FSDP2 zero3": [1.0] * 3, "compute": [1.0] * 3}
    assert list(results.refused) == ["ours zero3 symmetric_memory"]
    results.left = {"ours zero3, compute": 2**21, "DDP": 0}
    gpu.finish(arguments, "1 ranks, gloo, 0 x nothing", results)
    printed = " ".join(capsys.readouterr().out.split())  # whatever the width of the terminal
    assert "1 ranks, gloo, 0 x nothing; GPT with 1 blocks" in printed
    assert "ours zero3 symmetric_memory does not run here: transport='symmetric_memory' needs GPUs" in printed
    assert "2,097,152 bytes were still allocated after these were freed: ours zero3, compute" in printed
    assert "freed: DDP" not in printed
    saved = json.loads((tmp_path / "gpu.json").read_text())
    assert saved["figures"]["compute"]["ours"] == 1.0
    assert saved["setup"]["together"] == 4
    assert (tmp_path / "gpu.png").stat().st_size > 0
    assert (tmp_path / "ours_zero3.json").exists()


def test_measured_systems_are_freed(fake_gpu: None) -> None:
    created: dict[str, list[weakref.ref[torch.Tensor]]] = {}

    def recording(make: Callable[..., systems.System], name: str, *args: Any) -> systems.System:
        system = make(name, *args)
        tensors = [*map(systems.local, system.module.parameters()), *systems.arenas(system)]
        if system.transform:
            tensors += [bucket.shard for bucket in system.transform.sharded.buckets]
        created[name] = [weakref.ref(tensor) for tensor in tensors]
        return system

    makes = {
        "ours zero3": partial(systems.ours, sharding_strategy="zero3"),
        "ours zero2": partial(systems.ours, sharding_strategy="zero2"),
        "FSDP2": partial(systems.fsdp2, reshard=True),
        "DDP": systems.ddp,
        "compute": systems.unsharded,
    }
    shape, results = systems.Shape(1, 64, 8, 1), gpu.Results()
    recording_makes = {name: partial(recording, make) for name, make in makes.items()}
    gpu.run_group(recording_makes, gpu.parse(["--rounds", "1"]), shape, shape.tokens(), results)
    gc.collect()
    assert results.refused == {}
    assert created.keys() == makes.keys()
    assert {
        name: sum(reference() is not None for reference in found) for name, found in created.items()
    } == dict.fromkeys(makes, 0)


@pytest.fixture
def fake_rank() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_memory_in_an_arena_counts_until_its_last_read_or_wait(fake_rank: None) -> None:
    arena, shard, reduced = torch.zeros(32), torch.zeros(4), torch.empty(4)
    with LiveMemory([shard], [arena]) as memory:
        dist.all_gather_into_tensor(arena[:16], shard)
        y = arena[:16].view(4, 4) @ torch.ones(4, 4)
        torch.mm(y, y, out=arena[:16].view(4, 4))  # a gradient in the slot of its parameter
        copied = y + 1
        arena[16:].view(4, 4).copy_(copied)
        dist.reduce_scatter_tensor(reduced, arena[16:])
        reduced.view(2, 2)  # waited for
        dist.reduce_scatter_tensor(reduced, arena[:16])
        reduced.view(2, 2)
        y.neg()
    held = memory.held()
    assert held.arena == 128
    assert max(held.parameters) == 64
    assert max(held.gradients) == 64 + 64 + 64  # two in the arena, and the copied one
    assert held.peaks()["peak_parameters_and_gradients"] == 192
    assert held.peaks()["peak_allocated"] == 128 + 64
    assert held.new["gradients"] == (1, 64)
    assert held.new["parameters"] == (0, 0)
    assert held.operators["copy"] == (1, 64)
    assert held.gradients[-1] == 64  # the copied one is still alive


def test_memory_outside_of_arenas_counts_until_it_is_freed(fake_rank: None) -> None:
    shard, reduced = torch.zeros(4), torch.empty(4)
    with LiveMemory([shard]) as memory:
        whole = torch.empty(16)
        dist.all_gather_into_tensor(whole, shard)
        parameter = whole.clone()
        del whole
        grad = parameter * parameter
        del parameter
        mean = grad / 4
        dist.reduce_scatter_tensor(reduced, mean)
        del grad, mean
        reduced.neg()
    held = memory.held()
    assert max(held.parameters) == 128
    assert max(held.gradients) == 128
    assert held.peaks()["peak_parameters_and_gradients"] == 128
    assert held.peaks()["peak_allocated"] == 128
    assert held.new["parameters"] == (2, 128)
    assert held.new["gradients"] == (2, 128)
    assert held.gradients[-1] == 0


#
# benchmarks/memory.py
#


def test_a_recomputed_multiplication_takes_emulated_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selective checkpoints save the results of multiplications, so those are paid for once."""
    shapes = {how: RecomputingShape(1, 64, 8, 2, recompute=how) for how in ("none", "every block", "selective")}
    kernels, slept = PacedKernels(shapes["none"]), []
    monkeypatch.setattr("paced_kernels.time.perf_counter", lambda: 0.0)  # the kernels themselves take no time
    monkeypatch.setattr("paced_kernels.time.sleep", slept.append)
    try:
        seconds, losses = {}, {}
        kernels.seconds = 1.0
        for how, shape in shapes.items():
            kernels.flops = 0
            loss = shape.model()(shape.tokens(), shape.tokens())
            forward = sum(slept)
            loss.backward()
            seconds[how] = sum(slept)
            losses[how] = loss.item()
            assert kernels.flops / shape.flops == pytest.approx(seconds[how])
            slept.clear()
    finally:
        kernels.close()
    assert forward == pytest.approx(seconds["none"] / 3, rel=0.05)
    assert seconds["none"] == pytest.approx(1.0, rel=0.05)  # attention, which the seconds do not include
    assert seconds["selective"] == seconds["none"]
    # Of 16 w^2 weights, those of the head included, 8 are multiplied again: the last layer of a block is not.
    assert seconds["every block"] / seconds["none"] == pytest.approx(1 + 8 / 48, rel=0.01)
    assert len(set(losses.values())) == 1
    shapes["none"].model()(shape.tokens(), shape.tokens())
    assert not slept  # the kernels are torch's again


def test_slices_of_an_arena_count_as_part_of_it(fake_rank: None) -> None:
    arena, shard = torch.zeros(32), torch.zeros(4)
    own = with_own_storage(arena[:16])
    with LiveMemory([shard], [arena]) as memory:
        y = own + 1
    assert max(memory.held().total) == 16 + 128 + 64
    assert memory.bytes_of([y, y.view(4, 4)])[-1] == 64


@LONG_ONLY
def test_memory_is_compared_at_equal_peaks(fake_rank: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of ``memory.py`` with few systems and collectives that do nothing."""
    pytest.importorskip("matplotlib")
    only = "overlapped zero3(, every block|, selective)?$"
    sizes = ["--blocks", "1", "--width", "64", "--length", "16", "--batch", "16", "--compute", "0.01", "--rounds", "1"]
    options = ["--no-limit", "--repeats", "0", "--budgets", "0.8", "--not-equal", "--save", str(tmp_path)]
    memory.run(memory.parse([*sizes, *options, "--only", only]))
    printed = " ".join(capsys.readouterr().out.split())
    saved = json.loads((tmp_path / "memory.json").read_text())
    figures = saved["figures"]
    fsdp2 = "FSDP2 overlapped zero3"
    assert list(figures) == ["ours zero3", fsdp2, f"{fsdp2}, every block", f"{fsdp2}, selective", "ours, 80%"]
    assert figures[f"{fsdp2}, every block"]["peak"] < figures[f"{fsdp2}, selective"]["peak"] < figures[fsdp2]["peak"]
    for of_one in figures.values():
        assert sum(of_one["at_peak"].values()) == of_one["peak"]
    assert figures["ours zero3"]["flops"] == figures[fsdp2]["flops"] == figures[f"{fsdp2}, selective"]["flops"]
    assert 0.99 < figures["ours zero3"]["predicted"] / figures["ours zero3"]["peak"] < 1.01
    assert figures["ours, 80%"]["peak"] <= 1.01 * figures["ours, 80%"]["budget"]
    assert "ours, 80%: counted" in printed
    assert (tmp_path / "memory.png").stat().st_size > 0


@mock.patch.object(systems.Shape, "model", _without_attention)
def _count_collectives(rank: int, world_size: int) -> None:
    shape = systems.Shape(1, 64, 16)
    emulation = systems.Emulation(shape)
    batches = [shape.tokens(rank)] * 4
    found, losses = {}, {}
    for name in (windows.REFERENCE, "ours zero2", "FSDP2 zero2, kept"):
        system = windows.systems(None)[name](name, shape, emulation)
        windows.window(system, batches)
        found[name] = windows.traffic(system, batches, "lo")
        losses[name] = system.losses
        if system.transform is not None:
            assert windows.only_communicate(system, len(batches)) > 0
            assert windows.simulated(system, len(batches), AnalyticCost(cluster("cpu-2core"))) > 0
    assert [of_one["collectives"] for of_one in found.values()] == [5, 2, 2]
    for of_one in losses.values():
        torch.testing.assert_close(of_one, losses[windows.REFERENCE], rtol=1e-4, atol=1e-4)


def test_windows_count_the_collectives_of_each_bucket(ranks: Ranks) -> None:
    ranks.run(_count_collectives)


def test_the_best_at_equal_peak_is_the_fastest_that_fits() -> None:
    results = memory_tables.Results(
        figures={
            "ours, 50%": {"peak": 50, "budget": 50},
            "ours, 20%": {"peak": 20, "budget": 20},
            "A": {"peak": 60},
            "A, every second block": {"peak": 50},
            "A, every block": {"peak": 40},
            "A, compiled 0": {"peak": 10},
        },
        seconds={
            "ours, 50%": [1.0, 1.0],
            "ours, 20%": [2.0, 2.0],
            "A": [0.5, 0.5],
            "A, every second block": [1.25, 1.25],
            "A, every block": [2.0, 2.0],
            "A, compiled 0": [4.0, 4.0],
        },
        refused={"ours, 5%": "max_memory: too few"},
    )
    half, fifth = memory_tables.equal_peaks(results)
    assert (half.best, half.ratio) == ("A, every second block", 0.8)
    assert half.block_wise == ("A, every second block", "A, every block")
    assert (fifth.best, fifth.ratio, fifth.block_wise) == ("A, compiled 0", 0.5, ())
    kept = dict((text, kept) for kept, text in memory_tables.promises(results, [half, fifth]))
    assert [text for text, is_kept in kept.items() if not is_kept] == ["ours, 5%: max_memory: too few"]
    assert "budgets that no checkpoints of blocks meet: ours, 20%" in kept
