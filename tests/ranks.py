"""Worker processes for tests on several ranks, started once and reused by all tests.

A test under :func:`on_ranks` runs on every rank. One that needs to do more in the test process takes the fixture ``ranks``
(or ``workers``) and calls ``ranks.run(fn, *args)``. This calls ``fn(rank, world_size, *args)`` in each
worker, in a process group, and returns the results in the order of ranks. ``fn`` must be a function at the top level of a
module. If it fails on a rank, the test fails with that rank's traceback, and all workers are replaced, so that the next
test starts with undamaged ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import itertools
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from device import BACKEND, IS_CUDA, use_device
from device_thread import backward_on
from internals import joint_control

_GRACE = 5.0  # seconds that the other ranks have to report after one has failed
_TIMEOUT_OF_WORLD = timedelta(minutes=5)
_TIMEOUT = float(os.environ.get("RANKS_TIMEOUT", "240"))  # seconds for one function; on an idle machine it takes a few


def fork_server() -> Any:
    """Return the context that forks processes off a server, the same for all tests, which has imported ``preloaded``.

    Importing Thunder looks at the GPUs, after which no forked process can use them: with a GPU, processes are spawned.
    """
    if IS_CUDA:
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    # The server finds modules by PYTHONPATH, not by sys.path, and ignores those that it does not find.
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path)):
        ensure_running()
    return context


class RankError(AssertionError):
    """An error that says that a function failed, or did not return, on some rank."""


class Ranks:
    """A process group of ``world_size`` workers, started at the first :meth:`run`.

    Args:
        world_size: number of workers.
        has_group: whether the workers have a process group; otherwise each function makes its own.
    """

    def __init__(self, world_size: int, *, has_group: bool = True) -> None:
        self.world_size, self._has_group = world_size, has_group
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._starts = itertools.count()
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = _TIMEOUT, **kwargs: Any) -> list[Any]:
        """Call ``fn(rank, world_size, *args, **kwargs)`` on every rank and return the results in the order of ranks.

        Args:
            timeout: seconds after which ranks that have not returned count as hanging.

        Raises:
            RankError: a rank failed or hangs. It has the tracebacks of failed ranks and the stacks of hanging ones.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # the worker has died, which is reported below
                connection.send_bytes(pickle.dumps((fn, args, kwargs)))
        results, failures = self._collect(timeout)
        pending = set(range(self.world_size)) - results.keys() - failures.keys()
        if pending or failures:
            reports = [f"--- rank {rank} failed\n{failure}" for rank, failure in failures.items()]
            reports += [f"--- rank {rank} did not return\n{self._stacks(rank)}" for rank in sorted(pending)]
            self._kill()
            title = f"{fn.__name__} failed" if failures else f"{fn.__name__} hung: no answer within {timeout:g} s"
            raise RankError("\n".join([f"{title} on {self.world_size} ranks", *reports]))
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Stop the workers. They end by themselves, so that a measurement of coverage is written."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(_GRACE)
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        context = fork_server()  # importing torch and Thunder takes longer than most tests
        store = self._folder / f"store-{next(self._starts)}"
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(rank, self.world_size, store if self._has_group else None, self._stack_file(rank), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}  # in order of arrival: the first is most likely the cause
        pending = dict(zip(self._connections, range(self.world_size), strict=True))
        deadline = time.monotonic() + timeout
        while pending and (ready := wait(list(pending), timeout=max(deadline - time.monotonic(), 0))):
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(_GRACE)
                    succeeded, value = False, f"the process died, exit code {self._processes[rank].exitcode}"
                (results if succeeded else failures)[rank] = value
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return results, failures

    def _stack_file(self, rank: int) -> Path:
        return self._folder / f"stacks-{rank}"

    def _stacks(self, rank: int) -> str:
        self._processes[rank].join(0)
        if self._processes[rank].exitcode is None:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)
        file = self._stack_file(rank)
        return file.read_text() if file.exists() else "(not even started)"

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


@contextlib.contextmanager
def worker_pool(*, has_group: bool = True) -> Iterator[Callable[[int], Ranks]]:
    """Workers by their number, which end with the context; see :class:`Ranks`."""
    started: dict[int, Ranks] = {}

    def of_size(world_size: int) -> Ranks:
        if world_size not in started:
            started[world_size] = Ranks(world_size, has_group=has_group)
        return started[world_size]

    yield of_size
    for of_number in started.values():
        of_number.close()


@dataclass(frozen=True)
class _OnRank:
    """The function under :func:`on_ranks`, found by name: the name in its module is the test."""

    module: str
    __name__: str

    def __call__(self, rank: int, world_size: int, **arguments: Any) -> Any:
        function = getattr(importlib.import_module(self.module), self.__name__).on_rank
        own = {"rank": rank, "world_size": world_size}
        taken = inspect.signature(function).parameters
        return function(**{name: value for name, value in own.items() if name in taken}, **arguments)


def on_ranks(count: int | Callable[..., int] = 2, *, timeout: float = _TIMEOUT) -> Callable[..., Callable[..., None]]:
    """Turn a function into a test that runs on the session's worker ranks.

    The function may take ``rank`` and ``world_size``; its other arguments are parameters and fixtures of the test, whose
    values are sent to the ranks. Its result is ignored.

    Args:
        count: the number of ranks, or a function of the other arguments that returns it.
        timeout: see :meth:`Ranks.run`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(request: Any, **arguments: Any) -> None:
            size = count(**arguments) if callable(count) else count
            on_rank = _OnRank(function.__module__, function.__name__)
            request.getfixturevalue("workers")(size).run(on_rank, timeout=timeout, **arguments)

        others = [p for name, p in inspect.signature(function).parameters.items() if name not in ("rank", "world_size")]
        request = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([request, *others])  # type: ignore[attr-defined]
        test.on_rank = function  # type: ignore[attr-defined]
        return test

    return decorate


@contextlib.contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """Set the environment that torchrun gives its processes, for libraries that look for it."""
    environment = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "localhost", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    with mock.patch.dict(os.environ, {name: str(value) for name, value in environment.items()}):
        yield


def _destroy_groups() -> None:
    """Destroy all process groups but the default one and its control channel, which nearly all functions use.

    A thread of each gloo group wakes up a hundred times a second. Without this, idle workers take a quarter of a core.
    """
    of_world = tuple(range(dist.get_world_size())), _TIMEOUT_OF_WORLD
    control = joint_control._channels.get(of_world)
    usable = control is not None and control.is_open and control.pending is None
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and not (usable and group is control.group.process_group):
            if IS_CUDA:  # destroying it would wait for collectives that other ranks have not issued, after an error
                with contextlib.suppress(RuntimeError):  # it has no backend for GPUs
                    group._get_backend(torch.device("cuda")).abort()
            dist.destroy_process_group(group)


def _work(rank: int, world_size: int, store: Path | None, stacks: Path, connection: Connection) -> None:
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        torch.set_num_threads(1)
        use_device(rank)
        if store is not None:
            dist.init_process_group(
                BACKEND, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=_TIMEOUT_OF_WORLD
            )
        while True:
            try:
                job = connection.recv_bytes()
            except EOFError:  # the test process is gone
                return
            try:
                fn, args, kwargs = pickle.loads(job)
                torch.manual_seed(0)
                with backward_on("alternating"):
                    report = pickle.dumps((True, fn(rank, world_size, *args, **kwargs)))
                if store is not None:
                    dist.barrier()  # no rank continues while another is still in this function
                    _destroy_groups()
                torch.set_default_dtype(torch.float32)
                torch.set_grad_enabled(True)
            except BaseException:
                connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
                return  # exiting also fails the collectives in which other ranks wait for this one
            connection.send_bytes(report)
