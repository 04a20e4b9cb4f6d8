"""A line of the log that describes what a pass has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ...ir.inspection import statements
from ...ir.read_schedule import is_communication
from ...runtime.memory import Slot


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
