"""Let a complete checkpoint take the place of another one of the same name.

[Note: Replacing a checkpoint]
The new checkpoint is completed under another name (see [Note: Two runs, one folder] in ``checkpoint.folder``). A file
replaces a file in one operation. Where one of them is a folder, the old checkpoint is renamed before the new one gets its
name. A process that is killed in between leaves the old one under the other name, where it is found. What others have put
into the old folder is moved into the new one. A new checkpoint is on disk before anything of the old one is removed.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..checkpoint.folder import METADATA, SaveRun, drafts_of, remove, sync


class ReplacingRun(SaveRun):
    """A save that replaces the checkpoint of its name."""

    def refuse_used(self) -> None:
        if not is_checkpoint(self.folder):
            super().refuse_used()

    def _rename(self) -> None:
        replace(self.folder, self.draft)


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` is a file, or a folder with a checkpoint."""
    return path.is_file() or (path / METADATA).is_file()


def replace(path: Path, new: Path) -> None:
    """Let ``new``, a complete folder or file, take the place of ``path``, if there is one; see the note above."""
    if path.is_dir() or (new.is_dir() and path.exists()):
        os.rename(path, _old_beside(path))
        sync(path.parent)
    os.rename(new, path)
    sync(path.parent)
    _remove_old(path)


def find(path: Path) -> Path:
    """Return where the checkpoint ``path`` is: elsewhere if a process was killed while replacing it."""
    old = _old_beside(path)
    return old if old.exists() and not path.exists() else path


def recover(path: Path) -> None:
    """Undo or finish what a process that was killed has begun, before ``path`` is saved again."""
    if (old := find(path)) != path:
        os.rename(old, path)
    _remove_old(path)
    for draft in drafts_of(path):
        remove(draft)


def _remove_old(path: Path) -> None:
    """Remove what ``path`` has replaced."""
    old = _old_beside(path)
    if old.is_dir() and path.is_dir():
        for file in old.iterdir():
            if file.suffix != ".distcp" and not (path / file.name).exists():
                file.rename(path / file.name)
        sync(path)
    remove(old)


def _old_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.fsdp_sched_old")
