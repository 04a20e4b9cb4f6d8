"""Collectives have names in profiles. Those in dumps of the Flight Recorder are tested with the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

from thunder_fsdp_sched import fsdp

import thunder
import torch
import torch.distributed as dist
from device_thread import backward_on
from models import Stack
from ranks import on_ranks
from thunder.dev_utils.nvtx_profile_transform import NvtxProfileTransform


def _model(*more: Any) -> Any:
    torch.manual_seed(0)
    return thunder.jit(Stack(1), transforms=[fsdp(), *more])


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


def test_thunders_ranges_of_nvtx_name_the_bucket(one_rank: None) -> None:
    with mock.patch("torch.cuda.nvtx.range_push") as push, mock.patch("torch.cuda.nvtx.range_pop"):
        _model(NvtxProfileTransform())(torch.ones(2, 4)).sum().backward()
    for call in ("fsdp_all_gather", "fsdp_reduce_scatter"):
        assert f"{call}(bucket_blocks_0, " in str(push.call_args_list)
