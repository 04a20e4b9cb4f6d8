"""The names of collectives in profiles, in dumps of the Flight Recorder, and in stacks.

[Note: Names of collectives]
In a profile, the call that issues a collective is labelled with its bucket, such as ``fsdp_reduce_scatter(blocks.0)``.
The backend's own entry also has the phase and the number of optimizer steps in this process:
``fsdp_reduce_scatter(blocks.0) in backward, step 12``. Before torch 2.12, which lets us name it, that is a second label.

The Flight Recorder has no field for such names, but records the Python stack of each collective. So a collective is
issued in a function named ``fsdp_reduce_scatter(blocks.0) in backward``. Every stack shows it: a dump of the Flight
Recorder, a traceback, a snapshot of CUDA's memory, and a sampling profiler's view of a process that hangs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..private_torch import labelled, running_node

T = TypeVar("T")

_optimizer_steps = 0


def _count_optimizer_step(*args: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)


def optimizer_steps() -> int:
    """Return the number of optimizer steps in this process."""
    return _optimizer_steps


def issue_named(what: str, bucket_name: str, issue: Callable[[], T]) -> T:
    """Issue a collective, such as the ``"all-gather"`` of a bucket; see [Note: Names of collectives]."""
    phase = "forward" if running_node() is None else "backward"
    name, run = _named_function(what, bucket_name, phase)
    with labelled(what, bucket_name) as label:
        if label is None:  # no profiler is running
            return run(issue)
        name_collectives = getattr(dist, "record_comm", torch.profiler.record_function)
        with name_collectives(f"{name}, step {_optimizer_steps}"):
            return run(issue)


@functools.cache
def _named_function(what: str, bucket_name: str, phase: str) -> tuple[str, Callable[[Callable[[], T]], T]]:
    """Return the name of a collective, and a function of this name that calls its argument."""
    name = f"fsdp_{what.replace('-', '_')}({bucket_name}) in {phase}"

    def call(issue: Callable[[], T]) -> T:
        return issue()

    names: dict[str, Any] = {field: name for field in ("co_name", "co_qualname") if hasattr(call.__code__, field)}
    call.__code__ = call.__code__.replace(**names)
    return name, call
