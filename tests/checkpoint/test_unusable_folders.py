"""Folders that one rank cannot use raise an error on every rank, which names the rank and the folder."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs

import pytest
import torch
import torch.distributed as dist
from coded import coded, says
from ranks import on_ranks
from saving import on_first, refused, small, small_files


@contextlib.contextmanager
def _deleted_working_folder(folder: Path) -> Iterator[None]:
    before = os.open(".", os.O_RDONLY)
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def _save(folder: Any, model: Any) -> Any:
    return tfs.save_checkpoint(model, folder)


def _save_beside(folder: Any, model: Any) -> Any:
    return tfs.save_checkpoint_async(model, folder).result()


def _load(folder: Any, model: Any) -> Any:
    return tfs.load_checkpoint(model, folder)


def _save_whole(folder: Any, model: Any) -> Any:
    return tfs.save_safetensors(model, folder)


def _load_whole(folder: Any, model: Any) -> Any:
    return tfs.load_safetensors(model, folder)


CALLS: list[Callable[[Any, Any], Any]] = [_save, _save_beside, _load, _save_whole, _load_whole]
UNUSABLE = dict.fromkeys(CALLS, coded("checkpoint.path-not-usable"))
# Rank 0 does not find what it would load either, and the error has the code of the first rank that fails.
UNUSABLE[_load_whole] = coded("checkpoint.source-without-safetensors")


@on_ranks(2)
def test_a_folder_that_one_rank_cannot_use_is_refused_on_all(rank: int, tmp_path: Path) -> None:
    model, optimizer = small()
    for number, call in enumerate(CALLS):
        folder = tmp_path / str(number)
        unusable = UNUSABLE[call].naming("(on ranks [1])")
        refused(unusable.naming(": None "), model, call, None if rank else folder, model)
        with _deleted_working_folder(tmp_path / f"deleted-{rank}") if rank else contextlib.nullcontext():
            relative = os.path.relpath(folder) if rank == 0 else "relative"
            refused(unusable.naming("'relative'"), model, call, relative, model)
    for save in (_save, _save_beside, _save_whole):
        expected = coded("checkpoint.not-saved", "the folder that the first rank saves into", "(on ranks [1])")
        refused(expected, model, save, tmp_path / f"of-{rank}", model)
    on_first((tmp_path / "file").write_text, "")
    for culprit in range(2):
        folder = tmp_path / ("file" if rank == culprit else "folder") / "step-1"
        for call in CALLS:
            # Other calls and ranks have other reasons.
            expected = says(re.escape(str(tmp_path / "file" / "step-1")))
            assert f"(on ranks [{culprit}])" in refused(expected, model, call, folder, model)
    for chosen, shown in ((5, "5 of type int"), ([5], "5 of type int"), (None, "None of type NoneType")):
        for call in (tfs.save_checkpoint, tfs.load_checkpoint):
            expected = coded("optimizer.not-an-optimizer", f"{shown} (on ranks [1])")
            refused(expected, model, call, model, tmp_path / "new", chosen if rank else optimizer)
    assert tfs.latest_checkpoint(tmp_path) is None
    dist.barrier()


@on_ranks(2)
def test_a_link_to_nothing_is_refused_with_its_target(rank: int, tmp_path: Path) -> None:
    model, _ = small()
    on_first((tmp_path / "latest").symlink_to, "step-3")
    for folder in (tmp_path / "latest", tmp_path / "latest" / "below"):
        for call in CALLS:
            refused(coded("checkpoint.path-is-broken-link", tmp_path / "latest", "step-3"), model, call, folder, model)
    on_first((tmp_path / "step-3").mkdir)
    _save(tmp_path / "latest", model)
    _load(tmp_path / "step-3", model)


fabric = pytest.importorskip("thunder_fsdp_sched.extras.fabric.checkpoint", exc_type=ImportError)


@on_ranks(2)
def test_fabric_saves_where_the_first_rank_says_and_raises_on_all(rank: int, tmp_path: Path) -> None:
    save = fabric.save

    class Broken:
        def state_dict(self) -> dict[str, Any]:
            if rank:
                raise ValueError("this loader has no state")
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    model, _ = small()
    for whole in (False, True):
        path = tmp_path / f"whole-{whole}"
        refused(
            coded("checkpoint.failed-on-ranks", "this loader has no state (on ranks [1])"),
            model,
            save,
            path,
            {"m": model, "l": Broken()},
            whole=whole,
            keep=None,
        )
        with _deleted_working_folder(tmp_path / f"gone-{whole}") if rank else contextlib.nullcontext():
            relative = Path(os.path.relpath(path)) if rank == 0 else Path("relative")
            save(relative, {"m": model}, whole=whole, keep=None)
        assert path.exists()
        unpicklable = {"m": model, "step": 1, "rule": lambda step: step}
        expected = coded("fabric.entry-not-picklable", "state['rule']", "<lambda>", "(on ranks [0])")
        refused(expected, model, save, path, unpicklable, whole=whole, keep=None)


@on_ranks(1)
def test_a_full_disk_is_named_when_values_of_fabric_are_written(tmp_path: Path) -> None:
    """``torch.save`` hides the reason of a tensor that is larger than the buffer of the file."""
    model, _ = small()
    state = {"m": model, "a": torch.ones(100_000)}
    with small_files(os.getpid()):
        refused(says("File too large"), model, fabric.save, tmp_path / "file", state, whole=True, keep=None)
