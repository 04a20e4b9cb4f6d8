"""Save into a folder so that two runs never mix, a killed run leaves no checkpoint, and the order of saves is known.

[Note: Two runs, one folder]
Runs that save into the same folder at once know nothing of each other. Two mechanisms keep them apart:

1. The names of a run's files contain its id, so no run overwrites or reads the files of another.
2. The file that completes the folder is written elsewhere and then created as a hard link, which fails if the name
   exists. So the first run to finish has saved, all others get an error, and a complete folder is never overwritten.

The run that has completed the folder deletes the files of all others, including killed ones. A run that fails deletes
its own.

[Note: Order on disk]
After a crash of the machine, any write, creation, rename or removal that was not synced may be lost, regardless of
their order. An fsync of a file syncs its data, one of a folder the names in it. So everything that a checkpoint
consists of is synced before the file that completes it gets its name, and that name before an older checkpoint is
removed.

[Note: The order of saves]
Copying changes the times of files, so checkpoints record the order themselves: the list of contents ends with a stamp.
It is the time of the save in nanoseconds or, if a checkpoint in the same folder has that stamp or a later one, the
latest stamp plus one. So neither a copy of the folder nor a clock that goes back changes the order.

Checkpoints of ``dcp.save`` and of earlier versions of this package have no stamp. They count as older than those with one.
Among them, a series (names that differ in digits alone) is ordered by these numbers, and series by the times of their files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...errors import coded_error
from ...ranks.process_groups import ProcessGroupRef
from .on_all_ranks import CheckpointError, reason_of, run_on_all_ranks, share_on_all_ranks

METADATA = ".metadata"
"""The file that completes a checkpoint: the list of its contents."""

OTHERS = "meta.pt"
"""The file of Fabric in the folder of a checkpoint: everything besides the module and its optimizers."""

INDEX = "model.safetensors.index.json"
"""The file that completes a whole model."""

_KINDS = {METADATA: "checkpoint", INDEX: "model"}
_FILES = {
    METADATA: re.compile(r"__\d+_([0-9a-f]{12})_\d+\.distcp|\.metadata\.([0-9a-f]{12})"),
    INDEX: re.compile(r"model-\w+-([0-9a-f]{12})\.safetensors|model\.safetensors\.index\.json\.([0-9a-f]{12})"),
}
"""The names of the files of a run, keyed by the name of the file that completes a folder."""

_DATA = re.compile(r"__\d+_.*\.distcp|\.metadata\.")
"""The beginning of the names of files of a checkpoint, whoever saves it."""

_CANNOT_SYNC = (errno.EACCES, errno.EINVAL, errno.ENOTSUP)
"""Errors of folders that cannot be opened, and of file systems that cannot sync folders."""

_PIECE = 1 << 22
"""Bytes that are read at once for a checksum."""

_log = logging.getLogger(__name__)


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
    """One save into a folder. See [Note: Two runs, one folder].

    Attributes:
        id: part of the names of all files of the run.
        last: name of the file that completes the folder.
        draft: a folder in which the first rank prepares that file.
    """

    def __init__(self, folder: Path, last: str, id: str) -> None:
        self.folder, self.last, self.id = folder, last, id
        self.draft = folder / f"{last}.{id}"
        self._has_completed = False
        self._process = os.getpid()

    def begin(self) -> str:
        """Create the draft on the first rank, before all ranks look for it; return the run's id."""
        refuse_complete(self.folder, self.last)
        make_folder(self.folder)
        self.draft.mkdir()
        if (self.folder / self.last).exists():
            (self.folder / self.last).unlink()  # empty: see `is_complete`
        return self.id

    def check(self) -> None:
        """Raise an error if this rank does not see the draft.

        Raises:
            ValueError: the first rank's folder is not this one, or another run has completed it in the meantime, or
                this rank cannot write into it.
        """
        refuse_complete(self.folder, self.last)
        if not self.draft.is_dir():
            raise coded_error(ValueError, "ranks.folders-differ", folder=self.folder)
        if not os.access(self.folder, os.W_OK):
            raise coded_error(ValueError, "checkpoint.folder-not-writable", folder=self.folder)

    def complete(self) -> None:
        """Create the file that completes the folder from the one in the draft, and let it survive a crash.

        The data of the other files must have been synced.

        Raises:
            ValueError: another run has completed it.
        """
        sync(self.draft / self.last)
        sync(self.folder)  # the names of the other files
        if not _link_exclusively(self.draft / self.last, self.folder / self.last):
            raise coded_error(ValueError, "checkpoint.folder-completed-by-other-run", folder=self.folder)
        self._has_completed = True
        sync(self.folder)

    def clean_up(self) -> None:
        """Delete the draft, and the files of all other runs if this one has completed the folder, else its own.

        It never raises: at worst, unused files remain. A process that was forked in the meantime deletes nothing.
        """
        if self._process != os.getpid():
            return
        try:
            shutil.rmtree(self.draft, ignore_errors=True)
            for entry in self.folder.iterdir() if self.folder.is_dir() else ():
                match = _FILES[self.last].fullmatch(entry.name)
                if match is None or (self.id in match.groups()) is self._has_completed:
                    continue
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s was not cleaned up: %s", self.folder, error)


@contextmanager
def saving_into(group: ProcessGroupRef, folder: Path, last: str, is_ready: bool) -> Iterator[tuple[SaveRun, bool]]:
    """Begin a run on all ranks, and clean up at the end; yield it, and whether all ranks are ready. A collective.

    Args:
        last: name of the file that completes the folder.
        is_ready: whether this rank has what the caller needs.

    Raises:
        CheckpointError: on all ranks, if the folder is complete, ranks passed other folders, or saving failed.
    """
    what = "saving into a folder"
    run = own = SaveRun(folder, last, uuid.uuid4().hex[:12])
    try:
        begin = lambda: (own.begin() if group.rank == 0 else "", is_ready)  # noqa: E731
        everyones = share_on_all_ranks(group, what, begin)
        run = SaveRun(folder, last, everyones[0][0])
        run_on_all_ranks(group, what, run.check)
        yield run, all(theirs for _, theirs in everyones)
    except Exception as error:
        complete = "; it is complete nevertheless, by this run or another" if is_complete(folder, last) else ""
        raise coded_error(
            CheckpointError,
            "checkpoint.not-saved",
            content=_KINDS[last],
            folder=folder,
            reason=reason_of(error),
            remark=complete,
        ) from error
    finally:
        if group.rank == 0:
            run.clean_up()


def are_of_one_run(names: Iterable[str]) -> bool:
    """Return whether these are names of data files of a single checkpoint that :class:`SaveRun` has saved."""
    matches = [_FILES[METADATA].fullmatch(name) for name in names]
    return all(matches) and len({match[1] for match in matches if match}) == 1


def is_complete(folder: Path, last: str) -> bool:
    """Return whether the file that completes ``folder`` exists.

    An empty file does not count: without hard links, a run that is killed may leave one.
    """
    return (folder / last).exists() and (folder / last).stat().st_size > 0


def refuse_complete(folder: Path, last: str) -> None:
    """Raise an error if ``folder`` is complete.

    Raises:
        ValueError: names the folder.
    """
    if is_complete(folder, last):
        raise coded_error(ValueError, "checkpoint.folder-already-complete", folder=folder, content=_KINDS[last])


def refuse_incomplete(folder: Path) -> None:
    """Raise an error unless ``folder`` holds a checkpoint that is complete.

    Raises:
        ValueError: says what is there instead.
    """
    if is_complete(folder, METADATA):
        return
    if folder.is_file():
        raise coded_error(ValueError, "checkpoint.folder-is-file", folder=folder)
    if not folder.exists():
        raise coded_error(ValueError, "checkpoint.folder-does-not-exist", folder=folder)
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        raise coded_error(ValueError, "checkpoint.folder-is-empty", folder=folder)
    if METADATA in names or any(_DATA.match(name) for name in names):
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


_STAMP = re.compile(rb"\nthunder_fsdp_sched saved (\d{1,30})\nthunder_fsdp_sched crc32 [0-9a-f]{8}\n\Z")

_NUMBER = re.compile("[0-9]+")

_END = 128
"""Bytes at the end of a list of contents that contain the stamp."""


def stamped(data: bytes, folder: Path) -> bytes:
    """Append the stamp of a checkpoint that is about to be completed in ``folder`` to its list of contents."""
    others = (stamp_of(file.parent) for file in folder.resolve().parent.glob(f"*/{METADATA}"))
    return data + b"\nthunder_fsdp_sched saved %d" % max(time.time_ns(), *((stamp or 0) + 1 for stamp in others), 0)


def stamp_of(folder: Path) -> int | None:
    """Return the stamp of a checkpoint; ``None`` if it has none, or its list of contents is damaged or gone."""
    with contextlib.suppress(OSError), (folder / METADATA).open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _END, 0))
        if found := _STAMP.search(file.read()):
            return int(found[1])
    return None


def newest_first(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, newest first; a link comes after the folder to which it points."""
    found: list[Path] = []
    times: dict[str, int] = {}
    for file in folder.glob(f"*/{METADATA}"):
        with contextlib.suppress(FileNotFoundError):  # the first rank may be removing old ones
            series = series_of(file.parent)
            times[series] = max(time_of(file.parent), times.get(series, 0))
            found.append(file.parent)

    def order(path: Path) -> tuple[bool, int, str, list[int], bool, str]:
        stamp, series = stamp_of(path), series_of(path)
        numbers = [int(number) for number in _NUMBER.findall(path.resolve().name)]
        when = times[series] if stamp is None else stamp
        return stamp is not None, when, series, numbers, not path.is_symlink(), path.name

    return sorted(found, key=order, reverse=True)


def series_of(path: Path) -> str:
    """Return the common part of the names in a series: ``step-#`` for ``step-100``."""
    return _NUMBER.sub("#", path.resolve().name)


def time_of(folder: Path) -> int:
    """Return the time at which the list of contents of a checkpoint was written or copied, in nanoseconds."""
    return (folder / METADATA).stat().st_mtime_ns
