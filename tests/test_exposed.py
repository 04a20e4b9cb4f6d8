"""Exposed communication of recorded steps: hand-made files, real gloo ranks, and virtual GPUs."""

from __future__ import annotations

import gzip
import json
import random
import time
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched.extras.command_line import app
from thunder_fsdp_sched.planning import AnalyticCost, cluster, read_recorded, simulate
from thunder_fsdp_sched.reports import calibrate

import pytest
import thunder
import torch
from coded import coded
from hypothesis import given
from hypothesis import strategies as st
from models import Stack
from random_models import quiet
from scenario import fsdp2
from typer.testing import CliRunner
from virtual_gpu import guard
from virtual_gpu.histories import make_model
from virtual_gpu.recorder import recorded_step
from virtual_gpu.world import Rank, run

#
# Hand-made files
#


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


def gloo_step(late: float = 0.0) -> list[dict[str, Any]]:
    """A step of ours on gloo: a gather that is waited for in half of its time, and a reduction that hides.

    ::

        host    | issue a | compute   | wait a |  compute    backward: issue b, compute, wait b
        gloo               [ gather a         ]                         [ reduce b  ]
    """
    return [
        ranged("ProfilerStep#3", 0, 100),
        ranged("fsdp_all_gather(a)", 10, 12),
        event("c10d::_allgather_base_", 11, 12),
        ranged("gloo:all_gather", 15 + late, 40, 7),
        ranged("fsdp_wait_all_gather(a)", 30, 41),
        ranged("ThunderFunctionBackward", 50, 95),
        ranged("fsdp_reduce_scatter(b)", 60, 61),
        event("c10d::_reduce_scatter_base_", 60, 61),
        ranged("gloo:all_reduce", 62, 80, 8),
        ranged("fsdp_wait_reduce_scatter(b)", 79, 90),
        ranged("Optimizer.step#SGD.step", 96, 99),
    ]


def test_waits_for_gloo_count_while_a_collective_runs(tmp_path):
    found = tfs.exposed_communication(written(tmp_path / "profile.json.gz", gloo_step()))
    assert found.by_rank == {0: pytest.approx(11e-3)}
    assert {key: of[0] for key, of in found.by_bucket.items()} == {
        ("forward", "all_gather", "a"): pytest.approx(10e-3),
        ("backward", "reduce_scatter", "b"): pytest.approx(1e-3),
    }
    [step] = found.steps
    assert (step.rank, step.name) == (0, "ProfilerStep#3")
    assert step.passes == pytest.approx((11e-3, 95e-3)) and step.compute_seconds == pytest.approx(73e-3)
    assert step.timeline.step_seconds == pytest.approx(0.1)
    assert sum(step.timeline.communication_seconds.values()) == pytest.approx(43e-3)
    text = str(found)
    assert "ProfilerStep" not in text and "reduce_scatter" in text and "11.00" in text


def test_messages_of_a_round_count_as_agreement_while_the_host_waits_for_them(tmp_path):
    round_of_three = [
        ranged("fsdp_agreement", 2, 3),
        *(ranged("gloo:recv", 2.5, end) for end in (6, 8)),
        ranged("gloo:send", 2.6, 4),
        ranged("fsdp_wait_agreement", 5, 8),
        ranged("gloo:send", 6, 8),
        ranged("gloo:recv", 45, 49),  # of the user
    ]
    found = tfs.exposed_communication(written(tmp_path / "profile.json", gloo_step() + round_of_three))
    assert {key: of[0] for key, of in found.by_bucket.items() if "reduce" not in key[1]} == {
        ("forward", "agreement", ""): pytest.approx(3e-3),
        ("forward", "all_gather", "a"): pytest.approx(10e-3),
    }
    [step] = found.steps
    assert step.passes[0] == pytest.approx(2e-3)
    lanes = step.timeline.communication_seconds
    assert lanes["agreement"] == pytest.approx(3e-3) and sum(lanes.values()) == pytest.approx(50e-3)


def test_fsdp2_on_a_gpu_that_lags_behind_its_host(tmp_path):
    """Copies and collectives on other streams communicate; what they launch on the compute stream is compute.

    Each step's kernels run after the host has ended the step, one step after the other.
    """
    events = []
    for number in (1, 2):
        host, gpu = 10 * number, 100 * number
        ranges = [
            (
                "FSDP::all_gather (blocks.0)",
                0,
                2,
                1,
                [("copy_in", 0, 5, 20), ("ncclDevKernel_AllGather_RING", 5, 25, 21)],
            ),
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
    paths = [written(tmp_path / f"{rank}.json", gloo_step(late=20.0 * rank), rank) for rank in (1, 0)]
    found = tfs.exposed_communication(paths)
    assert [step.rank for step in found.steps] == [0, 1]
    assert found.by_rank[0] > found.by_rank[1]


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=8)


@quiet()
@given(gathers=SPANS.filter(bool), compute=SPANS, reductions=SPANS)
def test_the_union_of_intervals_is_what_counting_microseconds_gives(tmp_path_factory, gathers, compute, reductions):
    streams = {"ncclDevKernel_AllGather": gathers, "gemm": compute, "ncclDevKernel_ReduceScatter": reductions}
    events, running = [], dict.fromkeys(streams, frozenset())
    for number, (name, spans) in enumerate(streams.items()):
        for start, length in spans:
            events.append(event(name, start / 1e3, (start + length) / 1e3, "kernel", stream=number))
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


def test_files_that_do_not_belong_together_are_named(tmp_path):
    one, same = (written(tmp_path / f"{name}.json", gloo_step(), 1) for name in ("one", "same"))
    with pytest.raises(ValueError, check=coded("plan.profile-files-of-one-rank", "one.json", "same.json", "rank 1")):
        read_recorded([one, same])
    renamed = [e | {"name": e["name"].replace("#3", "#4")} for e in gloo_step()]
    other = written(tmp_path / "other.json", renamed, 0)
    steps = "one.json holds ProfilerStep#3", "other.json holds ProfilerStep#4"
    with pytest.raises(ValueError, check=coded("plan.profile-files-of-different-steps", *steps)):
        read_recorded([one, other])
    with pytest.raises(ValueError, check=coded("plan.profile-not-readable", "none.json")):
        read_recorded([tmp_path / "none.json"])
    compute = [event("aten::mm", 0, 1)]
    for events, expected in (
        ([], coded("plan.profile-without-step")),
        (compute, coded("plan.profile-without-communication")),
        ([3], coded("plan.profile-not-of-torch-profiler")),
    ):
        with pytest.raises(ValueError, check=expected):
            read_recorded([written(tmp_path / "bad.json", events)])


#
# Real ranks
#


def _train(rank: int, world_size: int, folder: Path) -> tuple[str, list[str]]:
    """Record two steps of ours and of FSDP2, in each of which rank 1 comes 30 ms late; return what ours has compiled."""
    torch.manual_seed(0)
    models = {"ours": thunder.jit(Stack(2, 32), transforms=[ours := tfs.fsdp()]), "fsdp2": fsdp2(Stack(2, 32))}
    for name, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.profiler.schedule(wait=0, warmup=2, active=2, repeat=1)
        with torch.profiler.profile(schedule=schedule) as profiler:
            for _ in range(4):
                time.sleep(0.03 * rank)
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()
        profiler.export_chrome_trace(str(folder / f"{name}{rank}.json"))
        if name == "ours":
            with pytest.raises(ValueError, check=coded("plan.profile-exported-before")):
                tfs.exposed_communication(profiler)
            path = folder / f"{name}{rank}.json"
            found = tfs.exposed_communication(path)
            assert list(found.by_rank) == [rank]
            spec = calibrate(cluster("cpu-2core"), ours.compiled[-1], found.steps)
            step = simulate(ours.compiled[-1].forward, ours.compiled[-1].backward, AnalyticCost(spec))
            recorded = sorted(step.compute_seconds for step in found.steps)
            assert recorded[0] * 0.999 <= step.compute_seconds <= recorded[-1] * 1.001
    with pytest.raises(ValueError, check=coded("plan.profile-of-other-buckets", f"other{rank}.json", "'blocks.0'")):
        other = written(folder / f"other{rank}.json", gloo_step())
        calibrate(cluster("cpu-2core"), ours.compiled[-1], read_recorded([other]))
    with torch.profiler.profile() as profiler:
        model(torch.randn(4, 32)).sum().backward()
    assert tfs.exposed_communication(profiler).by_rank[rank] > 0
    return [bucket.name for bucket in ours.plan]


def test_real_ranks_of_ours_and_of_fsdp2(ranks, tmp_path):
    pytest.importorskip("matplotlib")
    [buckets, _] = ranks.run(_train, tmp_path)
    expected = {"ours": {*buckets, ""}, "fsdp2": {"(root)", "blocks.0", "blocks.1"}}
    for name, names in expected.items():
        found = tfs.exposed_communication([tmp_path / f"{name}{rank}.json" for rank in (0, 1)])
        assert [(step.name, step.rank) for step in found.steps] == [
            (f"ProfilerStep#{n}", r) for n in (2, 3) for r in (0, 1)
        ]
        assert {bucket for _, _, bucket in found.by_bucket} <= names
        for rank, seconds in found.by_rank.items():
            assert seconds == pytest.approx(sum(of[rank] for of in found.by_bucket.values()))
        for step in found.steps:
            t = step.timeline
            assert t.exposed_seconds <= sum(t.communication_seconds.values()) and t.exposed_seconds < t.step_seconds
            assert t.compute_seconds + t.exposed_seconds == pytest.approx(t.step_seconds)
            assert {i.bucket for i in t.collectives} == names
    files = [str(tmp_path / f"ours{rank}.json") for rank in (0, 1)]
    result = CliRunner().invoke(
        app, ["exposed", *files, "--save", str(tmp_path / "exposed.png")], env={"COLUMNS": "100"}
    )
    assert result.exit_code == 0 and (tmp_path / "exposed.png").stat().st_size


#
# Virtual GPUs
#


def _record(rank: Rank, **options: Any) -> Any:
    model = make_model(rank, **options)
    inputs = torch.ones(4, 8, device=rank.device)
    model(inputs).sum().backward()
    return recorded_step(rank, model, inputs)


@pytest.mark.skipif(bool(guard.missing()), reason=guard.missing() or "nothing is missing")
@pytest.mark.parametrize(
    "transport", [*(pytest.param(t, marks=pytest.mark.long) for t in ("flat", "symmetric_memory")), "all_to_all"]
)
def test_streams_of_virtual_gpus(transport: str, tmp_path) -> None:
    content, communicating, computing = run(_record, transport=transport, ranks=[0]).values[0]
    random.Random(0).shuffle(content["traceEvents"])
    (tmp_path / "gpu.json").write_text(json.dumps(content))
    found = tfs.exposed_communication(tmp_path / "gpu.json")
    assert found.by_rank[0] == pytest.approx(len(communicating - computing) * 1e-6) and found.by_rank[0] > 0
    assert sum(of[0] for of in found.by_bucket.values()) == pytest.approx(found.by_rank[0])
    [step] = found.steps
    assert step.timeline.compute_seconds == pytest.approx(len(computing) * 1e-6)
    phases = {(i.trace, i.label): set() for i in step.timeline.collectives}
    for i in step.timeline.collectives:
        phases[i.trace, i.label].add(i.bucket)
    everything = {"first", "blocks.0", "blocks.1", "blocks.2", "last"}
    assert phases[0, "all_gather"] == everything and phases[1, "reduce_scatter"] == everything
    assert phases[1, "all_gather"] and phases.keys() == {(0, "all_gather"), (1, "all_gather"), (1, "reduce_scatter")}
