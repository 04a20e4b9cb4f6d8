"""The memory of the values of traces, of slots, and of what communication allocates.

[Note: Bytes of values]
A value occupies memory from the bound symbol that defines it to the last one that reads it or a view of it: there
Thunder deletes it. What a trace returns lives on, outputs to the end of the last trace, and what is saved for backward
until backward has read it. Inputs count as contiguous. If nothing is known about an operator, its outputs count as views
of all inputs and as new memory, so the bytes are an upper bound. What a function of torch allocates and frees again
counts, too: the most bytes of what its base operators return. What a base operator or a fusion allocates inside itself is
not counted.

[Note: Memory of communication]
What this package's symbols allocate is in ``symbol_costs``. Casts of shards and workspaces of transports stay
allocated for all steps. A reduction takes an idle buffer to receive into, or allocates one, and its wait gives it back; a
release frees the idle ones, and those in use when they have been waited for. Without a release they stay for all steps.

Gradients that ``no_sync`` accumulates outlive their backward, unsharded or reduced (see [Note: Two ways to accumulate] in
``runtime.accumulation``). The first backward of a window allocates them where it accumulates them; reduced ones stay where
the reduction has put them, unless they are added up in a wider dtype. Later ones, and the one that returns them, find them
allocated. Which buckets have such gradients depends on the micro-batches that ran before, so the caller names them
(:class:`PendingGrads`).

[Note: Observed strides]
A result's memory may depend on strides (a reshape copies a transposed tensor), so an operator is observed with the strides
that earlier operators have returned. A bound symbol keeps what was observed for each choice of strides.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from thunder.core.prims import PrimIDs
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ...ir.analysis import BEFORE_TRACE, NO_PENDING_GRADS, Analysis, Lifetime, PendingGrads, bytes_at
from ...ir.effects import NOTHING, Effects, effects, is_declared
from ...ir.inspection import UNPACKING, args_of, defined_by, is_statement, names, nbytes_of
from ...ir.operator_facts import facts_of, observed_call, tensors_read, tensors_returned
from ...ir.slots import peak_live_bytes, spans_of
from ...ir.symbols import LEAF
from ...private_thunder import OBSERVED_COSTS
from ...runtime.bucket import Bucket
from ...runtime.memory import Arena
from .costs import FREE, PERSISTENT, Allocation, Costs, reduced_gradients, unsharded_gradients
from .symbol_costs import costs

StepEffects = Sequence[tuple[Effects, Costs]]
"""The effects and the costs of the traces of a step, without observation, by position."""


def effects_of(bsyms: Iterable[BoundSymbol | None]) -> StepEffects:
    """Return a step; ``None`` stands for a bound symbol that is not of this package."""
    return [(NOTHING, FREE) if bsym is None else (effects(bsym), costs(bsym)) for bsym in bsyms]


def observed_costs(bsym: BoundSymbol, strides: Mapping[str, tuple[int, ...]]) -> Costs:
    """Return the costs of a bound symbol, with the views that it returns and the memory that it allocates.

    Args:
        strides: strides by name, of inputs that are not contiguous. They change the costs of operators that are not ours
            only.
    """
    if is_declared(bsym.sym) or bsym.sym.id in UNPACKING or bsym.sym.id in (PrimIDs.DEL, PrimIDs.RETURN):
        return costs(bsym)
    observed: dict[Any, Costs] = vars(bsym).setdefault(OBSERVED_COSTS, {})
    key = tuple([strides.get(name) for name in args_of(bsym)])
    if key not in observed:
        observed[key] = _observed(bsym, strides)
    return observed[key]


def observed(bsyms: Iterable[BoundSymbol]) -> Iterator[tuple[Costs, dict[str, tuple[int, ...]]]]:
    """Yield the costs of each bound symbol on inputs with the strides that they have, and the strides of these inputs.

    Strides are those that the bound symbols before it have returned, by name. Values without are contiguous.
    """
    strides: dict[str, tuple[int, ...]] = {}
    for bsym in bsyms:
        found = observed_costs(bsym, strides)
        yield found, strides
        for out in () if bsym.sym.id in UNPACKING else defined_by(bsym):  # perhaps saved by an earlier trace
            known = found.strides.get(out.name) or strides.get(found.layouts.get(out.name, ""))
            if known is None:
                strides.pop(out.name, None)
            else:
                strides[out.name] = known


def _observed(bsym: BoundSymbol, strides: Mapping[str, tuple[int, ...]]) -> Costs:
    """Return the costs of an operator that is not ours, on inputs with these strides."""
    facts, call = facts_of(bsym), observed_call(bsym, strides)
    inputs, outs, by_name = tensors_read(bsym), tensors_returned(bsym), {p.name: p for p in bsym.flat_proxy_args}
    views: dict[str, tuple[str, ...]] = {}
    found: dict[str, tuple[int, ...]] = {}
    memory = []
    leaf = bsym.args[0] if bsym.sym.name.startswith(LEAF) else None
    for out in defined_by(bsym):
        nbytes = nbytes_of(out) if isinstance(out, TensorProxy) else 0
        if call is not None and out.name in outs:
            index = outs.index(out.name)
            first, nbytes = call.storages[index]
            if (of_out := call.strides[index]) is not None:
                found[out.name] = of_out
            of = tuple(inputs[i] for i in sorted(call.aliases[index])) or (outs[first],) * (first != index)
            is_new = not of
        else:
            of = tuple(name for name in facts.aliases.get(out.name, ()) if _may_be_view(out, by_name[name]))
            is_new = not (of and facts.known)
        views[out.name] = of
        if is_new:
            memory.append(Allocation(out.name, nbytes, device_of(out), kind="values"))
    if call is not None and call.temporary_bytes:
        tensors = (p for p in (*bsym.flat_proxy_outs, *bsym.flat_proxy_args) if isinstance(p, TensorProxy))
        device = next(map(device_of, tensors), "cpu")
        memory.append(Allocation(None, call.temporary_bytes, device, "call", "temporaries", bsym.sym.name))
    operators, flops = (None, None) if call is None else (call.operators, call.flops)
    if leaf is not None:
        flops = leaf.flops_of(bsym.sym.name)
        for state in [out for out in defined_by(bsym) if not isinstance(out, TensorProxy)]:  # its autograd graph
            views[state.name] = facts.aliases.get(state.name, ())
            memory.append(Allocation(state.name, leaf.saved_bytes, leaf.outputs[0].device.type, kind="values"))
        temporary = leaf.bytes_of(bsym.sym.name) - sum(
            nbytes_of(out) for out in defined_by(bsym) if isinstance(out, TensorProxy)
        )
        memory.append(
            Allocation(None, max(temporary, 0), leaf.outputs[0].device.type, "call", "temporaries", bsym.sym.name)
        )
    return Costs(views=views, strides=found, operators=operators, flops=flops, allocates=tuple(memory))


def device_of(proxy: object) -> str:
    """Return the type of the device of a value."""
    return proxy.device.type if isinstance(proxy, (TensorProxy, FutureTensorProxy)) else "cpu"


def _may_be_view(value: object, base: object) -> bool:
    """Return whether dtype and device allow that a value, whose operator may return a view of ``base``, is one."""
    return (
        isinstance(value, TensorProxy)
        and isinstance(base, TensorProxy)
        and (value.dtype, value.device) == (base.dtype, base.device)
    )


def pending_grads_of(bsyms: Iterable[BoundSymbol]) -> PendingGrads:
    """Return the gradients that a backward leaves under ``no_sync``.

    Those that it reduces and returns count as unsharded: it would leave them so under ``no_sync``.
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


class MemoryAnalysis(Analysis):
    """An analysis that also tells the memory of values, computed when it is first asked for."""

    def __init__(self, *traces: Sequence[BoundSymbol] | TraceCtx) -> None:
        super().__init__(*traces)
        lengths = [len(trace.bound_symbols if isinstance(trace, TraceCtx) else trace) for trace in traces]
        self._begins = list(itertools.accumulate(lengths[:-1], initial=0))

    @cached_property
    def counted(self) -> list[BoundSymbol]:
        """The bound symbols that have schedule positions."""
        return list(filter(is_statement, self.bsyms))

    @cached_property
    def schedule_positions(self) -> list[int]:
        """For each bound symbol, its schedule position, or that of the next one that has one."""
        return list(itertools.accumulate(map(is_statement, self.bsyms[:-1]), initial=0))

    @cached_property
    def observed(self) -> list[Costs]:
        """The costs of each bound symbol on inputs with the strides that they have."""
        return [found for found, _ in observed(self.bsyms)]

    @cached_property
    def step_effects(self) -> StepEffects:
        """The effects and the costs of each bound symbol."""
        return effects_of(self.bsyms)

    @cached_property
    def memory(self) -> list[Lifetime]:
        """The memory of values, without slots, and what operators allocate and free again; see [Note: Bytes of values].

        It also sets the owners and the bytes of values.
        """
        temporary = []
        for position, (bsym, c) in enumerate(zip(self.bsyms, self.observed, strict=True)):
            by_name = {value.name: value for value in (*self.args[position], *self.outs[position])}
            for value in self.args[position]:
                if not value.owners:
                    _own(value, _memory_of(value, counted=True))
            own = {m.owner: m for m in c.allocates if m.scope == "value"}
            for value in self.outs[position]:
                shared = dict.fromkeys(o for name in c.views.get(value.name, ()) for o in by_name[name].owners)
                if value.name in own or not shared:
                    _own(value, own.get(value.name) or _memory_of(value, counted=bsym.sym.id in UNPACKING))
                    shared = {value: None, **shared}
                value.owners = tuple(shared)
            temporary += [
                _lifetime(m, position, position) for m in c.allocates if m.scope == "call" and m.kind == "temporaries"
            ]
        return [*self._memory_of_values(), *temporary]

    def _memory_of_values(self) -> Iterator[Lifetime]:
        end = len(self.bsyms) - 1
        begins: dict[Lifetime, int] = {}
        ends: dict[Lifetime, int] = {}
        for value in self.values:
            for owner in value.owners:
                last = value.reads[-1] if value.reads else value.first
                ends[owner] = max(ends.get(owner, BEFORE_TRACE), last)
        for position, bsym in enumerate(self.bsyms):
            if bsym.sym.id is PrimIDs.RETURN:
                outputs = set(_outputs(bsym))
                for value in self.args[position]:
                    if value.name in outputs:
                        ends.update(dict.fromkeys(value.owners, end))
            elif bsym.sym.id in UNPACKING:
                begin = max(start for start in self._begins if start <= position)
                begins.update(dict.fromkeys(self.outs[position], begin or BEFORE_TRACE))
        for owner, last in ends.items():
            first = begins.get(owner, owner.first)
            owner.last = end if first == BEFORE_TRACE else last  # the caller keeps the arguments of the first trace
            if owner.nbytes:
                kind = "inputs" if first == BEFORE_TRACE or owner in begins else owner.kind
                yield replace(owner, first=first, kind=kind)

    def allocated(
        self, pending_grads: PendingGrads = NO_PENDING_GRADS, others: Sequence[StepEffects] = ()
    ) -> Iterator[Lifetime]:
        """Return the memory outside the slots (casts, workspaces, receive buffers) that is alive in this step.

        Casts and workspaces that any step allocates stay for all steps. Receive buffers that steps without a release have
        left stay until the first release of this one.

        Args:
            pending_grads: the gradients that earlier backwards under ``no_sync`` have left.
            others: other steps that have run.
        """
        end = len(self.bsyms) - 1
        everything = [*self.step_effects, *itertools.chain(*others)]
        lasting: dict[Hashable, Allocation] = {}
        for m in (m for _, c in everything for m in c.allocates if m.scope == "steps"):
            lasting[m.owner] = max(m, lasting.get(m.owner, m), key=lambda m: m.nbytes)
        yield from (_lifetime(m, BEFORE_TRACE, end) for m in lasting.values() if m.nbytes)
        kept = {m.owner: _lifetime(m, BEFORE_TRACE, end) for m in sorted(pending_grads, key=lambda m: m.label)}
        before = frozenset(kept)
        found = list(kept.values())
        waits = {e.waits.future: position for position, e in enumerate(self.effects) if e.waits is not None}
        for position, (e, c) in enumerate(self.step_effects):
            for m in c.allocates:
                if m.only_with is not None and m.only_with not in before:
                    continue
                if m.scope == "call":
                    found.append(_lifetime(m, position, position))
                elif m.scope == "wait" and e.issues is not None:
                    at = waits[e.issues.future]
                    later = sum(a.nbytes for a in self.step_effects[at][1].allocates if _is_new(a, before, kept))
                    if m.nbytes > later:  # it is freed before the wait allocates anything
                        found.append(_lifetime(m._replace(nbytes=m.nbytes - later), at, at))
                elif m.scope in PERSISTENT and m.owner not in kept:
                    following = (i for i in range(position + 1, end + 1) if is_statement(self.bsyms[i]))
                    kept[m.owner] = _lifetime(m, position if m.scope == "persistent" else next(following), end)
                    found.append(kept[m.owner])
            for key in c.forgets:
                if key in kept:
                    kept[key].last = position
        yield from found
        if releases(self.step_effects):
            yield from _receive_buffers(self.step_effects, before)
        leaving = [each for step in (self.step_effects, *others) if not releases(step) for each in step]
        released = next((position for position, e in enumerate(self.effects) if e.frees), end)
        for buffer in _receive_buffers(leaving, before.union(*(e.leaves for e, _ in everything))):
            yield replace(buffer, first=BEFORE_TRACE, last=released)


def releases(step: StepEffects) -> bool:
    """Return whether a step frees memory of arenas."""
    return any(e.frees for e, _ in step)


def _receive_buffers(step: StepEffects, kept: Collection[Hashable]) -> list[Lifetime]:
    """Return the buffers into which reductions receive, each from its first use until it is freed.

    A reduction uses an idle buffer again. A release frees the idle ones, and those in use when they have been waited for.

    Args:
        kept: keys of the gradients that exist before.
    """
    found: list[Lifetime] = []
    idle: dict[Hashable, list[Lifetime]] = defaultdict(list)
    taken: dict[str, list[tuple[Hashable, Lifetime]]] = {}  # by the future of the reduction
    leaving: set[Lifetime] = set()
    for position, (e, c) in enumerate(step):
        used = []
        for m in c.allocates:
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
    """Return whether a symbol allocates this memory, given keys of what exists before the step and before the symbol."""
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


def slots_in_use(analysis: Analysis) -> list[int]:
    """Return the bytes of arenas that hold unsharded parameters or gradients at each position, each byte counted once.

    Args:
        analysis: that of traces with slots.
    """
    return bytes_at(spans_of([live for live in analysis.slots.values() if live.slot is not None]), len(analysis.bsyms))


def shared_slots(trace: TraceCtx) -> tuple[int, int]:
    """Return the bytes of arena that the shared slots of a trace occupy, and a lower bound for any allocation."""
    ends: dict[Arena, int] = defaultdict(int)
    for e in map(effects, trace.bound_symbols):
        region = e.issues.region if e.issues is not None else None
        if region is not None and region.slot is not None and not region.is_private:
            ends[region.slot.arena] = max(ends[region.slot.arena], region.slot.end)
    return sum(ends.values()), peak_live_bytes(trace)


def arena_allocations(step: StepEffects) -> dict[Arena, list[tuple[int, int]]]:
    """Return for each arena the positions, first and last included, between which its memory is allocated.

    An arena that is freed is allocated from its next use on; one that nothing frees, all the time.

    Args:
        step: with slots.
    """
    begins: dict[Arena, int] = {}
    found: dict[Arena, list[tuple[int, int]]] = defaultdict(list)
    for position, (e, _) in enumerate(step):
        for arena in e.frees:
            if arena in begins:
                found[arena].append((begins.pop(arena), position))
        if e.uses is not None:
            begins.setdefault(e.uses.arena, position)
    for arena, begin in begins.items():
        since = begin if arena in found else 0
        found[arena].append((since, len(step) - 1))
    return dict(found)
