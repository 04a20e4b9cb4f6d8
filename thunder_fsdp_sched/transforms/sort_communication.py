"""Move communication so that it overlaps compute. Compute keeps its order, so results stay bit for bit the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.analysis import Analysis
from ..ir.effects import effects
from ..ir.inspection import args_of, outs_of, short_form, statements, with_bound_symbols
from ..ir.symbols import without_token
from ..ranks.process_groups import ProcessGroupRef

MAX_REDUCTIONS_IN_FLIGHT = 2
"""How many equally large reductions of one process group may be in flight. Each holds a slot of unsharded gradients. A
third one would not improve overlap, because the reductions of one process group run one after the other. Meanwhile the
next bucket's slot may fill with gradients that are written in place; copied gradients would need as much memory of
their own."""

_SMALL = 10
"""A collective this many times smaller than another is too small to hide it."""

MAX_SMALL_STAGES = 4
"""How many more steps than ``prefetch`` a gather may be issued ahead if the steps between are small."""


@dataclass(eq=False)
class _Collective:
    """A gather or a reduction, and its wait.

    Attributes:
        name: of its bucket.
        nbytes: of what it sends, padding included.
        slot_bytes: of its slot.
    """

    issue: BoundSymbol
    wait: BoundSymbol

    def __post_init__(self) -> None:
        of = effects(self.issue).slot_issue
        assert of is not None and of.place is not None and of.group is not None
        self.name, self.group = of.place.bucket.spec.name, of.group
        self.nbytes, self.slot_bytes = of.nbytes, of.place.nbytes


@dataclass(eq=False)
class _Gather(_Collective):
    """A gather with the positions, counted in compute, of its first and last consumer.

    Gathers with the same first consumer (a fusion may read two buckets) form one *prefetch step*: they are issued one
    after the other and then waited for, so that no gather is issued between their waits.
    """

    first_consumer: int = -1
    last_consumer: int = -1
    section: int = -1
    stage: int = -1


@dataclass(eq=False)
class _Reduction(_Collective):
    all_reduce: BoundSymbol | None = None
    """The all-reduce of its result across replicas; ``None`` without replicas and once it is issued."""
    ready_after: int = -1
    first_consumer: int | None = None

    @property
    def holds_slot(self) -> bool:
        waits = effects(self.wait).waits
        return self.all_reduce is not None or (waits is not None and waits.future == self.issue.output.name)


def sort_communication(
    trace: TraceCtx,
    *,
    prefetch: int,
    max_unsharded_bytes: int | None = None,
    max_gathers_in_flight: int | None = None,
    max_reductions_in_flight: int = MAX_REDUCTIONS_IN_FLIGHT,
) -> TraceCtx:
    """Reorder the communication of a forward or backward execution trace.

    Runs after ``guard_first`` and before ``assign_slots``; ``replay_schedule`` takes its place if a schedule is pinned. A
    trace without communication keeps its bound symbols. Before::

        ft146 = fsdp_all_gather(bucket_blocks_0, None, t_blocks_0_weight, again=False)  # 16,384 bytes float32
        (t109,) = fsdp_wait_params(bucket_blocks_0, ft146)
        t110 = torch.nn.functional.linear(x, t109, None)
        t111 = torch.gt(t110, 0.0)
        t112 = torch.where(t111, t110, 0.0)
        ft148 = fsdp_all_gather(bucket_blocks_1, None, t_blocks_1_weight, again=False)  # 16,384 bytes float32
        (t113,) = fsdp_wait_params(bucket_blocks_1, ft148)
        t114 = torch.nn.functional.linear(t112, t113, None)

    After: the second gather overlaps the compute of the first block::

        # first consumer: the next wait needs it
        ft146 = fsdp_all_gather(bucket_blocks_0, None, t_blocks_0_weight, again=False)  # 16,384 bytes float32
        # prefetch: 1 ahead of its wait, before the wait for blocks.0
        ft148 = fsdp_all_gather(bucket_blocks_1, None, t_blocks_1_weight, again=False)  # 16,384 bytes float32
        # first consumer: t110 = linear
        (t109,) = fsdp_wait_params(bucket_blocks_0, ft146)
        t110 = torch.nn.functional.linear(x, t109, None)
        ...
        # first consumer: t114 = linear
        (t113,) = fsdp_wait_params(bucket_blocks_1, ft148)

    The rules:

    * Gathers are issued in the order of their first consumers. A wait is placed right before the first consumer.
    * A gather is issued ``prefetch`` steps ahead of its own wait, right before the wait of that step; with 0, right
      before its own wait. If a reduction is ready in that step, the gather is issued before it, because on one
      communicator it would queue behind the reduction. A smaller step counts by its share of the gather's bytes: see
      ``issue_points``.
    * With ``max_gathers_in_flight``, a gather that would be one too many is issued right after the wait that makes room
      for it, before that wait's consumer.
    * A reduction is issued right after the last of its gradients. The bytes in flight are limited to those of the
      ``max_reductions_in_flight`` largest reductions; beyond that the oldest is waited for. The others are waited for
      where their results are read, usually at the end. With 0, each is waited for right after its issue.
    * An all-reduce across replicas is issued after the reduce-scatter of the next bucket that is not small in
      comparison. It has to wait for its own reduce-scatter, which can finish during the compute in between, while the
      inner group already works on the next one.
    * No collective moves across a bound symbol that communicates and is not ours.

    The reason for each position is the header of the bound symbol: the trace prints it, and the schedule stores it.
    The cost is linear in the number of bound symbols. ``del`` statements are dropped.

    Args:
        prefetch: how many prefetch steps ahead of its wait a gather is issued. A step is all gathers with one first
            consumer.
        max_unsharded_bytes: limit (bytes) on the gathered buckets that are live at once. A gather is issued ahead of
            its step only if it stays within the limit.
        max_gathers_in_flight: limit on the gathers that are issued and not waited for, at least 1.
        max_reductions_in_flight: how many equally large reductions of one process group may be in flight.
    """
    bsyms = _Sorter(trace, prefetch, max_unsharded_bytes, max_gathers_in_flight, max_reductions_in_flight).run()
    return with_bound_symbols(trace, bsyms, "fsdp: sort communication")


def bytes_in_flight(reductions: Iterable[tuple[ProcessGroupRef, int]], most: int) -> dict[ProcessGroupRef, int]:
    """Return the most bytes of slots that the reductions of each process group may hold between issue and wait.

    Args:
        reductions: the process group and the bytes of the slot of each.
        most: how many equally large ones may be in flight.
    """
    reduced: dict[ProcessGroupRef, list[int]] = defaultdict(list)
    for group, nbytes in reductions:
        reduced[group].append(nbytes)
    return {group: sum(sorted(slots, reverse=True)[:most]) for group, slots in reduced.items()}


def issue_points(stage_bytes: Sequence[int], prefetch: int) -> list[int]:
    """Return for each prefetch step of a trace the step before whose wait its gathers are issued.

    Usually that is ``prefetch`` steps earlier. But the compute of a step is roughly proportional to its bytes, so a
    smaller step (a norm, an edge piece) hides only part of a larger gather and counts only by that part. A gather may
    therefore be issued up to ``MAX_SMALL_STAGES`` steps further ahead, as long as all steps from there on have no more
    bytes together than ``prefetch + 1`` of the largest, plus a tenth of one for small steps. No gather overtakes
    another.

    Args:
        stage_bytes: unsharded bytes of each step, in order.
    """
    most = (prefetch + 1 + 1 / _SMALL) * max(stage_bytes, default=0)
    points = []
    for stage, nbytes in enumerate(stage_bytes):
        point, hidden, held = stage, 0, nbytes
        while point > max(0, stage - prefetch - MAX_SMALL_STAGES) and hidden * _SMALL < prefetch * nbytes * (
            _SMALL - 1
        ):
            held += stage_bytes[point - 1]
            if held > most:
                break
            point -= 1
            hidden += min(nbytes, stage_bytes[point])
        points.append(point)
    for stage in range(len(points) - 2, -1, -1):
        points[stage] = min(points[stage], points[stage + 1])
    return points


@dataclass
class _Sorter:
    trace: TraceCtx
    prefetch: int
    budget: int | None
    max_in_flight: int | None
    max_reductions: int

    def __post_init__(self) -> None:
        self.out: list[BoundSymbol] = []
        self.compute: list[BoundSymbol] = []
        issues: dict[str, BoundSymbol] = {}
        all_reduces: dict[str, BoundSymbol] = {}
        gathers: list[_Gather] = []
        self.reductions: list[_Reduction] = []
        for bsym in statements(self.trace):
            e = effects(bsym)
            if e.bucket is None or (e.issues is None and e.waits is None):
                self.compute.append(bsym)
            elif e.slot_issue is not None:
                issues[e.slot_issue.future] = bsym
            elif e.issues is not None:
                all_reduces[e.issues.future] = bsym
            elif e.waits is not None and e.unshards:
                # The token, if any, is no longer needed: it kept fusion regions apart.
                gathers.append(_Gather(issues[e.waits.future], without_token(bsym)))
            elif e.waits is not None:
                future, all_reduce = e.waits.future, all_reduces.get(e.waits.future)
                if all_reduce is not None and (inside := effects(all_reduce).waits) is not None:
                    future = inside.future
                self.reductions.append(_Reduction(issues[future], bsym, all_reduce))
        self.in_flight_limit = bytes_in_flight(((r.group, r.slot_bytes) for r in self.reductions), self.max_reductions)
        self._find_consumers(gathers)
        self.gathers = sorted((g for g in gathers if g.first_consumer >= 0), key=lambda g: g.first_consumer)
        self.stages = [list(stage) for _, stage in groupby(self.gathers, key=lambda gather: gather.first_consumer)]
        for number, stage in enumerate(self.stages):
            for gather in stage:
                gather.stage = number
        stage_bytes = [sum(g.nbytes for g in stage) for stage in self.stages]
        self.issue_points = issue_points(stage_bytes, self.prefetch)

        self.next_issue = 0  # number of the gather to be issued next
        self.next_wait = 0  # number of the gather to be waited for next
        self.next_stage = 0  # step to be waited for next
        self.live: list[_Gather] = []  # issued, last consumer not yet in `out`
        self.delay_reasons: dict[_Gather, str] = {}  # why a gather could not be issued when it was due
        self.in_flight: list[_Reduction] = []

    def _find_consumers(self, gathers: list[_Gather]) -> None:
        self.section_of: list[int] = []
        self.foreign: list[int] = []  # the compute that ends each section, and still belongs to it
        for i, bsym in enumerate(self.compute):
            self.section_of.append(len(self.foreign))
            if effects(bsym).communicates:
                self.foreign.append(i)
        live = self.liveness = Analysis(self.compute)
        of_param: dict[str, _Gather] = {}
        for gather in gathers:
            params = outs_of(gather.wait)
            of_param.update(dict.fromkeys(params, gather))
            first = live.first_read(params)
            if first is not None:
                gather.first_consumer, gather.section = first, self.section_of[first]
                gather.last_consumer = live.last_use(params)
        for reduction in self.reductions:
            grads = args_of(reduction.issue)
            reduction.ready_after = live.defined(grads)
            reduction.first_consumer = live.first_read(outs_of(reduction.wait))
            # A gradient may be a gathered parameter or a view of one. Then the reduction reads the gathered bucket,
            # too.
            for root in sorted(live.roots(grads) & of_param.keys()):
                gather = of_param[root]
                if gather.first_consumer < 0:
                    gather.first_consumer = max(reduction.ready_after, live.defined(args_of(gather.issue)) + 1)
                    gather.section = self.section_of[gather.first_consumer]
                reduction.ready_after = max(reduction.ready_after, gather.first_consumer)
                gather.last_consumer = max(gather.last_consumer, reduction.ready_after)

    def run(self) -> list[BoundSymbol]:
        ready: dict[int, list[_Reduction]] = defaultdict(list)
        waits_at: dict[int, list[_Reduction]] = defaultdict(list)
        for reduction in self.reductions:
            ready[reduction.ready_after].append(reduction)
            consumer = len(self.compute) - 1 if reduction.first_consumer is None else reduction.first_consumer
            waits_at[consumer].append(reduction)

        for i, bsym in enumerate(self.compute):
            if self.next_stage < len(self.stages) and self.stages[self.next_stage][0].first_consumer == i:
                self._wait_for_params(bsym, i)
            for reduction in waits_at.get(i, ()):
                self._wait_for_grads(reduction, f"consumer: {short_form(bsym)}")
            self.out.append(bsym)
            for reduction in ready.get(i, ()):
                self._reduce(reduction, i)
        return self.out

    def _wait_for_params(self, consumer: BoundSymbol, position: int) -> None:
        """Emit the waits of the next step, due before compute ``position``, and the gathers to issue before them."""
        stage = self.stages[self.next_stage]
        ahead = f", before the wait for {stage[0].name}" if self.prefetch else ""
        prefetched = f"prefetch: {self.prefetch} ahead of its wait{ahead}"
        self._issue_gathers(position - 1, prefetched)
        end = self.next_wait + len(stage)
        for gather in stage:
            while self.next_issue < end and not self._is_full():
                self._issue("first consumer: the next wait needs it")
            self._emit(gather.wait, f"first consumer: {short_form(consumer)}")
            self.next_wait += 1
        if self.max_in_flight is not None:
            self._issue_gathers(position - 1, prefetched)
        self.next_stage += 1

    def _is_full(self) -> bool:
        """Return whether as many gathers are in flight as may be. Gathers are waited for in the order of their issues."""
        return self.max_in_flight is not None and self.next_issue - self.next_wait >= self.max_in_flight

    def _issue_gathers(self, position: int, reason: str) -> None:
        """Issue the gathers that are due after compute ``position``, before the next step is waited for."""
        self.live = [g for g in self.live if g.last_consumer > position]
        while self.next_issue < len(self.gathers):
            gather = self.gathers[self.next_issue]
            if self.issue_points[gather.stage] > self.next_stage:
                return
            early = gather.stage > self.next_stage
            delay_reason = self._delay_reason(gather, position, early)
            if delay_reason:
                self.delay_reasons[gather] = delay_reason
                return
            self._issue(reason if early or not self.prefetch else "first consumer: the next wait needs it")

    def _delay_reason(self, gather: _Gather, position: int, early: bool) -> str:
        """Return why ``gather`` cannot be issued after compute ``position``; empty if it can."""
        if gather.section != self.section_of[min(position + 1, len(self.section_of) - 1)]:
            foreign = self.compute[self.foreign[gather.section - 1]]
            return f"producer: not across {short_form(foreign)}, which communicates too"
        shards_from = self.liveness.defined(args_of(gather.issue))
        if shards_from > position:
            return f"producer: its shards come from {short_form(self.compute[shards_from])}"
        if self._is_full():
            first = self.gathers[self.next_wait].name
            return f"in-flight limit: at most {self.max_in_flight}, so only after the wait for {first}"
        excess = sum(g.slot_bytes for g in self.live) + gather.slot_bytes - (self.budget or 0)
        if early and self.budget is not None and excess > 0:
            for freed in sorted(self.live, key=lambda g: g.last_consumer):
                excess -= freed.slot_bytes
                if excess <= 0:
                    return f"byte budget: fits only after the last read of {freed.name}"
            return "byte budget: fits only when nothing else is gathered"
        return ""

    def _issue(self, reason: str) -> None:
        gather = self.gathers[self.next_issue]
        self._emit(gather.issue, self.delay_reasons.pop(gather, reason))
        self.live.append(gather)
        self.next_issue += 1

    def _reduce(self, reduction: _Reduction, position: int) -> None:
        # Once its all-reduce across replicas is issued, a reduction no longer holds a slot.
        most = self.in_flight_limit[reduction.group]
        while before := [r for r in self.in_flight if r.holds_slot and r.group is reduction.group]:
            if sum(r.slot_bytes for r in (*before, reduction)) <= most:
                break
            reason = f"in-flight limit: the bytes of the {self.max_reductions} largest reductions"
            if before[0].all_reduce is not None:
                self._issue_all_reduce(before[0], reason)
            else:
                self._wait_for_grads(before[0], reason)
        if self.prefetch and self.next_stage < len(self.stages) and self._share_a_group(reduction):
            # A bucket that is still read before the next step occupies the memory that an earlier gather would need.
            until = self.stages[self.next_stage][0].first_consumer
            if not any(position < g.last_consumer < until for g in self.live if g.stage < self.next_stage):
                self._issue_gathers(
                    position, f"prefetch: due, and would queue behind the reduction of {reduction.name}"
                )
        last = self.compute[reduction.ready_after] if reduction.ready_after >= 0 else None
        self._emit(reduction.issue, f"producer: last gradient by {short_form(last)}" if last else "producer: none")
        for earlier in self.in_flight:
            if reduction.nbytes * _SMALL >= earlier.nbytes:
                self._issue_all_reduce(
                    earlier, f"producer: its reduce-scatter could finish before that of {reduction.name}"
                )
        self.in_flight.append(reduction)
        if self.max_reductions == 0:
            self._wait_for_grads(reduction, "in-flight limit: no reduction beside compute")

    def _share_a_group(self, reduction: _Reduction) -> bool:
        """Return whether the next gather would queue behind ``reduction``."""
        if self.next_issue == len(self.gathers):
            return False
        return self.gathers[self.next_issue].group is reduction.group

    def _wait_for_grads(self, until: _Reduction, reason: str) -> None:
        # Earlier reductions of its group have finished by then; those of other groups may still be in flight.
        for reduction in [r for r in self.in_flight if r.group is until.group]:
            if until not in self.in_flight:
                return
            self.in_flight.remove(reduction)
            self._issue_all_reduce(reduction, reason)
            self._emit(reduction.wait, reason)

    def _issue_all_reduce(self, reduction: _Reduction, reason: str) -> None:
        if reduction.all_reduce is not None:
            self._emit(reduction.all_reduce, reason)
            reduction.all_reduce = None

    def _emit(self, bsym: BoundSymbol, reason: str) -> None:
        self.out.append(bsym.from_bsym(header=reason))
