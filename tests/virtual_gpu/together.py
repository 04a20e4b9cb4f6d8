"""Ranks that decide differently: each on virtual GPUs in a process of its own, with agreement through a store of files."""

from __future__ import annotations

import contextlib
import linecache
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from internals import channel
from ranks import Ranks

from .log import Entry, Log
from .world import Rank, Result, virtual_rank


class _Gather:
    """An all-gather of bytes through a store."""

    def __init__(self, store: dist.Store, group: Any) -> None:
        self._store, self._rank, self._size = store, group.rank, group.size
        self._name = f"virtual/{group.global_ranks}"

    def start(self, own: bytes, backend: Any, tag: int) -> None:
        self._tag = tag
        self._store.set(f"{self._name}/{tag}/{self._rank}", own)

    def finish(self, timeout: timedelta) -> None:
        keys = [f"{self._name}/{self._tag}/{rank}" for rank in range(self._size)]
        self._store.wait(keys, timeout)
        self._gathered = [self._store.get(key) for key in keys]

    def gathered(self) -> list[bytes]:
        return self._gathered

    def close(self) -> None: ...


class _Channel(channel.Channel):
    """A channel of the ranks of a virtual process group."""

    def __init__(self, group: Any, store: dist.Store) -> None:
        with mock.patch.object(channel, "new_group", lambda *args, **options: group):
            super().__init__(group, timedelta(minutes=2))
        self.store = store
        self._tokens = _Gather(store, group)  # type: ignore[assignment]

    def _all_gather(self, own: bytes, sizes: Sequence[int]) -> list[bytes]:
        gather = _Gather(self.store, self.group)
        gather.start(own, None, self._next_tag())
        gather.finish(self._timeout)
        return gather.gathered()


_PATIENCE = timedelta(minutes=1)
"""How long a late rank waits for the first one; only if that waits for it, too, it takes so long."""


@contextlib.contextmanager
def late_round(rank: Rank, channel: _Channel, name: str) -> Iterator[None]:
    """Within the context, let all ranks but the first announce traces only after the first has run an operator of one.

    So the context ends with an error if the first rank waits for the others before its first operator.

    Args:
        name: unique to this context, the same on all ranks.
    """
    post, add = channel.post, rank.log.add

    def add_and_tell(kind: str, *args: Any, **kwargs: Any) -> Entry:
        entry = add(kind, *args, **kwargs)
        if kind == "kernel" and entry.where and entry.where[-1][0].startswith("thunder."):
            channel.store.set(name, "computes")
        return entry

    def post_late(*args: Any) -> None:
        channel.store.wait([name], _PATIENCE)
        post(*args)

    owner, method, late = (channel, "post", post_late) if rank.rank else (rank.log, "add", add_and_tell)
    with mock.patch.object(owner, method, late):
        yield


def run_together(ranks: Ranks, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Result:
    """Run ``function(rank, *args, **kwargs)`` as each rank at once, as ``world.run`` does it one after the other.

    Ranks see each other's tokens and programs, and no other data.

    Args:
        ranks: without a process group.
        function: at the top level of a module.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = ranks.run(_run, f"{folder}/store", function, args, kwargs)
    logs, values, sources = zip(*found, strict=True)
    for lines in sources:
        for file, text in lines.items():
            linecache.cache[file] = len(text), None, text, file
    return Result(logs, values)


def _run(
    rank: int, world_size: int, file: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Log, Any, dict[str, list[str]]]:
    store = dist.FileStore(file, world_size)
    channels: dict[tuple[int, ...], _Channel] = {}

    def open_channel(group: Any, name: str) -> _Channel | None:
        members = tuple(group.global_ranks)
        if len(members) > 1 and members not in channels:
            channels[members] = _Channel(group, store)
        return channels.get(members)

    with (
        mock.patch.object(channel, "host_backend", lambda group: None),
        virtual_rank(rank, world_size, open_channel=open_channel) as as_rank,
    ):
        value = function(as_rank, *args, **kwargs)
    return as_rank.log, value, _name_traces_by_rank(as_rank.log)


def _name_traces_by_rank(log: Log) -> dict[str, list[str]]:
    """Let the files of traces in a log have names that no other rank has, and return their lines."""
    lines = {}
    for entry in log.entries:
        where = []
        for file, line, function in entry.where:
            name = f"{file}@{log.rank}" if file.startswith("thunder.") else file
            if name != file:
                lines[name] = linecache.getlines(file)
            where.append((name, line, function))
        entry.where = tuple(where)
    return lines
