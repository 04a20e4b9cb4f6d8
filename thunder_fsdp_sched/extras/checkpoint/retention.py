"""The checkpoints in a folder: which is the latest, and which old ones are removed.

[Note: What is removed]
``keep=n`` deletes data, so it deletes only what is certainly an old checkpoint of this package:

- a sibling folder whose name differs in digits alone from that of the new one (``step-100``, not ``best``). Links
  (``latest -> step-3``) are left alone, as are their targets outside of this folder. Folders are compared by device and
  inode, because one folder may have several names;
- complete, with a stamp (see [Note: The order of saves] in ``folder``), with the file names of a single run, and not
  one of Fabric, which has more files;
- only after the new checkpoint has been found intact, and neither that one nor the ``keep`` newest intact siblings.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

from ...errors import coded_error
from .beside import wait_for_latest
from .folder import METADATA, OTHERS, are_of_one_run, is_complete, newest_first, series_of, stamp_of, sync, time_of
from .storage import check_lengths, read_metadata

_log = logging.getLogger(__name__)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the subfolder of ``folder`` with the checkpoint that was saved last, whatever its name; ``None`` without one.

    Checkpoints record the order in which they were saved, so copying the folder does not change it. Those of
    ``dcp.save`` and of earlier versions of this package do not, and count as older than all that do. Among themselves
    they are ordered by the numbers in names that differ in digits alone, otherwise by the times of their files. A
    warning names one that may be newer than the result.

    All ranks must see the same disk. Folders with an incomplete save do not count, nor do those whose list of contents
    is damaged, or whose files are missing or truncated; a warning names the latter. If an asynchronous save of this
    process is in flight, the call waits for it.

    Raises:
        ValueError: ``folder`` is a file, or a checkpoint itself that contains no others.
    """
    wait_for_latest()
    parent = Path(folder)
    if parent.exists() and not parent.is_dir():
        raise coded_error(ValueError, "checkpoint.parent-is-file", parent=parent)
    latest, stamp = None, None
    for path in newest_first(parent):
        # One without a stamp may be newer than the latest that has one.
        if latest is not None and (stamp is None or stamp_of(path) is not None):
            continue
        try:
            _intact_chunks(path)
        except (OSError, ValueError) as error:
            warnings.warn(f"latest_checkpoint leaves out {path}: {error}", stacklevel=2)
            continue
        if latest is None:
            latest, stamp = path, stamp_of(path)
        elif stamp is not None and time_of(path) > stamp:
            warnings.warn(
                f"latest_checkpoint returns {latest}. {path}, which dcp.save or an earlier version has saved, does not tell "
                f"when it was saved, and its files are newer: pass its path to load_checkpoint if you want it",
                stacklevel=2,
            )
    if latest is None and is_complete(parent, METADATA):
        raise coded_error(ValueError, "checkpoint.parent-is-checkpoint", parent=parent)
    return latest


def check_keep(path: Path, keep: int | None) -> None:
    """Check that old checkpoints beside ``path`` can be distinguished from others.

    Raises:
        TypeError, ValueError: ``keep`` is not a positive integer, or ``path`` is a link, or its name has no number.
    """
    if keep is None:
        return
    if type(keep) is not int:
        raise coded_error(TypeError, "checkpoint.keep-not-a-number", keep=keep)
    if keep < 1:
        raise coded_error(ValueError, "checkpoint.keep-below-one", keep=keep)
    if path.is_symlink():
        raise coded_error(ValueError, "checkpoint.keep-beside-link", path=path)
    if series_of(path) == (name := path.resolve().name):
        raise coded_error(ValueError, "checkpoint.keep-of-unnumbered-name", name=name, keep=keep)


def remove_old(path: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest siblings of ``path``, which is complete; see [Note: What is removed]."""
    try:
        _intact_chunks(path)
    except (OSError, ValueError) as error:
        _log.error("keep: nothing was removed, because the new checkpoint %s is damaged: %s", path, error)
        return
    kept: set[tuple[int, int]] = set()
    for old in newest_first(path.resolve().parent):
        try:
            if old.is_symlink() or series_of(old) != series_of(path):
                continue
            chunks, identity = _intact_chunks(old), _identity(old)
            if len(kept) < keep or identity in kept or identity == _identity(path):
                kept.add(identity)
                continue
            names = {info.relative_path for info in chunks}
            if stamp_of(old) is None or not are_of_one_run(names):
                raise coded_error(ValueError, "checkpoint.old-of-other-program")
            if (old / OTHERS).exists():
                raise coded_error(ValueError, "checkpoint.old-of-fabric")
            (old / METADATA).unlink()  # first, so that the folder is never half a checkpoint
            sync(old)
            for name in names:
                (old / name).unlink()
            if not any(old.iterdir()):
                old.rmdir()
        except (OSError, ValueError) as error:
            _log.warning("keep: %s was not removed: %s", old, error)


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _intact_chunks(path: Path) -> list[Any]:
    """Return the locations of the data of a checkpoint.

    Raises:
        OSError, ValueError: its list of contents is damaged, or files are missing or truncated.
    """
    chunks = list(read_metadata(path)[0].storage_data.values())
    check_lengths(path, chunks)
    return chunks
