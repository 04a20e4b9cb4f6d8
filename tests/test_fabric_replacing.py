"""A process that is killed at any operation on files while it replaces a checkpoint of Fabric leaves one that loads."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("thunder_fsdp_sched.extras.fabric", exc_type=ImportError)

from thunder_fsdp_sched.extras.checkpoint.folder import METADATA
from thunder_fsdp_sched.extras.checkpoint.storage import CheckedReader, check_lengths, read_metadata
from thunder_fsdp_sched.extras.checkpoint.writer_process import text_of
from thunder_fsdp_sched.extras.fabric import checkpoint
from thunder_fsdp_sched.extras.fabric.checkpoint import OTHERS, clean_up, find, new_beside, others_in, replace

import torch
import torch.distributed.checkpoint as dcp

_EVENTS = (
    "open",
    "os.mkdir",
    "os.link",
    "os.remove",
    "os.rmdir",
    "os.rename",
    "os.listdir",
    "os.scandir",
    "shutil.rmtree",
)


def _make(path: Path, number: int, kind: str) -> None:
    """Make a complete checkpoint that holds a number in two places, which belong together."""
    if kind == "file":
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": torch.tensor(number), "number": number}, path)
        return
    dcp.save({"model": torch.tensor(number)}, checkpoint_id=path, no_dist=True)
    own = f"__0_{number:012x}_0.distcp"
    metadata = pickle.loads((path / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = own
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    (path / "__0_0.distcp").rename(path / own)
    torch.save({"number": number}, path / OTHERS)


def _load(path: Path) -> int:
    """Return the number of a checkpoint, as ``fabric.load`` finds it."""
    path = find(path)
    if path.is_file():
        content = torch.load(path)
        model, number = content["model"], content["number"]
    else:
        metadata, _ = read_metadata(path)
        check_lengths(path, list(metadata.storage_data.values()))
        model = CheckedReader(path, metadata, verify=True).load({"model": torch.tensor(0)})["model"]
        number = torch.load(others_in(path))["number"]
    assert int(model) == number, "parts of two checkpoints"
    return number


def _killed_at(point: int, do: Any, folder: Path) -> bool:
    """Run a function in a forked process that is killed at an operation on files in a folder; return whether it was."""
    if (pid := os.fork()) == 0:
        left = point

        def count(event: str, args: Any) -> None:
            nonlocal left
            if event in _EVENTS and args and str(folder) in str(args[0]):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            do()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize(
    "before, after", [("folder", "folder"), ("file", "folder"), ("folder", "file"), ("file", "file")]
)
def test_a_checkpoint_that_loads_remains_wherever_a_process_is_killed(tmp_path: Path, before: str, after: str) -> None:
    found = []
    for point in range(100):
        folder = tmp_path / str(point)
        path, new = folder / "checkpoint", new_beside(folder / "checkpoint")
        _make(path, 1, before)
        _make(new, 2, after)
        if before == "folder":
            (path / "notes").touch()
        if not _killed_at(point, lambda path=path, new=new: replace(path, new), folder):
            break
        found.append(_load(path))
        # A later save finishes what was begun, and takes the place of what is there.
        clean_up(path)
        assert _load(path) == found[-1]
        _make(new, 3, "folder")
        if path.is_dir():
            replace(path, new)
            assert _load(path) == 3 and not find(path).is_symlink()
            assert {file.name for file in path.iterdir()} - {"notes"} == {METADATA, OTHERS, "__0_000000000003_0.distcp"}
            assert [file.name for file in folder.iterdir()] == ["checkpoint"]
    assert _load(path) == 2 and [file.name for file in folder.iterdir()] == ["checkpoint"]
    assert found == sorted(found) and found[0] == 1
    assert 2 in found or (before, after) == ("file", "file")
    assert after == "file" or before == "file" or (path / "notes").exists()


def test_a_full_disk_is_named_when_values_of_fabric_are_written() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    with pytest.raises((OSError, RuntimeError)) as caught:
        checkpoint._write({"a": torch.ones(100_000)}, full)
    assert "No space left on device" in text_of(caught.value)
