"""A crash at any file operation of a save leaves the old or the new checkpoint whole, and the next save works."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import thunder_fsdp_sched as tfs

import pytest
import torch.distributed as dist
from file_operations import build, record, states
from ranks import Ranks, worker_pool
from saving import INDEX, METADATA, assert_intact, fill, on_first, small

fabric = pytest.importorskip("thunder_fsdp_sched.extras.fabric.checkpoint", exc_type=ImportError)


def _save(model: Any, run: Path, number: int, save: Any = tfs.save_checkpoint, **options: Any) -> None:
    saving = save(model, run / f"step-{number}", extra={"number": number}, **options)
    if save is tfs.save_checkpoint_async:
        saving.result()


def _load(model: Any, run: Path) -> int:
    for file in run.glob(f"*/{METADATA}"):
        assert_intact(file.parent)
    return tfs.load_checkpoint(model, tfs.latest_checkpoint(run), extra={"number": 0})["number"]


def _export(model: Any, run: Path, number: int) -> None:
    tfs.save_safetensors(model, run / f"step-{number}" / "model")


def _import(model: Any, run: Path) -> int:
    folder = max(run.glob(f"*/model/{INDEX}")).parent
    tfs.load_safetensors(model, folder)
    return int(folder.parent.name.removeprefix("step-"))


def _fabric(call: Any, model: Any, run: Path, number: int = 0, **options: Any) -> int:
    state = {"model": model, "number": number}
    call(run / "checkpoint", state, **options)
    return state["number"]


class Row(NamedTuple):
    save: Callable[..., Any]  # saves number 2, and crashes
    others: Callable[..., Any] = _save  # saves number 1 before, and one more than what is found afterwards
    load: Callable[..., int] = _load
    names: int = 2  # how many files and folders are below `result` after the last save, whatever the crash has left
    result: str = "step-{}"
    before: Collection[tuple[str, bytes | None]] = ()  # other files and folders that exist before


_folder, _file = (partial(_fabric, fabric.save, whole=whole, keep=None) for whole in (False, True))
_find = partial(_fabric, fabric.load, strict=True, weights_only=None)
_KILLED = ("step-2", None), ("step-2/.metadata.aaaaaaaaaaaa", None), ("step-2/__0_aaaaaaaaaaaa_0.distcp", b"cut")
ROWS = {
    "save": Row(_save),
    "save beside, retention": Row(partial(_save, save=tfs.save_checkpoint_async, keep=1), partial(_save, keep=1)),
    "save into the folder of a killed run": Row(_save, before=_KILLED),
    "export": Row(_export, _export, _import, 4),
    "fabric, folder over folder": Row(_folder, _folder, _find, 5, "", [("checkpoint/notes", b"a user's")]),
    "fabric, folder over file": Row(_folder, _file, _find, 1, ""),
    "fabric, file over folder": Row(_file, _folder, _find, 4, ""),
    "fabric, file over file": Row(_file, _file, _find, 1, ""),
}


@pytest.fixture(scope="module")
def recorders() -> Iterator[Ranks]:
    """Workers of these tests alone, because audit hooks remain."""
    with worker_pool() as of_size:
        yield of_size(2)


def _record(rank: int, world_size: int, name: str, folder: Path) -> None:
    row, run = ROWS[name], folder / "run"
    row.others(small(1)[0], run, 1)
    on_first(build, row.before, run)
    (model, _), stop = small(2), record(run, folder / "log")
    dist.barrier()
    # A writer process that starts now records as well.
    with mock.patch.dict(os.environ, PYTHONPATH=f"{folder}:{Path(__file__).parents[1]}"):
        row.save(model, run, 2)
    stop()


@pytest.mark.filterwarnings("error::UserWarning")  # of `latest_checkpoint`
@pytest.mark.parametrize("name", ROWS)
def test_a_crash_leaves_the_old_or_the_new(recorders: Ranks, one_rank: None, tmp_path: Path, name: str) -> None:
    row, run, log, found = ROWS[name], tmp_path / "run", tmp_path / "log", set()
    start = f"import file_operations; file_operations.record({str(run)!r}, {str(log)!r})"
    (tmp_path / "sitecustomize.py").write_text(start)
    recorders.run(_record, name, tmp_path)
    model, _ = small()

    def load() -> int:
        fill(model, 0.0)
        number = row.load(model, run)
        assert all((value == number).all() for value in tfs.full_state_dict(model).values()), "a mixture"
        return number

    with mock.patch("os.fsync"):
        for state, (tree, has_returned) in enumerate(states(log).items()):
            build(tree, run := tmp_path / str(state))
            found.add(number := load())
            assert number == 2 or (number == 1 and not has_returned), tree
            fill(model, number + 1)
            row.others(model, run, number + 1)
            names = list((run / row.result.format(number + 1)).rglob("*"))
            assert load() == number + 1 and len(names) == row.names, (tree, names)
    assert found == {1, 2}
