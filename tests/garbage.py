"""Garbage that is collected at chosen operations: objects in reference cycles may be destroyed at any time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import thunder_fsdp_sched as tfs

import thunder
import torch
import torch.distributed as dist


def drop_in_a_cycle(value: Any) -> None:
    """Let only a reference cycle refer to a value, so that it lives until garbage is collected."""
    cycle = [value]
    cycle.append(cycle)


def leave_a_group(timeout: timedelta) -> None:
    """Leave to the garbage collector a process group that has been destroyed, and a model sharded over it."""
    group = dist.new_group(timeout=timeout)
    transform = tfs.fsdp(ranks=tfs.Ranks(process_group=group, separate_reduce_scatter_group=True))
    drop_in_a_cycle([group, thunder.jit(torch.nn.Linear(2, 2), transforms=[transform])])
    dist.destroy_process_group(group)


class Collecting:
    """Collects garbage in the n-th gather or reduction of the given buckets after :meth:`after`."""

    def __init__(self, buckets: Iterable[Any]) -> None:
        self._left = -1
        for bucket in buckets:
            for owner, name in (bucket.source, "shard"), (bucket.accumulation, "check_complete"):
                setattr(owner, name, self._counted(getattr(owner, name)))

    def after(self, operations: int) -> None:
        """Collect garbage after so many gathers and reductions: now for 0, never if negative."""
        self._left = operations
        self._count()

    def _count(self) -> None:
        if self._left == 0:
            gc.collect()
        self._left -= 1

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._count()
            return function(*args, **kwargs)

        return counted
