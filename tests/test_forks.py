"""Process-wide state: forked processes share none with their parent, whose work goes on, and changes are undone."""

from __future__ import annotations

import ast
import atexit
import contextlib
import logging
import os
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.extras.checkpoint.storage import RunWriter
from thunder_fsdp_sched.planning import compile_as_rank
from thunder_fsdp_sched.process_state import Reentrant

import pytest
import torch
import torch.distributed as dist
from coded import coded
from forked import run_python
from internals import process_groups
from models import Stack
from ranks import on_ranks
from saving import contents, small

PACKAGE = Path(tfs.__file__).parent

_SCRIPT = """
import sys, threading
from pathlib import Path
import thunder_fsdp_sched as tfs
import thunder, torch, torch.distributed as dist
import torch.multiprocessing as mp

WRITER, folder = sys.argv[1], Path(sys.argv[2])

def make():
    torch.manual_seed(0)
    return thunder.jit(torch.nn.Linear(64, 300), transforms=[tfs.fsdp()])

def init(name, rank, size):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=size)
"""


def _run(script: str, writer: str, folder: Path) -> Any:
    (folder / "script.py").write_text(_SCRIPT + script)
    return run_python("script.py", writer, folder, cwd=folder, env={"OMP_NUM_THREADS": "1"})


_RANKS = """
def rank_main(rank):
    init("store2", rank, 2)
    model = make()
    expected = tfs.full_state_dict(model)["weight"].clone()
    tfs.save_checkpoint_async(model, folder / "second", writer=WRITER).result()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    tfs.load_checkpoint(model, folder / "second")
    assert torch.equal(tfs.full_state_dict(model)["weight"], expected)
    dist.destroy_process_group()

if __name__ == "__main__":
    init("store1", 0, 1)
    tfs.save_checkpoint_async(make(), folder / "first", writer=WRITER).result()
    dist.destroy_process_group()
    mp.start_processes(rank_main, nprocs=2, start_method="fork")
    init("store3", 0, 1)
    tfs.save_checkpoint_async(make(), folder / "third", writer=WRITER).result()
    dist.destroy_process_group()
"""


# The next test forks beside a writer process.
@pytest.mark.parametrize("writer", ["thread", pytest.param("process", marks=pytest.mark.long)])
def test_ranks_forked_by_a_process_that_has_saved_save_what_they_hold(tmp_path: Path, writer: str) -> None:
    result = _run(_RANKS, writer, tmp_path)
    assert result.returncode == 0, result.stderr


_WORKERS = """
init("store", 0, 1)
model = make()
optimizer = torch.optim.AdamW(model.parameters())
tfs.save_checkpoint_async(model, folder / "0", optimizer).result()  # without state of the optimizer
loader = torch.utils.data.DataLoader([torch.ones(64)] * 2, 2, num_workers=1, multiprocessing_context="fork")
for x in loader:
    model(x).sum().backward()
    optimizer.step()
    tfs.save_checkpoint_async(model, folder / "1", optimizer).result()  # needs more memory
tfs.load_checkpoint(model, folder / "1", optimizer)
dist.destroy_process_group()
"""


def test_a_save_needs_no_end_of_the_connection_that_forked_workers_of_a_data_loader_hold(tmp_path: Path) -> None:
    result = _run(_WORKERS, "process", tmp_path)
    assert result.returncode == 0, result.stderr


_FAILS = """
from thunder_fsdp_sched.extras.checkpoint.storage import RunWriter

def fail(*args):
    raise OSError("No space left on device")

def rank_main(case):
    init(f"store-{case}", 0, 1)
    model = make()
    tfs.save_checkpoint_async(model, folder / f"first-{case}", writer=WRITER).result()
    if case != "works":
        RunWriter.write_data = fail
    if case == "closed":
        sys.stderr.close()
    if case == "none":
        sys.stderr = None
    tfs.save_checkpoint_async(model, folder / f"last-{case}", writer=WRITER)
    dist.destroy_process_group()

for case in ("works", "fails", "closed", "none"):
    process = mp.get_context("fork").Process(target=rank_main, args=(case,))
    process.start()
    process.join()
    print(process.exitcode)
"""


def test_a_process_of_multiprocessing_whose_last_save_failed_has_another_exit_code(tmp_path: Path) -> None:
    """Also if its standard error is closed or ``None``."""
    result = _run(_FAILS, "thread", tmp_path)
    assert result.stdout.split() == ["0", "1", "1", "1"], (result.stdout, result.stderr)
    assert result.stderr.count("Error: fsdp: the checkpoint") == 1, result.stderr


def _in_fork(check: Callable[[], Any]) -> None:
    """Run a function in a process that is forked off this one."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_process_registers_the_exit_hook_of_groups_again() -> None:
    process_groups._register_exit_hook()

    def check() -> None:
        inherited = atexit._ncallbacks()
        for _ in range(2):
            process_groups._register_exit_hook()
        assert atexit._ncallbacks() == inherited + 1

    _in_fork(check)


@on_ranks(1)
def test_a_forked_process_neither_ends_a_save_nor_uses_the_groups_of_its_parent(tmp_path: Path) -> None:
    model, optimizer = small()
    before = contents(model, optimizer)
    write_data = RunWriter.write_data

    has_returned = threading.Event()

    def fork_and_write(writer: Any, *args: Any) -> Any:
        has_returned.wait()

        def check() -> None:
            writer._run.clean_up()  # as at the end of the generator that runs it
            for call in (saving.done, saving.result, saving.staged):
                with pytest.raises(RuntimeError, check=coded("environment.save-of-parent-process")):
                    call()
            assert tfs.latest_checkpoint(tmp_path) is None, "it does not wait for the save"
            with pytest.raises(
                RuntimeError, check=coded("step.collective-failed", "was created before this process was forked")
            ):
                model(torch.ones(2, 4))

        _in_fork(check)
        return write_data(writer, *args)

    with mock.patch.object(RunWriter, "write_data", fork_and_write):
        saving = tfs.save_checkpoint_async(model, tmp_path / "0", optimizer)
        has_returned.set()
        saving.result()
    _in_fork(lambda: None)
    tfs.save_checkpoint_async(model, tmp_path / "1", optimizer).result()
    for name in ("0", "1"):
        tfs.load_checkpoint(model, tmp_path / name, optimizer)
        assert str(contents(model, optimizer)) == str(before)
    assert dist.is_initialized()


def _mutable_globals(path: Path) -> set[str]:
    """Return the names at the top level of a module that functions assign, or that hold a mutable container or counter.

    Names in capitals are constants and registries.
    """
    tree = ast.parse(path.read_text())
    assigned = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        makes = re.search(r"(?i)Dictionary|WeakSet|\bdict$|\blist$|\bset$|defaultdict|count$|deque|Lock|memory", called)
        is_empty = isinstance(value, (ast.Dict, ast.List)) and not ast.unparse(value).strip("{}[]")
        if makes or is_empty:
            assigned |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in assigned if not name.isupper()}


_CHANGES = re.compile(
    r"atexit\.register|at_fork\(|Finalize\(|\bThread\(|Popen\(|^register_optimizer_step|^register_executor|set_threshold\(|"
    r"setswitchinterval\(|gc\.disable\(|setprofile\(|"
    r"environ\[.*\] = |\bsys\.\w+(, \w+)* = |sys\.path\.|setattr\(torch|Function\.apply = |_supported_types|"
    r"register_general_jit_lookaside\(|filterwarnings\(|simplefilter\(|safe_globals\(|\.disabled = ",
    re.MULTILINE,
)
"""Patterns of code that changes the whole process: hooks, threads, processes, tables, attributes of classes."""


def test_the_table_of_process_wide_state_is_complete() -> None:
    table = re.findall(
        r"(?m)^\| (`.*?`) \| (.*?) \|", ast.get_docstring(ast.parse((PACKAGE / "process_state.py").read_text())) or ""
    )
    rows = [(module, names) for modules, names in table for module in re.findall(r"`(.*?)`", modules)]
    listed = {(module, name) for module, names in rows for name in re.findall(r"`(\w+)`", names) if name != "foreach"}
    changing = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if _CHANGES.search(path.read_text())
    }
    assert len(changing) > 10
    assert changing - {module for module, _ in rows} == {"process_state"}
    found = {
        (".".join(path.relative_to(PACKAGE).with_suffix("").parts), name)
        for path in PACKAGE.rglob("*.py")
        for name in _mutable_globals(path)
    }
    assert found - listed == set()
    for module, name in listed:
        source = (PACKAGE / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"(?m)^(class |def )?{name}\b", source), (module, name)


def _state() -> Any:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    return list(warnings.filters), logger.disabled, set(torch.serialization.get_safe_globals())


@contextlib.contextmanager
def _changed_state() -> Iterator[None]:
    with warnings.catch_warnings(), torch.serialization.safe_globals([Path]):
        warnings.simplefilter("ignore")
        yield


def test_the_last_to_leave_restores_the_state() -> None:
    changed = Reentrant(_changed_state)
    before = _state()
    with ThreadPoolExecutor(1) as other:
        changed.__enter__()
        within = _state()
        assert within != before
        other.submit(changed.__enter__).result()
        changed.__exit__()
        assert _state() == within  # the other one is still inside
        other.submit(changed.__exit__).result()
    assert _state() == before
    with changed, changed:
        assert _state() == within
    assert _state() == before
    changed.__enter__()
    changed._reset()  # as in a process that is forked off meanwhile
    assert _state() == before


def test_a_compilation_leaves_the_state_as_it_was() -> None:
    before = _state()
    compile_as_rank(lambda: (Stack(1), (torch.ones(2, 4),)), fsdp(), rank=0, world_size=2)
    assert _state() == before
