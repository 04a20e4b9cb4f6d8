"""Log messages: the progress of compiling (INFO, first rank) and the changes of each pass (DEBUG, every rank).

Both go to the logger ``thunder_fsdp_sched``. Python shows neither by default::

    logging.basicConfig()
    logging.getLogger("thunder_fsdp_sched").setLevel(logging.DEBUG)

With ``TORCH_TRACE=folder``, torch's structured log gets the traces before and after the passes (at DEBUG after each one),
the schedule and the predicted memory of each compilation. ``tlparse folder --all-ranks-html`` shows them, and compares the
order of collectives across ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from thunder.core.trace import TraceCtx

from .extensions import load
from .private_torch import log_artifact

LOGGER = logging.getLogger("thunder_fsdp_sched")

_IDS = range(10_000, 1 << 31)
"""The numbers of modules in torch's structured log: torch.compile, which counts from 0, does not reach them."""

_followers: list[Callable[[str], None]] = []


@contextlib.contextmanager
def following_stages(follower: Callable[[str], None]) -> Iterator[None]:
    """Call ``follower`` with the name of each stage of each compilation."""
    _followers.append(follower)
    try:
        yield
    finally:
        _followers.remove(follower)


class Progress:
    """Progress messages of one model's compilations. Only the first rank logs them.

    Args:
        title: the model's name in messages.
        rank: this process's rank among those that share the model.
    """

    def __init__(self, title: str, rank: int) -> None:
        self._title = title
        self._quiet = rank != 0
        self._started = time.perf_counter()

    def say(self, text: str, *args: object) -> None:
        """Log a message outside of a compilation."""
        if not self._quiet:
            LOGGER.info(f"%s: {text}", self._title, *args)

    def begin(self, text: str, *args: object, stage: str) -> None:
        """Log the first message of a compilation, and start its clock and its first stage."""
        self._started = time.perf_counter()
        self.say(text, *args)
        self._begin_stage(stage)

    def log_phase(self, text: str, *args: object, stage: str) -> None:
        """Log a later message of a compilation, and begin a stage."""
        self.end(text, *args)
        self._begin_stage(stage)

    def end(self, text: str, *args: object) -> None:
        """Log a message of a compilation, with the seconds since its start."""
        if not self._quiet:
            LOGGER.info(f"%s, %.1f s: {text}", self._title, time.perf_counter() - self._started, *args)

    def _begin_stage(self, stage: str) -> None:
        for follower in () if self._quiet else _followers:
            follower(stage)


class Artifacts:
    """One compilation in torch's structured log. tlparse compares those of all ranks by their numbers.

    Args:
        module: a number of the module, the same on all ranks.
        compilation: the number of the compilation of this module on this rank, from 0.
    """

    def __init__(self, module: int, compilation: int) -> None:
        self._module, self._compilation = _IDS[module % len(_IDS)], compilation

    def log(self, name: str, half: str, payload: Callable[[], Any], *, encoding: str = "json") -> None:
        """Log ``payload()`` for ``"forward"`` or ``"backward"``; it is called only if torch writes that log."""
        log_artifact(name, encoding, (self._module, 2 * self._compilation + (half == "backward")), payload)

    def log_pass(self, name: str, half: str, trace: TraceCtx) -> None:
        """Log a trace after a pass, if the logger of this package shows DEBUG."""
        if LOGGER.isEnabledFor(logging.DEBUG):
            self.log(f"fsdp_after_{name}", half, lambda: str(trace), encoding="string")

    def log_schedule(self, half: str, unscheduled: TraceCtx, schedule: Any) -> None:
        """Log a trace before it is scheduled, and its ``Schedule``, before the ranks compare theirs.

        The shortest payload comes first: even without ``TORCH_TRACE``, torch calls the first payload of a process, and
        only then finds that it writes no log. Printing a trace of 32 blocks takes 0.3 s.
        """
        self.log("inductor_collective_schedule", half, schedule.collectives)
        self.log(f"fsdp_{half}_before", half, lambda: str(unscheduled), encoding="string")
        self.log(f"fsdp_{half}_schedule", half, lambda: dataclasses.asdict(schedule))


def log_pass(name: str, seconds: float, before: TraceCtx, after: TraceCtx) -> None:
    """Log at DEBUG what a pass changed and the processor time (s) that it took."""
    if LOGGER.isEnabledFor(logging.DEBUG):
        changed = load("extras.reports.texts:describe_change")(before, after)
        LOGGER.debug("pass %s: %s, %.1f ms", name, changed, 1e3 * seconds)
