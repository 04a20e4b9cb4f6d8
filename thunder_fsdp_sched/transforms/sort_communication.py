"""Move communication so that it overlaps compute. Compute keeps its order, so results stay bit for bit the same."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.analysis import Analysis
from ..ir.effects import effects
from ..ir.inspection import args_of, outs_of, short_form, with_bound_symbols, without_token
from ..ir.schedule import MAX_REDUCTIONS_IN_FLIGHT
from ..ir.slots import ReductionLimits
from ..ir.statements import operations, read_statements
from ..ranks.process_groups import ProcessGroupRef

_SMALL = 10
"""A collective this many times smaller than another is too small to hide it."""

MAX_SMALL_STAGES = 4
"""How many more steps than ``prefetch`` a gather may be issued ahead if the steps between are small."""


def sort_communication(
    trace: TraceCtx,
    *,
    prefetch: int,
    max_gathers_in_flight: int | None = None,
    reductions_in_flight: int = MAX_REDUCTIONS_IN_FLIGHT,
) -> TraceCtx:
    """Reorder the communication of a forward or backward execution trace.

    Runs after ``write_grads_in_place`` and before ``assign_slots``; ``replay_schedule`` takes its place if a schedule is
    pinned. A trace without communication keeps its bound symbols. Before::

        ft146 = fsdp_all_gather(bucket_blocks_0, None, t_blocks_0_weight, reuse_cast=False)  # 16,384 bytes float32
        (t109,) = fsdp_wait_params(bucket_blocks_0, ft146)
        t110 = torch.nn.functional.linear(x, t109, None)
        t111 = torch.gt(t110, 0.0)
        t112 = torch.where(t111, t110, 0.0)
        ft148 = fsdp_all_gather(bucket_blocks_1, None, t_blocks_1_weight, reuse_cast=False)  # 16,384 bytes float32
        (t113,) = fsdp_wait_params(bucket_blocks_1, ft148)
        t114 = torch.nn.functional.linear(t112, t113, None)

    After: the second gather overlaps the compute of the first block::

        # first consumer: the next wait needs it
        ft146 = fsdp_all_gather(bucket_blocks_0, None, t_blocks_0_weight, reuse_cast=False)  # 16,384 bytes float32
        # prefetch: 1 ahead of its wait, before the wait for blocks.0
        ft148 = fsdp_all_gather(bucket_blocks_1, None, t_blocks_1_weight, reuse_cast=False)  # 16,384 bytes float32
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
    * With ``max_gathers_in_flight``, a gather beyond the limit is issued right after the wait that makes room for it,
      before that wait's consumer.
    * A reduction is issued right after the last of its gradients. Before, the oldest in flight is waited for if it has
      probably ended, or if there would be more bytes in flight than the ``reductions_in_flight`` largest reductions have:
      see [Note: When a reduction has ended] in ``ir.slots``. The others are waited for where their results are read,
      usually at the end. With 0, each is waited for right after its issue.
    * An all-reduce across replicas is issued after the reduce-scatter of the next bucket that is not small in
      comparison. It has to wait for its own reduce-scatter, which can finish during the compute in between, while the
      inner group already works on the next one.
    * No collective moves across a bound symbol that communicates and is not ours.

    The reason for each position is the header of the bound symbol: the trace prints it, and the schedule stores it.
    The cost is linear in the number of bound symbols. ``del`` statements are dropped.

    Args:
        prefetch: how many prefetch steps ahead of its wait a gather is issued. A step is all gathers with one first
            consumer.
        max_gathers_in_flight: limit on the gathers that are issued and not waited for, at least 1.
        reductions_in_flight: how many equally large reductions of one process group may be in flight.
    """
    found = _Sorter(trace, prefetch, max_gathers_in_flight, reductions_in_flight).run()
    return with_bound_symbols(trace, found, "fsdp: sort communication")


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


@dataclass(eq=False)
class _Collective:
    """A gather or a reduction. Positions count compute.

    Gathers with the same first consumer (a fusion may read two buckets) form one *prefetch step*: they are issued one
    after the other and then waited for, so that no gather is issued between their waits.

    Attributes:
        bsyms: the bound symbols that are not placed yet, from the issue to the wait.
        ready: the position of the last shard or gradient.
        first, last: the positions of the first and the last consumer.
        step: the number of the prefetch step of a gather.
        delay: why a gather could not be issued when it was due.
    """

    bsyms: list[BoundSymbol]
    ready: int
    first: int | None
    last: int
    step: int = 0
    delay: str = ""

    def __post_init__(self) -> None:
        issue = effects(self.bsyms[0]).slot_issue
        assert issue is not None and issue.region is not None and issue.group is not None
        self.future, self.name, self.group = issue.future, issue.region.bucket.spec.name, issue.group
        self.nbytes, self.slot_bytes, self.is_gather = issue.nbytes, issue.region.nbytes, issue.gathers

    @property
    def holds_slot(self) -> bool:
        """Whether a reduction that is in flight still needs its slot: not once its all-reduce has been issued."""
        waits = effects(self.bsyms[0]).waits
        return waits is not None and waits.future == self.future


@dataclass
class _Sorter:
    trace: TraceCtx
    prefetch: int
    max_in_flight: int | None
    max_reductions: int

    def __post_init__(self) -> None:
        self.compute, found = operations(read_statements(self.trace))
        self.live = Analysis(self.compute)
        collectives = [self._collective(bsyms) for bsyms in found]
        self.reductions = [each for each in collectives if not each.is_gather]
        of_group: dict[ProcessGroupRef, list[int]] = defaultdict(list)
        for each in self.reductions:
            of_group[each.group].append(each.slot_bytes)
        self.limits = {group: ReductionLimits.of(sizes, self.max_reductions) for group, sizes in of_group.items()}
        self._let_reductions_read_parameters([each for each in collectives if each.is_gather])
        # The section of each position ends with compute that communicates, which still belongs to it.
        ends = [effects(bsym).communicates for bsym in self.compute]
        self.section = list(accumulate(ends[:-1], initial=0))
        gathers = sorted((g for g in collectives if g.is_gather and g.first is not None), key=_first_consumer)
        self.steps = [list(step) for _, step in groupby(gathers, key=_first_consumer)]
        for number, step in enumerate(self.steps):
            for gather in step:
                gather.step = number
        self.issue_points = issue_points([sum(g.nbytes for g in step) for step in self.steps], self.prefetch)

        self.out: list[BoundSymbol] = []
        self.next_step = 0  # to be waited for
        self.unissued = deque(gathers)
        self.gathering: deque[_Collective] = deque()  # issued, not waited for
        self.gathered: list[_Collective] = []  # issued, last consumer not yet in `out`
        self.reducing: list[_Collective] = []

    def _collective(self, bsyms: list[BoundSymbol]) -> _Collective:
        # A token of a wait, if any, is no longer needed: it kept fusion regions apart.
        args, outs, live = args_of(bsyms[0]), outs_of(bsyms[-1]), self.live
        placed = [*bsyms[:-1], without_token(bsyms[-1])]
        return _Collective(placed, live.defined(args), live.first_read(outs), live.last_use(outs))

    def _let_reductions_read_parameters(self, gathers: Sequence[_Collective]) -> None:
        """Let a reduction count as a consumer of gathers: a gradient may be a gathered parameter, or a view of one."""
        of_param = {param: gather for gather in gathers for param in outs_of(gather.bsyms[-1])}
        for reduction in self.reductions:
            for root in sorted(self.live.roots(args_of(reduction.bsyms[0])) & of_param.keys()):
                gather = of_param[root]
                if gather.first is None:
                    gather.first = max(reduction.ready, gather.ready + 1)
                reduction.ready = max(reduction.ready, gather.first)

    def run(self) -> list[BoundSymbol]:
        ready: dict[int, list[_Collective]] = defaultdict(list)
        waited: dict[int, list[_Collective]] = defaultdict(list)
        for reduction in self.reductions:
            ready[reduction.ready].append(reduction)
            waited[len(self.compute) - 1 if reduction.first is None else reduction.first].append(reduction)
        for position, bsym in enumerate(self.compute):
            if self.next_step < len(self.steps) and self.steps[self.next_step][0].first == position:
                self._wait_for_params(self.steps[self.next_step], position)
            for reduction in waited[position]:
                self._wait_for_grads(reduction, f"consumer: {short_form(bsym)}")
            self.out.append(bsym)
            for reduction in ready[position]:
                self._reduce(reduction, position)
        return self.out

    def _place(self, collective: _Collective, reason: str) -> None:
        """Place the next bound symbol of a collective."""
        self.out.append(collective.bsyms.pop(0).from_bsym(header=reason))

    def _wait_for_params(self, step: Sequence[_Collective], position: int) -> None:
        """Place the waits of the next step, due before compute ``position``, and the gathers to issue before them."""
        ahead = f", before the wait for {step[0].name}" if self.prefetch else ""
        prefetched = f"prefetch: {self.prefetch} ahead of its wait{ahead}"
        self._issue_gathers(position - 1, prefetched)
        for gather in step:
            while self.unissued and self.unissued[0].step == self.next_step and not self._is_full():
                self._issue_gather("first consumer: the next wait needs it")
            self._place(gather, f"first consumer: {short_form(self.compute[position])}")
            self.gathering.popleft()
        if self.max_in_flight is not None:
            self._issue_gathers(position - 1, prefetched)
        self.next_step += 1

    def _is_full(self) -> bool:
        """Return whether no further gather may be in flight. Gathers are waited for in the order of their issues."""
        return self.max_in_flight is not None and len(self.gathering) >= self.max_in_flight

    def _issue_gathers(self, position: int, reason: str) -> None:
        """Issue the gathers that are due after compute ``position``, before the next step is waited for."""
        self.gathered = [g for g in self.gathered if g.last > position]
        while self.unissued and self.issue_points[self.unissued[0].step] <= self.next_step:
            gather = self.unissued[0]
            early = gather.step > self.next_step
            if delay := self._delay(gather, position):
                gather.delay = delay
                return
            self._issue_gather(reason if early or not self.prefetch else "first consumer: the next wait needs it")

    def _delay(self, gather: _Collective, position: int) -> str:
        """Return why ``gather`` cannot be issued after compute ``position``; empty if it can."""
        section = self.section[_first_consumer(gather)]
        if section != self.section[min(position + 1, len(self.section) - 1)]:
            foreign = self.compute[self.section.index(section) - 1]
            return f"producer: not across {short_form(foreign)}, which communicates too"
        if gather.ready > position:
            return f"producer: its shards come from {short_form(self.compute[gather.ready])}"
        if self._is_full():
            first = self.gathering[0].name
            return f"in-flight limit: at most {self.max_in_flight}, so only after the wait for {first}"
        return ""

    def _issue_gather(self, reason: str) -> None:
        gather = self.unissued.popleft()
        self._place(gather, gather.delay or reason)
        self.gathering.append(gather)
        self.gathered.append(gather)

    def _reduce(self, reduction: _Collective, position: int) -> None:
        while before := [r for r in self.reducing if r.holds_slot and r.group is reduction.group]:
            if not self.limits[reduction.group].are_exceeded([r.slot_bytes for r in before], reduction.slot_bytes):
                break
            reason = f"in-flight limit: about {self.max_reductions} reductions, counted in bytes"
            if not self._issue_all_reduce(before[0], reason):
                self._wait_for_grads(before[0], reason)
        # Issue the next gather first: on a shared communicator the reduction would delay it. But a bucket that is still
        # read before the next step occupies the memory that an earlier gather would need.
        if self.prefetch and self.next_step < len(self.steps) and self._shares_group(reduction):
            until = _first_consumer(self.steps[self.next_step][0])
            if not any(position < g.last < until for g in self.gathered if g.step < self.next_step):
                due = f"prefetch: due, and would queue behind the reduction of {reduction.name}"
                self._issue_gathers(position, due)
        last = f"last gradient by {short_form(self.compute[reduction.ready])}" if reduction.ready >= 0 else "none"
        self._place(reduction, f"producer: {last}")
        for earlier in self.reducing:
            if reduction.nbytes * _SMALL >= earlier.nbytes:
                reason = f"producer: its reduce-scatter could finish before that of {reduction.name}"
                self._issue_all_reduce(earlier, reason)
        self.reducing.append(reduction)
        if self.max_reductions == 0:
            self._wait_for_grads(reduction, "in-flight limit: no reduction beside compute")

    def _shares_group(self, reduction: _Collective) -> bool:
        return bool(self.unissued) and self.unissued[0].group is reduction.group

    def _wait_for_grads(self, until: _Collective, reason: str) -> None:
        # Earlier reductions of its group have finished by then; those of other groups may still be in flight.
        for reduction in [r for r in self.reducing if r.group is until.group]:
            if until not in self.reducing:
                return
            self.reducing.remove(reduction)
            self._issue_all_reduce(reduction, reason)
            self._place(reduction, reason)

    def _issue_all_reduce(self, reduction: _Collective, reason: str) -> bool:
        """Place the all-reduce of a reduction's result across replicas, unless there is none or it has been issued."""
        is_due = len(reduction.bsyms) > 1
        if is_due:
            self._place(reduction, reason)
        return is_due


def _first_consumer(gather: _Collective) -> int:
    assert gather.first is not None
    return gather.first
