"""The checkpoints in a folder: which is the latest, and which old ones are removed.

[Note: What is removed]
``keep=n`` deletes data, so it deletes only what is certainly an old checkpoint of this package:

- a folder beside the new one. Links (``latest -> step-3``) are left alone, as is what they point to unless it is beside the
  new one. Folders are compared by device and inode, because one folder may have several names.
- complete, with the seal of a list that this package wrote, with the file names of a single run, and not one of Fabric,
  which has more files;
- only when the new checkpoint has been found intact, and never the newest intact one, which is another one if the
  clocks of two hosts differ.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from pathlib import Path
from typing import Any

from .beside import wait_for_latest
from .folder import METADATA, OTHERS, are_of_one_run
from .storage import check_lengths, is_sealed, read_metadata

_log = logging.getLogger(__name__)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the subfolder of ``folder`` with the checkpoint that was completed last, if there is one.

    All ranks must see the same disk. Folders with an incomplete save do not count, nor do those whose list of contents
    is damaged or has files that are missing or truncated; a warning names the latter. A save of this process that is in
    flight beside training is waited for.
    """
    wait_for_latest()
    for path in _newest_first(Path(folder)):
        try:
            _intact_chunks(path)
        except (OSError, ValueError) as error:
            warnings.warn(f"latest_checkpoint leaves out {path}: {error}", stacklevel=2)
        else:
            return path
    return None


def check_keep(path: Path, keep: int | None) -> None:
    """Check that old checkpoints beside ``path`` can be told from others.

    Raises:
        TypeError, ValueError: ``keep`` is no positive integer, or ``path`` is a link.
    """
    if keep is not None and type(keep) is not int:
        raise TypeError(f"keep: expected a number of checkpoints, got {keep!r}")
    if keep is not None and keep < 1:
        raise ValueError(f"keep: expected at least 1 checkpoint, got {keep}")
    if keep is not None and path.is_symlink():
        raise ValueError(f"keep: {path} is a link: give the folder itself, in which others are beside it")


def remove_old(path: Path, keep: int) -> None:
    """Remove checkpoints beside ``path``, which is complete, but the ``keep`` newest; see [Note: What is removed]."""
    try:
        _intact_chunks(path)
    except (OSError, ValueError) as error:
        _log.error("keep: nothing was removed, because the new checkpoint %s is damaged: %s", path, error)
        return
    kept: set[tuple[int, int]] = set()
    for old in _newest_first(path.resolve().parent):
        try:
            if old.is_symlink():
                continue
            chunks, identity = _intact_chunks(old), _identity(old)
            if len(kept) < keep or identity in kept or identity == _identity(path):
                kept.add(identity)
                continue
            names = {info.relative_path for info in chunks}
            if not is_sealed(old) or not are_of_one_run(names):
                raise ValueError("this package has not written it")
            if (old / OTHERS).exists():
                raise ValueError("Fabric has written it, and keeps more there")
            (old / METADATA).unlink()  # first, so that it is never half a checkpoint
            for name in names:
                (old / name).unlink()
            if not any(old.iterdir()):
                old.rmdir()
        except (OSError, ValueError) as error:
            _log.warning("keep: %s was not removed: %s", old, error)


def _newest_first(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, links to one after the folder itself."""
    order = {}
    for file in folder.glob(f"*/{METADATA}"):
        with contextlib.suppress(FileNotFoundError):  # the first rank removes old ones meanwhile
            order[file.parent] = file.stat().st_mtime_ns, not file.parent.is_symlink(), file.parent.name
    return sorted(order, key=order.__getitem__, reverse=True)


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _intact_chunks(path: Path) -> list[Any]:
    """Return where the data of a checkpoint are.

    Raises:
        OSError, ValueError: its list of contents is damaged, or files are missing or truncated.
    """
    chunks = list(read_metadata(path)[0].storage_data.values())
    check_lengths(path, chunks)
    return chunks
