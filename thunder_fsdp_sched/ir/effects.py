"""Effects of bound symbols on memory and communication, declared as data.

[Note: Effects]
Each symbol of this package declares its effects next to its definition. Code that sorts, assigns slots, prints or
verifies reads them through :func:`effects`, and knows no symbol by name. So a new kind of communication is one
declaration and one function that runs. Costs in bytes and time are declared separately, for predictions: see [Note:
Costs] in ``extras.step_memory.costs``.

The effects of all other operators follow from the facts about them (``operator_facts``): they read and write values, some
results are views, and the others are new memory.

A bound symbol caches its effects, like its facts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol, Symbol

from ..private_thunder import EFFECTS
from ..ranks.process_groups import ProcessGroupRef
from ..runtime.bucket import WINDOW_FIRST, Bucket
from ..runtime.memory import Arena, Slot, slot_bytes
from ..transports.base import Traffic
from .inspection import UNPACKING, args_of, communicates
from .operator_facts import facts_of


class SlotRegion(NamedTuple):
    """The bytes of a slot that hold one parameter of a bucket, or its gradient; or all of them.

    Attributes:
        bucket: the bucket to which the bytes belong.
        slot: ``None`` before ``assign_slots``.
        dtype: the dtype of the parameters or gradients.
        param: the number of the parameter in the bucket; ``None`` for the whole slot.
    """

    bucket: Bucket
    slot: Slot | None
    dtype: torch.dtype
    param: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole slot, including alignment."""
        return slot_bytes(self.bucket.spec, self.dtype)

    @property
    def is_private(self) -> bool:
        """Whether this is in the slot in which the bucket stays from forward to backward."""
        return self.slot is self.bucket.private_slot

    @property
    def span(self) -> tuple[int, int]:
        """The offsets (bytes) in the arena, the second one excluded."""
        assert self.slot is not None, "assign_slots has run"
        if self.param is None:
            return self.slot.offset, self.slot.end
        begin = self.slot.offset + self.bucket.spec.layout.placements[self.param].unsharded_offset * self.dtype.itemsize
        return begin, begin + self.bucket.spec.params[self.param].numel * self.dtype.itemsize


class Issue(NamedTuple):
    """An asynchronous operation, which a later bound symbol waits for.

    Attributes:
        kind: the name of the symbol that issues it.
        future: the name of its future.
        bucket: the bucket that it sends; ``None`` if it sends something else.
        group: the ranks that take part; ``None`` if it is no collective.
        nbytes: bytes of the whole tensor that it operates on, with padding.
        dtype: dtype of that tensor.
        region: the slot that it uses until the wait; ``None`` if it uses none.
        gathers: whether the slot then holds the bucket's parameters.
        transport: how it is sent; the name of a transport, or of the collective.
        encoding: the format in which it is sent; ``None`` if exactly.
        resident: whether forward has left the bucket in the slot for backward, so that nothing is sent.
        window: the mark of a gather whose bucket may be resident already; see [Note: Gathered once in a window].
        traffic: the bytes that it sends and copies.
        from_host: bytes that are first copied from the host's memory.
    """

    kind: str
    future: str
    bucket: Bucket | None
    group: ProcessGroupRef | None
    nbytes: int
    dtype: torch.dtype | None
    region: SlotRegion | None = None
    gathers: bool = False
    transport: str = ""
    encoding: str | None = None
    resident: bool = False
    window: str | None = None
    traffic: Traffic | None = None
    from_host: int = 0

    @property
    def sent_by(self) -> str:
        """The transport, and the format if there is one."""
        return f"{self.transport} {self.encoding}" if self.encoding else self.transport

    @property
    def marks(self) -> dict[str, bool | str]:
        """The marks of a gather that may find its bucket resident, from forward or in a window."""
        marks = {"resident": self.resident, "window": self.window}
        return {name: mark for name, mark in marks.items() if mark}

    @property
    def is_in_window(self) -> bool:
        """Whether an earlier micro-batch of its window may have left the bucket in the slot."""
        return self.window not in (None, WINDOW_FIRST)


class Wait(NamedTuple):
    """A wait for an asynchronous operation.

    Attributes:
        future: the name of its future.
        kinds: the kinds of operation that it can wait for.
    """

    future: str
    kinds: tuple[str, ...]


class UnbucketedParam(NamedTuple):
    """One parameter of a bucket that a symbol handles on its own, until ``bucket_communication``.

    Attributes:
        param: the number of the parameter in the bucket.
        reduces: whether the symbol reduces its gradient; it unshards the parameter otherwise.
    """

    bucket: Bucket
    param: int
    reduces: bool


def left_unsharded(bucket: Bucket) -> Hashable:
    """Return the key of the gradients of a bucket that ``no_sync`` leaves unsharded."""
    return "unsharded gradients", bucket


def left_reduced(bucket: Bucket) -> Hashable:
    """Return the key of this rank's rows of the gradients that ``no_sync`` reduces and leaves."""
    return "reduced gradients", bucket


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of one bound symbol. Values are known by their names.

    Attributes:
        issues: the operation that it issues.
        waits: the operation that it waits for.
        runs: an operation that it issues and waits for, if earlier micro-batches have left gradients to reduce.
        leaves: the keys of the gradients that it leaves for a later micro-batch: :func:`left_unsharded` and the like.
        bucket: the bucket of a symbol of this package.
        hook: the user's function that it calls, which may communicate.
        communicates: whether it communicates with other ranks and is not ours, so nothing may be moved across it.
        uses: the slot whose memory it needs, and allocates if it was freed.
        frees: the arenas whose memory it frees.
        ensures: a slot that holds the bucket's parameters afterwards, gathered again if need be.
        fills: where it writes a gradient, which only the issue that collects it may read.
        collects: where the gradients that it reads must be, if they were written in place.
        in_place: results that are views of the slot of the future that it waits for, in the order of parameters.
        requires: contents that values must have: the token that earlier effects ``give`` them.
        gives: contents of results, for ``requires``.
        aliases: results that may share memory with others, by the safe facts. Slots are not among them: see ``in_place``.
        writes: values that it writes in place.
        copies_slot: whether it copies what is in a slot only until another collective uses the slot.
        faults: contradictions to the settings of the bucket.
        single: the one parameter that it handles, before communication is bucketed.
        is_fusion_barrier: whether it only gives its arguments other names, to keep fusions apart.
    """

    issues: Issue | None = None
    waits: Wait | None = None
    runs: Issue | None = None
    leaves: tuple[Hashable, ...] = ()
    bucket: Bucket | None = None
    hook: str | None = None
    communicates: bool = False
    uses: Slot | None = None
    frees: tuple[Arena, ...] = ()
    ensures: SlotRegion | None = None
    fills: SlotRegion | None = None
    collects: Mapping[str, SlotRegion] = field(default_factory=dict)
    in_place: tuple[str, ...] = ()
    requires: tuple[tuple[str | None, Hashable], ...] = ()
    gives: Mapping[str, Hashable] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    writes: frozenset[str] = frozenset()
    copies_slot: bool = False
    faults: tuple[str, ...] = ()
    single: UnbucketedParam | None = None
    is_fusion_barrier: bool = False

    @property
    def missing_gradients(self) -> tuple[int, ...]:
        """The numbers of the bucket's parameters for which a reduction gets no gradient from its trace."""
        if self.bucket is None or not (self.collects or self.runs):
            return ()
        given = {region.param for region in self.collects.values()}
        return tuple(index for index in range(len(self.bucket.spec.params)) if index not in given)

    @property
    def in_schedule(self) -> bool:
        """Whether it is a line of the schedule: it communicates for its bucket, or leaves gradients that will be reduced."""
        return self.bucket is not None and (self.issues is not None or self.waits is not None or bool(self.leaves))

    @property
    def is_gather(self) -> bool:
        """Whether it issues a gather of a bucket."""
        return self.issues is not None and self.issues.gathers

    @property
    def unshards(self) -> bool:
        """Whether it waits for a gather, so that its results are the parameters of a bucket."""
        return self.waits is not None and bool(self.in_place)

    @property
    def slot_issue(self) -> Issue | None:
        """The operation that it issues, if that uses a slot."""
        return self.issues if self.issues is not None and self.issues.region is not None else None


NOTHING = Effects()


def bucket_of(bsym: BoundSymbol) -> Bucket:
    """Return the bucket of any symbol of this package that has one: its first operand."""
    return cast(Bucket, bsym.args[0])


DECLARED: dict[Symbol, Callable[[BoundSymbol], Effects]] = {}
"""The declaration of each symbol of this package: a function from a bound symbol to its effects."""


def declared(bsym: BoundSymbol) -> Effects:
    """Return the effects of a symbol of this package; none for other operators, without observing them."""
    return effects(bsym) if is_declared(bsym.sym) else NOTHING


def effects(bsym: BoundSymbol) -> Effects:
    """Return the effects of a bound symbol; see [Note: Effects]."""
    known = vars(bsym)
    known_effects: Effects | None = known.get(EFFECTS)
    if (declaration := DECLARED.get(bsym.sym)) is not None:
        if known_effects is None:
            known_effects = known[EFFECTS] = declaration(bsym)
        return known_effects
    if bsym.sym.id in UNPACKING or bsym.sym.id in (PrimIDs.DEL, PrimIDs.RETURN):
        return NOTHING
    if known_effects is None:
        facts = facts_of(bsym)
        writes = facts.writes if facts.known else frozenset(args_of(bsym))
        communicating = communicates(bsym)
        known_effects = NOTHING  # of most operators
        if facts.aliases or writes or communicating:
            known_effects = Effects(aliases=facts.aliases, writes=writes, communicates=communicating)
        known[EFFECTS] = known_effects
    return known_effects


def sends(bsym: BoundSymbol) -> Issue | None:
    """Return the collective of a bucket that ``bsym`` issues, if something is sent; ``None`` otherwise."""
    issue = effects(bsym).issues
    return issue if issue is not None and issue.bucket is not None and not issue.resident else None


def is_declared(symbol: Symbol) -> bool:
    """Return whether a symbol declares its effects."""
    return symbol in DECLARED
