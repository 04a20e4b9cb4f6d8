"""Log messages: the progress of compiling (INFO, first rank) and the changes of each pass (DEBUG, every rank).

Both go to the logger ``thunder_fsdp_sched``. Python shows neither by default::

    logging.basicConfig()
    logging.getLogger("thunder_fsdp_sched").setLevel(logging.DEBUG)
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from .runtime.memory import Slot
from .trace.inspection import statements
from .trace.schedule import is_communication

__all__ = ["LOGGER", "Progress", "describe_change", "log_pass"]

LOGGER = logging.getLogger("thunder_fsdp_sched")


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

    def begin(self, text: str, *args: object) -> None:
        """Log the first message of a compilation and start its clock."""
        self._started = time.perf_counter()
        self.say(text, *args)

    def log_phase(self, text: str, *args: object) -> None:
        """Log a later message of a compilation, with the seconds since its start."""
        if not self._quiet:
            LOGGER.info(f"%s, %.1f s: {text}", self._title, time.perf_counter() - self._started, *args)


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
