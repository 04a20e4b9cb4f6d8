"""A process that writes a rank's data files from shared memory, so that the rank's interpreter stays free.

The rank plans and completes the checkpoint. The process runs this file, and imports torch, but neither this package nor
the user's script.

[Note: The end of the writer process]
Processes that the rank forks, such as the workers of a ``DataLoader``, may hold the connection open after one side has
died, so neither side can rely on it to notice that. Every few seconds the writer checks whether its rank still exists,
and a rank that waits checks whether the writer does. A writer that is no longer needed is idle, and is killed. Forked
processes close their copies of the connection (see [Note: State of the process] in ``process_state``).

The signals that end or interrupt training (Ctrl-C, Slurm's notice before a time limit) often reach all processes of a job.
They are meant for the rank, which may want to finish or to begin a save, so the writer starts with these signals blocked.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

_START = "import runpy, sys; sys.path[:] = sys.argv[4:]; runpy.run_path(sys.argv[1], run_name='__main__')"
"""The program of the process. Before it imports anything, it adopts the rank's ``sys.path``, to find the same torch."""

_INTERVAL = 2.0
"""Seconds between checks whether the other side still exists."""

_PATIENCE = 10.0
"""Seconds within which a writer must end after its connection has."""


class ReportedError(RuntimeError):
    """An error that another process reports; its text begins with the type of the original."""


class WriterProcess:
    """The writer process, as its rank sees it.

    Args:
        file: the file descriptor of the shared memory.
        memory: the same memory in this process.
    """

    def __init__(self, file: int, memory: torch.Tensor) -> None:
        self._memory = memory
        # Not over standard output, because Python may print something while it starts.
        self.connection, theirs = Pipe()
        path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]  # Python ignores others
        with theirs, _blocked_signals():
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, __file__, f"{file},{theirs.fileno()}", f"{os.getpid()}", *path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[file, theirs.fileno()],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # otherwise it would use memory of the GPU
            )

    def write(self, folder: Path, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write the rank's data files.

        Raises:
            RuntimeError: the process was killed.
            ReportedError: an error of the writer.
        """
        data = {item.index: self._locate(planner.resolve_data(item)) for item in plan.items}
        try:
            self.connection.send_bytes(pickle.dumps((folder, plan, data)))
            while not self.connection.poll(_INTERVAL):
                if self.process.poll() is not None:
                    raise EOFError
            written, fault = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_PATIENCE)
            self.process.kill()
            raise RuntimeError(f"the process that writes was killed, exit code {self.process.wait()}") from None
        if fault:
            raise ReportedError(fault)
        result: list[WriteResult] = written
        return result

    def stop(self) -> None:
        """End the process, which is idle; see [Note: The end of the writer process]."""
        self.connection.close()
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """Close the copy of the connection in a process that was forked off the rank."""
        self.connection.close()
        self.process.returncode = 0  # it is the rank's child, not this process's

    def _locate(self, data: Any) -> Any:
        """Return the range of a tensor in the shared memory, its dtype and shape; any other data itself."""
        if isinstance(data, torch.Tensor):
            offset = data.data_ptr() - self._memory.data_ptr()
            if 0 <= offset <= self._memory.nbytes - data.nbytes and data.is_contiguous():
                return offset, data.dtype, data.shape
        return data


def tensor_at(memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Return a tensor in ``memory`` whose storage has no other bytes, which a writer would save or copy."""
    storage = memory.untyped_storage()[offset : offset + shape.numel() * dtype.itemsize]
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


class _Data:
    """The planner that the writer asks for data."""

    def __init__(self, memory: torch.Tensor, data: dict[Any, Any]) -> None:
        self._memory, self._data = memory, data

    def resolve_data(self, item: WriteItem) -> Any:
        data = self._data[item.index]
        return tensor_at(self._memory, *data) if isinstance(data, tuple) else data


def text_of(error: BaseException) -> str:
    """Return the type and message of an error of a writer."""
    if isinstance(error, ReportedError):
        return str(error)
    return f"{type(error).__name__} {error}{hidden_reason(error)}"


def hidden_reason(error: BaseException) -> str:
    """Return the operating system's error in the context of another one, such as a full disk, which ``torch.save`` hides."""
    if isinstance(error, OSError):
        return ""
    while (before := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if isinstance(before, OSError):
            return f" ({before})"
        error = before
    return ""


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block signals in this thread; a process that it starts has them blocked from the beginning."""
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in names})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(file: int, connection: Connection, rank: int) -> None:
    """Serve the rank's requests until it closes the connection or dies."""
    os.nice(10)  # training has the cores first
    torch.set_num_threads(1)
    memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
    while True:
        while not connection.poll(_INTERVAL):
            if os.getppid() != rank:
                return
        try:
            folder, plan, data = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        answer: tuple[Any, str]
        try:
            planner: Any = _Data(memory, data)
            answer = FileSystemWriter(folder, per_thread_copy_ahead=0).write_data(plan, planner).value(), ""
        except Exception as error:
            answer = None, text_of(error)
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _file, _connection = map(int, sys.argv[2].split(","))
    _serve(_file, Connection(_connection), int(sys.argv[3]))
