"""Ranks that die, raise or are slow: the errors of the other ranks, how soon they come, and resuming from a checkpoint."""

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

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp, full_state_dict, load_checkpoint, save_checkpoint

import pytest
import thunder
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import Stack
from profiles import LONG_ONLY
from ranks import RankError, Ranks, fork_server
from scenario import loss_of

MAX_SECONDS = 30.0
"""Seconds within which every surviving rank must raise, even on a busy machine."""


def _model(seed: int = 0, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
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
    """Train, save a checkpoint in step 1, and stop rank 1 in step 3."""
    model, optimizer = _model(sharding_strategy=strategy)

    def stop() -> None:
        (folder / "stopped").write_text(repr(time.time()))
        stop_rank()

    for step in range(6):
        stops_here = rank == 1 and step == 3
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
        if stops_here and stage == "optimizer":
            optimizer.register_step_pre_hook(lambda *args: stop())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            save_checkpoint(model, folder / "step-1", optimizer, extra={"step": step})


def _resume_and_compare(rank: int, world_size: int, folder: Path) -> None:
    """Train from the last checkpoint to step 5, and compare with training that was not interrupted."""
    model, optimizer = _model(seed=3)
    latest = tfs.latest_checkpoint(folder)
    assert latest is not None
    begin = load_checkpoint(model, latest, optimizer, extra={"step": 0})["step"] + 1
    uninterrupted, uninterrupted_optimizer = _model()
    for step in range(6):
        losses = []
        for jitted, its_optimizer in ((model, optimizer), (uninterrupted, uninterrupted_optimizer)):
            if jitted is model and step < begin:
                continue
            loss = loss_of(jitted(_batch(rank, step)))
            loss.backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
            losses.append(loss.item())
        assert len(set(losses)) == 1, (step, losses)
    ours, theirs = full_state_dict(model), full_state_dict(uninterrupted)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "stage, stop_rank, strategy, expected_error",
    [
        pytest.param("forward", _die, "zero3", r"the all-gather of bucket '\S+' failed", marks=LONG_ONLY),
        ("backward", _die, "zero2", r"the reduce-scatter of bucket '\S+' failed"),
        pytest.param(  # a rank that is gone before a round, as in `test_rounds`
            "optimizer",
            _die,
            "zero3",
            r"rank 1 did not come and a connection was closed:\n +rank 0: the forward for in",
            marks=LONG_ONLY,
        ),
        ("forward", _raise, "zero3", r"the all-gather of bucket '\S+' failed"),
    ],
)
def test_the_other_rank_raises_soon_and_training_resumes_from_the_checkpoint(
    tmp_path: Path, stage: str, stop_rank: Callable[[], None], strategy: str, expected_error: str
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
        if stage == "optimizer":
            error, where = "ScheduleDisagreement: fsdp: the ranks of .* disagree", r"computation\n +fsdp_agreed"
        else:  # the error says what happened to the other ranks
            error, where = "RuntimeError: rank 0", r"line \d+ of \w+: .*fsdp_(all_gather|reduce_scatter|wait_\w+)"
            assert re.search(r"The other ranks:\n +rank(s)? .*1", report_of_rank["0"]), message
        assert re.search(rf"{error}: {expected_error}", report_of_rank["0"]), message
        assert re.search(rf"in {where}\(", report_of_rank["0"]), message
        if stage == "backward":  # the checkpoint does not depend on it
            workers.run(_resume_and_compare, tmp_path)
    finally:
        workers.close()


def _exceed_the_timeout(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=5))
    model, _ = _model(ranks=group)
    loss_of(model(_batch(rank, 0))).backward()
    if rank == 1:
        dist.barrier()  # fails when rank 0 has raised
    model(_batch(rank, 1))


@pytest.mark.long  # `test_rounds` has late ranks
def test_a_rank_slower_than_the_timeout_of_the_group_is_an_error(ranks: Ranks) -> None:
    with pytest.raises(
        RankError, match=r"rank 1 did not come within 5\.\d s:\n +rank 0: the forward for inputs .*\n.*\n.*[Tt]imed out"
    ):
        ranks.run(_exceed_the_timeout, timeout=MAX_SECONDS)


def _run_rank(rank: int, folder: Path, lose_the_store: bool) -> None:
    try:
        _train_from_a_store(rank, folder, lose_the_store)
    except Exception as error:
        (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
        raise


def _train_from_a_store(rank: int, folder: Path, lose_the_store: bool) -> None:
    store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimizer = _model()
    losses = []
    for step in range(3):
        if lose_the_store and step == 1:
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


def _join(processes: list[Any]) -> list[int | None]:
    deadline = time.monotonic() + 120
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _start_ranks(folder: Path, method: str) -> None:
    context = mp.get_context(method)
    processes = [context.Process(target=_run_rank, args=(rank, folder, False), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    assert _join(processes) == [0, 0]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=LONG_ONLY)])
def test_processes_may_be_forked_or_spawned(tmp_path: Path, method: str) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "port").write_text(str(server.port))
    # Not from this process: if an earlier test has started threads of autograd, forked processes cannot run backward.
    parent = fork_server().Process(target=_start_ranks, args=(tmp_path, method))
    parent.start()
    assert _join([parent]) == [0]
    assert (tmp_path / "losses-0").read_text() == (tmp_path / "losses-1").read_text()


def test_training_and_compiling_continue_without_a_store(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "port").write_text(str(server.port))
    context = fork_server()
    processes = [context.Process(target=_run_rank, args=(rank, tmp_path, True), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)) and time.monotonic() < deadline:
        time.sleep(0.05)
    del server
    (tmp_path / "gone").touch()
    assert _join(processes) == [0, 0]
    losses = {(tmp_path / f"losses-{rank}").read_text() for rank in range(2)}
    assert len(losses) == 1 and losses.pop().count(",") == 2  # of three steps, the last of which compiles
