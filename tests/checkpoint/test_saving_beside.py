"""Asynchronous saves (``save_checkpoint_async``): files, training, errors on all ranks, killed processes."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import load_checkpoint, save_checkpoint, save_checkpoint_async
from thunder_fsdp_sched.extras.checkpoint import staging
from thunder_fsdp_sched.extras.checkpoint.storage import RunWriter

import profiles
import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from ranks import on_ranks
from saving import METADATA, assert_equal, contents, fill, make, on_first, small, small_files, train, update
from virtual_gpu import guard
from virtual_gpu.histories import make_model
from virtual_gpu.world import Rank, run


@pytest.mark.parametrize("writer", ["process", pytest.param("thread", marks=pytest.mark.long)])
@on_ranks(2)
def test_each_save_holds_the_values_at_its_call_and_host_memory_is_used_again(tmp_path: Path, writer: Any) -> None:
    model, optimizer = small()
    expected, addresses = [], set()
    for step in range(3):
        update(model, optimizer)
        expected.append(copy.deepcopy(contents(model, optimizer)))
        extra = {"list": [step]}
        saving = save_checkpoint_async(model, tmp_path / str(step), optimizer, extra=extra, writer=writer)
        addresses.add(staging.host_memory.memory.data_ptr())
        extra["list"][0] = -1
    saving.staged()
    fill(model, 0.0)
    assert saving.result() == tmp_path / "2" and saving.done() and len(addresses) == 1
    for step, values in enumerate(expected):
        assert load_checkpoint(model, tmp_path / str(step), optimizer, extra={"list": [0]}) == {"list": [step]}
        assert_equal(contents(model, optimizer), values, step)


@on_ranks(2)
def test_each_tensor_is_staged_once(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer)
    state = {"model": tfs.get_model_state_dict(model), "optim": tfs.get_optimizer_state_dict(model, optimizer)}
    rows = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    own = [getattr(value, "_local_tensor", value) for value in [*rows, *model.buffers()]]
    staging.host_memory.__init__()
    staged, _ = staging.Staging(state).copy()
    assert staging.host_memory.memory.nbytes <= sum(-(-value.nbytes // 64) * 64 for value in own)
    tied = [staged["model"][name].to_local() for name in ("embedding.weight", "head.weight")]
    assert tied[0].data_ptr() == tied[1].data_ptr()


def _save_on_a_gpu(rank: Rank, waits: bool) -> None:
    """Take two steps, each with a save whose copies a writer reads after the optimizer has changed the parameters."""
    model = make_model(rank)
    for _ in range(2):
        with rank.phase("step"):
            model(torch.randn(4, 8, device=rank.device)).sum().backward()
        with (
            rank.phase("save"),
            mock.patch.object(staging, "host_memory"),
            mock.patch.object(
                staging, "tensor_at", lambda _, __, d, shape: torch.empty(shape, dtype=d, pin_memory=True)
            ),
        ):
            staged, finish = staging.Staging({"model": tfs.get_model_state_dict(model)}).copy()
        with rank.phase("optimizer"), torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad)
                param.grad = None
        if waits:
            finish()
        for entry in staged["model"].values():
            entry._local_tensor.sum()  # a thread writes it


@pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")
def test_on_a_gpu_the_host_does_not_wait_and_the_optimizer_comes_after_the_copies() -> None:
    result = run(_save_on_a_gpu, waits=True)
    result.assert_clean()
    assert result.count("save")["syncs"] == result.count("optimizer")["syncs"] == 0 < result.count("save")["copy"]
    with pytest.raises(AssertionError, match="host race"):
        run(_save_on_a_gpu, waits=False).assert_clean()


#
# Errors
#


@pytest.mark.parametrize("writer", ["thread", pytest.param("process", marks=pytest.mark.long)])
@on_ranks(2)
def test_a_full_disk_is_an_error_on_all_ranks_at_the_next_call_and_nothing_is_lost(
    rank: int, tmp_path: Path, writer: Any
) -> None:
    keep = RunWriter.write_data

    def write_data(*args: Any) -> Any:
        with small_files(staging.host_memory.writer().process.pid if writer == "process" else os.getpid()):
            return keep(*args)

    model, optimizer = small()
    save_checkpoint_async(model, tmp_path / "good", optimizer, writer=writer).result()
    calls: list[Any] = [
        lambda saving: saving.result(),
        lambda saving: save_checkpoint(model, tmp_path / "next", optimizer),
        lambda saving: save_checkpoint_async(model, tmp_path / "next", optimizer, writer=writer),
        lambda saving: load_checkpoint(model, tmp_path / "good", optimizer),
        lambda saving: tfs.save_safetensors(model, tmp_path / "whole"),
        lambda saving: tfs.load_safetensors(model, tmp_path / "whole"),
        lambda saving: model(torch.ones(2, 4)),
    ]
    for number, call in enumerate(calls):
        folder = tmp_path / str(number)
        with mock.patch.object(RunWriter, "write_data", write_data) if rank == 1 else contextlib.nullcontext():
            saving = save_checkpoint_async(model, folder, optimizer, writer=writer)
            update(model, optimizer)
            saving._thread.join()
        expected = coded("checkpoint.not-saved", folder, "rank 1: OSError", "File too large")
        with pytest.raises(tfs.CheckpointError, check=expected):
            call(saving)
        with pytest.raises(tfs.CheckpointError, check=expected):
            saving.result()
        assert tfs.latest_checkpoint(tmp_path) == tmp_path / "good"
        dist.barrier()
        assert not any(folder.iterdir())
    load_checkpoint(model, tmp_path / "good", optimizer)  # it is raised once
    save_checkpoint_async(model, tmp_path / "0", optimizer, writer=writer).result()
    assert tfs.latest_checkpoint(tmp_path) == tmp_path / "0"


@pytest.mark.parametrize("writer", [None, "thread", "process"])
@on_ranks(1)
def test_the_error_of_a_full_disk_says_so_where_torch_fails_later(tmp_path: Path, writer: Any) -> None:
    """``torch.save`` raises "unexpected pos" when a tensor is larger than the buffer of the file."""
    model = thunder.jit(torch.nn.Linear(100, 1000), transforms=[tfs.fsdp()])
    if writer is not None:
        save_checkpoint_async(model, tmp_path / "good", writer=writer).result()
    full = staging.host_memory.writer().process.pid if writer == "process" else os.getpid()
    with (
        small_files(full),
        pytest.raises(tfs.CheckpointError, check=coded("checkpoint.not-saved", "unexpected pos", "File too large")),
    ):
        if writer is None:
            save_checkpoint(model, tmp_path / "0")
        else:
            save_checkpoint_async(model, tmp_path / "0", writer=writer).result()


@on_ranks(2)
def test_what_cannot_succeed_is_refused_on_all_ranks_before_anything_is_copied(rank: int, tmp_path: Path) -> None:
    model, optimizer = small()
    on_first((tmp_path / "file").touch)
    with mock.patch.object(staging.Staging, "copy", side_effect=AssertionError):
        for folder, options, expected in (
            ("file/inside", {}, coded("checkpoint.not-saved", "Not a directory")),
            (str(rank), {}, coded("checkpoint.not-saved", "the folder that the first rank saves into")),
            ("a", {"keep": 0}, coded("checkpoint.keep-below-one")),
            ("a", {"writer": "fiber"}, coded("checkpoint.unknown-writer", "'fiber'")),
        ):
            with pytest.raises(tfs.CheckpointError, check=expected):
                save_checkpoint_async(model, tmp_path / folder, optimizer, **options)
        with (
            pytest.raises(tfs.CheckpointError, check=coded("checkpoint.not-saved", "cannot be written")),
            mock.patch("os.access", return_value=False),
        ):
            tfs.save_safetensors_async(model, tmp_path / "b")


@on_ranks(2)
def test_a_copy_that_fails_on_one_rank_is_an_error_on_all_ranks(rank: int, tmp_path: Path) -> None:
    model, optimizer = small()
    fails = mock.patch.object(staging.Staging, "copy", side_effect=MemoryError("no room"))
    with fails if rank else contextlib.nullcontext():
        saving = save_checkpoint_async(model, tmp_path / "0", optimizer)
    with pytest.raises(tfs.CheckpointError, check=coded("checkpoint.not-saved", "rank 1", "no room")):
        saving.result()
    save_checkpoint(model, tmp_path / "1", optimizer)


@on_ranks(2)
def test_one_save_is_in_flight_and_a_second_waits(rank: int, tmp_path: Path) -> None:
    model, optimizer = small()
    go = threading.Event()
    keep = RunWriter.write_data

    def write_data(*args: Any) -> Any:
        if rank == 1:
            go.wait()
        return keep(*args)

    with mock.patch.object(RunWriter, "write_data", write_data):
        first = save_checkpoint_async(model, tmp_path / "first", optimizer)
        assert not first.done()
        threading.Timer(0.2, go.set).start()
        second = save_checkpoint_async(model, tmp_path / "second", optimizer)
        assert first.done() and (tmp_path / "first" / METADATA).exists()
    second.result()


#
# Killed processes
#


@on_ranks(2)
def test_a_killed_writer_process_is_an_error_on_all_ranks_and_replaced(rank: int, tmp_path: Path) -> None:
    model, optimizer = small()
    save_checkpoint_async(model, tmp_path / "0", optimizer, writer="process").result()
    for _ in range(2):
        process = staging.host_memory.writer()
        victim = process.process.pid

        def write(folder: Any, plan: Any, planner: Any, process: Any = process, victim: int = victim) -> Any:
            os.kill(victim, signal.SIGSTOP)  # so that it is killed with a request that it has not answered
            threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
            return type(process).write(process, folder, plan, planner)

        with mock.patch.object(process, "write", write) if rank == 1 else contextlib.nullcontext():
            saving = save_checkpoint_async(model, tmp_path / "1", optimizer, writer="process")
            killed = coded("checkpoint.not-saved", "rank 1: RuntimeError the process that writes was killed")
            with pytest.raises(tfs.CheckpointError, check=killed):
                saving.result()
        assert tfs.latest_checkpoint(tmp_path) == tmp_path / "0"
        dist.barrier()
    save_checkpoint_async(model, tmp_path / "1", optimizer, writer="process").result()
    load_checkpoint(model, tmp_path / "1", optimizer)


@pytest.mark.parametrize("what", ["path", "printed", "signals"])
@on_ranks(1)
def test_nothing_that_happens_while_a_writer_starts_disturbs_it(tmp_path: Path, what: str) -> None:
    """A path object in ``sys.path``, which Python ignores; text that Python prints at its start; signals to the job."""
    model, optimizer = small()
    expected = contents(model, optimizer)
    changes = contextlib.ExitStack()
    if what == "path":
        changes.enter_context(mock.patch.object(sys, "path", [*sys.path, tmp_path, f"{tmp_path}/with:colon", b"bytes"]))
    if what == "printed":
        (tmp_path / "sitecustomize.py").write_text(f"print('hello', flush=True); open({str(tmp_path / 'ran')!r}, 'w')")
        changes.enter_context(mock.patch.object(sys, "path", [str(tmp_path), *sys.path]))
        changes.enter_context(mock.patch.dict(os.environ, PYTHONPATH=str(tmp_path)))
    with changes:
        staging.host_memory.__init__()  # it has no writer
        saving = save_checkpoint_async(model, tmp_path / "0", optimizer, writer="process")
        while what == "signals" and not saving.done():
            if (started := staging.host_memory._writer) is not None:
                for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                    os.kill(started.process.pid, sent)
            time.sleep(0.01)
        saving.result()
    assert what != "printed" or (tmp_path / "ran").exists()
    fill(model, 0.0)
    load_checkpoint(model, tmp_path / "0", optimizer)
    assert_equal(contents(model, optimizer), expected)


@on_ranks(1)
def test_a_writer_ends_with_its_rank_although_another_process_has_a_copy_of_the_connection() -> None:
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:  # a rank
        try:
            staging.host_memory.reserve(64, pinned=False)
            writer = staging.host_memory.writer()
            files = [writer.connection.fileno()]
            holder = subprocess.Popen(["sleep", "1000"], pass_fds=files)
            os.write(writing, f"{writer.process.pid} {holder.pid}".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    writer_pid, holder_pid = map(int, os.read(reading, 100).split())
    try:
        while _is_running(writer_pid):
            time.sleep(0.05)
        assert _is_running(holder_pid)
    finally:
        os.kill(holder_pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    """Return whether a process that may be a zombie of another one is running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


_SCRIPT = '''
import atexit, os, sys, time
atexit.register(lambda: print("all exit hooks", file=sys.stderr, flush=True))
import thunder_fsdp_sched as tfs
import thunder, torch, torch.distributed as dist
from thunder_fsdp_sched.extras.checkpoint.storage import RunWriter
from pathlib import Path

def start(*cases):
    """In each child its case and rank; the parent prints the exit codes and ends."""
    pids = {}
    for case in cases:
        for rank in range(2):
            if (pid := os.fork()) == 0:
                return case, rank
            pids[pid] = case
    for pid, case in pids.items():
        print(case, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), sep=": ", flush=True)
    os._exit(0)

case, rank = start(*sys.argv[2:])
folder = Path(sys.argv[1], case)
os.dup2(os.open(f"{folder}-{rank}", os.O_CREAT | os.O_WRONLY), 2)
dist.init_process_group("gloo", init_method=f"file://{folder}-store", rank=rank, world_size=2)
torch.manual_seed(0)
model = thunder.jit(torch.nn.Linear(4, 4), transforms=[tfs.fsdp()])
keep = RunWriter.write_data
def write_data(*args):
    time.sleep(0.5)  # until the main thread has ended
    if case != "works" and rank == 1:
        raise OSError("No space left on device")
    return keep(*args)
RunWriter.write_data = write_data
if case == "fails silently":
    sys.stderr.close() if rank else setattr(sys, "stderr", None)
tfs.save_checkpoint_async(model, folder / "last")
dist.destroy_process_group()
'''


def test_a_script_that_ends_completes_its_save_or_reports_the_error(tmp_path: Path) -> None:
    """No ``guard`` around the script, no wait for the save, and the process group is destroyed while it is in flight.

    The exit code tells of the error also if standard error is closed or ``None``.
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT))
    codes = {"works": 0, "fails": 120, "fails silently": 120}
    if not profiles.LONG:  # `test_forks` has it with a thread
        del codes["fails silently"]
    command = [sys.executable, script, tmp_path, *codes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.stdout.splitlines() == [f"{case}: {code}" for case, code in codes.items() for _ in range(2)], done
    for case in ("works", "fails"):
        for rank in range(2):
            errors = (tmp_path / f"{case}-{rank}").read_text()
            assert ("was not saved: rank 1: OSError No space left on device" in errors) is (case == "fails"), errors
            assert "all exit hooks" in errors
    assert [case for case in codes if tfs.latest_checkpoint(tmp_path / case)] == ["works"]
