"""Saving in rounds of all ranks, in the calling thread or asynchronously.

[Note: Asynchronous saves]
``torch.distributed.checkpoint.async_save`` loses the checkpoint in flight if a script ends with
``destroy_process_group()``, because its thread communicates over a registered process group, by default that of
training. Any number of saves may be in flight, and an error is seen only by callers that ask the future. Its process
runs the user's script again (``spawn``), serves the ranks of the first call forever, and is not replaced if it dies. So
only DCP's planner, writer and format are used here. The ranks exchange plans and results over connections of their own
(:class:`Rounds`).

A round ends in the same way on all ranks, so an error of one rank is an error of all. It is logged at once. On all
ranks, ``result()`` raises it; otherwise the next call of the model, save or load does, or the exit of the process.
Python waits for the thread before it exits.

[Note: The exit code of a failed save]
Python decides on the exit code before it runs exit hooks, and ignores their errors. But if standard output or standard
error cannot be flushed at the very end, the exit code is 120 (documented at ``sys.exit``). So after a failed save,
standard error is replaced by a stream whose last flush fails. All other exit hooks run as usual, which ``os._exit``
would prevent.

A forked process of ``multiprocessing`` ends with ``os._exit``. Before Python 3.13 it runs only finalizers, in which
``SystemExit`` sets the exit code. Since then it runs exit hooks and then finalizers, after the exit code is decided.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import multiprocessing
import os
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from ...errors import coded_error
from ...private_distributed import gloo_connections, timeout_of
from ...process_state import reset_after_fork
from ...ranks.control import Control, control_of
from ...ranks.process_groups import ProcessGroupRef
from .folder import INDEX, SaveRun, saving_into
from .on_all_ranks import CheckpointError
from .staging import Staging
from .storage import RunWriter
from .writer_process import text_of

_PATIENCE = timedelta(minutes=30)
"""The least time for which a rank waits for the others, which may write more, or to a slower disk."""

_log = logging.getLogger(__name__)


class Rounds:
    """Connections between one thread of each rank. In a round, each rank sends a value to the first.

    The first rank answers all. Creating them is a collective.

    Args:
        key: unique to these connections, the same on all ranks.
    """

    def __init__(self, group: ProcessGroupRef, key: str) -> None:
        self.rank, self.size = group.rank, 1 if group.is_fake else group.size
        self.is_usable = True
        self._ranks = group.global_ranks
        if self.size > 1:
            timeout = max(timeout_of(group.process_group), _PATIENCE)
            self._connections = gloo_connections(group.process_group, key, timeout)

    def run(self, make: Callable[[], Any], answer: Callable[[list[Any]], Sequence[Any] | None]) -> Any:
        """Return this rank's answer.

        Args:
            make: returns the value of a rank.
            answer: on the first rank, returns the answers to the values of all ranks; ``None`` for no answers.

        Raises:
            CheckpointError: on all ranks, if one of these fails, or a rank has exited.
        """
        value, fault = self._attempt(make)
        if self.rank:
            self._send(0, (value, fault))
            value, fault = self._receive(0)
        else:
            others = [self._receive(rank) for rank in range(1, self.size)]
            values = [value, *(other for other, _ in others)]
            fault = "; ".join(filter(None, [fault, *(theirs for _, theirs in others)]))
            answers: Sequence[Any] | None = None
            if not fault:
                answers, fault = self._attempt(lambda: answer(values))
            answers = answers or [None] * self.size
            for rank in range(1, self.size):
                self._send(rank, (answers[rank], fault))
            value = answers[0]
        if fault:
            self.is_usable = False  # messages may be in flight
            raise CheckpointError(fault)
        return value

    def _attempt(self, do: Callable[[], Any]) -> tuple[Any, str]:
        try:
            return do(), ""
        except Exception as error:
            return None, f"rank {self._ranks[self.rank]}: {text_of(error)}"

    def _send(self, rank: int, message: tuple[Any, str]) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):  # a rank that has exited does not answer, either
            self._connections.send([torch.tensor([data.numel()])], rank, 0).wait()
            self._connections.send([data], rank, 0).wait()

    def _receive(self, rank: int) -> tuple[Any, str]:
        size = torch.empty(1, dtype=torch.int64)
        try:
            self._connections.recv([size], rank, 0).wait()
            data = torch.empty(int(size), dtype=torch.uint8)
            self._connections.recv([data], rank, 0).wait()
        except RuntimeError as error:
            return None, f"rank {self._ranks[rank]} is gone: {str(error).splitlines()[0]}"
        message: tuple[Any, str] = pickle.loads(data.numpy().data)
        return message


class Saving:
    """An asynchronous save: the result of ``save_checkpoint_async`` and ``save_safetensors_async``."""

    def __init__(self, path: Path, control: Control, write: Callable[[], None], staged: Callable[[], None]) -> None:
        self._path, self._control, self._staged = path, control, staged
        self._error: Exception | None = None
        self._is_settled = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"saving {path}")
        self._thread.start()
        _register_exit_hooks()

    def staged(self) -> None:
        """Wait until the values are copied. Training need not do that: see [Note: Staging] in ``staging``."""
        self._check_process()
        self._staged()

    def done(self) -> bool:
        """Return whether the save has ended on this rank, completely or with an error."""
        self._check_process()
        return not self._thread.is_alive()

    def result(self) -> Path:
        """Wait until the save is complete, and return the path that the function without ``_async`` returns.

        Raises:
            CheckpointError: on all ranks, if it failed on any.
            RuntimeError: this process is a fork of the one that saves.
        """
        self._check_process()
        self._thread.join()
        self._is_settled, self._control.failure = True, None
        if self._error is not None:
            raise self._error
        return self._path

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise coded_error(
                RuntimeError, "environment.save-of-parent-process", path=self._path, process=self._process
            )

    def _run(self, write: Callable[[], None]) -> None:
        try:
            self._staged()
            write()
        except Exception as error:
            self._error, self._control.failure = error, self.result
            if self._control.group.rank == 0:
                _log.error("%s", error)


_latest: Saving | None = None
"""The latest asynchronous save of this process."""


def finish_latest() -> None:
    """Wait for the save in flight.

    Raises:
        CheckpointError: it failed, and its error has not been raised yet.
    """
    global _latest
    if _latest is not None:
        latest, _latest = _latest, None
        if not latest._is_settled:
            latest.result()


def wait_for_latest() -> None:
    """Wait for the save in flight, whose error is raised elsewhere."""
    if _latest is not None:
        _latest._thread.join()


def _forget_latest() -> None:
    global _latest
    _latest = None


reset_after_fork(_forget_latest)

#
# Exit
#


_finalizer: Finalize | None = None
"""The finalizer of this process, if ``multiprocessing`` has started the process. In a fork it is not active."""

_has_failed = False
"""Whether the last save of this process has failed, at exit."""

_UNUSABLE_STREAM = contextlib.suppress(AttributeError, OSError, ValueError)
"""Ignores the errors of a standard stream that is ``None``, closed or not writable."""


def _register_exit_hooks() -> None:
    global _finalizer
    atexit.unregister(_finish_at_exit)
    atexit.register(_finish_at_exit)
    if multiprocessing.parent_process() is not None and not (_finalizer and _finalizer.still_active()):
        _finalizer = Finalize(None, _finish_in_child, exitpriority=-100)  # after all others


def _finish_at_exit() -> None:
    """Finish the save in flight; if it failed, print the error and make the exit code 120."""
    global _has_failed
    try:
        finish_latest()
    except BaseException:
        sys.stderr, _has_failed = _FailsAtTheEnd(sys.stderr), True
        raise


def _finish_in_child() -> None:
    """Do the same at the end of a process of ``multiprocessing``, with exit code 1."""
    try:
        finish_latest()
    except BaseException as error:
        with _UNUSABLE_STREAM:
            sys.stderr.write(traceback.format_exc())
        raise SystemExit(1) from error
    if _has_failed and not isinstance(multiprocessing.current_process(), SpawnProcess):
        for stream in (sys.stdout, sys.stderr):
            with _UNUSABLE_STREAM:
                stream.flush()
        os._exit(1)  # in place of Python's own os._exit(0), which would come next


class _FailsAtTheEnd:
    """A stream that Python cannot flush when it has run all exit hooks; see [Note: The exit code of a failed save].

    Args:
        stream: the stream that it replaces, which may be closed or ``None``.
    """

    closed = False  # Python flushes only open streams

    def __init__(self, stream: Any) -> None:
        self._stream = io.StringIO() if stream is None else stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("a checkpoint was not saved")


Write: TypeAlias = Callable[[Rounds, SaveRun, dict[str, Any]], None]
"""A function that writes a state dict."""


def save_in_rounds(group: ProcessGroupRef, folder: Path, last: str, state: dict[str, Any], write: Write) -> Path:
    """Write a state dict into a folder; a collective.

    Args:
        last: name of the file that completes the folder.

    Raises:
        CheckpointError: on all ranks, if it fails.
    """
    with _connected(group, folder, last) as (rounds, run):
        write(rounds, run, state)
    return _path(folder, last)


def save_beside(group: ProcessGroupRef, folder: Path, last: str, staging: Staging, write: Write) -> Saving:
    """Copy a state dict, and write the copy in a thread; otherwise as :func:`save_in_rounds`."""
    global _latest
    with contextlib.ExitStack() as stack:
        rounds, run = stack.enter_context(_connected(group, folder, last))
        try:
            copied, finish_staging = staging.copy()
        except Exception as error:  # such as a lack of memory: the others, which write, learn of it in the next round
            write, copied, finish_staging = _failing(error), {}, lambda: None
        ending = stack.pop_all()

    def write_copy() -> None:
        with ending:
            write(rounds, run, copied)

    _latest = Saving(_path(folder, last), control_of(group), write_copy, finish_staging)
    return _latest


def _failing(error: Exception) -> Write:
    def fail() -> NoReturn:
        raise error

    return lambda rounds, run, state: rounds.run(fail, lambda values: None)


def _path(folder: Path, last: str) -> Path:
    return folder / INDEX if last == INDEX else folder


@contextlib.contextmanager
def _connected(group: ProcessGroupRef, folder: Path, last: str) -> Iterator[tuple[Rounds, SaveRun]]:
    """Begin a save into a folder, and end it, completely or with an error on all ranks."""
    known = _rounds.get(group.process_group)
    is_connected = known is not None and known.is_usable
    with saving_into(group, folder, last, is_connected) as (run, are_connected):
        if known is None or not are_connected:
            known = _rounds[group.process_group] = Rounds(group, f"saving/{run.id}")
        yield known, run


def write_checkpoint(rounds: Rounds, state: dict[str, Any], writer: RunWriter) -> None:
    """Do what ``torch.distributed.checkpoint.save`` does, in rounds."""
    planner, is_first = DefaultSavePlanner(), rounds.rank == 0
    contents: list[Metadata] = []

    def plan() -> Any:
        planner.set_up_planner(state, writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def join_plans(plans: list[Any]) -> Sequence[Any]:
        joined, metadata = planner.create_global_plan(plans)
        contents.append(metadata)
        return writer.prepare_global_plan(joined)

    own = rounds.run(plan, join_plans)
    rounds.run(
        lambda: writer.write_data(planner.finish_plan(own), planner).value(),
        lambda results: writer.finish(contents[0], results),
    )


_rounds: weakref.WeakKeyDictionary[dist.ProcessGroup, Rounds] = weakref.WeakKeyDictionary()
"""The connections of the ranks of each process group. A forked process cannot use those of its parent, nor free them:
gloo would wait for the parent's threads."""
