"""Collectives have names in profiles, in dumps of the Flight Recorder, and in stacks."""

from __future__ import annotations

import json
import pickle
import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.distributed as dist
from device_thread import backward_on
from forked import run_python
from internals import ops
from models import Stack
from ranks import on_ranks
from torch._C._distributed_c10d import _dump_fr_trace

GATHER = "fsdp_all_gather(blocks.0) in forward"


def _model(**options: Any) -> Any:
    torch.manual_seed(0)
    return thunder.jit(Stack(1), transforms=[fsdp(**options)])


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@on_ranks(2)
def test_collectives_have_bucket_phase_and_step_in_profiles(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer)
    with torch.profiler.profile() as profile, backward_on("caller"):  # it records this thread
        for _ in range(2):
            _step(model, optimizer)
    path = tmp_path / f"{dist.get_rank()}.json"
    profile.export_chrome_trace(str(path))
    names = [str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]]
    buckets = [bucket.name for bucket in model._lc_transforms[0].plan]
    for bucket in buckets:
        assert names.count(f"fsdp_reduce_scatter({bucket})") == 2
        steps = {int(n.rpartition(" ")[2]) for n in names if f"fsdp_reduce_scatter({bucket}) in backward, step" in n}
        assert len(steps) == 2 and max(steps) - min(steps) == 1, names
        assert any(name.startswith(f"fsdp_all_gather({bucket}) in forward, step ") for name in names), names


def hang(rank: int, folder: str) -> None:
    """Train on two ranks, of which one stops before its first gather; write a dump of the Flight Recorder on the other."""
    options: Any = {"timeout": timedelta(seconds=2)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, **options)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer)
    if rank == 1:
        with mock.patch.object(ops, "issue_named", side_effect=SystemExit):
            _step(model, optimizer)
    else:
        with pytest.raises(RuntimeError):
            _step(model, optimizer)
        (Path(folder) / "dump").write_bytes(_dump_fr_trace(True, True, False))


def test_flight_recorder_names_the_bucket_that_hangs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch.multiprocessing\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_names import hang\n"
        "if __name__ == '__main__':\n"
        "    torch.multiprocessing.spawn(hang, (sys.argv[1],), nprocs=2)\n"
    )
    done = run_python(script, str(tmp_path), cwd=tmp_path, env={"TORCH_FR_BUFFER_SIZE": "500"})
    assert done.returncode == 0, done.stderr
    entries = pickle.loads((tmp_path / "dump").read_bytes())["entries"]
    last = [entry for entry in entries if entry["process_group"][1] != "fsdp_control"][-1]
    names = [frame["name"] for frame in last["frames"]]
    (name,) = (name for name in names if name.startswith("fsdp_"))
    assert re.fullmatch(r"fsdp_all_gather\([\w.]+\) in forward", name), names
