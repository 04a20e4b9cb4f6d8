"""Old checkpoints are removed and nothing else. Folders that one rank cannot use are an error on every rank."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import save_checkpoint, save_checkpoint_async
from thunder_fsdp_sched.extras.checkpoint.storage import RunWriter

import pytest
import thunder
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from coded import coded, says
from ranks import on_ranks
from saving import METADATA, assert_intact, on_first, refused, small, small_files, update


def _complete(folder: Path) -> list[str]:
    """Return the names of the complete checkpoints in a folder, without links, and check that no data file is missing."""
    found = sorted(p.name for p in folder.iterdir() if not p.is_symlink() and (p / METADATA).exists())
    for name in found:
        assert_intact(folder / name)
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
    with pytest.raises(tfs.CheckpointError, check=coded("checkpoint.keep-beside-link", "step-6")):
        save_checkpoint(model, run / "step-6", keep=1)
    assert _complete(store) == ["first"]


@on_ranks(1)
def test_a_folder_is_the_same_under_another_name(tmp_path: Path) -> None:
    """With ``"."``, only what is beside the working folder is removed, nothing in it."""
    model, optimizer = small()
    run = tmp_path / "run"
    for name in ("step-1", "step-2/step-3", "step-2/step-4"):
        save_checkpoint(model, run / name)
    with _chdir(run / "step-2"):
        save_checkpoint(model, ".", keep=1)
    assert _complete(run) == ["step-2"] and _complete(run / "step-2") == ["step-3", "step-4"]
    # A relative folder is that of the call, whatever the working folder is when the files are written.
    for step, writer in ((5, "thread"), (6, "process")):
        with _chdir(tmp_path):
            saving = save_checkpoint_async(model, f"run/step-{step}", optimizer, writer=writer, keep=1)
            whole = tfs.save_safetensors_async(model, f"{writer}-whole")
            update(model, optimizer)
        assert saving.result() == run / f"step-{step}" and _complete(run) == [f"step-{step}"]
        assert whole.result().parent == tmp_path / f"{writer}-whole"
    with _chdir(run):
        save_checkpoint(model, "step-7", keep=1)
        save_checkpoint(model, "../run/step-8", keep=1)
    assert _complete(run) == ["step-8"]


@contextlib.contextmanager
def _chdir(folder: Path) -> Any:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@on_ranks(1)
def test_only_complete_checkpoints_of_this_package_are_removed(tmp_path: Path) -> None:
    model, _ = small()
    dcp.save({"model": tfs.get_model_state_dict(model)}, checkpoint_id=tmp_path / "1")
    for step in (2, 3, 4):
        save_checkpoint(model, tmp_path / f"{step}")
    (tmp_path / "2" / "meta.pt").touch()  # as Fabric's checkpoints have
    (tmp_path / "4" / "notes").touch()
    earlier = (tmp_path / "3" / METADATA).read_bytes()
    (tmp_path / "3" / METADATA).write_bytes(_without_stamp(earlier))
    with mock.patch.object(logging.Logger, "warning") as warned:
        save_checkpoint(model, tmp_path / "5", keep=1)
    assert _complete(tmp_path) == ["1", "2", "3", "5"]
    assert [call.args[1].name for call in warned.call_args_list] == ["2", "3", "1"]
    assert [file.name for file in (tmp_path / "4").iterdir()] == ["notes"]
    with mock.patch.object(RunWriter, "finish", side_effect=OSError("full")), pytest.raises(tfs.CheckpointError):
        save_checkpoint_async(model, tmp_path / "6", keep=1).result()
    assert _complete(tmp_path) == ["1", "2", "3", "5"]
    for keep, expected in (
        *((wrong, coded("checkpoint.keep-not-a-number")) for wrong in (True, 1.5, "2")),
        (0, coded("checkpoint.keep-below-one")),
        (1, coded("checkpoint.keep-of-unnumbered-name", "'new'")),
    ):
        with pytest.raises(tfs.CheckpointError, check=expected):
            save_checkpoint(model, tmp_path / "new", keep=keep)
    # The new one is damaged before old ones are removed: then nothing is.
    complete = os.link

    def damage(source: Path, target: Path) -> None:
        complete(source, target)
        next(target.parent.glob("*.distcp")).write_bytes(b"")

    with mock.patch("os.link", damage):
        save_checkpoint(model, tmp_path / "6", keep=1)
    assert {path.parent.name for path in tmp_path.glob(f"*/{METADATA}")} == {"1", "2", "3", "5", "6"}
    save_checkpoint(model, tmp_path / "7", keep=1)  # the damaged one is not removed
    assert {path.parent.name for path in tmp_path.glob(f"*/{METADATA}")} == {"1", "2", "3", "6", "7"}


def _without_stamp(contents: bytes) -> bytes:
    """Return a list of contents as earlier versions wrote it: the pickle, and its checksum."""
    data = contents[: contents.index(b"\nthunder_fsdp_sched saved ")]
    return data + b"\nthunder_fsdp_sched crc32 %08x\n" % zlib.crc32(data)


def _copy(source: Path, target: Path) -> None:
    """Copy a folder of checkpoints in alphabetical order: the files of ``step-900`` are the newest then."""
    for age, path in enumerate(sorted(source.iterdir())):
        shutil.copytree(path, target / path.name)
        os.utime(target / path.name / METADATA, (1000 + age, 1000 + age))


@on_ranks(1)
def test_copies_clocks_and_other_names_change_neither_the_latest_nor_what_is_removed(tmp_path: Path) -> None:
    model, _ = small()
    run, copy = tmp_path / "run", tmp_path / "copy"
    for name in ("pretrained", "run-b-step-1", "step-900", "step-1000", "best", "step-1100"):
        save_checkpoint(model, run / name)
    _copy(run, copy)
    assert tfs.latest_checkpoint(copy) == copy / "step-1100"
    _copy(run, shrinking := tmp_path / "shrinking")
    for name in ("step-1100", "best", "step-1000", "step-900", "run-b-step-1", "pretrained"):
        assert tfs.latest_checkpoint(shrinking) == shrinking / name
        shutil.rmtree(shrinking / name)
    for clock, step in ((1, 1200), (1 << 62, 1300), (2, 50)):  # it goes back, far ahead, and back again
        with mock.patch("time.time_ns", return_value=clock):
            save_checkpoint(model, copy / f"step-{step}", keep=2)
        assert tfs.latest_checkpoint(copy) == copy / f"step-{step}"
    assert _complete(copy) == ["best", "pretrained", "run-b-step-1", "step-1300", "step-50"]
    # Another folder, and the same name again.
    with mock.patch("time.time_ns", return_value=5):
        for name in ("a", "b", "a"):
            shutil.rmtree(tmp_path / "same" / name, ignore_errors=True)
            save_checkpoint(model, tmp_path / "same" / name)
    assert tfs.latest_checkpoint(tmp_path / "same") == tmp_path / "same" / "a"


def test_checkpoints_without_an_order_are_older_and_ordered_by_their_numbers(one_rank: None, tmp_path: Path) -> None:
    def save(name: str, time: int) -> None:
        dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / name, no_dist=True)
        os.utime(tmp_path / name / METADATA, (time, time))

    for name, time in (("step-1000", 10), ("step-900", 11), ("best", 9), ("step-1100-bad", 12)):
        save(name, time)
    (tmp_path / "latest").symlink_to("step-1000")
    (tmp_path / "step-1100-bad" / METADATA).write_bytes(b"cut")
    with pytest.warns(UserWarning, match="step-1100-bad"):
        assert tfs.latest_checkpoint(tmp_path) == tmp_path / "step-1000"
    model = thunder.jit(torch.nn.Linear(2, 2), transforms=[tfs.fsdp()])
    save_checkpoint(model, tmp_path / "step-300", keep=1)
    with pytest.warns(UserWarning, match="step-1100-bad"):  # it may be the newest
        assert tfs.latest_checkpoint(tmp_path) == tmp_path / "step-300"
    shutil.rmtree(tmp_path / "step-1100-bad")
    save("step-400", 1 << 33)
    with pytest.warns(UserWarning, match="step-300.*step-400"):
        assert tfs.latest_checkpoint(tmp_path) == tmp_path / "step-300"
    with pytest.raises(ValueError, check=coded("checkpoint.parent-is-checkpoint", "step-300")):
        tfs.latest_checkpoint(tmp_path / "step-300")
    with pytest.raises(ValueError, check=coded("checkpoint.parent-is-file", METADATA)):
        tfs.latest_checkpoint(tmp_path / "step-300" / METADATA)
    assert tfs.latest_checkpoint(tmp_path / "nothing") is None


def test_a_checkpoint_that_is_removed_while_a_folder_is_listed_does_not_count(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "kept", no_dist=True)
    listed = [tmp_path / "removed" / METADATA, tmp_path / "kept" / METADATA]
    with mock.patch.object(Path, "glob", return_value=listed):
        assert tfs.latest_checkpoint(tmp_path) == tmp_path / "kept"


#
# Folders that one rank cannot use
#


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


SAVES: dict[str, Callable[[Any, Any], Any]] = {
    "save": lambda folder, model: tfs.save_checkpoint(model, folder),
    "save beside": lambda folder, model: tfs.save_checkpoint_async(model, folder).result(),
    "save whole": lambda folder, model: tfs.save_safetensors(model, folder),
}
CALLS: dict[str, Callable[[Any, Any], Any]] = SAVES | {
    "load": lambda folder, model: tfs.load_checkpoint(model, folder),
    "load whole": lambda folder, model: tfs.load_safetensors(model, folder),
}
UNUSABLE = dict.fromkeys(CALLS, coded("checkpoint.path-not-usable"))
# Rank 0 does not find what it would load either, and the error has the code of the first rank that fails.
UNUSABLE["load whole"] = coded("checkpoint.source-without-safetensors")


@on_ranks(2)
def test_a_folder_that_one_rank_cannot_use_is_refused_on_all(rank: int, tmp_path: Path) -> None:
    model, optimizer = small()
    for name, call in CALLS.items():
        folder = tmp_path / name
        unusable = UNUSABLE[name].naming("(on ranks [1])")
        refused(unusable.naming(": None "), model, call, None if rank else folder, model)
        with _deleted_working_folder(tmp_path / f"deleted-{rank}") if rank else contextlib.nullcontext():
            relative = os.path.relpath(folder) if rank == 0 else "relative"
            refused(unusable.naming("'relative'"), model, call, relative, model)
    for save in SAVES.values():
        expected = coded("checkpoint.not-saved", "the folder that the first rank saves into", "(on ranks [1])")
        refused(expected, model, save, tmp_path / f"of-{rank}", model)
    on_first((tmp_path / "file").write_text, "")
    for culprit in range(2):
        folder = tmp_path / ("file" if rank == culprit else "folder") / "step-1"
        for call in CALLS.values():
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
        for call in CALLS.values():
            refused(coded("checkpoint.path-is-broken-link", tmp_path / "latest", "step-3"), model, call, folder, model)
    on_first((tmp_path / "step-3").mkdir)
    tfs.save_checkpoint(model, tmp_path / "latest")
    tfs.load_checkpoint(model, tmp_path / "step-3")


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
