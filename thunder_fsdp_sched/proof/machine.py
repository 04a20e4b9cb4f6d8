"""An abstract machine that runs traces on their effects, and raises an error at the first bound symbol that is wrong.

[Note: The abstract machine]
The machine executes forward, then backward, on the effects of bound symbols alone (``ir.effects``). It has no tensors. Each
range of bytes of each arena holds a token that says what was written there last, and each value in an arena needs a token.
A bound symbol that reads a value while its bytes hold another token is refused, and the error names what overwrote them.
That one check covers slots that are reused too early, gradients written over parameters that are still needed, buckets
that forward leaves for backward, memory that is freed too early, and gradients that are overwritten before their
reduction. The other checks are about order: definitions, waits, first consumers, communication of others.

It knows no symbol by name and counts no bytes. It relies on the facts about operators, which the audit of the first run
checks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable
from typing import NamedTuple, NoReturn

from thunder.core.prims import PrimIDs
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..errors import coded_error
from ..ir.effects import Effects, Issue, SlotRegion, effects
from ..ir.inspection import (
    UNPACKING,
    args_of,
    has_backward,
    is_backward_trace,
    names,
    outs_of,
    return_of,
    statement,
)
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, Slot


class VerificationError(AssertionError):
    """A broken promise of a trace: a defect of this plugin or of a later pass, found before or during the first run."""


class _Range(NamedTuple):
    """Bytes of an arena, and the token that they hold or that a value needs them to hold.

    Attributes:
        region: the bucket, and its slot, for which they were written.
        since: what wrote or freed them, for errors.
    """

    start: int
    end: int
    content: Hashable
    region: SlotRegion
    since: str = ""

    def overlaps(self, arena: Arena, start: int, end: int) -> bool:
        slot = self.region.slot
        return slot is not None and slot.arena is arena and self.start < end and start < self.end


class _Pending(NamedTuple):
    """An operation that was issued at ``position`` and is not waited for."""

    issue: Issue
    position: int


class Machine:
    """The state of arenas and values while traces run. Call :meth:`run` for forward, then for backward.

    Attributes:
        memory: the written ranges of each arena.
        needs: the range that a value in an arena needs.
        roots: the values with which another one may share memory.
        contents: the contents of values, if an effect states them.
        left: the ranges that forward has left, by identity.
        filling: the gradients in place that no reduction has collected, with the positions of their writers.
        guarded: buckets whose private slots are known to hold the parameters in backward.
        ahead: the gathers that nothing has consumed, in the order of their issues.
        future_of: the future of its gather, for each gathered parameter.
        foreign: the position of the last communication that is not ours.
    """

    def __init__(self, most_gathers: int | None) -> None:
        self.most_gathers = most_gathers
        self.memory: dict[Arena, list[_Range]] = defaultdict(list)
        self.needs: dict[str, _Range] = {}
        self.roots: dict[str, frozenset[str]] = {}
        self.contents: dict[str, Hashable] = {}
        self.left: dict[int, _Range] = {}
        self.ran_forward = False

    def run(self, trace: TraceCtx) -> None:
        """Execute a trace to its end."""
        self.trace, self.is_awaited = trace, has_backward(trace)
        self.name = "backward" if is_backward_trace(trace) else "forward"
        self.defined_at = dict.fromkeys(names(tree_iter((trace.args, trace.kwargs))), -1)
        self.flights: dict[str, _Pending] = {}
        self.waited: set[str] = set()
        self.filling: dict[str, tuple[SlotRegion, int]] = {}
        self.guarded: set[Bucket] = set()
        self.ahead: dict[str, Issue] = {}
        self.future_of: dict[str, str] = {}
        self.foreign = -1
        seen: set[int] = set()
        for self.position, bsym in enumerate(trace.bound_symbols):
            if bsym.sym.id is PrimIDs.DEL:
                for name in args_of(bsym):
                    self.defined_at.pop(name, None)
                continue
            if id(bsym) in seen:
                self.fail("stands in the trace twice")
            seen.add(id(bsym))
            if bsym.sym.id is not PrimIDs.UNPACK_TRIVIAL:
                self._execute(bsym, effects(bsym))
            for out in outs_of(bsym):
                if out in self.defined_at and bsym.sym.id not in UNPACKING:
                    self.fail(f"defines {out!r}, which bound symbol {self.defined_at[out]} has defined")
                self.defined_at[out] = self.position
        self._end()

    def fail(self, what: str, position: int | None = None) -> NoReturn:
        position = self.position if position is None else position
        bsym = self.trace.bound_symbols[position]
        raise coded_error(
            VerificationError,
            "proof.invalid-bound-symbol",
            position=position,
            trace=self.name,
            fault=what,
            statement=statement(bsym),
        )

    def _execute(self, bsym: BoundSymbol, effect: Effects) -> None:
        for fault in effect.faults:
            self.fail(fault)
        for name in args_of(bsym):
            self._read(name, bsym, effect)
        self._consume(bsym)
        self._check_communication(effect)
        self._check_contents(effect)
        flight = self._wait(effect) if effect.waits is not None else None
        for arena in effect.frees:
            self._free(arena)
        if effect.ensures is not None:
            self._write(effect.ensures, _params(effect.ensures), bsym)
            if self.ran_forward:  # otherwise it is not known what backward reads there
                self.guarded.add(effect.ensures.bucket)
        if effect.fills is not None:
            [grad] = effect.in_place
            self._write(effect.fills, grad, bsym)
            self.filling[grad] = effect.fills, self.position
        if effect.issues is not None:
            flight = self._issue(effect.issues, bsym)
        if bsym.sym.id not in UNPACKING:
            self._put_results(bsym, effect, flight)

    def _put_results(self, bsym: BoundSymbol, effect: Effects, flight: _Pending | None) -> None:
        """Record where results are in memory, and what they hold."""
        for out in outs_of(bsym):
            for known in (self.needs, self.roots, self.contents):
                known.pop(out, None)  # another trace may have used the name
            if out in effect.aliases:
                self.roots[out] = frozenset().union(*map(self._roots, effect.aliases[out]))
        for index, out in enumerate(effect.in_place):
            if effect.fills is not None:
                self.needs[out] = _Range(*effect.fills.span, out, effect.fills)
                continue
            assert flight is not None and flight.issue.region is not None
            region = flight.issue.region
            if effect.waits is not None:
                region = region._replace(param=index)
                self.future_of[out] = flight.issue.future
            self.needs[out] = _Range(*region.span, _params(region), region)
            self.contents[out] = (*_params(region), region.param)
        self.contents.update(effect.gives)

    def _roots(self, name: str) -> frozenset[str]:
        return self.roots.get(name, frozenset({name}))

    def _read(self, name: str, bsym: BoundSymbol, effect: Effects) -> None:
        if name not in self.defined_at:
            self.fail(f"reads {name!r}, which nothing before it defines")
        if name in self.flights and (effect.waits is None or name != effect.waits.future):
            self.fail(f"reads {name!r}, the future of {self.flights[name].issue.kind}, which it does not wait for")
        for root in self._roots(name):
            if root in self.filling and root not in effect.collects:
                self.fail(f"reads {name!r}, {_show(self.filling[root][0])}, before its reduction")
            if root in self.needs:
                self._check(self.needs[root], f"reads {name!r}")

    def _check(self, needed: _Range, what: str) -> None:
        """Refuse to read bytes that hold something else. Bytes that nothing has written are not checked."""
        arena = self._slot(needed.region).arena
        for held in self.memory[arena]:
            if held.content != needed.content and held.overlaps(arena, needed.start, needed.end):
                self.fail(f"{what} of bucket {_name(needed.region)} in {needed.region.slot}{held.since}")

    def _consume(self, bsym: BoundSymbol) -> None:
        """Note which buckets are read for the first time."""
        if futures := {self.future_of[name] for name in args_of(bsym) if name in self.future_of} & self.ahead.keys():
            self.check_order(futures)
            for future in futures:
                del self.ahead[future]

    def check_order(self, futures: Collection[str]) -> None:
        """Refuse to read buckets for the first time before those that were gathered earlier.

        Machines for traces that gather in another order override this.

        Args:
            futures: the futures of the gathers whose buckets are read now; :attr:`ahead` has these and all others.
        """
        for future in itertools.islice(self.ahead, len(futures)):
            if future not in futures:
                later = next(issue for other, issue in reversed(self.ahead.items()) if other in futures)
                first = self.ahead[future]
                self.fail(
                    f"reads bucket {_name(later)}, gathered after bucket {_name(first)}, whose first consumer is later"
                )

    def _check_communication(self, effect: Effects) -> None:
        moved = list(self.ahead.values()) if effect.communicates else []
        if effect.communicates:
            self.foreign = self.position
        if effect.issues is not None and effect.collects:
            if self.foreign > max(self.defined_at[name] for name in effect.collects):
                moved = [effect.issues]
        for issue in moved:
            self.fail(f"communicates, but a collective of bucket {_name(issue)} was moved across it", self.foreign)

    def _check_contents(self, effect: Effects) -> None:
        for name, expected in effect.requires:
            actual = None if name is None else self.contents.get(name)
            if actual != expected:
                self.fail(f"reads {name!r}, which holds {actual}, not {expected}")
        for name, region in effect.collects.items():
            written, _ = self.filling.pop(name, (region, -1))
            if written != region:
                self.fail(f"reduces {name!r} as {_show(region)}, but it is {_show(written)}")

    def _slot(self, region: SlotRegion) -> Slot:
        if region.slot is None:
            self.fail(f"bucket {_name(region)} has no slot")
        if region.slot.nbytes < region.nbytes or (region.param or 0) >= len(region.bucket.spec.params):
            self.fail(f"bucket {_name(region)} has no parameter {region.param}, or does not fit into {region.slot}")
        return region.slot

    def _write(self, region: SlotRegion, content: Hashable, bsym: BoundSymbol) -> None:
        slot, (start, end) = self._slot(region), region.span
        what = f"{slot} for bucket {_name(region)}"
        if content != _params(region) and region.is_private and region.bucket not in self.guarded:
            self.fail(f"writes gradients into {slot} without a guard of bucket {_name(region)} before it")
        for name in args_of(bsym):
            for root in self._roots(name) & self.needs.keys():
                needed = self.needs[root]
                if needed.content != root and needed.overlaps(slot.arena, start, end):  # gradients stay where they are
                    self.fail(f"writes {what} while it reads {name!r} there")
        self._check_idle(slot.arena, start, end, "writes")
        kept = []
        for held in self.memory[slot.arena]:
            if not held.overlaps(slot.arena, start, end):
                kept.append(held)
                continue
            if held.region.is_private and held.region.bucket.primary is not region.bucket.primary:
                self.fail(f"writes {what}, but it belongs to bucket {_name(held.region)}")
            if held.start < start:
                kept.append(held._replace(end=start))
            if end < held.end:
                kept.append(held._replace(start=end))
        since = f", which bound symbol {self.position} of {self.name} has overwritten for bucket {_name(region)}"
        self.memory[slot.arena] = [*kept, _Range(start, end, content, region, since)]

    def _free(self, arena: Arena) -> None:
        self._check_idle(arena, 0, arena.nbytes, "frees")
        for held in self.memory[arena]:
            if held.region.is_private and self.is_awaited:
                self.fail(f"frees {held.region.slot}, which backward reads")
        since = f", which bound symbol {self.position} of {self.name} has freed"
        self.memory[arena] = [held._replace(content=_NOTHING, since=since) for held in self.memory[arena]]

    def _check_idle(self, arena: Arena, start: int, end: int, verb: str) -> None:
        for flying in self.flights.values():
            region = flying.issue.region
            if region is not None and _Range(*region.span, None, region).overlaps(arena, start, end):
                self.fail(f"{verb} {region.slot} before the wait for bucket {_name(region)}")

    def _issue(self, issue: Issue, bsym: BoundSymbol) -> _Pending:
        flight = _Pending(issue, self.position)
        if issue.region is not None:
            if issue.gathers:
                self._check_marks(issue, issue.region)
            self._write(issue.region, _params(issue.region) if issue.gathers else issue.future, bsym)
        if issue.gathers:
            self.ahead[issue.future] = issue
            others = [_name(flying.issue) for flying in self.flights.values() if flying.issue.gathers]
            if self.most_gathers is not None and len(others) >= self.most_gathers:
                limit = f"max_gathers_in_flight={self.most_gathers}"
                self.fail(f"gathers bucket {_name(issue)} while {', '.join(others)} are in flight, but {limit}")
        self.flights[issue.future] = flight
        return flight

    def _check_marks(self, issue: Issue, region: SlotRegion) -> None:
        """Check a gather that may find its bucket in the slot already."""
        if issue.is_in_window and not (region.is_private and self.is_awaited):
            self.fail(f"reuses {region.slot}, which does not keep bucket {_name(region)} until backward")
        slot = self._slot(region)
        if issue.resident or issue.window is not None:
            self._check(_Range(*region.span, _params(region), region), "expects the parameters")
        if issue.resident and self.ran_forward:
            held = (each for each in self.memory[slot.arena] if each.region.slot is slot)
            if not any(id(each) in self.left for each in held):
                self.fail(f"expects bucket {_name(region)} in {region.slot}, where forward did not leave it")

    def _wait(self, effect: Effects) -> _Pending:
        assert effect.waits is not None
        future, kinds = effect.waits
        flight = self.flights.pop(future, None)
        if flight is None:
            self.fail(f"waits {'a second time ' * (future in self.waited)}for {future!r}, which is not in flight")
        self.waited.add(future)
        issue = flight.issue
        if issue.kind not in kinds or issue.bucket is not effect.bucket:
            what = f"{issue.kind} of bucket {_name(issue)}" if issue.bucket else issue.kind
            self.fail(f"waits for {future!r}, {what}, but expects {' or '.join(kinds)} of its own bucket")
        return flight

    def _end(self) -> None:
        for flight in self.flights.values():
            self.fail(f"{flight.issue.kind} is never waited for", flight.position)
        for region, position in self.filling.values():
            self.fail(f"writes {_show(region)}, which nothing reduces", position)
        last = return_of(self.trace)
        returned, saved = (last.args[0]["output"], last.args[1:]) if self.is_awaited else (last.args, ())
        for what, values in (("returns", returned), ("saves", saved)):
            for name in names(tree_iter(values)):
                for region in (self.needs[root].region for root in self._roots(name) & self.needs.keys()):
                    if what == "returns" or not region.is_private:
                        self.fail(
                            f"{what} {name!r}, which is stored in {region.slot} of bucket {_name(region)}. If the operator "
                            f"that computes it returns memory of its own, declare it: thunder_fsdp_sched.declare_operator"
                        )
        self.ran_forward = True
        for ranges in self.memory.values():
            for index, held in enumerate(ranges):
                if held.region.is_private:  # other steps may write there before backward
                    since = f" before the guard of bucket {_name(held.region)}"
                    ranges[index] = held._replace(content=_NOTHING, since=since)
        self.left = {id(held): held for ranges in self.memory.values() for held in ranges}


_NOTHING = "nothing that a value needs"


def _params(region: SlotRegion) -> tuple[str, Bucket]:
    """Return the content of a slot into which the bucket was gathered. Its secondary gathers the same."""
    return "params", region.bucket.primary


def _name(item: Issue | SlotRegion) -> str:
    return "" if item.bucket is None else repr(item.bucket.spec.name)


def _show(region: SlotRegion) -> str:
    """Describe where a gradient is."""
    param = "" if region.param is None else f" of {region.bucket.spec.params[region.param].name!r}"
    return f"the gradient{param} for bucket {_name(region)} in {region.slot}"
