"""The memory of the values of traces, of slots, and of communication.

[Note: Bytes of values]
A value occupies memory from the bound symbol that defines it to the last one that reads it or a view of it: there
Thunder deletes it. Values that a trace returns live longer: outputs to the end of the last trace, and those saved for
backward until backward has read them. Inputs count as contiguous. If nothing is known about an operator, its outputs
count as views of all inputs and as new memory, so the bytes are an upper bound. Memory that a function of torch
allocates and frees again counts, too: the peak of its base operators' results. Memory that a base operator or a fusion
allocates internally does not count.

[Note: Memory of communication]
The allocations of this package's symbols are in ``symbol_costs``. Casts of shards and workspaces of transports stay
allocated for all steps. A reduction takes an idle receive buffer, or allocates one, and its wait gives it back. A
release frees idle buffers, and buffers in use after their wait. Without a release they stay for all steps.

Gradients that ``no_sync`` accumulates outlive their backward, unsharded or reduced (see [Note: Two ways to accumulate] in
``runtime.accumulation``). The first backward of a window allocates them where it accumulates them; reduced ones stay where
the reduction has put them, unless they are added up in a wider dtype. In later ones, and in the one that returns them,
they are already allocated. Which buckets have such gradients depends on the micro-batches that ran before, so the
caller names them (:class:`PendingGrads`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ...ir.analysis import BEFORE_TRACE, NO_PENDING_GRADS, Analysis, Lifetime, PendingGrads, bytes_at
from ...ir.effects import effects
from ...ir.inspection import UNPACKING, is_statement, names, nbytes_of
from ...ir.slots import peak_live_bytes, spans_of
from ...runtime.bucket import Bucket
from ...runtime.memory import Arena
from .costs import PERSISTENT, Allocation, Row, device_of, reduced_gradients, unsharded_gradients


def pending_grads_of(bsyms: Iterable[BoundSymbol]) -> PendingGrads:
    """Return the gradients that a backward leaves unreduced under ``no_sync``.

    Those that it reduces and returns count as unsharded, as it would leave them under ``no_sync``.
    """
    found: dict[Bucket, Allocation] = {}
    for e in map(effects, bsyms):
        if e.bucket is None:
            continue
        unsharded, reduced = unsharded_gradients(e.bucket), reduced_gradients(e.bucket)
        if reduced.owner in e.leaves:
            found[e.bucket] = reduced
        elif e.collects or unsharded.owner in e.leaves:
            found.setdefault(e.bucket, unsharded)
    return frozenset(found.values())


def memory_of(rows: Sequence[Row], values: Iterable[Lifetime]) -> list[Lifetime]:
    """Return the memory of values, without slots, and what operators allocate and free again; see [Note: Bytes of values].

    It also sets the owners and the bytes of ``values``, those of the rows.
    """
    temporary = []
    for position, row in enumerate(rows):
        by_name = {value.name: value for value in (*row.args, *row.outs)}
        for value in row.args:
            if not value.owners:
                _own(value, _memory_of(value, counted=True))
        own = {m.owner: m for m in row.costs.allocates if m.scope == "value"}
        for value in row.outs:
            shared = dict.fromkeys(o for name in row.costs.views.get(value.name, ()) for o in by_name[name].owners)
            if value.name in own or not shared:
                _own(value, own.get(value.name) or _memory_of(value, counted=row.bsym.sym.id in UNPACKING))
                shared = {value: None, **shared}
            value.owners = tuple(shared)
        temporary += [_lifetime(m, position, position) for m in row.costs.allocates if m.kind == "temporaries"]
    return [*_memory_of_values(rows, values), *temporary]


def _memory_of_values(rows: Sequence[Row], values: Iterable[Lifetime]) -> Iterator[Lifetime]:
    end = len(rows) - 1
    first_of: dict[int, int] = {}  # by the index of a trace
    begins: dict[Lifetime, int] = {}
    ends: dict[Lifetime, int] = {}
    for value in values:
        for owner in value.owners:
            last = value.reads[-1] if value.reads else value.first
            ends[owner] = max(ends.get(owner, BEFORE_TRACE), last)
    for position, row in enumerate(rows):
        begin = first_of.setdefault(row.trace, position)
        if row.bsym.sym.id is PrimIDs.RETURN:
            outputs = set(_outputs(row.bsym))
            for value in row.args:
                if value.name in outputs:
                    ends.update(dict.fromkeys(value.owners, end))
        elif row.bsym.sym.id in UNPACKING:
            begins.update(dict.fromkeys(row.outs, begin or BEFORE_TRACE))
    for owner, last in ends.items():
        first = begins.get(owner, owner.first)
        owner.last = end if first == BEFORE_TRACE else last  # the caller keeps the arguments of the first trace
        if owner.nbytes:
            kind = "inputs" if first == BEFORE_TRACE or owner in begins else owner.kind
            yield replace(owner, first=first, kind=kind)


def memory_of_communication(
    rows: Sequence[Row], pending_grads: PendingGrads = NO_PENDING_GRADS, others: Sequence[Sequence[Row]] = ()
) -> Iterator[Lifetime]:
    """Return the memory outside the slots (casts, workspaces, receive buffers) that is alive in a step.

    Casts and workspaces that any step allocates stay for all steps. Receive buffers of steps without a release stay
    until the first release of this one.

    Args:
        pending_grads: the unreduced gradients of earlier backwards under ``no_sync``.
        others: other steps that have run.
    """
    end = len(rows) - 1
    everything = [*rows, *itertools.chain(*others)]
    lasting: dict[Hashable, Allocation] = {}
    for m in (m for row in everything for m in row.costs.allocates if m.scope == "steps"):
        lasting[m.owner] = max(m, lasting.get(m.owner, m), key=lambda m: m.nbytes)
    yield from (_lifetime(m, BEFORE_TRACE, end) for m in lasting.values() if m.nbytes)
    kept = {m.owner: _lifetime(m, BEFORE_TRACE, end) for m in sorted(pending_grads, key=lambda m: m.label)}
    before = frozenset(kept)
    found = list(kept.values())
    waits = {row.effects.waits.future: at for at, row in enumerate(rows) if row.effects.waits is not None}
    for position, row in enumerate(rows):
        for m in row.costs.allocates:
            if (m.only_with is not None and m.only_with not in before) or m.kind == "temporaries":
                continue
            if m.scope == "call":
                found.append(_lifetime(m, position, position))
            elif m.scope == "wait" and row.effects.issues is not None:
                at = waits[row.effects.issues.future]
                later = sum(a.nbytes for a in rows[at].costs.allocates if _is_new(a, before, kept))
                if m.nbytes > later:  # it is freed before the wait allocates anything
                    found.append(_lifetime(m._replace(nbytes=m.nbytes - later), at, at))
            elif m.scope in PERSISTENT and m.owner not in kept:
                following = (at for at in range(position + 1, end + 1) if is_statement(rows[at].bsym))
                kept[m.owner] = _lifetime(m, position if m.scope == "persistent" else next(following), end)
                found.append(kept[m.owner])
        for key in row.costs.forgets:
            if key in kept:
                kept[key].last = position
    yield from found
    if releases(rows):
        yield from _receive_buffers(rows, before)
    leaving = [row for step in (rows, *others) if not releases(step) for row in step]
    released = next((position for position, row in enumerate(rows) if row.effects.frees), end)
    for buffer in _receive_buffers(leaving, before.union(*(row.effects.leaves for row in everything))):
        yield replace(buffer, first=BEFORE_TRACE, last=released)


def releases(step: Sequence[Row]) -> bool:
    """Return whether a step frees memory of arenas."""
    return any(row.effects.frees for row in step)


def _receive_buffers(step: Sequence[Row], kept: Collection[Hashable]) -> list[Lifetime]:
    """Return the buffers into which reductions receive, each from its first use until it is freed.

    A reduction uses an idle buffer again. A release frees idle ones, and those in use after their wait.

    Args:
        kept: keys of the gradients that exist before.
    """
    found: list[Lifetime] = []
    idle: dict[Hashable, list[Lifetime]] = defaultdict(list)
    taken: dict[str, list[tuple[Hashable, Lifetime]]] = {}  # by the future of the reduction
    leaving: set[Lifetime] = set()
    for position, row in enumerate(step):
        used, e = [], row.effects
        for m in row.costs.allocates:
            if m.scope == "pool" and (m.only_with is None or m.only_with in kept):
                if not idle[m.owner]:
                    found.append(_lifetime(m, position, len(step) - 1))
                    idle[m.owner].append(found[-1])
                used.append((m.owner, idle[m.owner].pop()))
        if e.issues is not None:
            taken[e.issues.future], used = used, []
        if e.waits is not None:
            used += taken.pop(e.waits.future, [])
        for key, buffer in used:
            if buffer in leaving:
                buffer.last = position
            else:
                idle[key].append(buffer)
        if e.frees:
            leaving.update(buffer for buffers in taken.values() for _, buffer in buffers)
            for buffer in itertools.chain(*idle.values()):
                buffer.last = position
            idle.clear()
    return found


def _is_new(m: Allocation, before: Collection[Hashable], kept: Collection[Hashable]) -> bool:
    """Return whether a symbol allocates this memory, given the keys of memory before the step and before the symbol."""
    if m.only_with is not None and m.only_with not in before:
        return False
    return m.scope in ("value", "call") or (m.scope == "persistent" and m.owner not in kept)


def _own(value: Lifetime, memory: Allocation) -> None:
    """Let a value own memory."""
    value.owners = (value,)
    value.nbytes, value.device, value.kind, value.on_host = memory.nbytes, memory.device, memory.kind, memory.on_host


def _memory_of(value: Lifetime, *, counted: bool) -> Allocation:
    """Return the memory of a value that no bound symbol of the traces allocates."""
    nbytes = nbytes_of(value.proxy) if counted and isinstance(value.proxy, TensorProxy) else 0
    return Allocation(value.name, nbytes, device_of(value.proxy), kind="values")


def _lifetime(m: Allocation, first: int, last: int) -> Lifetime:
    return Lifetime(m.label, first, first, last, m.nbytes, m.device, m.kind, m.on_host)


def _outputs(last: BoundSymbol) -> Iterator[str]:
    """Return the names of the values that a trace returns to its caller, without those that it saves for backward."""
    returned = last.args[0] if last.args else None
    return names(tree_iter(returned["output"] if isinstance(returned, dict) and "output" in returned else last.args))


def slots_in_use(step: Analysis) -> list[int]:
    """Return the bytes of arenas that hold unsharded parameters or gradients in each statement, each byte counted once.

    Args:
        step: the analysis of traces with slots.
    """
    nbytes = bytes_at(spans_of([live for live in step.slots.values() if live.slot is not None]), len(step.bsyms))
    return [n for n, bsym in zip(nbytes, step.bsyms, strict=True) if is_statement(bsym)]


def shared_slots(trace: TraceCtx) -> tuple[int, int]:
    """Return the bytes of arena that the shared slots of a trace occupy, and a lower bound for any allocation."""
    ends: dict[Arena, int] = defaultdict(int)
    for e in map(effects, trace.bound_symbols):
        region = e.issues.region if e.issues is not None else None
        if region is not None and region.slot is not None and not region.is_private:
            ends[region.slot.arena] = max(ends[region.slot.arena], region.slot.end)
    return sum(ends.values()), peak_live_bytes(trace)


def arena_allocations(step: Sequence[Row], others: Iterable[Sequence[Row]]) -> dict[Arena, list[tuple[int, int]]]:
    """Return for each arena the positions, first and last included, between which its memory is allocated.

    An arena that this step frees is allocated from its first use, or its next one, on. One that it uses and does not
    free is allocated all the time, as is one that only other steps use, of which one never frees it.

    Args:
        step: the rows of traces with slots.
        others: other steps that have run.
    """
    begins: dict[Arena, int] = {}
    found: dict[Arena, list[tuple[int, int]]] = {}
    for other in others:
        freed = {arena for row in other for arena in row.effects.frees}
        used = (row.effects.uses.arena for row in other if row.effects.uses is not None)
        found.update((arena, [(0, len(step) - 1)]) for arena in used if arena not in freed)
    own: dict[Arena, list[tuple[int, int]]] = defaultdict(list)
    for position, row in enumerate(step):
        for arena in row.effects.frees:
            if arena in begins:
                own[arena].append((begins.pop(arena), position))
        if row.effects.uses is not None:
            begins.setdefault(row.effects.uses.arena, position)
    for arena, begin in begins.items():
        since = begin if arena in own else 0
        own[arena].append((since, len(step) - 1))
    return found | own
