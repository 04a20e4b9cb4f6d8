"""Every state in which a crash may leave a folder, from a log of the file operations of the processes that write into it.

[Note: Crashes]
Before each file operation, a process appends the contents of the folder to the log and, for an fsync, its target. So
entries differ by changes of names (of two by a rename), and of the data of files. A change is safe after an fsync of
its file, or of a folder of its names. As POSIX allows, each of the others may survive a crash or not, regardless of
their order. The states at each entry are those with all of these others (as if only the processes had been killed),
with none, all but one or one of them, and with all but the second half of the data of one file.

Audit hooks see all operations of Python except ``os.fsync``, which is replaced. Files of other programs appear at the
next entry.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

_EVENTS = ("os.mkdir", "os.link", "os.remove", "os.rmdir", "os.rename", "os.truncate")
# Numbers of files by their folder's number and their name (that of the whole folder by `_ROOT`), data by number and `None`.
Changes = list[dict[Any, Any]]
_ROOT = (0, "")
Tree = Collection[tuple[str, bytes | None]]  # paths below a folder with the data of files, or `None` for folders


def record(folder: Path | str, log: Path | str) -> Callable[[], None]:
    """Record this process's file operations in ``log`` until the result is called. An audit hook remains."""
    file, fsync, lock, is_recording = open(log, "ab", buffering=0), os.fsync, threading.RLock(), True  # noqa: SIM115

    def add(synced: int | None = None) -> None:
        with lock:
            fcntl.flock(file, fcntl.LOCK_EX)  # other processes record in it as well
            file.write(pickle.dumps((_scan(folder), synced)))
            fcntl.flock(file, fcntl.LOCK_UN)

    def on_event(event: str, args: Any) -> None:
        if is_recording and (event in _EVENTS or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR))):
            add()

    def stop() -> None:
        nonlocal is_recording
        add()
        os.fsync, is_recording = fsync, False

    add()
    os.fsync = lambda fd: (add(os.fstat(fd).st_ino), fsync(fd))
    sys.addaudithook(on_event)
    return stop


def _scan(folder: Path | str) -> dict[Any, Any]:
    """Return the contents of ``folder``, with inodes as numbers."""
    while True:
        found: dict[Any, Any] = {_ROOT: os.stat(folder).st_ino}
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            for path in sorted(Path(folder).rglob("*")):
                found[path.parent.stat().st_ino, path.name] = inode = path.stat().st_ino
                found[inode, None] = None if path.is_dir() else path.read_bytes()
            return found


def states(log: Path) -> dict[Tree, bool]:
    """Return the states, and whether each is one at the last entry."""
    found, changes, unsafe, folders = dict[Tree, bool](), Changes(), set[int](), dict[Any, Any]()
    inodes, fresh, before = dict[int, int](), itertools.count(1), dict[Any, Any]()
    with log.open("rb") as file:
        while file.peek(1):
            scan, synced = pickle.load(file)
            # The inode of a removed file may be that of another file later.
            inodes = {inode: inodes.get(inode) or next(fresh) for (_, name), inode in scan.items() if name is not None}
            now = {(inodes.get(i, 0), name): v if name is None else inodes[v] for (i, name), v in scan.items()}
            folders |= {key: value for key, value in now.items() if value is None}
            names = {k: now.get(k) for k in before | now if k[1] is not None and before.get(k) != now.get(k)}
            written = [{key: v} for key, v in now.items() if key[1] is None and v not in (None, before.get(key, b""))]
            for change in filter(None, [names, *written]):
                unsafe |= {len(changes)} if before else set()
                changes.append(change)
            found |= {_tree([folders, *kept]): not file.peek(1) for kept in _surviving(changes, unsafe)}
            unsafe -= {n for n in unsafe if any(number == inodes.get(synced) for number, _ in changes[n])}
            before = now
    return found


def _surviving(changes: Changes, unsafe: set[int]) -> Iterator[Changes]:
    for lost in (set(), unsafe, *({n} for n in unsafe), *(unsafe - {n} for n in unsafe)):
        yield [change for n, change in enumerate(changes) if n not in lost]
    for n, [(key, data), *_] in ((n, changes[n].items()) for n in unsafe):
        if isinstance(data, bytes):
            yield [*changes[:n], {key: data[: len(data) // 2]}, *changes[n + 1 :]]


def _tree(changes: Changes) -> Tree:
    disk = {key: value for change in changes for key, value in change.items()}

    def below(folder: int, path: str) -> Iterator[tuple[str, bytes | None]]:
        for (inside, name), number in disk.items():
            if inside == folder and name is not None and number is not None:
                yield path + name, disk.get((number, None), b"")
                yield from below(number, f"{path}{name}/")

    return frozenset(below(disk[_ROOT], ""))


def build(tree: Tree, folder: Path) -> None:
    """Create the files and folders of a state."""
    folder.mkdir(exist_ok=True)
    for path, data in sorted(tree):
        (folder / path).mkdir() if data is None else (folder / path).write_bytes(data)
