"""Python commands without a new interpreter: in processes forked off the server of ``ranks``, which has imported everything.

Importing torch and Thunder takes longer than most commands of tests. Further Python processes that a command starts,
such as the workers of torchrun, are forked as well, whether ``subprocess`` or ``multiprocessing`` starts them; but not
those of ``python -c``.

They differ from fresh interpreters in this: modules have been imported already, sets of strings have the same order in all
of them, and at the end only functions of ``atexit`` run. A test that depends on one of these starts an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from ranks import fork_server


def run_python(
    *arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 500.0
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` without stdin, and return its exit code and output.

    Args:
        arguments: a script or ``-m module``, perhaps after ``-u`` or ``-W action``, and its arguments.
        env: additions to the environment.
        timeout: seconds.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed.
    """
    command, outputs = [str(argument) for argument in arguments], (cwd / ".stdout", cwd / ".stderr")
    process = fork_server().Process(target=_first, args=(command, cwd, {**os.environ, **(env or {})}, outputs))
    process.start()
    process.join(timeout)
    finished = process.exitcode is not None
    if not finished:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    stdout, stderr = (path.read_text() for path in outputs)
    for path in outputs:
        path.unlink()
    if not finished:
        raise subprocess.TimeoutExpired(command, timeout, stdout, stderr)
    return subprocess.CompletedProcess(command, process.exitcode, stdout, stderr)


def _first(command: list[str], cwd: Path, environment: dict[str, str], outputs: tuple[Path, Path]) -> None:
    os.setsid()
    os.chdir(cwd)
    for fd, path in enumerate((os.devnull, *outputs)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, fd)
        os.close(opened)
    started, get_context = subprocess.Popen.__init__, multiprocessing.get_context

    def start(self: Any, args: Any, *more: Any, env: Mapping[str, str] | None = None, **options: Any) -> None:
        if not isinstance(args, str) and args[0] == sys.executable and args[1] != "-c":
            options["preexec_fn"] = functools.partial(_instead_of_exec, list(args[1:]), env)
        started(self, args, *more, env=env, **options)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)  # type: ignore
    os._exit(_run(command, environment))


def _instead_of_exec(command: list[str], environment: Mapping[str, str] | None) -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # as exec does; subprocess waits until its own pipe is closed
    os._exit(_run(command, environment or dict(os.environ)))


def _run(command: list[str], environment: Mapping[str, str]) -> int:
    """Run ``python *command`` in this process, and return the exit code."""
    os.environ.clear()
    os.environ.update(environment)
    if threads := environment.get("OMP_NUM_THREADS"):  # OpenMP read it when it was loaded
        torch.set_num_threads(int(threads))
    # New ones, because the buffered output of the old ones is the parent's.
    sys.stdin, sys.stdout, sys.stderr = (
        open(fd, mode, buffering=1, closefd=False)  # noqa: SIM115
        for fd, mode in enumerate(("r", "w", "w"))
    )
    atexit._clear()
    warnings.resetwarnings()
    while command[0] in ("-u", "-W"):
        if command.pop(0) == "-W":
            warnings.simplefilter(command.pop(0))  # type: ignore[arg-type]
    code: Any = None
    try:
        _program(command)()
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def _program(command: Sequence[str]) -> Callable[[], Any]:
    """Return the function that runs the program, after setting ``sys.argv`` and ``sys.path`` for it."""
    if command[0].startswith("-m"):
        name, *arguments = [command[0][2:], *command[1:]] if len(command[0]) > 2 else command[1:]
        sys.path.insert(0, os.getcwd())
        program = functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    else:
        name, *arguments = command
        sys.path.insert(0, str(Path(name).resolve().parent))
        program = functools.partial(runpy.run_path, name, run_name="__main__")
    sys.argv = [name, *arguments]
    return program
