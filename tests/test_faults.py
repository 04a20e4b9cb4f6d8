"""Ranks that die or raise: the errors of the other ranks, how soon they come, and exit codes. Training needs no store."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import thunder_fsdp_sched
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


#
# Exit codes
#

_SCRIPT = """
import atexit, os, sys, threading
import thunder_fsdp_sched as tfs
from thunder_fsdp_sched.runtime import ops
from thunder_fsdp_sched.runtime.memory import slot_bytes
import thunder, torch, torch.distributed as dist
from datetime import timedelta

def rank_of():
    '''In each of two children its rank; the parent returns when they have ended.'''
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            return rank
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(*codes, flush=True)
    return None

def run_last(how, rank):
    '''An exit handler of the user, registered before this package's, so that it runs afterwards.'''
    if how == "failed" and rank == 0 and sys.last_traceback.tb_frame.f_globals["__name__"] != "__main__":
        os._exit(9)

def run(rank, store, how):
    atexit.register(run_last, how, rank)
    main = threading.get_native_id()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    transform = tfs.fsdp(bucketing_strategy="layer", ranks=tfs.Ranks(separate_reduce_scatter_group=how == "twin"))
    model = thunder.jit(torch.nn.Sequential(torch.nn.Linear(64, 64)), transforms=[transform])
    for task in os.listdir("/proc/self/task"):
        if int(task) != main:
            os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
    bucket, = transform.sharded.buckets
    slot = bucket.arena.slot(0, slot_bytes(bucket.spec, bucket.spec.param_dtype))
    for step in range(3):
        if how == "failed" and rank == 1 and step == 1:
            sys.exit(3)
        grads = [torch.ones(param.shape) for param in bucket.spec.params]
        reduction = ops.reduce_scatter(bucket, slot, *grads)
        ops.wait_grads(bucket, reduction)
        ops.wait_params(bucket, ops.all_gather(bucket, slot, *bucket.params))
    for _ in range(5 if how == "own" else 0):
        dist.all_gather([torch.empty(4096) for _ in range(2)], torch.ones(4096))
    if how == "twin":
        dist.destroy_process_group()

torch.set_num_threads(1)
folder, *hows = sys.argv[1:]
for name in hows:
    store = f"{folder}/store-{len(os.listdir(folder))}"
    open(store, "w").close()
    print(name, end=": ", flush=True)
    rank = rank_of()
    if rank is not None:
        run(rank, store, name)
        break
"""

EXPECTED = {"left": "0 0", "own": "0 0", "twin": "0 0", "failed": "1 3"}
"""Ways in which a process ends, with the expected exit codes of both ranks.

"left" and "twin": without and with ``destroy_process_group``, the latter of a second group for reductions, too.
"own": after collectives of the script's own, whose tensors nobody else keeps; often aborts without the exit hook.
"failed": rank 1 exits with code 3 before a collective.
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux's scheduling classes")
def test_a_process_that_used_gloo_exits_with_its_own_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    stores = tmp_path / "stores"
    stores.mkdir()
    done = subprocess.run(
        [sys.executable, str(script), str(stores), *EXPECTED],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(thunder_fsdp_sched.__file__).parents[1])},
    )
    expected = [f"{way}: {codes}" for way, codes in EXPECTED.items()]
    assert done.stdout.splitlines() == expected, done.stderr[-3000:]
