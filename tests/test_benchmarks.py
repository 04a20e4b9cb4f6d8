"""The benchmarks as far as they can be tested without a GPU or a rate-limited link: what they count and conclude."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import thunder_fsdp_sched  # before thunder  # noqa: F401

import systems
import gpu
import overlap
import pytest
import torch
import torch.distributed as dist
from gpu import Setup, Worker
from models import linear_gpt
from ranks import on_ranks
from thunder import extend
from torch.testing._internal.distributed.fake_pg import FakeStore
from virtual_gpu import guard
from virtual_gpu.world import Rank, run

GPU = Path(__file__).parents[1] / "benchmarks/gpu.py"

#
# benchmarks/gpu.py
#


def _without_attention(shape: systems.Shape) -> torch.nn.Module:
    return linear_gpt(shape, shape.device)


def _train_on_virtual_gpus(rank: Rank, folder: Path, cases: tuple[str, ...]) -> dict[str, Any]:
    setup = dataclasses.asdict(Setup("alone", "", rank.world_size, repeats=2, fuse=False))
    job = {"setup": setup, "stand_in": False}
    return {case: Worker({**job, "case": case, "stem": str(folder / case)}, rank.rank).train() for case in cases}


@pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")
@mock.patch.object(systems.Shape, "model", _without_attention)
@mock.patch.multiple(gpu, SHAPE=systems.Shape(1, 64, 8, 2), STEPS=2)
@mock.patch.object(gpu, "_digest", lambda tensors: f"{len(list(tensors))} tensors")  # they have no values
def test_the_first_run_trains_on_virtual_gpus_without_a_race(tmp_path: Path) -> None:
    unfused = [e for e in extend.get_default_executors() if not isinstance(e, extend.FusionExecutor)]
    cases = ("zero3 coalesced bfloat16", "zero2 symmetric_memory")  # `test_commands` runs "zero3 flat"
    with mock.patch.object(extend, "_default_executors", unfused), mock.patch.object(dist, "barrier"):
        result = run(_train_on_virtual_gpus, tmp_path, cases, world_size=1)
    result.assert_clean()
    for case in cases:
        record = result.values[0][case]
        assert len(record["digests"]) == 2
        assert record["finite"]


#
# benchmarks/overlap.py
#


@pytest.fixture
def fake_rank() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@mock.patch.object(systems.Shape, "model", _without_attention)
def test_counts_are_those_of_each_system(fake_rank: None) -> None:
    shape = systems.Shape(1, 64, 16)
    whole = sum(p.nbytes for p in shape.model().parameters())
    counted = {}
    for name in ("ours zero2", "FSDP2 zero2", "DDP"):
        system = overlap.systems()[name](name, shape, systems.Emulation(shape))
        systems.step(system, shape.tokens())
        counted[name] = overlap.counts_of(system, shape.tokens())
    assert counted["ours zero2"]["parameters"] == counted["DDP"]["parameters"] == 0
    assert counted["FSDP2 zero2"]["parameters"] >= whole
    assert counted["DDP"]["peak"] == whole
    assert counted["DDP"]["sent"] == pytest.approx(2 * whole * 3 / 4, rel=0.01)
    assert counted["ours zero2"]["sent"] == pytest.approx(1.5 * whole, rel=0.1)
    assert counted["FSDP2 zero2"]["sent by gloo"] == pytest.approx(1.5 * counted["FSDP2 zero2"]["sent"], rel=0.1)


@on_ranks()
@mock.patch.object(systems.Shape, "model", _without_attention)
def test_windows_count_the_collectives_of_each_bucket(rank: int) -> None:
    shape = systems.Shape(1, 64, 16)
    emulation = systems.Emulation(shape)
    batches = [shape.tokens(rank + number) for number in range(overlap.MICRO_BATCHES)]
    found, losses = {}, {}
    for name in (overlap.EACH_TIME, "ours zero2", "FSDP2 zero2, kept"):
        system = overlap.window_systems()[name](name, shape, emulation)
        systems.step(system, *batches)
        found[name] = overlap.counts_of(system, *batches)["collectives"]
        losses[name] = system.losses
        if system.transform is not None:
            assert overlap.communicate_in_window(system) > 0
    assert list(found.values()) == [5, 2, 2]
    for of_one in losses.values():
        torch.testing.assert_close(of_one, losses[overlap.EACH_TIME], rtol=1e-4, atol=1e-4)


def test_steps_on_gloo_are_read_from_ranges_of_this_package_and_threads_of_gloo(tmp_path: Path) -> None:
    ranges = (
        ("ProfilerStep#3", 0, 100),
        ("fsdp_all_gather(a)", 10, 12),
        ("c10d::_allgather_base_", 11, 12),
        ("gloo:all_gather", 15, 40),
        ("gloo:recv", 20, 90),  # a message of a round
        ("fsdp_wait_all_gather(a)", 30, 41),
        ("ThunderFunctionBackward", 50, 95),
        ("fsdp_reduce_scatter(b)", 60, 61),
        ("c10d::alltoall_base_", 60, 61),
        ("gloo:all_to_all", 62, 80),
        ("fsdp_wait_reduce_scatter(b)", 79, 90),
        ("fsdp_wait_agreement", 91, 93),
    )
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": 1e6 * start, "dur": 1e6 * (end - start)}
        for name, start, end in ranges
    ]
    (tmp_path / "gloo.json").write_text(json.dumps({"traceEvents": events}))
    [step] = overlap.read_steps(tmp_path / "gloo.json", 0)
    found = {(c.kind, c.bucket): c.seconds for c in step.timeline.collectives}
    assert found == pytest.approx({("fsdp_all_gather", "a"): 25, ("fsdp_reduce_scatter", "b"): 18})
    assert step.passes == pytest.approx((10, 95)) and step.compute_seconds == pytest.approx(85 - 13)
