"""Log messages during compilation, and Thunder's warnings that this package must not cause."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.extras.reports import texts as report_texts
from thunder_fsdp_sched.logs import following_stages
from thunder_fsdp_sched.planning import compile_as_rank

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Stack
from ranks import on_ranks
from thunder.core.trace import TraceCtx
from torch._logging import _internal

NAME = "thunder_fsdp_sched"


def _make() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    return Stack(2), (torch.randn(2, 4),)


def _messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == NAME and r.levelno == level]


def test_functions_that_follow_compilations_get_their_stages() -> None:
    stages: list[str] = []
    with following_stages(stages.append):
        compile_as_rank(_make, fsdp(), rank=0, world_size=2)
        compile_as_rank(_make, fsdp(), rank=1, world_size=2)
    assert stages == ["tracing", "differentiating", "bucketing and fusing", "scheduling forward", "scheduling backward"]


def test_the_first_rank_logs_the_phases_of_compilation_and_describes_no_changes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(report_texts, "describe_change")
    with caplog.at_level(logging.INFO, logger=NAME):
        compile_as_rank(_make, fsdp(), rank=0, world_size=4)
    texts = "\n".join(_messages(caplog, logging.INFO))
    phases = r"sharded over.*tracing.*traced.*differentiated.*scheduling forward.*scheduling backward.*compiled"
    assert re.search(phases, texts, re.DOTALL), texts
    assert not _messages(caplog, logging.DEBUG)


def test_other_ranks_log_what_each_pass_changed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=NAME):
        transform = compile_as_rank(_make, fsdp(), rank=1, world_size=4)
    assert not _messages(caplog, logging.INFO)
    changes = [re.match(r"pass (\w+): (.*)", text) for text in _messages(caplog, logging.DEBUG)]
    assert {found[1] for found in changes if found} == set(transform.compiled[0].pass_seconds)
    buckets = len(transform.plan)
    [bucketed] = {found[2] for found in changes if found and found[1] == "bucket_communication"}
    assert f"+{buckets} fsdp_all_gather" in bucketed and f"+{buckets} fsdp_reduce_scatter" in bucketed


def test_no_trace_is_printed_for_a_log_that_torch_does_not_write() -> None:
    with (
        mock.patch.object(_internal.trace_log, "handlers", [_internal.LazyTraceHandler(None)]),  # as in a new process
        mock.patch.object(TraceCtx, "__repr__", side_effect=AssertionError) as printed,
    ):
        compile_as_rank(_make, fsdp(), rank=0, world_size=2)
    assert not printed.called


#
# Warnings of Thunder
#


def test_no_sync_causes_no_warning_and_sets_thunders_flag(fake_ranks: None) -> None:
    model = thunder.jit(Stack(2), transforms=[fsdp()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.no_sync():
            assert thunder.distributed.get_skip_data_parallel_grad_sync()
        assert not thunder.distributed.get_skip_data_parallel_grad_sync()
        with pytest.raises(KeyError), model.no_sync():
            raise KeyError
        assert not thunder.distributed.get_skip_data_parallel_grad_sync()


def test_other_modules_keep_thunders_warning(fake_ranks: None) -> None:
    thunder.jit(Stack(2), transforms=[fsdp()])
    with pytest.warns(UserWarning, match="No op since neither"), thunder.jit(torch.nn.Linear(2, 2)).no_sync():
        pass


@on_ranks(2)
def test_tlparse_shows_traces_and_compares_collectives(rank: int, tmp_path: Path) -> None:
    alone = dist.new_group([0])
    if rank == 0:  # has compiled more than rank 1
        thunder.jit(Stack(1), transforms=[fsdp(ranks=alone)])(torch.randn(2, 4))
    handler = _internal.LazyTraceHandler(str(tmp_path))  # what TORCH_TRACE installs when torch is imported
    handler.setFormatter(_internal.TorchLogsFormatter(trace=True))
    logger = logging.getLogger(NAME)
    logger.setLevel(logging.DEBUG)
    try:
        with mock.patch.object(_internal.trace_log, "handlers", [handler]), contextlib.closing(handler):
            torch.manual_seed(0)
            model = thunder.jit(Stack(2), transforms=[fsdp()])
            model(torch.randn(2, 4)).sum().backward()
    finally:
        logger.setLevel(logging.NOTSET)
    dist.barrier()
    if rank:
        return
    page, tlparse = tmp_path / "page", Path(sys.executable).with_name("tlparse")
    subprocess.run([tlparse, tmp_path, "--all-ranks-html", "--no-browser", "-o", page], check=True, capture_output=True)
    diverging = re.findall(r".*Diverging.*(?:\n.*){8}", (page / "index.html").read_text())
    assert not diverging, diverging
    compiled = model._lc_transforms[0].compiled[0]
    shown = {}
    for path in (page / "rank_0").glob("*/*"):
        half, name = path.parent.name.split("_")[2], path.stem.rpartition("_")[0]
        shown[half, name] = path.read_text()
    for half, name in enumerate(("forward", "backward")):
        number, schedule = str(half), getattr(compiled, f"{name}_schedule")
        assert shown[number, f"fsdp_{name}_before"].split() == str(getattr(compiled, f"{name}_before")).split()
        assert "fsdp_wait" in shown[number, f"fsdp_{name}_after"]
        assert "(bucket_blocks_0, slot_" in shown[number, "fsdp_after_assign_slots"]
        assert json.loads(shown[number, "inductor_collective_schedule"]) == schedule.collectives()
        assert len(json.loads(shown[number, f"fsdp_{name}_schedule"])["ops"]) == len(schedule)
    assert str(compiled.memory) in shown["1", "fsdp_memory"]
