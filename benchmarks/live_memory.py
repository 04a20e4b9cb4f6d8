"""Measure the bytes that a training step holds, operator by operator: unsharded parameters, gradients, and everything.

[Note: Live memory]
A storage is live as long as it exists and has bytes; FSDP2 frees and fills its storages by resizing them. A storage that
is a slice of an arena, of a shard, or of memory allocated in the step, counts as part of it. Wrappers, such as DTensors,
hold nothing themselves. Memory that no operator allocated, such as gloo's buffers, is live from its first use by an
operator. The bytes of a storage count as unsharded parameters if an all-gather writes it, or a copy from such a storage
does. They count as unsharded gradients if a reduction reads the storage, or a copy, a concatenation or a scaling of it. All
bytes count, including padding.

An *arena* outlives the step and contains only unsharded buckets, so it has two figures. *Allocated* is all of it, all
the time. *Live* are the bytes that are yet to be read. Parameters are live from the issue of their gather to their last
consumer, gradients from the first write to the wait for the reduction. As waits are not operators, the first operator
on the result of the reduction marks that time.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from thunder_fsdp_sched.compat import prepare  # noqa: F401  # before torch's modules that Thunder misses

import torch
from step_counter import _COPIES, _SCALINGS, _extent, _tensors, _written
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_CONCATENATIONS = frozenset({"_chunk_cat", "cat", "chunk_cat", "stack"})
_REDUCTIONS = ("reduce_scatter", "alltoall")

# Number of a storage, first byte, end.
_Range = tuple[int, int, int]


@dataclass(frozen=True)
class Held:
    """The bytes that one step held and moved on this rank.

    Attributes:
        parameters, gradients: live unsharded bytes after each operator.
        total: bytes of all storages that the step touches, arenas in full, after each operator.
        arena: bytes of arenas.
        outside: unsharded bytes outside of arenas, after each operator.
        new: number and bytes of storages made in the step, by what they hold: ``"parameters"``, ``"gradients"``,
            ``"all"``.
        operators: number and bytes of ``"copy"``, ``"concatenation"`` and ``"cast"`` that read or write parameters,
            sharded ones too, or unsharded gradients.
    """

    parameters: list[int]
    gradients: list[int]
    total: list[int]
    arena: int
    outside: list[int]
    new: dict[str, tuple[int, int]]
    operators: dict[str, tuple[int, int]]

    def peaks(self) -> dict[str, int]:
        """Return the peaks, in bytes."""
        return {
            "peak_parameters": max(self.parameters),
            "peak_parameters_and_gradients": max(map(sum, zip(self.parameters, self.gradients, strict=True))),
            "peak_allocated": self.arena + max(self.outside),
            "peak_total": max(self.total),
        }


@dataclass(eq=False)
class _Storage:
    ref: StorageWeakRef
    new: bool
    sizes: list[tuple[int, int]]  # pairs of the event since which it has a size, and that size (bytes)
    arena: bool = False


@dataclass(eq=False)
class _Event:
    kind: str  # "gather", "reduction", "all-reduce", "copy", "concatenation", "cast", "scaling"; "" for others
    reads: list[_Range]
    writes: list[_Range]
    nbytes: int
    holds: str = ""  # the kind of data that it writes: "parameters", "placed" (shards copied into place), "gradients"
    over: int | None = None  # for a reduction: the event before which it was waited for


class LiveMemory(TorchDispatchMode):
    """An observer of one step: ``with LiveMemory(parameters, arenas) as memory: ...``, then ``memory.held()``.

    Args:
        parameters: the tensors that the optimizer updates.
        arenas: tensors whose memory contains only unsharded buckets, and outlives the step.
        whole: whether the parameters are not sharded, so that they count as unsharded parameters all the time.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], arenas: Iterable[torch.Tensor] = (), *, whole: bool = False
    ) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}
        self._storages: list[_Storage] = []
        self._events: list[_Event] = [_Event("", [], [], 0)]
        self._alive: set[int] = set()
        self._results: dict[int, list[_Event]] = defaultdict(list)  # reductions by the storages they write
        self._there: set[int] = set()
        self._sliced: dict[int, tuple[int, int, int]] = {}  # arenas and shards by number: first address, end, number
        self._slices: list[StorageWeakRef] = []  # storages of unsharded parameters, which are slices of those
        self._shards = {self._add_sliced(parameter) for parameter in parameters}
        self._whole = set(self._shards) if whole else set()
        for arena in arenas:
            self._storages[self._add_sliced(arena)].arena = True

    def _add_sliced(self, tensor: torch.Tensor) -> int:
        number, (address, nbytes) = self._number(tensor), _memory_of(tensor.untyped_storage())
        self._sliced[number] = address, address + nbytes, number
        return number

    def __enter__(self) -> LiveMemory:
        for found in gc.get_objects():  # storages that are freed now may be filled again before an operator sees them
            if type(found) in (torch.Tensor, torch.nn.Parameter) and found.layout == torch.strided:
                self._there.add(found.untyped_storage()._cdata)
                if found.numel() and not found.untyped_storage().nbytes():
                    self._number(found)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        for tensor in inputs:
            number = self._number(tensor)
            for reduction in self._results.pop(number, ()):
                reduction.over = len(self._events)
        result = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional", "symm_mem"):
            event = self._communication(func, args, result)
        else:
            event = self._computation(func, inputs, _written(func, args, kwargs), result)
        self._events.append(event)
        self._look()
        return result

    def _communication(self, func: Any, args: Sequence[Any], result: Any) -> _Event:
        name = func.overloadpacket.__name__
        in_place = func.namespace == "c10d"  # outputs come first, then inputs
        outputs = _tensors(args[0] if in_place else result)
        inputs = _tensors(args[1]) if in_place and len(args) > 1 else _tensors(args)
        kind = ""
        if any(reduction in name for reduction in _REDUCTIONS):
            kind = "reduction"
        elif "gather" in name:
            kind = "gather"
        elif "allreduce" in name:
            kind, inputs = "all-reduce", outputs
        if not kind:
            return _Event("", [], [], 0)
        event = _Event(kind, self._ranges(inputs), self._ranges(outputs, new=True), 0)
        if kind == "reduction":
            for number, _, _ in event.writes:
                self._results[number].append(event)
        return event

    def _computation(self, func: Any, inputs: list[torch.Tensor], written: list[torch.Tensor], result: Any) -> _Event:
        if func.is_view:
            return _Event("", [], [], 0)
        name = func.overloadpacket.__name__
        targets = written or _tensors(result)
        sources = [t for t in inputs if not any(t is w for w in written)]
        kind = ""
        if name in _COPIES and targets:
            kind = "concatenation" if name in _CONCATENATIONS else "copy"
            if sources and sources[0].dtype != targets[0].dtype:
                kind = "cast"
        elif name in _SCALINGS:
            kind = "scaling"
        return _Event(kind, self._ranges(sources), self._ranges(targets, new=True), sum(t.nbytes for t in targets))

    def _ranges(self, tensors: Iterable[torch.Tensor], *, new: bool = False) -> list[_Range]:
        found = [(self._number(t, new=new), _extent(t)) for t in tensors]
        return [(number, *extent) for number, extent in found if any(extent)]

    def _number(self, tensor: torch.Tensor, *, new: bool = False) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:  # the weak reference prevents the address from being used again
            address, nbytes = _memory_of(storage)
            number = self._arena_of(address, nbytes) if nbytes else None
            if number is not None:
                self._slices.append(StorageWeakRef(storage))
                self._numbers[storage._cdata] = number
                return number
            number = self._numbers[storage._cdata] = len(self._storages)
            there = storage._cdata in self._there  # if not, no operator allocated it, as with gloo's buffers
            since = 0 if there and not new else len(self._events)
            self._storages.append(_Storage(StorageWeakRef(storage), new, [(since, nbytes)]))
            if address or not storage.nbytes():
                self._alive.add(number)
        return number

    def _arena_of(self, begin: int, nbytes: int) -> int | None:
        """Return the number of the arena, shard or storage allocated in the step of which a storage is a slice, if any."""
        for start, end, number in (*self._sliced.values(), *self._allocated()):
            if start <= begin and begin + nbytes <= end:
                return number
        return None

    def _allocated(self) -> Iterator[_Range]:
        """Yield first address, end and number of each live storage allocated in the step, which may be an arena's."""
        for number in self._alive:
            known = self._storages[number]
            storage = torch.UntypedStorage._new_with_weak_ptr(known.ref.cdata) if known.new else None
            if storage is not None:
                address, nbytes = _memory_of(storage)  # now: storages may be resized, which moves them
                yield address, address + nbytes, number

    def _look(self) -> None:
        """Record which storages were freed or have changed their size."""
        gone = []
        for number in self._alive:
            known = self._storages[number]
            storage = torch.UntypedStorage._new_with_weak_ptr(known.ref.cdata)
            nbytes = 0 if storage is None else storage.nbytes()
            if nbytes != known.sizes[-1][1]:
                known.sizes.append((len(self._events) - 1, nbytes))  # before this operator, or by it
            if storage is None:
                gone.append(number)
        self._alive.difference_update(gone)

    def held(self) -> Held:
        """Return the result, after the step has finished."""
        parameters = self._follow_parameters()
        gradients = self._follow_gradients(parameters)
        moments = len(self._events) + 1
        series = {key: _Series(moments) for key in ("parameters", "gradients", "total", "outside")}
        new: dict[str, list[int]] = {key: [0, 0] for key in ("parameters", "gradients", "all")}
        arena = 0
        for number, storage in enumerate(self._storages):
            holds = "parameters" if number in parameters else "gradients" if number in gradients else ""
            arena += storage.sizes[0][1] * storage.arena
            for (since, nbytes), (until, _) in pairwise([*storage.sizes, (moments, 0)]):
                series["total"].add(since, until, nbytes)
                if holds and not storage.arena:
                    series[holds].add(since, until, nbytes)
                    series["outside"].add(since, until, nbytes)
            for key in {holds, "all"} - {""}:
                if storage.new and storage.sizes[0][1]:
                    new[key][0] += 1
                    new[key][1] += storage.sizes[0][1]
            if storage.arena:
                for use in self._uses(number):
                    series[use.holds].add(use.start, use.last + 1, use.nbytes)
        operators: dict[str, list[int]] = {key: [0, 0] for key in ("copy", "concatenation", "cast")}
        ours = parameters | gradients | self._shards | {n for n, s in enumerate(self._storages) if s.arena}
        for event in self._events:
            if event.kind in operators and any(n in ours for n, _, _ in (*event.reads, *event.writes)):
                operators[event.kind][0] += 1
                operators[event.kind][1] += event.nbytes
        return Held(
            *(series[key].values() for key in ("parameters", "gradients", "total")),
            arena,
            series["outside"].values(),
            {key: (count, nbytes) for key, (count, nbytes) in new.items()},
            {key: (count, nbytes) for key, (count, nbytes) in operators.items()},
        )

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Return the bytes of the storages of ``tensors`` after each operator, each storage once."""
        moments = len(self._events) + 1
        series = _Series(moments)
        for number in {self._numbers.get(tensor.untyped_storage()._cdata) for tensor in tensors} - {None}:
            for (since, nbytes), (until, _) in pairwise([*self._storages[number].sizes, (moments, 0)]):
                series.add(since, until, nbytes)
        return series.values()

    def _follow_parameters(self) -> set[int]:
        """Return the storages outside of arenas that hold unsharded parameters; mark events that write them into arenas."""
        found = set(self._whole)
        regions: dict[int, list[tuple[int, int, str]]] = defaultdict(list)

        def holds(ranges: Iterable[_Range]) -> set[str]:
            return {
                what
                for number, *extent in ranges
                for begin, end, what in regions[number]
                if _overlap(begin, end, extent)
            } | {"shards" for number, _, _ in ranges if number in self._shards}

        for event in self._events:
            before = holds(event.reads)
            if event.kind == "gather" or (event.kind == "all-reduce" and "placed" in before):
                event.holds = "parameters"
            elif event.kind in ("copy", "concatenation", "cast") and before & {"parameters", "shards"}:
                event.holds = "parameters" if "parameters" in before else "placed"
            elif event.kind != "reduction" and any(self._storages[n].arena for n, _, _ in event.writes):
                event.holds = "gradients"
            for number, begin, end in event.writes:
                regions[number] = [r for r in regions[number] if not _overlap(r[0], r[1], (begin, end))]
                if event.holds in ("parameters", "placed"):
                    regions[number].append((begin, end, event.holds))
                    if event.holds == "parameters" and number not in self._shards:
                        found.add(number)
        return {n for n in found if not self._storages[n].arena}

    def _follow_gradients(self, parameters: set[int]) -> set[int]:
        """Return the storages outside of arenas that hold unsharded gradients."""
        found: set[int] = set()
        for event in reversed(self._events):
            reduces = event.kind == "reduction" or (event.kind == "all-reduce" and event.holds != "parameters")
            passes_on = event.kind in ("copy", "concatenation", "cast", "scaling") and (
                event.holds == "gradients" or any(n in found for n, _, _ in event.writes)
            )
            if reduces or passes_on:
                read = {n for n, _, _ in event.reads if not self._storages[n].arena}
                found |= {n for n in read - parameters - self._shards if reduces or self._storages[n].new}
        return found

    def _uses(self, number: int) -> list[_Use]:
        """Return the ranges of an arena that are in use, each with its first and last event."""
        touched = [r for e in self._events for r in (*e.reads, *e.writes) if r[0] == number]
        bounds = sorted({bound for _, begin, end in touched for bound in (begin, end)})

        def pieces(ranges: list[_Range]) -> list[int]:
            own = [(bisect_left(bounds, begin), bisect_left(bounds, end)) for n, begin, end in ranges if n == number]
            return [piece for first, end in own for piece in range(first, end)]

        current: dict[int, _Use] = {}
        done = []
        for now, event in enumerate(self._events):
            until = now
            if event.kind == "reduction":
                until = len(self._events) if event.over is None else event.over - 1
            for piece in pieces(event.reads):
                if piece not in current:
                    continue
                if event.kind == "reduction" and current[piece].holds == "parameters":  # padding is reduced, too
                    done.append(current[piece])
                    current[piece] = _Use("gradients", current[piece].nbytes, now, now)
                current[piece].last = max(current[piece].last, until)
                current[piece].reduced |= event.kind == "reduction"
            what = "parameters" if event.holds == "placed" else event.holds
            for piece in pieces(event.writes) if what else ():
                old = current.get(piece)
                # Gradients are accumulated, and an all-reduce completes the shards that were copied into place.
                goes_on = event.kind == "all-reduce" if what == "parameters" else old and not old.reduced
                if old is not None and old.holds == what and goes_on:
                    old.last = max(old.last, now)
                    continue
                if old is not None:
                    old.last = min(old.last, now - 1)
                    done.append(old)
                current[piece] = _Use(what, bounds[piece + 1] - bounds[piece], now, now)
        return [*done, *current.values()]


@dataclass(eq=False)
class _Use:
    holds: str
    nbytes: int
    start: int
    last: int
    reduced: bool = False


@dataclass(eq=False)
class _Series:
    """A number of bytes after each event."""

    moments: int
    changes: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, since: int, until: int, nbytes: int) -> None:
        self.changes[since] += nbytes
        self.changes[until] -= nbytes

    def values(self) -> list[int]:
        return list(accumulate(self.changes.get(moment, 0) for moment in range(self.moments)))


def _memory_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return the address and bytes of a storage; 0 for that of a wrapper, such as a DTensor, which holds nothing."""
    try:
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return 0, 0


def _overlap(begin: int, end: int, extent: Sequence[int]) -> bool:
    return begin < extent[1] and extent[0] < end
