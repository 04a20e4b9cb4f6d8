"""Old checkpoints are removed, and nothing else: no data behind links, nothing of others, never the newest one."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import save_checkpoint, save_checkpoint_async
from thunder_fsdp_sched.extras.checkpoint import retention
from thunder_fsdp_sched.extras.checkpoint.folder import METADATA

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from saving import small, update


def _complete(folder: Path) -> list[str]:
    """Return the names of the complete checkpoints in a folder, without links, and check that no data file is missing."""
    found = sorted(p.name for p in folder.iterdir() if not p.is_symlink() and (p / METADATA).exists())
    for name in found:
        retention._intact_chunks(folder / name)
    return found


def _point(link: Path, target: str) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


@on_ranks(1)
def test_links_neither_count_nor_lose_what_they_point_to(tmp_path: Path) -> None:
    model, _ = small()
    run, store = tmp_path / "run", tmp_path / "store"
    for step in (1, 2, 3):
        save_checkpoint(model, run / f"step-{step}", keep=2)
        _point(run / "latest", f"step-{step}")
    assert _complete(run) == ["step-2", "step-3"]
    saving = save_checkpoint_async(model, run / "step-4", keep=1)
    _point(run / "latest", "step-4")
    saving.result()
    assert _complete(run) == ["step-4"] and tfs.latest_checkpoint(run) == run / "step-4"
    # A link to a checkpoint of another run, and a run whose folder is itself a link.
    save_checkpoint(model, store / "first")
    (run / "pretrained").symlink_to(store / "first")
    (tmp_path / "current").symlink_to(run)
    save_checkpoint(model, tmp_path / "current" / "step-5", keep=1)
    assert _complete(run) == ["step-5"] and _complete(store) == ["first"]
    (run / "step-6").symlink_to(store / "second")
    (store / "second").mkdir()
    with pytest.raises(tfs.CheckpointError, match=r"keep: .*step-6 is a link"):
        save_checkpoint(model, run / "step-6", keep=1)
    assert _complete(store) == ["first"]


@on_ranks(1)
def test_a_folder_is_the_same_under_another_name(tmp_path: Path) -> None:
    """With ``"."``, only what is beside the working folder is removed, nothing in it."""
    model, optimizer = small()
    run = tmp_path / "run"
    for name in ("step-1", "step-2/kept", "step-2/also"):
        save_checkpoint(model, run / name)
    with _chdir(run / "step-2"):
        save_checkpoint(model, ".", keep=1)
    assert _complete(run) == ["step-2"] and _complete(run / "step-2") == ["also", "kept"]
    # A relative folder is that of the call, whatever the working folder is when the files are written.
    for writer in ("thread", "process"):
        with _chdir(tmp_path):
            saving = save_checkpoint_async(model, f"run/{writer}", optimizer, writer=writer, keep=1)
            whole = tfs.save_safetensors_async(model, f"{writer}-whole")
            update(model, optimizer)
        assert saving.result() == run / writer and _complete(run) == [writer]
        assert whole.result().parent == tmp_path / f"{writer}-whole"
    with _chdir(run):
        save_checkpoint(model, "new", keep=1)
        save_checkpoint(model, "../run/newer", keep=1)
    assert _complete(run) == ["newer"]


@contextlib.contextmanager
def _chdir(folder: Path) -> Any:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@on_ranks(1)
def test_only_complete_checkpoints_of_this_package_are_removed_and_never_the_newest(tmp_path: Path) -> None:
    model, _ = small()
    dcp.save({"model": tfs.get_model_state_dict(model)}, checkpoint_id=tmp_path / "theirs")
    for name in ("old", "newest", "more"):
        save_checkpoint(model, tmp_path / name)
    (tmp_path / "more" / "meta.pt").touch()  # as Fabric's checkpoints have
    os.utime(tmp_path / "newest" / METADATA, (1 << 33, 1 << 33))  # the clock of another host
    with mock.patch.object(logging.Logger, "warning") as warned:
        save_checkpoint(model, tmp_path / "new", keep=1)
    assert _complete(tmp_path) == ["more", "new", "newest", "theirs"]
    for keep in (True, 1.5, "2"):
        with pytest.raises(tfs.CheckpointError, match="keep: expected a number of checkpoints"):
            save_checkpoint(model, tmp_path / "new", keep=keep)
    assert any("theirs" in str(call.args) for call in warned.call_args_list)
    # The new one is damaged before old ones are removed: then nothing is.
    remove = retention.remove_old

    def damage(path: Path, number: int) -> None:
        next(path.glob("*.distcp")).write_bytes(b"")
        remove(path, number)

    with mock.patch("thunder_fsdp_sched.extras.checkpoint.api.remove_old", damage):
        save_checkpoint(model, tmp_path / "damaged", keep=1)
    names = {path.parent.name for path in tmp_path.glob(f"*/{METADATA}")}
    assert names == {"more", "new", "newest", "theirs", "damaged"}


def test_a_checkpoint_that_is_removed_while_a_folder_is_listed_does_not_count(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "kept", no_dist=True)
    listed = [tmp_path / "removed" / METADATA, tmp_path / "kept" / METADATA]
    with mock.patch.object(Path, "glob", return_value=listed):
        assert tfs.latest_checkpoint(tmp_path) == tmp_path / "kept"
