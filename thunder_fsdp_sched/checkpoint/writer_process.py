"""A process that writes a rank's data files from memory that both share, so that the rank's interpreter stays free.

The rank plans and completes the checkpoint. The process runs this file, imports torch and neither this package nor the
user's script, and ends with the rank.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult


class WriterProcess:
    """The process, as its rank sees it.

    Args:
        file: the file descriptor of the shared memory.
        memory: the same memory in this process.
    """

    def __init__(self, file: int, memory: torch.Tensor) -> None:
        self._memory = memory
        command = [sys.executable, __file__, str(file)]
        # No GPU, on which it would use memory.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[file],
            env=environment,
        )

    def write(self, folder: Path, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write the rank's data files.

        Raises:
            RuntimeError: the process was killed.
            Exception: an error of the writer.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        data = {item.index: self._locate(planner.resolve_data(item)) for item in plan.items}
        try:
            pickle.dump((folder, plan, data), self.process.stdin)
            self.process.stdin.flush()
            answer = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError):
            raise RuntimeError(f"the process that writes was killed, exit code {self.process.wait()}") from None
        if isinstance(answer, Exception):
            raise answer
        written: list[WriteResult] = answer
        return written

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


def _serve(file: int) -> None:
    """Write what the rank requests, until it closes the connection or dies."""
    os.nice(10)  # training has the cores first
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts the rank alone
    torch.set_num_threads(1)
    memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything printed goes elsewhere
    while True:
        try:
            folder, plan, data = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            planner: Any = _Data(memory, data)
            answer: Any = FileSystemWriter(folder, per_thread_copy_ahead=0).write_data(plan, planner).value()
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules have common names
    _serve(int(sys.argv[1]))
