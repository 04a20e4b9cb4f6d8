"""Join gloo's threads before the interpreter shuts down.

[Note: Gloo threads at exit]
A gloo thread that releases the tensors of its last collective needs the interpreter's lock. Once the interpreter is
shutting down, acquiring the lock terminates the thread inside a destructor, and the process aborts (SIGABRT). A process
group joins its threads when it is destroyed, which happens when the last reference is gone. So models refer to process
groups weakly (see ``process_groups``), and at exit all remaining gloo groups are aborted and destroyed; after an uncaught
error, for example, the traceback still refers to them. Groups that also have another backend are not destroyed, because
that could wait for other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import sys

import torch
import torch.distributed as dist

from ..private_api import process_groups

__all__ = ["register"]


@functools.cache
def register() -> None:
    """Register the exit hook; later calls do nothing."""
    atexit.register(_tear_down)


def _tear_down() -> None:
    for name in ("last_exc", "last_value", "last_traceback"):  # already printed
        sys.__dict__.pop(name, None)
    if not dist.is_available() or not dist.is_initialized():
        gc.collect()  # a reference cycle may keep a destroyed group alive
        return
    _destroy_groups()
    gc.collect()


def _destroy_groups() -> None:
    groups = process_groups()
    for group in groups:
        with contextlib.suppress(Exception):
            backend = group._get_backend(torch.device("cpu"))
            if backend.name() == "gloo":
                backend.abort()  # otherwise destruction waits for collectives in flight
    only_gloo = [group for group in groups if _only_gloo(group)]
    if len(only_gloo) == len(groups):
        _destroy(None)
    else:
        for group in only_gloo:
            if group is not dist.group.WORLD:
                _destroy(group)


def _destroy(group: dist.ProcessGroup | None) -> None:
    with contextlib.suppress(Exception):  # the process is exiting, nothing can handle an error
        dist.destroy_process_group(group)


def _only_gloo(group: dist.ProcessGroup) -> bool:
    with contextlib.suppress(Exception):
        return {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")} == {"gloo"}
    return False
