"""Ranks that decide differently: each on virtual GPUs in a process of its own, with real rounds over gloo."""

from __future__ import annotations

import linecache
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from internals import channel
from ranks import Ranks

from .log import Log
from .world import Result, virtual_rank

_PATIENCE = timedelta(minutes=2)
"""How long a rank waits for another one."""


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
    channels: dict[tuple[int, ...], Any] = {}
    backends: dict[Any, dist.ProcessGroupGloo] = {}

    def open_channel(group: Any, name: str) -> Any:
        members = tuple(group.global_ranks)
        if len(members) > 1 and members not in channels:
            of_group = dist.PrefixStore(f"{members}", store)
            backends[group.process_group] = dist.ProcessGroupGloo(of_group, group.rank, group.size, _PATIENCE)
            channels[members] = channel.Channel(group, _PATIENCE)
        return channels.get(members)

    with (
        mock.patch.object(channel, "host_backend", backends.__getitem__),
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
