"""Count, in a real training step, collectives, copied bytes, and live bytes of unsharded parameters.

[Note: Attribution of memory]
The counter tracks *memory ranges* (an allocation and a range of addresses in it), because a slot holds parameters at one
time and gradients at another. A storage that is a slice of another one, such as that of an unsharded parameter, belongs
to the same allocation. A range belongs to a parameter if it stores shards, if an all-gather writes it, if an
all-reduce completes copies of shards in it, or if any of these is copied to it. A range belongs to a gradient if a
reduce-scatter writes it. A copy into a range, or a multiplication or division by a number, is a gradient's if a
reduce-scatter reads that range later (in plain data parallelism, an all-reduce). All other copies are the model's own.
Operators that return views neither move nor read bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from thunder_fsdp_sched.ir.analysis import peak_bytes
from thunder_fsdp_sched.runtime.row_dtensor import DTENSORS, local_rows

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# fmt: off
_COPIES = frozenset({
    "_chunk_cat", "_foreach_copy_", "_to_copy", "cat", "chunk_cat", "clone", "constant_pad_nd", "contiguous", "copy",
    "copy_", "split_copy", "split_with_sizes_copy", "stack", "all_gather_copy_in",  # the last is an operator of FSDP2
})
# fmt: on
_SCALINGS = frozenset({"div", "mul"})
_KINDS = {"reduce_scatter": "reduce_scatter", "gather": "all_gather"}
"""The kinds of collectives, by a part of the operator's name; others are counted under their own names."""


@dataclass(frozen=True)
class Collective:
    """One collective of the step.

    Attributes:
        phase: the phase in which it was issued.
        kind: ``"all_gather"``, ``"reduce_scatter"``, or the name of the operator.
        nbytes: bytes of the unsharded side.
    """

    phase: str
    kind: str
    nbytes: int


@dataclass(frozen=True)
class StepCounts:
    """The counts of one step on this rank.

    Attributes:
        collectives: all collectives, in issue order.
        parameter_bytes_copied: bytes of shards or unsharded parameters that an operator wrote elsewhere.
        gradient_bytes_copied: bytes of unsharded or sharded gradients that an operator wrote elsewhere, or scaled
            separately.
        backend_bytes_copied: bytes that the communication backend itself copied on waiting (gloo: reduced gradients).
        unsharded_bytes_allocated: bytes of unsharded parameters gathered into memory that was allocated in this step.
        peak_unsharded_bytes: peak of live bytes of unsharded parameters, by phase. In memory that outlives the step, a
            range is live from the gather to its last read; in memory of the step, until it is freed.
    """

    collectives: tuple[Collective, ...]
    parameter_bytes_copied: int
    gradient_bytes_copied: int
    backend_bytes_copied: int
    unsharded_bytes_allocated: int
    peak_unsharded_bytes: dict[str, int]


@dataclass(eq=False)
class _Region:
    kind: (
        str  # "shard", "copied shard", "unsharded", "gradient", or "written": by an operator whose bytes may yet count
    )
    start: int
    end: int
    since: int
    last_read: int
    until: int | None = None
    nbytes: int = 0  # that operators have written, for "written"


@dataclass(eq=False)
class _Memory:
    ref: StorageWeakRef
    start: int
    end: int
    new: bool
    known: bool = False  # it has stored parameters or gradients
    regions: list[_Region] = field(default_factory=list)


class StepCounter(TorchDispatchMode):
    """The counter of one step: ``with StepCounter(parameters) as counter: with counter.phase("forward"): ...``.

    Args:
        parameters: the parameters that the optimizer updates: this rank's shards, or whole parameters.
        sharded: whether they are shards; whole parameters always count as unsharded.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, sharded: bool = True) -> None:
        super().__init__()
        self._now = 0
        self._phase = ""
        self._phases: list[tuple[str, int, int]] = []
        self._memory: dict[int, _Memory] = {}
        self._refs: list[StorageWeakRef] = []  # prevent reuse of the addresses that are the keys above
        self._outliving: list[_Memory] = []  # what the step did not allocate
        self._unsharded: list[tuple[_Memory, _Region]] = []
        self._collectives: list[Collective] = []
        self._bytes: dict[str, int] = defaultdict(int)
        self._always = 0
        for parameter in map(local_rows, parameters):
            self._add(self._find(parameter), _Region("shard", *_extent(parameter), 0, 0))
            self._always += 0 if sharded else parameter.nbytes

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute all counts in this context to a phase, such as ``"forward"``."""
        outer, self._phase, start = self._phase, name, self._now + 1
        try:
            yield
        finally:
            self._phases.append((name, start, self._now))
            self._phase = outer

    def counts(self) -> StepCounts:
        """The counts, after the step has finished."""
        return StepCounts(
            tuple(self._collectives),
            self._bytes["parameter"],
            self._bytes["gradient"],
            self._bytes["backend"],
            self._bytes["allocated"],
            {name: self._peak(start, end) for name, start, end in self._phases},
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTENSORS) for kind in types):  # it calls operators on its local tensor
            return NotImplemented
        kwargs = kwargs or {}
        self._now += 1
        self._expire()
        inputs = _tensors((args, kwargs))
        for tensor in inputs:
            self._find(tensor)  # before the call: memory that is known by then is not new
        result = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional", "symm_mem"):
            self._communicate(func, args, result)
        elif not func.is_view:
            self._compute(func, args, kwargs, inputs, result)
        return result

    def _communicate(self, func: Any, args: Sequence[Any], result: Any) -> None:
        name = func.overloadpacket.__name__
        if name == "wait_tensor":
            return
        in_place = func.namespace == "c10d"  # outputs precede inputs
        outputs = _tensors(args[0] if in_place else result)
        inputs = _tensors(args[1]) if in_place and len(args) > 1 else _tensors(args)
        sums = "reduce_scatter" in name or "alltoall" in name  # with the latter, ranks sum locally
        kind = next((kind for part, kind in _KINDS.items() if part in name), name)
        self._collectives.append(Collective(self._phase, kind, sum(t.nbytes for t in (inputs if sums else outputs))))
        if sums:
            for tensor in inputs:
                self._bytes["gradient"] += self._take_writes(tensor)
                self._label(tensor, None)  # no longer parameters: padding that a gather wrote is sent as well
        for tensor in outputs:
            if kind == "reduce_scatter":
                self._label(tensor, "gradient")
            elif kind == "all_gather":
                self._label(tensor, "unsharded")
                self._bytes["allocated"] += tensor.nbytes if self._find(tensor).new else 0
            elif not sums and self._kind(tensor) == "copied shard":
                self._label(tensor, "unsharded")
            elif "allreduce" in name and (copied := self._take_writes(tensor)):
                self._bytes["gradient"] += copied
                self._label(tensor, "gradient")

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Any, inputs: list[torch.Tensor], result: Any) -> None:
        name = func.overloadpacket.__name__
        written = _written(func, args, kwargs)
        is_copy = name in _COPIES
        sources = [t for t in inputs if not any(t is w for w in written)]
        only_written = written if is_copy else _written(func, args, kwargs, only=True)
        for tensor in inputs:
            if not any(tensor is w for w in only_written):
                self._read(tensor)
        targets = written or _tensors(result)
        for tensor in targets:
            self._find(tensor, new=True)
        if not targets:
            return
        if is_copy:
            self._copy(sources, targets)
            return
        for tensor in targets:
            self._label(tensor, None)
        if name in _SCALINGS:
            scaled = [t for t in sources if t.numel() == targets[0].numel()]
            if len(scaled) == 1 and all(t.numel() == 1 for t in sources if t is not scaled[0]):
                self._label(targets[0], "written", targets[0].nbytes + self._take_writes(scaled[0]))

    def _copy(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        kinds = [self._kind(t) for t in sources]
        unknown = 0
        for source, kind in zip(sources, kinds, strict=True):
            nbytes, memory = source.numel() * targets[0].element_size(), self._find(source)
            if kind is not None:
                self._bytes["gradient" if kind == "gradient" else "parameter"] += nbytes
            elif not memory.new and not memory.known and self._kind(targets[0]) in ("gradient", "unsharded"):
                self._bytes["backend"] += nbytes  # no operator made this memory, so only the backend can have filled it
                return
            else:
                unknown += nbytes + self._take_writes(source)
        inherited = next((k for k in ("unsharded", "shard", "copied shard", "gradient") if k in kinds), None)
        inherited = "copied shard" if inherited == "shard" else inherited
        written = "written" if unknown else None
        for target in targets:
            self._label(target, inherited or written, unknown // len(targets))

    def _find(self, tensor: torch.Tensor, *, new: bool = False) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            ref, start = StorageWeakRef(storage), storage.data_ptr()
            self._refs.append(ref)
            memory = self._containing(start, start + storage.nbytes())
            if memory is None:
                memory = _Memory(ref, start, start + storage.nbytes(), new)
                if not new:
                    self._outliving.append(memory)
            self._memory[storage._cdata] = memory
        return memory

    def _containing(self, start: int, end: int) -> _Memory | None:
        """Return the memory that outlives the step and of which a storage at these addresses is a slice, if any."""
        if start == end:
            return None
        return next((m for m in self._outliving if m.start <= start and end <= m.end and not m.ref.expired()), None)

    def _overlapping(self, tensor: torch.Tensor) -> list[_Region]:
        start, end = _extent(tensor)
        return [r for r in self._find(tensor).regions if r.start < end and start < r.end]

    def _kind(self, tensor: torch.Tensor) -> str | None:
        return next((region.kind for region in self._overlapping(tensor) if region.kind != "written"), None)

    def _read(self, tensor: torch.Tensor) -> None:
        for region in self._overlapping(tensor):
            region.last_read = self._now

    def _label(self, tensor: torch.Tensor, kind: str | None, nbytes: int = 0) -> None:
        """Record a new content for the range of ``tensor``; shards remain shards when they are updated."""
        memory, extent = self._find(tensor), _extent(tensor)
        for old in self._overlapping(tensor):
            if old.kind == "shard" and not memory.new:
                return
            memory.regions.remove(old)
            old.until = self._now
            for start, end in ((old.start, extent[0]), (extent[1], old.end)):
                if start < end and old.kind != "written":  # the part outside of the new range stays
                    # It was counted with the old region so far; from now on it counts only if it is read again.
                    self._add(memory, _Region(old.kind, start, end, self._now + 1, self._now))
        if kind is not None:
            self._add(memory, _Region(kind, *extent, self._now, self._now, nbytes=nbytes))

    def _add(self, memory: _Memory, region: _Region) -> None:
        memory.regions.append(region)
        memory.known = True
        if region.kind == "unsharded":
            self._unsharded.append((memory, region))

    def _take_writes(self, tensor: torch.Tensor) -> int:
        """Return the bytes that operators wrote into the range of ``tensor``, each counted for one reader."""
        taken = [region for region in self._overlapping(tensor) if region.kind == "written"]
        for region in taken:
            self._find(tensor).regions.remove(region)
        return sum(region.nbytes for region in taken)

    def _expire(self) -> None:
        for memory, region in self._unsharded:
            if region.until is None and memory.new and memory.ref.expired():
                region.until = self._now - 1

    def _peak(self, start: int, end: int) -> int:
        spans = []
        for memory, region in self._unsharded:
            until = region.last_read
            if memory.new:
                until = self._now if region.until is None else region.until
            if max(region.since, start) <= min(until, end):
                spans.append((max(region.since, start), min(until, end), region.end - region.start))
        return peak_bytes(spans) + self._always


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Sequence[Any], kwargs: Any, *, only: bool = False) -> list[torch.Tensor]:
    """Return the arguments that ``func`` writes by its schema; with ``only``, those that it does not read (``out=``)."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write and (argument.is_out or not only):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += _tensors(value)
    return written


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of addresses (end excluded) that ``tensor`` spans; ``(0, 0)`` without elements."""
    if not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
