"""Claims on folders, so that two runs that save into one folder never mix.

[Note: Two runs, one folder]
Three things keep them apart, and the last two do not depend on anybody behaving well:

1. The first rank claims the folder, by a file that it creates exclusively, before anything is written. A claim whose owner
   is alive is an error. If its process does not exist any more, its files are deleted and the claim is taken over, so that a
   run that was killed while it saved can save into the same folder after its restart. A process of another host, boot or
   container cannot be looked up: its claim is taken over as well, but its files are left alone.
2. The names of a run's files contain its id, so no run writes or reads another's.
3. The file that makes a folder complete is put in place by a hard link, which fails if there is one: whoever is first has
   saved, everybody else gets an error, and a complete folder is never overwritten. Files of others are deleted after that.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import uuid
from pathlib import Path

__all__ = ["INDEX", "METADATA", "check_claim", "claim", "complete_folder", "is_complete", "leave"]

_log = logging.getLogger(__name__)

METADATA = ".metadata"
"""Completes a checkpoint."""

INDEX = "model.safetensors.index.json"
"""Completes a whole model."""

_CLAIM = ".claim"
_FILES = {
    METADATA: re.compile(r"__\d+_([0-9a-f]{12})_\d+\.distcp"),
    INDEX: re.compile(r"model-\w+-([0-9a-f]{12})\.safetensors"),
}
"""The files of a run, by the name of the file that makes a folder complete."""

_PRIVATE = re.compile(r"\.([0-9a-f]{12})")
"""The folder in which a run completes the list of a checkpoint's contents."""

_saving: set[str] = set()
"""The claims that this process holds."""

_completed: set[str] = set()
"""Those that have completed their folder."""


def claim(folder: Path, complete: str) -> str:
    """Claim ``folder`` for one save.

    Args:
        complete: name of the file that a complete folder has.

    Returns:
        The run's id, which the names of its files have to contain.

    Raises:
        ValueError: the folder is complete, or a run that is alive is saving into it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = uuid.uuid4().hex[:12]
    file = folder / _CLAIM
    own = folder / f"{_CLAIM}-{run}"
    own.write_text(json.dumps({"run": run, **_this_process()}))
    try:
        for _ in range(10):  # others may be after the same abandoned claim
            if _link_exclusively(own, file):
                break
            other = _read(file)
            known = _is_known(other)
            if known and _is_alive(other):
                raise ValueError(
                    f"folder: another run is saving into {folder} (process {other['pid']} on {other['host']}): give each "
                    f"run a folder of its own"
                )
            if known:
                _delete_files(folder, complete, run=str(other["run"]))
            file.unlink(missing_ok=True)
        else:
            raise ValueError(f"folder: other runs keep claiming {folder}: give each run a folder of its own")
    finally:
        own.unlink(missing_ok=True)
    _saving.add(run)
    if not is_complete(folder, complete):
        (folder / complete).unlink(missing_ok=True)  # an empty one, of a run that was killed while it wrote the file
    else:
        leave(folder, complete, run)
        raise ValueError(f"folder: another run has completed {folder} meanwhile: give each run a folder of its own")
    return run


def is_complete(folder: Path, complete: str) -> bool:
    """Return whether the file that completes ``folder`` is there.

    An empty one does not count: a run leaves it that is killed where there are no hard links.
    """
    file = folder / complete
    return file.exists() and file.stat().st_size > 0


def check_claim(folder: Path, run: str) -> None:
    """Raise unless this rank sees the claim of ``run``.

    Raises:
        ValueError: the first rank's folder is not this one.
    """
    if _read(folder / _CLAIM).get("run") != run:
        raise ValueError(
            f"folder: {folder} is not the folder that the first rank has claimed: give all ranks the same folder, on a "
            f"disk that all of them see"
        )


def complete_folder(folder: Path, complete: str, run: str, source: Path) -> None:
    """Put the file in place that makes ``folder`` complete.

    Raises:
        ValueError: another run was first.
    """
    if not _link_exclusively(source, folder / complete):
        raise ValueError(f"folder: another run has completed {folder} meanwhile: give each run a folder of its own")
    _completed.add(run)


def leave(folder: Path, complete: str, run: str) -> None:
    """Give up a claim, and delete the files of all other runs if ``run`` has completed the folder, else its own.

    It raises nothing: what remains is an abandoned claim, and files that nobody reads.
    """
    succeeded = run in _completed
    _saving.discard(run)
    _completed.discard(run)
    try:
        _delete_files(folder, complete, run=run, others=succeeded)
        if _read(folder / _CLAIM).get("run") == run:
            (folder / _CLAIM).unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s was not cleaned up: %s", folder, error)


def _link_exclusively(source: Path, target: Path) -> bool:
    """Give ``source`` the name ``target`` as well, unless there is such a file; return whether that was done."""
    try:
        os.link(source, target)
    except FileExistsError:
        # A network file system may have done it and lost the answer.
        return target.exists() and os.path.samefile(source, target)
    except OSError:  # no hard links here: exclusive as well, but not complete at once
        try:
            with target.open("xb") as file:
                file.write(source.read_bytes())
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            return False
    return True


def _delete_files(folder: Path, complete: str, *, run: str, others: bool = False) -> None:
    """Delete the files of ``run``, or those of all others."""
    for entry in folder.iterdir():
        match = _FILES[complete].fullmatch(entry.name)
        if match is None and complete == METADATA:
            match = _PRIVATE.fullmatch(entry.name)
        if match is not None and (match[1] == run) is not others:
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def _this_process() -> dict[str, object]:
    return {**_system(), "pid": os.getpid(), "started": _started(os.getpid())}


def _is_known(owner: dict[str, object]) -> bool:
    """Whether the process that has made a claim can be looked up here, alive or not."""
    return all(owner.get(key) == value for key, value in _system().items())


def _is_alive(owner: dict[str, object]) -> bool:
    pid = owner["pid"]
    assert isinstance(pid, int)
    if pid == os.getpid():
        return owner["run"] in _saving
    return _started(pid) == owner["started"] and _exists(pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _started(pid: int) -> str:
    """When a process was started, as far as the system tells: another process may get its number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _system() -> dict[str, object]:
    """Return the host, boot and pid namespace: processes that share them can look each other up."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = namespace = ""
    return {"host": socket.gethostname(), "boot": boot, "namespace": namespace}


def _read(file: Path) -> dict[str, object]:
    """The owner of a claim; empty if there is none, or none that can be read."""
    try:
        owner = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) and {"run", "pid", "started", *_system()} <= owner.keys() else {}
