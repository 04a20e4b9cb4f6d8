"""Gloo's threads are joined before the interpreter shuts down.

[Note: Threads of gloo at exit]
A thread of gloo that drops the tensors of its last collective needs the interpreter's lock. Once the interpreter has begun
to shut down, asking for it ends the thread inside a destructor, and the process aborts (SIGABRT). A process group joins
its threads when it is destroyed, that is, when nobody holds it any more. So models hold process groups weakly, see
``groups``, and at exit the groups of gloo that are left are aborted and destroyed. After an uncaught error its
traceback holds them. Groups with another backend beside gloo are not destroyed: that could wait for other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import sys

import torch
import torch.distributed as dist

from .compat import process_groups

__all__ = ["register"]


@functools.cache
def register() -> None:
    """Have the hook run at exit. Only the first call does something."""
    atexit.register(_tear_down)


def _tear_down() -> None:
    for name in ("last_exc", "last_value", "last_traceback"):  # printed already
        sys.__dict__.pop(name, None)
    if not dist.is_available() or not dist.is_initialized():
        gc.collect()  # a group that was destroyed may be held by a cycle
        return
    _destroy_groups()
    gc.collect()


def _destroy_groups() -> None:
    groups = process_groups()
    for group in groups:
        with contextlib.suppress(Exception):
            backend = group._get_backend(torch.device("cpu"))
            if backend.name() == "gloo":
                backend.abort()  # what is still in flight would be waited for
    only_gloo = [group for group in groups if _only_gloo(group)]
    if len(only_gloo) == len(groups):
        _destroy(None)
    else:
        for group in only_gloo:
            if group is not dist.group.WORLD:
                _destroy(group)


def _destroy(group: dist.ProcessGroup | None) -> None:
    with contextlib.suppress(Exception):  # nobody can do anything about it any more
        dist.destroy_process_group(group)


def _only_gloo(group: dist.ProcessGroup) -> bool:
    with contextlib.suppress(Exception):
        return {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")} == {"gloo"}
    return False
