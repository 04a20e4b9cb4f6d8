"""Replace a checkpoint of Fabric by a new one, so that a process that is killed at any point leaves one that loads.

[Note: Replacing a checkpoint]
The new folder is completed beside the old one. Its data files are moved first, because their names contain the id of the
save and are those of no other one. Then its list of contents takes the place of the old list, in one operation of the file
system: the old checkpoint is complete before it, and the new one after it. ``meta.pt``, which belongs to a list, carries
the list's digest in its name until it can take the place of the old one.

A file and a folder cannot replace each other in one operation. There, the old checkpoint is renamed before the new one
gets its name. A process that is killed in between leaves the old one under the other name, where it is found.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..checkpoint.folder import METADATA, OTHERS
from ..checkpoint.storage import read_metadata


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` is a file, or a folder with a checkpoint."""
    return path.is_file() or (path / METADATA).is_file()


def new_beside(path: Path) -> Path:
    """Return the folder in which the checkpoint is completed that will replace ``path``."""
    return path.with_name(f".{path.name}.fsdp_sched_new")


def replace(path: Path, new: Path) -> None:
    """Let ``new``, a complete folder or file, take the place of ``path``, if there is one; see the note above."""
    if path.is_dir() and new.is_dir():
        _replace_contents(path, new)
    elif path.exists() and path.is_dir() != new.is_dir():
        os.rename(path, old := _old_beside(path))
        os.rename(new, path)
        _remove(old)
    else:
        os.replace(new, path)


def _replace_contents(path: Path, new: Path) -> None:
    for file in new.iterdir():
        if file.name not in (METADATA, OTHERS):
            file.replace(path / file.name)
    contents, digest = read_metadata(new)
    others = _named_after(path, digest)
    (new / OTHERS).replace(others)
    (new / METADATA).replace(path / METADATA)  # from here on, the new checkpoint is complete
    others.replace(path / OTHERS)
    used = {info.relative_path for info in contents.storage_data.values()}
    for file in (*path.glob("*.distcp"), *path.glob(f"{OTHERS}.*")):
        if file.name not in used:
            file.unlink(missing_ok=True)
    new.rmdir()


def find(path: Path) -> Path:
    """Return where the checkpoint ``path`` is: elsewhere if a process was killed while replacing it."""
    old = _old_beside(path)
    return old if old.exists() and not path.exists() else path


def others_in(folder: Path) -> Path:
    """Return the file of a folder that has everything besides the module and its optimizers."""
    others = _named_after(folder, read_metadata(folder)[1])
    return others if others.exists() else folder / OTHERS


def clean_up(path: Path) -> None:
    """Undo or finish what a process that was killed has begun, before ``path`` is saved again."""
    if (old := find(path)) != path:
        os.rename(old, path)
    _remove(_old_beside(path))
    _remove(new_beside(path))


def _named_after(folder: Path, digest: str) -> Path:
    return folder / f"{OTHERS}.{digest[:16]}"


def _old_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.fsdp_sched_old")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
