"""Exposed communication of recorded steps: hand-made files. ``runtime/test_names.py`` has the names of ranges."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched.extras.command_line import app
from thunder_fsdp_sched.planning import AnalyticCost, RecordedStep, cluster, read_recorded, simulate
from thunder_fsdp_sched.reports import calibrate
from thunder_fsdp_sched.testing import compile_on_fake_ranks

import pytest
import torch
from coded import coded
from hypothesis import given
from hypothesis import strategies as st
from models import Stack
from random_models import quiet
from typer.testing import CliRunner


def event(name: str, start: float, end: float, category: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    """Return an event; times in ms."""
    times = {"ts": start * 1e3, "dur": (end - start) * 1e3}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "args": args, **times}


def ranged(name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return event(name, start, end, "user_annotation", tid)


def written(path: Path, events: list[dict[str, Any]], rank: int | None = 0) -> Path:
    content = {"traceEvents": events} | ({} if rank is None else {"distributedInfo": {"rank": rank}})
    data = json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def gpu_step(longer: float = 0.0) -> list[dict[str, Any]]:
    """A step of ours with a gather that compute hides in part, and a reduction in backward that it hides not at all.

    ::

        compute      | compute          |             |        |
        NCCL           [ gather a           ]           [ reduce b ]
    """
    launched = (
        ("fsdp_all_gather(a)", 10, "ncclDevKernel_AllGather", 15, 40 + longer, 20),
        ("of the model", 12, "gemm", 12, 30, 7),
        ("ThunderFunctionBackward", 50, "gemm", 50, 55, 7),
        ("fsdp_reduce_scatter(b)", 52, "ncclDevKernel_ReduceScatter", 60, 80, 20),
        ("Optimizer.step#SGD.step", 90, "multi_tensor_apply", 90, 95, 7),
    )
    events = [ranged("ProfilerStep#3", 0, 100)]
    for number, (name, launch, kernel, start, end, stream) in enumerate(launched):
        events.append(ranged(name, launch, launch + (30 if "Backward" in name else 0.5)))
        events.append(event("cudaLaunchKernel", launch, launch + 0.1, "cuda_runtime", correlation=number))
        events.append(event(kernel, start, end, "kernel", stream, stream=stream, correlation=number))
    return events


def test_a_step_is_what_the_gpu_ran_for_it(tmp_path):
    found = tfs.exposed_communication(written(tmp_path / "profile.json.gz", gpu_step()))
    assert found.by_rank == {0: pytest.approx(30e-3)}
    assert {key: of[0] for key, of in found.by_bucket.items()} == {
        ("forward", "all_gather", "a"): pytest.approx(10e-3),
        ("backward", "reduce_scatter", "b"): pytest.approx(20e-3),
    }
    [step] = found.steps
    assert (step.rank, step.name) == (0, "ProfilerStep#3")
    assert step.passes == pytest.approx((0.0, 68e-3)) and step.compute_seconds == pytest.approx(23e-3)
    assert step.timeline.step_seconds == pytest.approx(83e-3)
    assert sum(step.timeline.communication_seconds.values()) == pytest.approx(45e-3)
    text = str(found)
    assert "ProfilerStep" not in text and "reduce_scatter" in text and "30.00" in text


def test_fsdp2_on_a_gpu_that_lags_behind_its_host(tmp_path):
    """Copies and collectives on other streams communicate; what they launch on the compute stream is compute.

    Each step's kernels run after the host has ended the step, one step after the other.
    """
    events = []
    for number in (1, 2):
        host, gpu = 10 * number, 100 * number
        gathered = [("copy_in", 0, 5, 20), ("ncclDevKernel_AllGather_RING", 5, 25, 21)]
        ranges = [
            ("FSDP::all_gather (blocks.0)", 0, 2, 1, gathered),
            ("FSDP::all_gather_copy_out (blocks.0)", 2, 3, 1, [("split_with_sizes", 25, 30, 7)]),
            ("of the model", 3, 4, 1, [("gemm", 30, 60, 7), ("kernel of a loader", 60, 90, 30)]),
            ("FSDP::post_backward_reduce (blocks.0)", 5, 6, 2, [("ncclDevKernel_ReduceScatter_Sum", 50, 80, 22)]),
        ]
        events.append(ranged(f"ProfilerStep#{number}", host, host + 9))
        for name, since, until, tid, kernels in ranges:
            events.append(ranged(name, host + since, host + until, tid))
            for kernel, start, end, stream in kernels:
                launch = host + since + 0.1
                events.append(event("cudaLaunchKernel", launch, launch, "cuda_runtime", tid, correlation=len(events)))
                same = {"stream": stream, "correlation": len(events) - 1}
                events.append(event(kernel, gpu + start, gpu + end, "kernel", stream, **same))
    found = tfs.exposed_communication(written(tmp_path / "profile.json", events))
    assert [(s.name, s.timeline.step_seconds) for s in found.steps] == [
        (f"ProfilerStep#{number}", pytest.approx(90e-3)) for number in (1, 2)
    ]
    assert {key: of[0] for key, of in found.by_bucket.items()} == {
        ("forward", "all_gather", "blocks.0"): pytest.approx(25e-3)
    }
    reduces = [i for i in found.steps[0].timeline.collectives if i.label == "reduce"]
    assert [(i.bucket, i.trace, i.seconds) for i in reduces] == [("blocks.0", 1, pytest.approx(30e-3))]


def test_ranks_are_read_in_their_order(tmp_path):
    paths = [written(tmp_path / f"{rank}.json", gpu_step(longer=5.0 * (1 - rank)), rank) for rank in (1, 0)]
    found = tfs.exposed_communication(paths)
    assert [step.rank for step in found.steps] == [0, 1]
    assert found.by_rank[0] > found.by_rank[1]


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=8)


@quiet()
@given(gathers=SPANS.filter(bool), compute=SPANS, copies=SPANS)
def test_the_union_of_intervals_is_what_counting_microseconds_gives(tmp_path_factory, gathers, compute, copies):
    streams = {"ncclDevKernel_AllGather": gathers, "gemm": compute, "Memcpy PtoP": copies}
    events, running = [], dict.fromkeys(streams, frozenset())
    for number, (name, spans) in enumerate(streams.items()):
        category = "gpu_memcpy" if "Memcpy" in name else "kernel"
        for start, length in spans:
            events.append(event(name, start / 1e3, (start + length) / 1e3, category, stream=number))
            running[name] |= set(range(start, start + length))
    path = written(tmp_path_factory.getbasetemp() / "property.json", events)
    found = tfs.exposed_communication(path)
    computing = running.pop("gemm")
    exposed = set().union(*running.values()) - computing
    assert found.by_rank[0] == pytest.approx(len(exposed) * 1e-6, abs=1e-12)
    assert sum(of[0] for of in found.by_bucket.values()) == pytest.approx(len(exposed) * 1e-6, abs=1e-12)
    [step] = found.steps
    every = computing.union(*running.values())
    assert step.timeline.idle_seconds == pytest.approx((max(every) + 1 - min(every) - len(every)) * 1e-6, abs=1e-12)


def test_a_profiler_can_be_exported_once_and_the_command_draws_its_file(tmp_path):
    with torch.profiler.profile() as profiler:
        torch.ones(2)
    profiler.export_chrome_trace(str(tmp_path / "cpu.json"))
    with pytest.raises(ValueError, check=coded("plan.profile-exported-before")):
        tfs.exposed_communication(profiler)
    pytest.importorskip("matplotlib")
    path = written(tmp_path / "profile.json", gpu_step())
    result = CliRunner().invoke(app, ["exposed", str(path), "--save", str(tmp_path / "exposed.png")])
    assert result.exit_code == 0 and (tmp_path / "exposed.png").stat().st_size


def test_files_that_do_not_belong_together_are_named(tmp_path):
    one, same = (written(tmp_path / f"{name}.json", gpu_step(), 1) for name in ("one", "same"))
    with pytest.raises(ValueError, check=coded("plan.profile-files-of-one-rank", "one.json", "same.json", "rank 1")):
        read_recorded([one, same])
    renamed = [e | {"name": e["name"].replace("#3", "#4")} for e in gpu_step()]
    other = written(tmp_path / "other.json", renamed, 0)
    steps = "one.json holds ProfilerStep#3", "other.json holds ProfilerStep#4"
    with pytest.raises(ValueError, check=coded("plan.profile-files-of-different-steps", *steps)):
        read_recorded([one, other])
    with pytest.raises(ValueError, check=coded("plan.profile-not-readable", "none.json")):
        read_recorded([tmp_path / "none.json"])
    compute = [event("aten::mm", 0, 1), ranged("gloo:all_gather", 0, 1)]
    for events, expected in (
        ([], coded("plan.profile-without-step")),
        (compute, coded("plan.profile-without-communication")),
        ([3], coded("plan.profile-not-of-torch-profiler")),
    ):
        with pytest.raises(ValueError, check=expected):
            read_recorded([written(tmp_path / "bad.json", events)])


def test_a_calibrated_cluster_takes_as_long_as_the_recorded_step():
    [compiled] = compile_on_fake_ranks(lambda: (Stack(2, 32), (torch.ones(4, 32),)), 2, cluster="h100-sxm")
    preset = cluster("h100-sxm")
    machine = dataclasses.replace(
        preset,
        flops={dtype: peak / 3 for dtype, peak in preset.flops.items()},
        memory_bandwidth=preset.memory_bandwidth / 3,
        kernel_overhead=3 * preset.kernel_overhead,
        intra_node_bandwidth=preset.intra_node_bandwidth / 50,
        contention=0.0,
    )
    ran = simulate(*compiled.traces, AnalyticCost(machine))
    recorded = RecordedStep("profile.json", 0, "ProfilerStep#1", (0.0, ran.step_seconds), ran)
    found = calibrate(preset, compiled, [recorded])
    assert found.intra_node_bandwidth == pytest.approx(machine.intra_node_bandwidth)
    assert simulate(*compiled.traces, AnalyticCost(found)).step_seconds == pytest.approx(ran.step_seconds)
    [other] = compile_on_fake_ranks(lambda: (torch.nn.Linear(4, 4), (torch.ones(4, 4),)), 2, cluster="h100-sxm")
    with pytest.raises(ValueError, check=coded("plan.profile-of-other-buckets", "profile.json")):
        calibrate(preset, other, [recorded])
