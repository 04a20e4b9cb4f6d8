"""Moves communication so that it overlaps compute; compute keeps its order, so results stay bit for bit the same."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..groups import Group
from ..operands import Wait, bucket_of
from ..symbols import fsdp_all_gather, fsdp_all_reduce, fsdp_reduce_scatter, fsdp_wait_grads, fsdp_wait_params
from ..traces import Aliases, args_of, communicates, outs_of, statements, with_bound_symbols
from .plan_slots import slot_bytes_of

__all__ = ["MAX_REDUCTIONS_IN_FLIGHT", "MAX_SMALL_STEPS", "bytes_in_flight", "issue_points", "sort_communication"]

MAX_REDUCTIONS_IN_FLIGHT = 2
"""Reductions of one process group between issue and wait, if they are equally large. Each holds a slot of unsharded
gradients; a third one hides nothing more, because the reductions of one process group run one after the other. Beside
them the next bucket's slot may fill up with gradients that are written in place; copied gradients would need as much
memory of their own."""

_SMALL = 10
"""What has fewer bytes than this part of something else hides nothing of that."""

MAX_SMALL_STEPS = 4
"""Steps that a gather is issued ahead of beyond ``prefetch``, if they are smaller."""


@dataclass(eq=False)
class _Gather:
    """A gather with the positions, among compute, of its first and last consumer.

    Gathers that the same bound symbol reads first (a fusion may read two buckets) make one *step*: they are issued one
    behind the other and then waited for, so that a wait never has another gather behind it.
    """

    issue: BoundSymbol
    wait: BoundSymbol
    first_consumer: int = -1
    last_consumer: int = -1
    section: int = -1
    step: int = -1

    @property
    def name(self) -> str:
        return bucket_of(self.issue).spec.name

    @property
    def nbytes(self) -> int:
        """Of memory: with padding."""
        return slot_bytes_of(self.issue)


@dataclass(eq=False)
class _Reduction:
    issue: BoundSymbol
    wait: BoundSymbol
    across: BoundSymbol | None = None
    """The all-reduce across replicas that goes on with its result, until that is issued."""
    ready_after: int = -1
    consumers: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return bucket_of(self.issue).spec.name

    @property
    def nbytes(self) -> int:
        return bucket_of(self.issue).spec.grad_bytes

    @property
    def group(self) -> Group:
        return bucket_of(self.issue).ranks.reductions

    @property
    def holds_slot(self) -> bool:
        return self.across is not None or Wait(self.wait).future.name == self.issue.output.name


def sort_communication(trace: TraceCtx, *, prefetch: int, max_unsharded_bytes: int | None = None) -> TraceCtx:
    """Reorders the communication of a forward or backward execution trace.

    * Gathers are issued in the order of their first consumers; a wait stands right before its first consumer.
    * A gather is issued ``prefetch`` steps ahead of its own wait, just before the wait of that step (0: right before its
      own wait), or already before a reduction that is ready there: on one communicator it would queue behind it.
      Smaller steps count for their share of its bytes: see ``issue_points``.
    * A reduction is issued right after the last of its gradients. In flight are at most as many bytes as the
      ``MAX_REDUCTIONS_IN_FLIGHT`` largest have together, then the oldest is waited for; the others are waited for where
      their results are read, at the end usually.
    * An all-reduce across replicas follows the reduce-scatter of the next bucket that is not small beside it: it has to
      wait for its own, which then had the compute between the two to finish, and the group inside goes on with the next.
    * No collective crosses a bound symbol that communicates and is not one of ours.

    Why each of them stands where it stands is its header: the trace prints it, and the schedule holds it.
    The cost is linear in the number of bound symbols. ``del`` statements are dropped.

    Args:
        prefetch: steps.
        max_unsharded_bytes: a gather is issued ahead of its step only as far as the gathered buckets that are live then
            fit into that many bytes.
    """
    started = time.perf_counter()
    bsyms = _Sorter(trace, prefetch, max_unsharded_bytes).run()
    return with_bound_symbols(trace, bsyms, "fsdp: sort communication", started)


def bytes_in_flight(reductions: Iterable[BoundSymbol]) -> dict[Group, int]:
    """The most bytes of slots that reductions of each process group may hold between issue and wait."""
    reduced: dict[Group, list[int]] = defaultdict(list)
    for issue in reductions:
        reduced[bucket_of(issue).ranks.reductions].append(slot_bytes_of(issue))
    return {group: sum(sorted(nbytes)[-MAX_REDUCTIONS_IN_FLIGHT:]) for group, nbytes in reduced.items()}


def issue_points(step_bytes: Sequence[int], prefetch: int) -> list[int]:
    """For each step of a trace, the step before whose wait its gathers are issued.

    That is ``prefetch`` steps before it. But compute goes with bytes: that of a smaller step (a norm, a part of a block)
    hides only as much of a bigger one, and counts for no more than that, up to ``MAX_SMALL_STEPS`` further steps and as long
    as the steps from there on have no more bytes together than ``prefetch + 1`` of the largest (and a tenth of one, for what
    is small). No gather overtakes another.

    Args:
        step_bytes: unsharded bytes of each step, in order.
    """
    most = (prefetch + 1 + 1 / _SMALL) * max(step_bytes, default=0)
    points = []
    for step, nbytes in enumerate(step_bytes):
        point, hidden, held = step, 0, nbytes
        while point > max(0, step - prefetch - MAX_SMALL_STEPS) and hidden * _SMALL < prefetch * nbytes * (_SMALL - 1):
            held += step_bytes[point - 1]
            if held > most:
                break
            point -= 1
            hidden += min(nbytes, step_bytes[point])
        points.append(point)
    for step in range(len(points) - 2, -1, -1):
        points[step] = min(points[step], points[step + 1])
    return points


class _Sorter:
    def __init__(self, trace: TraceCtx, prefetch: int, max_unsharded_bytes: int | None) -> None:
        self.prefetch = prefetch
        self.budget = max_unsharded_bytes
        self.out: list[BoundSymbol] = []
        self.compute: list[BoundSymbol] = []
        issues: dict[str, BoundSymbol] = {}
        across: dict[str, BoundSymbol] = {}
        gathers: list[_Gather] = []
        self.reductions: list[_Reduction] = []
        for bsym in statements(trace):
            if bsym.sym in (fsdp_all_gather, fsdp_reduce_scatter):
                issues[bsym.output.name] = bsym
            elif bsym.sym is fsdp_all_reduce:
                across[bsym.output.name] = bsym
            elif bsym.sym is fsdp_wait_params:
                # The token, if any, has done its work: it kept fusion regions apart.
                gathers.append(_Gather(issues[Wait(bsym).future.name], Wait(bsym).with_token(None)))
            elif bsym.sym is fsdp_wait_grads:
                behind = across.get(Wait(bsym).future.name)
                future = Wait(bsym if behind is None else behind).future
                self.reductions.append(_Reduction(issues[future.name], bsym, behind))
            else:
                self.compute.append(bsym)
        self.most_in_flight = bytes_in_flight(r.issue for r in self.reductions)
        self._find_consumers(gathers)
        self.gathers = sorted((g for g in gathers if g.first_consumer >= 0), key=lambda g: g.first_consumer)
        self.steps: list[list[_Gather]] = []
        for gather in self.gathers:
            if not self.steps or self.steps[-1][0].first_consumer != gather.first_consumer:
                self.steps.append([])
            self.steps[-1].append(gather)
            gather.step = len(self.steps) - 1
        travelling = [sum(bucket_of(g.issue).spec.unsharded_bytes for g in step) for step in self.steps]
        self.issue_points = issue_points(travelling, prefetch)

        self.next_issue = 0  # number of the gather to be issued next
        self.next_step = 0  # step to be waited for next
        self.live: list[_Gather] = []  # issued, last consumer not yet in `out`
        self.held_back: dict[_Gather, str] = {}  # why a gather could not be issued when it was due
        self.in_flight: list[_Reduction] = []

    def _find_consumers(self, gathers: list[_Gather]) -> None:
        of_param = {out: g for g in gathers for out in outs_of(g.wait)}
        of_grad = {out: r for r in self.reductions for out in outs_of(r.wait)}
        produced: dict[str, int] = {}
        aliases = Aliases()
        section = 0
        self.section_of: list[int] = []
        self.foreign: list[int] = []  # what ends each section
        for i, bsym in enumerate(self.compute):
            if communicates(bsym):
                section += 1
                self.foreign.append(i)
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
        waits_at: dict[int, list[_Reduction]] = {}
        for reduction in self.reductions:
            ready.setdefault(reduction.ready_after, []).append(reduction)
            waits_at.setdefault(min(reduction.consumers, default=len(self.compute) - 1), []).append(reduction)

        for i, bsym in enumerate(self.compute):
            if self.next_step < len(self.steps) and self.steps[self.next_step][0].first_consumer == i:
                self._wait_for_params(bsym, i)
            for reduction in waits_at.get(i, ()):
                self._wait_for_grads(reduction, f"consumer: {_show(bsym)}")
            self.out.append(bsym)
            for reduction in ready.get(i, ()):
                self._reduce(reduction, i)
        return self.out

    def _wait_for_params(self, consumer: BoundSymbol, position: int) -> None:
        """Emits the waits of the next step, due before compute ``position``, and the gathers to be issued before them."""
        step = self.steps[self.next_step]
        ahead = f", before the wait for {step[0].name}" if self.prefetch else ""
        self._issue_gathers(position - 1, f"prefetch: {self.prefetch} ahead of its wait{ahead}")
        while self.next_issue < len(self.gathers) and self.gathers[self.next_issue].step <= self.next_step:
            self._issue("first consumer: its step comes next")
        for gather in step:
            self._emit(gather.wait, f"first consumer: {_show(consumer)}")
        self.next_step += 1

    def _issue_gathers(self, position: int, reason: str) -> None:
        """Issues what prefetch allows, with compute up to ``position`` in the trace and the next step not yet waited for."""
        self.live = [g for g in self.live if g.last_consumer > position]
        while self.next_issue < len(self.gathers):
            gather = self.gathers[self.next_issue]
            if self.issue_points[gather.step] > self.next_step:
                return
            early = gather.step > self.next_step
            held = self._held_back(gather, position, early)
            if held:
                self.held_back[gather] = held
                return
            self._issue(reason if early or not self.prefetch else "first consumer: its step comes next")

    def _held_back(self, gather: _Gather, position: int, early: bool) -> str:
        """Why ``gather`` cannot be issued behind compute ``position``; empty if it can."""
        if gather.section != self.section_of[min(position + 1, len(self.section_of) - 1)]:
            return (
                f"producer: not across {_show(self.compute[self.foreign[gather.section - 1]])}, which communicates too"
            )
        shards = [self.produced[a] for a in args_of(gather.issue) if self.produced.get(a, -1) > position]
        if shards:
            return f"producer: its shards come from {_show(self.compute[max(shards)])}"
        excess = sum(g.nbytes for g in self.live) + gather.nbytes - (self.budget or 0)
        if early and self.budget is not None and excess > 0:
            for freed in sorted(self.live, key=lambda g: g.last_consumer):
                excess -= freed.nbytes
                if excess <= 0:
                    return f"byte budget: room only after the last read of {freed.name}"
            return "byte budget: room only alone"
        return ""

    def _issue(self, reason: str) -> None:
        gather = self.gathers[self.next_issue]
        self._emit(gather.issue, self.held_back.pop(gather, reason))
        self.live.append(gather)
        self.next_issue += 1

    def _reduce(self, reduction: _Reduction, position: int) -> None:
        # One that goes on across replicas holds no slot any more.
        most = self.most_in_flight[reduction.group]
        while before := [r for r in self.in_flight if r.holds_slot and r.group is reduction.group]:
            if sum(slot_bytes_of(r.issue) for r in (*before, reduction)) <= most:
                break
            reason = f"in-flight limit: the bytes of the {MAX_REDUCTIONS_IN_FLIGHT} largest reductions"
            if before[0].across is not None:
                self._go_across(before[0], reason)
            else:
                self._wait_for_grads(before[0], reason)
        if self.prefetch and self.next_step < len(self.steps) and self._share_a_group(reduction):
            # A bucket that is still read before the next step has the memory that an earlier gather would need.
            until = self.steps[self.next_step][0].first_consumer
            if not any(position < g.last_consumer < until for g in self.live if g.step < self.next_step):
                self._issue_gathers(
                    position, f"prefetch: due, and would queue behind the reduction of {reduction.name}"
                )
        last = self.compute[reduction.ready_after] if reduction.ready_after >= 0 else None
        self._emit(reduction.issue, f"producer: last gradient by {_show(last)}" if last else "producer: none")
        for earlier in self.in_flight:
            if reduction.nbytes * _SMALL >= earlier.nbytes:
                self._go_across(earlier, f"producer: its reduce-scatter had time until that of {reduction.name}")
        self.in_flight.append(reduction)

    def _share_a_group(self, reduction: _Reduction) -> bool:
        """Whether the gather that comes next would queue behind ``reduction``."""
        if self.next_issue == len(self.gathers):
            return False
        return bucket_of(self.gathers[self.next_issue].issue).ranks.group is reduction.group

    def _wait_for_grads(self, until: _Reduction, reason: str) -> None:
        # Those of its group that were issued before it are over before it; other groups' go on.
        for reduction in [r for r in self.in_flight if r.group is until.group]:
            if until not in self.in_flight:
                return
            self.in_flight.remove(reduction)
            self._go_across(reduction, reason)
            self._emit(reduction.wait, reason)

    def _go_across(self, reduction: _Reduction, reason: str) -> None:
        if reduction.across is not None:
            self._emit(reduction.across, reason)
            reduction.across = None

    def _emit(self, bsym: BoundSymbol, reason: str) -> None:
        self.out.append(bsym.from_bsym(header=reason))


def _show(bsym: BoundSymbol) -> str:
    if bsym.sym.id is PrimIDs.RETURN:
        return "return"
    return " = ".join([", ".join(outs_of(bsym)[:1]), bsym.sym.name]).removeprefix(" = ")
