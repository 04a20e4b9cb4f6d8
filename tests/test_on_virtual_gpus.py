"""The functions of ``benchmarks/gpu.py`` on a virtual GPU, which checks order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import thunder_fsdp_sched  # before thunder  # noqa: F401

import gpu
import gpu_steps
import pytest
import systems
import torch
import torch.distributed as dist
from gpu_cases import CASES, Job
from models import byte_gpt
from profiles import LONG_ONLY
from thunder import extend
from virtual_gpu import guard
from virtual_gpu.world import Rank, run

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")


@pytest.fixture(autouse=True)
def _skip_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace functions that need values, and do not compile with Inductor."""
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", _Profiler)
    monkeypatch.setattr(gpu_steps, "_digest", lambda tensors: f"{len(list(tensors))} tensors")
    monkeypatch.setattr(systems.Shape, "model", _model)
    unfused = [e for e in extend.get_default_executors() if not isinstance(e, extend.FusionExecutor)]
    monkeypatch.setattr(extend, "_default_executors", unfused)


class _Profiler:
    """A stand-in for ``torch.profiler.profile``, whose trace is empty."""

    def __init__(self, activities: Any) -> None:
        pass

    def __enter__(self) -> _Profiler:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text('{"traceEvents": []}')


def _model(shape: systems.Shape) -> Any:
    return byte_gpt(shape, shape.device)


def _setup(rank: Rank, tmp_path: Path, cases: tuple[str, ...]) -> gpu_steps.Setup:
    files = (str(tmp_path / "store"), str(tmp_path / "results"), str(tmp_path))
    job = Job("train", cases, "cuda", "nccl", rank.world_size, False, 60.0, 1, 64, 8, 2, 2, 2, False, *files)
    return gpu_steps.Setup(job, rank.rank)


def _train(rank: Rank, tmp_path: Path, cases: tuple[str, ...]) -> dict[str, Any]:
    setup = _setup(rank, tmp_path, cases)
    return {case: gpu_steps.train(setup, case) for case in cases}


def test_the_first_run_trains_on_gpus_without_a_race(tmp_path: Path) -> None:
    cases = ("zero3 flat", "zero3 staged bfloat16", "zero2 symmetric_memory")
    result = run(_train, tmp_path, cases, world_size=1)
    result.assert_clean()
    for case in cases:
        record = result.values[0][case]
        assert len(record["digests"]) == 2
        assert record["finite"]
        assert record["peak"] == 0


def _profile(rank: Rank, tmp_path: Path, case: str) -> dict[str, Any]:
    return gpu_steps.profile(_setup(rank, tmp_path, (case,)), case)


@LONG_ONLY
def test_the_first_run_profiles_on_gpus(tmp_path: Path) -> None:
    assert "zero3 flat" in CASES
    [record] = run(_profile, tmp_path, "zero3 flat", world_size=1).values
    assert "nothing run on the GPU" in record["measured"]["error"]
    assert record["by preset"]["error"].startswith("ValueError: no preset is known for Virtual GPU")
    assert record["by profile"]["order"][0] == "fsdp_all_gather(embedding)"


def _benchmark(rank: Rank) -> gpu.Results:
    results = gpu.Results()
    shape = systems.Shape(1, 64, 8, 2, device=str(rank.device))
    names = {"ours zero3": systems.ours, "compute": systems.unsharded}
    gpu.run_group(names, gpu.parse(["--rounds", "1"]), shape, shape.tokens(), results)
    return results


def test_the_benchmark_measures_on_gpus() -> None:
    [results] = run(_benchmark, world_size=1).values
    assert results.refused == {}
    assert list(results.seconds) == ["ours zero3", "compute"]
