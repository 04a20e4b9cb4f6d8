"""Log messages: the progress of compiling (INFO, first rank) and the changes of each pass (DEBUG, every rank).

Both go to the logger ``thunder_fsdp_sched``. Python shows neither by default::

    logging.basicConfig()
    logging.getLogger("thunder_fsdp_sched").setLevel(logging.DEBUG)

With ``TORCH_TRACE=folder``, torch's structured log gets the traces before and after the passes, the schedule and the
predicted memory of each compilation. ``tlparse folder --all-ranks-html`` shows them, and compares the order of collectives
across ranks.

Where stderr is a terminal and the logger does not show INFO, the first rank shows the stage of the compilation and its
seconds in one line instead, which later stages overwrite. ``THUNDER_FSDP_SCHED_PROGRESS=0`` switches that line off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from .ir.inspection import statements
from .ir.schedule import Schedule, is_communication
from .private_torch import log_artifact
from .runtime.memory import Slot

LOGGER = logging.getLogger("thunder_fsdp_sched")

_compile_ids = itertools.count(10_000)
"""Compilations have numbers in torch's structured log that torch.compile, which counts from 0, does not reach."""

_followers: list[Callable[[str], None]] = []


@contextlib.contextmanager
def following_stages(follower: Callable[[str], None]) -> Iterator[None]:
    """Call ``follower`` with the name of each stage of each compilation, in place of the progress line."""
    _followers.append(follower)
    try:
        yield
    finally:
        _followers.remove(follower)


def _shows_line() -> bool:
    shown = os.environ.get("THUNDER_FSDP_SCHED_PROGRESS", "") != "0" and not LOGGER.isEnabledFor(logging.INFO)
    return shown and sys.stderr is not None and sys.stderr.isatty()


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
        self._stages: list[tuple[str, float]] = []  # names, with their starts

    def say(self, text: str, *args: object) -> None:
        """Log a message outside of a compilation."""
        if not self._quiet:
            LOGGER.info(f"%s: {text}", self._title, *args)

    def begin(self, text: str, *args: object, stage: str) -> None:
        """Log the first message of a compilation, start its clock, and show its first stage."""
        self._started = time.perf_counter()
        self._stages = []
        self.say(text, *args)
        self._show(stage)

    def log_phase(self, text: str, *args: object, stage: str) -> None:
        """Log a later message of a compilation, with the seconds since its start, and show the stage that begins."""
        if not self._quiet:
            LOGGER.info(f"%s, %.1f s: {text}", self._title, time.perf_counter() - self._started, *args)
        self._show(stage)

    def end(self, text: str, *args: object) -> None:
        """Log the last message of a compilation, and replace the progress line by the seconds of all stages."""
        now = time.perf_counter()
        if not self._quiet:
            LOGGER.info(f"%s, %.1f s: {text}", self._title, now - self._started, *args)
            if _shows_line() and not _followers:
                ends = [start for _, start in self._stages[1:]] + [now]
                parts = [f"{name} {end - start:.1f}" for (name, start), end in zip(self._stages, ends, strict=True)]
                self._write(f"compiled in {now - self._started:.1f} s ({', '.join(parts)})\n")

    def _show(self, stage: str) -> None:
        now = time.perf_counter()
        self._stages.append((stage, now))
        if self._quiet:
            return
        for follower in _followers:
            follower(stage)
        if _shows_line() and not _followers:
            self._write(f"{stage}, {now - self._started:.1f} s ... ")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[Kthunder_fsdp_sched, {self._title}: {text}")
        sys.stderr.flush()


class Artifacts:
    """A compilation, as torch's structured log shows it."""

    def __init__(self) -> None:
        self._compile_id = next(_compile_ids)

    def log(self, name: str, half: str, payload: Callable[[], Any], *, encoding: str = "json") -> None:
        """Log ``payload()`` for ``"forward"`` or ``"backward"``; it is called only if torch writes that log."""
        log_artifact(name, encoding, (self._compile_id, int(half == "backward")), payload)

    def log_schedule(self, half: str, unscheduled: TraceCtx, schedule: Schedule) -> None:
        """Log a trace before it is scheduled, and its schedule, before the ranks compare theirs."""
        self.log(f"fsdp_{half}_before", half, lambda: str(unscheduled), encoding="string")
        self.log("inductor_collective_schedule", half, schedule.collectives)
        self.log(f"fsdp_{half}_schedule", half, lambda: dataclasses.asdict(schedule))


def log_pass(name: str, seconds: float, before: TraceCtx, after: TraceCtx) -> None:
    """Log at DEBUG what a pass changed and the processor time (s) that it took."""
    if LOGGER.isEnabledFor(logging.DEBUG):
        LOGGER.debug("pass %s: %s, %.1f ms", name, describe_change(before, after), 1e3 * seconds)


def describe_change(before: TraceCtx, after: TraceCtx) -> str:
    """Describe how one trace differs from another in a line.

    It counts bound symbols, this package's own symbols that were added or removed, the collectives and waits that moved
    relative to the computation, and the slots, if they changed.
    """
    old, new = before.bound_symbols, after.bound_symbols
    known = {id(bsym) for bsym in old}
    rewritten = sum(id(bsym) not in known for bsym in new)
    if not rewritten and len(new) == len(old):
        return f"{_count(len(new), 'bound symbol')}, no change"
    counted = f"{len(old):,} -> {len(new):,} bound symbols" if len(old) != len(new) else f"{len(new):,} bound symbols"
    parts = [f"{counted} ({rewritten:,} new or rewritten)"]
    own, own_before = _own_symbols(new), _own_symbols(old)
    for name in sorted(own.keys() | own_before.keys()):
        if own[name] != own_before[name]:
            parts.append(f"{own[name] - own_before[name]:+} {name}")
    positions, positions_before = _positions(statements(after)), _positions(statements(before))
    moved = sum(positions_before.get(key, position) != position for key, position in positions.items())
    if moved:
        parts.append(f"{moved} of {len(positions)} collectives and waits moved")
    if (slots := _slots(new)) != _slots(old):
        parts.append(f"{_count(len(slots), 'slot')} of {sum(slot.nbytes for slot in slots):,} bytes in all")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _own_symbols(bsyms: Iterable[BoundSymbol]) -> Counter[str]:
    return Counter(bsym.sym.name for bsym in bsyms if bsym.sym.name.startswith("fsdp_"))


def _positions(bsyms: Iterable[BoundSymbol]) -> dict[tuple[str, str, int], int]:
    """Return the number of bound symbols of compute before each collective and wait."""
    positions: dict[tuple[str, str, int], int] = {}
    repeated: Counter[tuple[str, str]] = Counter()
    compute = 0
    for bsym in bsyms:
        if is_communication(bsym):
            key = (bsym.sym.name, str(bsym.args[0]))
            positions[(*key, repeated[key])] = compute
            repeated[key] += 1
        else:
            compute += 1
    return positions


def _slots(bsyms: Iterable[BoundSymbol]) -> set[Slot]:
    return {arg for bsym in bsyms for arg in bsym.args if isinstance(arg, Slot)}
