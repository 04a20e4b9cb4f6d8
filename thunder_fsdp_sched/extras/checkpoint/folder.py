"""Save a folder under another name and rename it, so that two runs never mix, and a killed run leaves no checkpoint.

[Note: Two runs, one folder]
A run writes into its draft, a hidden folder beside the wanted one with the run's id in its name. When everything is in it,
the draft is renamed. The file system does that at once, and refuses if there is a folder of the wanted name that holds
anything. So the first run to finish has saved, all others get an error, and a complete folder is never overwritten.

The run that has finished deletes the drafts of all others, also of those that were killed. A run that fails deletes its own.

[Note: Order on disk]
After a crash of the machine, any write, creation, rename or removal that was not synced may be lost, in whatever order they
were made. An fsync of a file syncs its data, one of a folder the names in it. So everything in a draft is synced before the
draft is renamed, and its new name before an older checkpoint is removed.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...errors import coded_error
from ...ranks.process_groups import ProcessGroupRef
from .on_all_ranks import CheckpointError, reason_of, run_on_all_ranks, share_on_all_ranks

METADATA = ".metadata"
"""The list of a checkpoint's contents."""

OTHERS = "meta.pt"
"""The file of Fabric in the folder of a checkpoint: everything besides the module and its optimizers."""

INDEX = "model.safetensors.index.json"
"""The list of the files of a whole model."""

_KINDS = {METADATA: "checkpoint", INDEX: "model"}

_DATA = re.compile(r"__\d+_.*\.distcp|\.metadata\.")
"""The beginning of the names of files of a checkpoint, whoever saves it."""

_CANNOT_SYNC = (errno.EACCES, errno.EINVAL, errno.ENOTSUP)
"""Errors of folders that cannot be opened, and of file systems that cannot sync folders."""

_PIECE = 1 << 22
"""Bytes that are read at once for a checksum."""


def path_of(value: str | os.PathLike[str], option: str) -> Path:
    """Return the absolute path of a folder or file that the user names.

    Raises:
        ValueError: it is not a path, or the working folder was deleted, or a link in the path has lost its target.
    """
    try:
        path = Path(value).absolute()
    except (OSError, TypeError) as error:
        shown = (
            f"a {type(value).__name__}" if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) else repr(value)
        )
        raise coded_error(ValueError, "checkpoint.path-not-usable", option=option, got=shown, error=error) from error
    for part in (path, *path.parents):
        if part.is_symlink() and not part.exists():
            target = os.readlink(part)
            raise coded_error(ValueError, "checkpoint.path-is-broken-link", option=option, path=part, target=target)
    return path


def sync(path: Path) -> None:
    """Let the data of a file, or the names in a folder, survive a crash; see [Note: Order on disk]."""
    try:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC or not path.is_dir():
            raise


def make_folder(folder: Path) -> None:
    """Create a folder and those above it unless they exist, and let their names survive a crash."""
    missing = [parent for parent in folder.parents if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in (folder, *missing):
        sync(made.resolve().parent)


class SaveRun:
    """One save of a folder. See [Note: Two runs, one folder].

    Args:
        last: name of the list of the folder's contents.

    Attributes:
        path: what the functions that save return.
        folder: the folder, without links.
        id: part of the name of the draft; the first rank's.
    """

    def __init__(self, folder: Path, last: str) -> None:
        self.path = folder / last if last == INDEX else folder
        self.folder, self.last, self.id = folder.resolve(), last, new_id()
        self._process = os.getpid()

    @property
    def draft(self) -> Path:
        """The folder that the ranks write into."""
        return draft_of(self.folder, self.id)

    def refuse_used(self) -> None:
        """Raise an error if the folder is used.

        Raises:
            ValueError: it holds anything; the message names it.
            NotADirectoryError: it is a file.
        """
        if is_complete(self.folder, self.last):
            kind = _KINDS[self.last]
            raise coded_error(ValueError, "checkpoint.folder-already-complete", folder=self.folder, content=kind)
        if self.folder.exists() and (names := sorted(entry.name for entry in self.folder.iterdir())):
            raise coded_error(ValueError, "checkpoint.folder-not-empty", folder=self.folder, names=_few(names))

    def begin(self) -> None:
        """Create the draft, on the first rank, after which all ranks look for it."""
        make_folder(self.folder.parent)
        self.draft.mkdir()

    def check(self) -> None:
        """Raise an error if this rank does not see the draft.

        Raises:
            ValueError: the first rank's folder is not this one, or this rank cannot write into it.
        """
        if not self.draft.is_dir():
            raise coded_error(ValueError, "ranks.folders-differ", folder=self.folder)
        if not os.access(self.draft, os.W_OK):
            raise coded_error(ValueError, "checkpoint.folder-not-writable", folder=self.folder)

    def complete(self) -> None:
        """Give the draft, whose files must have been synced, the name of the folder, and let it survive a crash.

        Raises:
            ValueError: the folder is used now, or cannot be replaced.
        """
        sync(self.draft)
        self._rename()
        sync(self.folder.parent)
        for other in drafts_of(self.folder):
            remove(other)

    def _rename(self) -> None:
        own = self.draft.stat()
        try:
            self.draft.rename(self.folder)
        except OSError as error:
            # A network file system may have renamed it and lost the reply.
            if not (self.folder.exists() and os.path.samestat(self.folder.stat(), own)):
                raise coded_error(
                    ValueError, "checkpoint.draft-not-renamed", folder=self.folder, error=error
                ) from error

    def clean_up(self) -> None:
        """Delete the draft, unless it has been renamed. A process that was forked meanwhile deletes nothing."""
        if self._process == os.getpid():
            shutil.rmtree(self.draft, ignore_errors=True)


@contextmanager
def saving_into(group: ProcessGroupRef, run: SaveRun, is_ready: bool) -> Iterator[bool]:
    """Begin a run on all ranks, and clean up at the end; yield whether all ranks are ready. A collective.

    Args:
        is_ready: whether this rank is ready, for whatever the caller needs.

    Raises:
        CheckpointError: on all ranks, if the folder is used, ranks passed other folders, or saving failed.
    """

    def begin() -> tuple[str, bool]:
        if group.rank == 0:
            run.begin()
        return run.id, is_ready

    try:
        everyones = share_on_all_ranks(group, "saving into a folder", begin)
        run.id = everyones[0][0]
        run_on_all_ranks(group, "saving into a folder", run.check)
        yield all(theirs for _, theirs in everyones)
    except Exception as error:
        complete = "; it is complete nevertheless, by this run or another" if is_complete(run.folder, run.last) else ""
        raise coded_error(
            CheckpointError,
            "checkpoint.not-saved",
            content=_KINDS[run.last],
            folder=run.folder,
            reason=reason_of(error),
            remark=complete,
        ) from error
    finally:
        if group.rank == 0:
            run.clean_up()


def new_id() -> str:
    """Return the id of a save."""
    return uuid.uuid4().hex[:12]


def draft_of(path: Path, id: str) -> Path:
    """Return the name under which ``path`` is written until it is complete."""
    return path.with_name(f".{path.name}.{id}.saving")


def drafts_of(path: Path) -> Iterator[Path]:
    """Return the drafts of ``path`` of all saves."""
    return path.parent.glob(draft_of(Path(glob.escape(path.name)), "[0-9a-f]" * 12).name)


def complete_in(folder: Path) -> Iterator[Path]:
    """Yield the checkpoints in ``folder``, but not drafts."""
    for file in folder.glob(f"*/{METADATA}"):
        if not file.parent.match(".*.saving"):
            yield file.parent


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_complete(folder: Path, last: str) -> bool:
    """Return whether ``folder`` has its list of contents."""
    return (folder / last).exists()


def refuse_incomplete(folder: Path) -> None:
    """Raise an error unless ``folder`` holds a checkpoint that is complete.

    Raises:
        ValueError: says what is there instead.
    """
    if is_complete(folder, METADATA):
        return
    if folder.is_file():
        raise coded_error(ValueError, "checkpoint.folder-is-file", folder=folder)
    if any(drafts_of(folder)):
        raise coded_error(ValueError, "checkpoint.save-did-not-end", folder=folder)
    if not folder.exists():
        raise coded_error(ValueError, "checkpoint.folder-does-not-exist", folder=folder)
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        raise coded_error(ValueError, "checkpoint.folder-is-empty", folder=folder)
    if any(_DATA.match(name) for name in names):
        raise coded_error(ValueError, "checkpoint.save-did-not-end", folder=folder)
    if below := [name for name in names if is_complete(folder / name, METADATA)]:
        raise coded_error(
            ValueError, "checkpoint.folder-of-checkpoints", folder=folder, names=_few(below), argument=str(folder)
        )
    whole = " (load whole models with load_safetensors)" if any(name.endswith(".safetensors") for name in names) else ""
    raise coded_error(ValueError, "checkpoint.folder-of-other-files", folder=folder, names=_few(names), hint=whole)


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def checksum(path: Path, offset: int, length: int) -> int:
    """Return the CRC-32 of a range of a file."""
    crc = 0
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.read(min(length, _PIECE)):
            crc = zlib.crc32(data, crc)
            length -= len(data)
    return crc
