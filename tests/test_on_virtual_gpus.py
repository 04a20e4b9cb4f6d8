"""The functions of ``benchmarks/gpu.py`` on a virtual GPU, which checks order."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import thunder_fsdp_sched  # before thunder  # noqa: F401

import gpu
import pytest
import systems
import torch
import torch.distributed as dist
from gpu import Setup, Worker
from models import byte_gpt
from thunder import extend
from virtual_gpu import guard
from virtual_gpu.world import Rank, run

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")


@pytest.fixture(autouse=True)
def _skip_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace functions that need values, and do not compile with Inductor."""
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", _Profiler)
    monkeypatch.setattr(gpu, "_digest", lambda tensors: f"{len(list(tensors))} tensors")
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


def _worker(rank: Rank, tmp_path: Path, case: str, **setup: Any) -> Worker:
    options = {"steps": 2, "stand_in": False, "blocks": 1, "width": 64, "length": 8, "batch": 2}
    of = dataclasses.asdict(Setup("alone", "", rank.world_size, fuse=False, **setup))
    return Worker({"setup": of, "case": case, "stem": str(tmp_path / case), "options": options}, rank.rank)


def _train(rank: Rank, tmp_path: Path, cases: tuple[str, ...]) -> dict[str, Any]:
    return {case: _worker(rank, tmp_path, case, repeats=2).train() for case in cases}


def test_the_first_run_trains_on_gpus_without_a_race(tmp_path: Path) -> None:
    cases = ("zero3 flat", "zero3 staged bfloat16", "zero2 symmetric_memory")
    result = run(_train, tmp_path, cases, world_size=1)
    result.assert_clean()
    for case in cases:
        record = result.values[0][case]
        assert len(record["digests"]) == 2
        assert record["finite"]
        assert record["peak"] == 0


def _profile(rank: Rank, tmp_path: Path, case: str) -> str:
    with pytest.raises(RuntimeError, match="nothing run on the GPU"):
        _worker(rank, tmp_path, case, repeats=0).profile()
    return "profiled"


@pytest.mark.long
def test_the_first_run_profiles_on_gpus(tmp_path: Path) -> None:
    assert run(_profile, tmp_path, "zero3 flat", world_size=1).values == ["profiled"]
