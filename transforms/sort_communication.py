"""Moves communication so that it overlaps compute; compute keeps its order, so results stay bit for bit the same."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..symbols import fsdp_all_gather, fsdp_reduce_scatter, fsdp_wait_grads, fsdp_wait_params
from ..traces import Aliases, args_of, communicates, outs_of, with_bound_symbols

__all__ = ["MAX_REDUCTIONS_IN_FLIGHT", "sort_communication"]

MAX_REDUCTIONS_IN_FLIGHT = 2
"""Reductions between issue and wait. Each holds a slot of unsharded gradients; a third one hides nothing more, because
the reductions of one process group run one after the other."""

_CLEAR_COLLECTION = "clear_mutable_collection"


@dataclass(eq=False)
class _Gather:
    issue: BoundSymbol
    wait: BoundSymbol
    first_consumer: int = -1
    last_consumer: int = -1
    section: int = -1


@dataclass(eq=False)
class _Reduction:
    issue: BoundSymbol
    wait: BoundSymbol
    ready_after: int = -1
    consumers: list[int] = field(default_factory=list)


def sort_communication(trace: TraceCtx, *, prefetch: int) -> TraceCtx:
    """Reorders the communication of a forward or backward execution trace.

    * Gathers are issued in the order of their first consumers; a wait stands right before its first consumer.
    * A gather is issued ``prefetch`` waits ahead of its own, just before that wait (0: right before its own wait), or
      already before a reduction that is ready there: on one communicator it would queue behind it.
    * A reduction is issued right after the last of its gradients. At most ``MAX_REDUCTIONS_IN_FLIGHT`` are in flight,
      then the oldest is waited for; the others are waited for where their results are read, at the end usually.
    * No collective crosses a bound symbol that communicates and is not one of ours.

    The cost is linear in the number of bound symbols. ``del`` statements are dropped.
    """
    started = time.perf_counter()
    return with_bound_symbols(trace, _Sorter(trace, prefetch).run(), "fsdp: sort communication", started)


class _Sorter:
    def __init__(self, trace: TraceCtx, prefetch: int) -> None:
        self.prefetch = prefetch
        self.out: list[BoundSymbol] = []
        self.compute: list[BoundSymbol] = []
        issues: dict[str, BoundSymbol] = {}
        gathers: list[_Gather] = []
        self.reductions: list[_Reduction] = []
        for bsym in trace.bound_symbols:
            if bsym.sym.id is PrimIDs.DEL or bsym.sym.name == _CLEAR_COLLECTION:
                continue
            if bsym.sym in (fsdp_all_gather, fsdp_reduce_scatter):
                issues[bsym.output.name] = bsym
            elif bsym.sym is fsdp_wait_params:
                # The token, if any, has done its work: it kept fusion regions apart.
                gathers.append(_Gather(issues[bsym.args[1].name], bsym.from_bsym(args=bsym.args[:2])))
            elif bsym.sym is fsdp_wait_grads:
                self.reductions.append(_Reduction(issues[bsym.args[1].name], bsym))
            else:
                self.compute.append(bsym)
        self._find_consumers(gathers)
        self.gathers = sorted((g for g in gathers if g.first_consumer >= 0), key=lambda g: g.first_consumer)

        self.next_issue = 0
        self.next_wait = 0
        self.resharded = 0  # gathers whose last consumer stands in `out`
        self.in_flight: deque[_Reduction] = deque()

    def _find_consumers(self, gathers: list[_Gather]) -> None:
        of_param = {out: g for g in gathers for out in outs_of(g.wait)}
        of_grad = {out: r for r in self.reductions for out in outs_of(r.wait)}
        produced: dict[str, int] = {}
        aliases = Aliases()
        section = 0
        self.section_of: list[int] = []
        for i, bsym in enumerate(self.compute):
            section += communicates(bsym)
            self.section_of.append(section)
            aliases.add(bsym)
            produced.update(dict.fromkeys(outs_of(bsym), i))
            for arg in args_of(bsym):
                if arg in of_param and of_param[arg].first_consumer < 0:
                    of_param[arg].first_consumer, of_param[arg].section = i, section
                if arg in of_grad:
                    of_grad[arg].consumers.append(i)
                for root in aliases.roots(arg):
                    if root in of_param:
                        of_param[root].last_consumer = i
        for reduction in self.reductions:
            grads = args_of(reduction.issue)
            reduction.ready_after = max((produced.get(g, -1) for g in grads), default=-1)
            # A gradient may be a gathered parameter itself, or a view of one: then the reduction reads the gather too.
            for root in {root for g in grads for root in aliases.roots(g)} & of_param.keys():
                gather = of_param[root]
                if gather.first_consumer < 0:
                    shards_there = max((produced.get(a, -1) for a in args_of(gather.issue)), default=-1)
                    gather.first_consumer = max(reduction.ready_after, shards_there + 1)
                    gather.section = self.section_of[gather.first_consumer]
                reduction.ready_after = max(reduction.ready_after, gather.first_consumer)
                gather.last_consumer = max(gather.last_consumer, reduction.ready_after)
        self.produced = produced

    def run(self) -> list[BoundSymbol]:
        ready: dict[int, list[_Reduction]] = {}
        for reduction in self.reductions:
            ready.setdefault(reduction.ready_after, []).append(reduction)
        waits_at: dict[int, list[_Reduction]] = {}
        for reduction in self.reductions:
            waits_at.setdefault(min(reduction.consumers, default=len(self.compute) - 1), []).append(reduction)
        resharded_after = Counter(g.last_consumer for g in self.gathers)

        for i, bsym in enumerate(self.compute):
            while self.next_wait < len(self.gathers) and self.gathers[self.next_wait].first_consumer <= i:
                self._wait_for_params(i)
            for reduction in waits_at.get(i, ()):
                self._wait_for_grads(until=reduction)
            self.out.append(bsym)
            self.resharded += resharded_after[i]
            for reduction in ready.get(i, ()):
                self._reduce(reduction, i)
        return self.out

    def _wait_for_params(self, position: int) -> None:
        """Emits the next wait, which is due before compute ``position``, and the gathers to be issued before it."""
        self._issue_gathers(up_to=self.next_wait + self.prefetch, position=position - 1)
        gather = self.gathers[self.next_wait]
        if self.next_issue <= self.next_wait:  # a barrier or a late producer kept it back until now
            self.out.append(gather.issue)
            self.next_issue = self.next_wait + 1
        self.out.append(gather.wait)
        self.next_wait += 1

    def _issue_gathers(self, up_to: int, position: int) -> None:
        """Issues gathers up to number ``up_to``, when compute up to ``position`` stands in the trace."""
        while self.next_issue <= min(up_to, len(self.gathers) - 1):
            gather = self.gathers[self.next_issue]
            if gather.section != self.section_of[min(position + 1, len(self.section_of) - 1)]:
                return
            if any(self.produced.get(a, -1) > position for a in args_of(gather.issue)):
                return
            self.out.append(gather.issue)
            self.next_issue += 1

    def _reduce(self, reduction: _Reduction, position: int) -> None:
        while len(self.in_flight) >= MAX_REDUCTIONS_IN_FLIGHT:
            self._wait_for_grads(until=self.in_flight[0])
        if self.prefetch and self.next_issue - self.resharded <= self.prefetch:
            self._issue_gathers(up_to=self.next_wait + self.prefetch, position=position)
        self.out.append(reduction.issue)
        self.in_flight.append(reduction)

    def _wait_for_grads(self, until: _Reduction) -> None:
        while until in self.in_flight:
            self.out.append(self.in_flight.popleft().wait)
