"""Ranks that die or raise: the errors of the other ranks, and how soon they come. Training goes on without a store."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Stack
from ranks import RankError, Ranks, fork_server
from scenario import loss_of

MAX_SECONDS = 30.0
"""Seconds within which every surviving rank must raise, even on a busy machine."""


def _model(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = thunder.jit(Stack(1, width=8).double(), transforms=[fsdp(**options)])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def _die() -> None:
    os._exit(9)


def _raise() -> None:
    raise ArithmeticError("something of the user's")


def _train_until(
    rank: int, world_size: int, folder: Path, stage: str, stop_rank: Callable[[], None], strategy: str
) -> None:
    """Train, and stop rank 1 in the second step."""
    model, optimizer = _model(sharding_strategy=strategy)

    def stop() -> None:
        (folder / "stopped").write_text(repr(time.time()))
        stop_rank()

    for step in range(2):
        stops_here = rank == 1 and step == 1
        x = _batch(rank, step).requires_grad_()
        if stops_here and stage == "forward":
            # Between the gathers of forward.
            model._lc_transforms[-1].sharded.buckets[1].source.shard = lambda **kwargs: stop()
        loss = loss_of(model(x))
        if stops_here and stage == "backward":
            # Between the reductions of backward.
            bucket = model._lc_transforms[-1].sharded.buckets[1]
            bucket.transport = copy.copy(bucket.transport)
            bucket.transport.reduce_scatter = lambda *args: stop()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "stage, stop_rank, strategy, collective",
    [("backward", _die, "zero2", "reduce-scatter"), ("forward", _raise, "zero3", "all-gather")],
)
def test_the_other_rank_raises_soon(
    tmp_path: Path, stage: str, stop_rank: Callable[[], None], strategy: str, collective: str
) -> None:
    workers = Ranks(2)
    try:
        with pytest.raises(RankError) as caught:
            timeout = 4 * MAX_SECONDS  # includes compiling
            workers.run(_train_until, tmp_path, stage, stop_rank, strategy, timeout=timeout)
        seconds = time.time() - float((tmp_path / "stopped").read_text())
        assert seconds < MAX_SECONDS
        message = str(caught.value)
        report_of_rank = dict(re.findall(r"--- rank (\d) failed\n(.*?)(?=\n--- rank|\Z)", message, re.DOTALL))
        assert ("exit code 9" if stop_rank is _die else "something of the user's") in report_of_rank["1"], message
        # The error says what happened to the other ranks.
        assert re.search(r"The other ranks:\n +rank(s)? .*1", report_of_rank["0"]), message
        assert re.search(rf"RuntimeError: rank 0: the {collective} of bucket '\S+' failed", report_of_rank["0"]), (
            message
        )
        assert re.search(r"in line \d+ of \w+: .*fsdp_(all_gather|reduce_scatter|wait_\w+)\(", report_of_rank["0"]), (
            message
        )
    finally:
        workers.close()


def _train_from_a_store(rank: int, folder: Path) -> None:
    store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimizer = _model()
    losses = []
    for step in range(3):
        if step == 1:
            (folder / f"ready-{rank}").touch()
            while not (folder / "gone").exists():
                time.sleep(0.05)
        # The first no_sync step compiles.
        with model.no_sync() if step == 2 else contextlib.nullcontext():
            loss = loss_of(model(_batch(0, step)))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        (folder / f"losses-{rank}").write_text(repr(losses))


def test_training_and_compiling_continue_without_a_store(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "port").write_text(str(server.port))
    context = fork_server()
    processes = [context.Process(target=_train_from_a_store, args=(rank, tmp_path), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)) and time.monotonic() < deadline:
        time.sleep(0.05)
    del server
    (tmp_path / "gone").touch()
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0]
    losses = {(tmp_path / f"losses-{rank}").read_text() for rank in range(2)}
    assert len(losses) == 1 and losses.pop().count(",") == 2  # of three steps, the last of which compiles
