"""Claims on folders, so that two runs that save into one folder never mix.

[Note: Two runs, one folder]
Three mechanisms keep two runs apart, and the last two do not depend on the cooperation of other runs:

1. Before anything is written, the first rank claims the folder with a file that it creates exclusively. A claim whose
owner
   is alive is an error. If the owner's process no longer exists, its files are deleted and the claim is taken over, so
   a run that was killed while saving can save into the same folder after a restart. A process of another host, boot or
   container cannot be looked up: its claim is also taken over, but its files are not deleted.
2. The names of a run's files contain its id, so no run writes or reads the files of another.
3. The file that completes a folder is created as a hard link, which fails if it exists. The first run has saved, all
others
   get an error, and a complete folder is never overwritten. After that, the files of other runs are deleted.
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

__all__ = ["INDEX", "METADATA", "check_claim", "claim", "complete_folder", "is_complete", "release_claim"]

_log = logging.getLogger(__name__)

METADATA = ".metadata"
"""The file that completes a checkpoint."""

INDEX = "model.safetensors.index.json"
"""The file that completes a whole model."""

_CLAIM = ".claim"
_FILES = {
    METADATA: re.compile(r"__\d+_([0-9a-f]{12})_\d+\.distcp"),
    INDEX: re.compile(r"model-\w+-([0-9a-f]{12})\.safetensors"),
}
"""The files of a run, keyed by the name of the file that completes a folder."""

_PRIVATE = re.compile(r"\.([0-9a-f]{12})")
"""The folder in which a run completes the list of a checkpoint's contents."""

_saving: set[str] = set()
"""The claims that this process holds."""

_completed: set[str] = set()
"""The claims of runs that have completed their folder."""


def claim(folder: Path, complete: str) -> str:
    """Claim ``folder`` for one save.

    Args:
        complete: name of the file that completes the folder.

    Returns:
        The run's id, which the names of its files must contain.

    Raises:
        ValueError: the folder is complete, or a run that is alive is saving into it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = uuid.uuid4().hex[:12]
    file = folder / _CLAIM
    own = folder / f"{_CLAIM}-{run}"
    own.write_text(json.dumps({"run": run, **_this_process()}))
    try:
        for _ in range(10):  # other runs may try to take over the same abandoned claim
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
        release_claim(folder, complete, run)
        raise ValueError(f"folder: another run has completed {folder} meanwhile: give each run a folder of its own")
    return run


def is_complete(folder: Path, complete: str) -> bool:
    """Return whether the file that completes ``folder`` exists.

    An empty file does not count: without hard links, a run that is killed may leave one.
    """
    file = folder / complete
    return file.exists() and file.stat().st_size > 0


def check_claim(folder: Path, run: str) -> None:
    """Raise an error unless this rank sees the claim of ``run``.

    Raises:
        ValueError: the first rank's folder is not this one.
    """
    if _read(folder / _CLAIM).get("run") != run:
        raise ValueError(
            f"folder: {folder} is not the folder that the first rank has claimed: give all ranks the same folder, on a "
            f"disk that all of them see"
        )


def complete_folder(folder: Path, complete: str, run: str, source: Path) -> None:
    """Create the file that completes ``folder``.

    Raises:
        ValueError: another run has completed it.
    """
    if not _link_exclusively(source, folder / complete):
        raise ValueError(f"folder: another run has completed {folder} meanwhile: give each run a folder of its own")
    _completed.add(run)


def release_claim(folder: Path, complete: str, run: str) -> None:
    """Give up a claim, and delete the files of all other runs if ``run`` has completed the folder, else its own.

    It never raises: at worst, an abandoned claim and unused files remain.
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
    """Link ``source`` as ``target`` unless that file exists; return whether the link was created."""
    try:
        os.link(source, target)
    except FileExistsError:
        # A network file system may have created the link and lost the reply.
        return target.exists() and os.path.samefile(source, target)
    except OSError:  # no hard links: an exclusive copy, which is not atomic
        try:
            with target.open("xb") as file:
                file.write(source.read_bytes())
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            return False
    return True


def _delete_files(folder: Path, complete: str, *, run: str, others: bool = False) -> None:
    """Delete the files of ``run``, or those of all other runs."""
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
    """Return whether the process of a claim can be looked up on this machine, alive or not."""
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
    """Return the start time of a process if the system has it, because process ids are reused."""
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
    """Return the owner of a claim; empty if there is none, or if it cannot be read."""
    try:
        owner = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) and {"run", "pid", "started", *_system()} <= owner.keys() else {}
