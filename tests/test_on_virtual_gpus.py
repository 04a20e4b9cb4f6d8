"""The functions of the GPU tests and of ``benchmarks/gpu.py first`` on a virtual GPU, which checks order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import thunder_fsdp_sched  # before thunder  # noqa: F401

import gpu
import gpu_steps
import on_gpus
import pytest
import systems
import torch
import torch.distributed as dist
from gpu_cases import CASES, Job
from on_gpus import NoAttention, Size
from profiles import LONG_ONLY
from thunder import extend
from virtual_gpu import guard
from virtual_gpu.world import Rank, run

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")

SIZE, TINY = Size(1, 64, 8, 2, "cuda"), NoAttention(1, 64, 8, 2, "cuda")


@pytest.fixture(autouse=True)
def _skip_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace functions that need values, and do not compile with Inductor."""
    monkeypatch.setattr(on_gpus, "_assert_near", lambda *args: None)
    monkeypatch.setattr(on_gpus, "_unsharded", lambda *args: {})
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
    return NoAttention(shape.blocks, shape.width, shape.length, shape.batch, "cuda").model(torch.device(shape.device))


def on_rank(rank: Rank, body: Callable[..., Any], size: Size, *args: Any) -> Any:
    return body(rank.rank, rank.world_size, size, *args)


@pytest.mark.parametrize(
    ("body", "size", "args"),
    [
        (on_gpus.trains_like_unsharded, TINY, ("coalesced", "zero2")),
        (on_gpus.trains_like_unsharded, SIZE, ("symmetric_memory", "zero3", torch.bfloat16)),
        (on_gpus.accumulates_and_clips_gradients, TINY, ("flat",)),
        pytest.param(on_gpus.recovers_after_an_exception, TINY, (), marks=LONG_ONLY),
        (on_gpus.bytes_allocated_after_steps, TINY, ("staged",)),
        (on_gpus.runs_eagerly, TINY, ()),
    ],
    ids=lambda value: getattr(value, "__name__", "-".join(map(str, value)) if isinstance(value, tuple) else None),
)
def test_the_functions_of_gpu_tests_run_without_a_race(
    body: Callable[..., Any], size: Size, args: tuple[Any, ...]
) -> None:
    run(on_rank, body, size, *args, ranks=[1]).assert_clean()


def test_measuring_runs_on_gpus() -> None:
    """Races are expected: contention is measured with collectives that write memory which compute reads."""
    [(step, simulated)] = run(on_rank, on_gpus.measured_and_simulated_seconds, TINY, ranks=[1]).values
    assert step > 0
    assert simulated > 0


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
