"""The start of a trace whose program may differ from those of other ranks; see [Note: Ranks that differ] in ``programs``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ...capture.while_compiling import CollectsLess
from ...compiled_traces import CompiledTraces
from ...ir.analysis import NO_PENDING_GRADS
from ...ir.effects import effects
from ...ir.inspection import AGREEMENT, with_bound_symbols
from ...ir.registry import register
from ...ir.statements import read_statements
from ...passes import Context
from ...proof.audit import Auditor
from ...ranks.compare_programs import Computation
from ...ranks.control import hash64
from ...ranks.joint_control import AgreedProgram, joint
from ...ranks.rounds import TOKEN, RoundAction
from ...runtime.accumulation import Accumulation
from ...runtime.autograd import requested
from ...runtime.bucket import Bucket
from ...runtime.ops import gather_again
from ...runtime.trace_start import GATHER_BITS, KEPT_BITS, SHARED, TraceStart
from ...runtime.unused_outputs import agree_on_unused
from ...sharding.sharded_module import ShardedModule, ShardingTransform
from ...transforms.insert_agreement import describe, fsdp_agree, fsdp_audit_agreed
from ..no_sync import reduce_sums
from .build import build
from .merging import BucketKey
from .programs import (
    Left,
    Outcome,
    Program,
    RankState,
    Report,
    differences_of,
    find_outcome,
    program_of,
)
from .symbols import bucket_with_key, key_of


class AccumulationOfAll(Accumulation):
    """The sums of a bucket's gradients on a rank that may differ from others."""

    expected: frozenset[int] = frozenset()
    """The parameters that have a gradient in the running backward or the window of some rank; empty if all ranks run
    the same program. The round at the start of each backward sets it."""

    def from_others(self) -> frozenset[int]:
        return self.expected


_READY, _AUDITED = 1, 2
"""The bits of a rank that has the merged trace for the latest registry, and of one that does not audit that trace. They
are free, because lost buckets are in ``RankState``."""


class Merged(NamedTuple):
    """A merged trace and its program.

    Attributes:
        version: the version of the registry.
        auditing: the auditor, until it has seen a complete run.
    """

    version: int
    run: Callable[..., Any]
    auditing: set[object]


class DifferingStart(TraceStart):
    """The start of a trace whose program may differ from those of other ranks.

    Args:
        kind: the facts that must be the same on all ranks: forward or backward, ``no_sync``, whether with gradients.
        text: a description of the trace.
        program: the communication of the trace.
        groups: the process groups that it uses.
        sharded: the module.
        make: a function that builds the merged trace from the registry's order and sources.
    """

    advice = ""

    def __init__(
        self,
        sharded: ShardedModule,
        name: str,
        kind: tuple[Any, ...],
        text: str,
        program: Program,
        groups: Sequence[tuple[str, tuple[int, ...]]],
        make: Callable[[DifferingStart], tuple[Callable[..., Any], set[object]]],
    ) -> None:
        lines = [f"{'wait for ' * step.waits}{step.key}" for step in program.steps]
        computation = Computation(trace_lines=lines)
        super().__init__(
            joint(sharded.control), name, AgreedProgram(0, True, False, True), text, computation, len(program.issues)
        )
        self.kind, self.program, self.groups = kind, program, groups
        self.half, self.no_sync, _ = kind
        self._module, self.buckets = sharded.module, sharded.buckets
        self.differences = differences_of(sharded.control)
        self.registry = self.differences.registries[kind]
        self._inputs = program.digest
        self._state, self._state_hash = RankState(), 0
        self._make = make
        self._merged: Merged | None = None
        self.waiting: list[Callable[[], object]] = []
        self._outcome = Outcome(False, True)
        self._remembered = RoundAction(self.describe())

    @property
    def remembered(self) -> RoundAction:
        return self._remembered

    def describe(self) -> str:
        steps, last = self.differences.steps, self.differences.last_step
        return super().describe() + (f", after {steps} steps of optimizers, of {last} in the last one" if steps else "")

    def _missing(self) -> tuple[int, bool]:
        missing, waits = super()._missing()
        missing &= ~KEPT_BITS
        if self._merged is None or self._merged.version != self.registry.version:
            missing |= _READY | _AUDITED
        elif self._merged.auditing:
            missing |= _AUDITED
        return missing, waits

    def _find_unused(self) -> int:
        """Find the state of this rank and return a hash; 0 if it is empty."""
        super()._find_unused()
        lost = tuple(sorted(key_of(bucket) for kept in self._lost if (bucket := kept.bucket()) is not None))
        unused: list[tuple[str, tuple[int, ...]]] = []
        left: list[tuple[str, Left]] = []
        if self.half == "backward" and not self.no_sync:
            unused = sorted((b.spec.name, tuple(sorted(indices))) for b, indices in self._unused.items() if indices)
            for bucket in self.buckets:
                if (a := bucket.accumulation).params and bucket.ends_window():
                    of_bucket = Left(tuple(sorted(a.params)), tuple(sorted(a.used)), a.unsharded is not None)
                    left.append((bucket.spec.name, of_bucket))
        state = RankState(tuple(unused), tuple(left), lost, self.registry.has_merged and self._is_partial())
        if state != self._state:
            self._state, self._state_hash = state, hash64(state) if any(state) else 0
        return self._state_hash

    def _is_partial(self) -> bool:
        return self.half == "backward" and any(len(requested(b.params)) < len(b.params) for b in self.buckets)

    def _same(self) -> int:
        state = self._surplus_issues, self._dropped, self._freed, self.differences.history, self._module.training
        if state != self._hashed[0]:
            self._hashed = state, hash64("trace", self.control.number, self.kind, state)
        return self._hashed[1]

    def apply_agreement(self, offered_bits: int, *, alike: bool) -> None:
        """Find the outcome, apply it, and build the merged trace if some rank lacks its own."""
        version = self.registry.version
        self._outcome = outcome = self._find_outcome()
        if outcome.fault:
            self.cancel()
            raise self.control.disagreement(f"{self.text}, in which the ranks differ: {outcome.fault}")
        reusable = outcome.is_alike and not outcome.merges
        super().apply_agreement(
            (offered_bits if reusable else offered_bits & ~GATHER_BITS) | SHARED | KEPT_BITS, alike=not outcome.merges
        )
        if outcome.merges:
            self.cancel()
        if outcome.lost:
            lost, bases = {kept.bucket() for kept in self._lost}, {bucket.spec.name: bucket for bucket in self.buckets}
            for bucket in (bucket_with_key(bases[key[0]], key) for key in outcome.lost):
                gather_again(bucket, bucket.private_slot if bucket in lost else None)
        if self.half == "backward":
            for bucket in self.buckets:
                assert isinstance(bucket.accumulation, AccumulationOfAll)
                bucket.accumulation.expected = outcome.used[bucket.spec.name] if outcome.merges else frozenset()
        if outcome.merges:
            is_ready = bool(offered_bits & _READY) and version == self.registry.version
            self._ends_with_audit = not (is_ready and offered_bits & _AUDITED)
            self._begin_merged(is_ready=is_ready)

    def _begin_merged(self, *, is_ready: bool) -> None:
        """Build the merged trace unless all ranks have theirs, and count its collectives."""
        self.waiting.clear()  # the waits of a failed run
        if self.half == "forward":  # it does not fill the slots in which this rank's own backward may expect buckets
            for arena in {bucket.arena for bucket in self.buckets}:
                arena.contents.clear()
        if not is_ready:
            with self.control.all_or_none("whether each rank can take part in the collectives of the others"):
                if self._merged is None or self._merged.version != self.registry.version:
                    self._merged = Merged(self.registry.version, *self._make(self))
        left = sum(whole + (b.ranks.replicas is not None) for b, whole in self._left_buckets())
        self._begun = 2 * (len(self._outcome.active) + left)
        self.control.issue_counts.expected += self._begun

    def _find_outcome(self) -> Outcome:
        """Return the outcome for the tokens of all ranks; for a new combination, exchange reports, as all ranks do."""
        tokens = self.control.channel.tokens
        unpacked = ((token, *TOKEN.unpack(token)) for token in set(tokens))
        told = {token: (digest, state) for token, _, digest, _, _, state in unpacked}
        key: Any = next(iter(told.values()))
        if len(set(told.values())) > 1:
            key = hash64([told[token] for token in tokens])
        if key in self.registry.outcomes:
            return self.registry.outcomes[key]
        self.registry.forget_if_full()
        digests, states = zip(*map(told.__getitem__, tokens), strict=True)
        own = list(zip(self.control.group.global_ranks, digests, strict=True))
        reports: dict[int, Any] = {rank: self.registry.reports.get((rank, digest)) for rank, digest in own}
        if not self.registry.has_merged or any(states) or None in reports.values():
            reports = self._exchange(self._inputs in digests[: self.control.group.rank])
            self.registry.add({rank: theirs.program for rank, theirs in reports.items() if theirs.program is not None})
            for rank, digest in own:
                self.registry.reports[rank, digest] = reports[rank]._replace(program=None, state=RankState())
        programs = {rank: self.registry.programs[digest] for rank, digest in zip(reports, digests, strict=True)}
        outcome = find_outcome(programs, reports, self.buckets)
        self.registry.has_merged |= outcome.merges
        if not outcome.fault:
            self.registry.outcomes[key] = outcome
        return outcome

    def _exchange(self, is_sent: bool) -> dict[int, Report]:
        """Return the reports of all ranks, by global rank; ``is_sent`` says whether another rank sends this program."""
        program = None if is_sent or self._inputs in self.registry.programs else self.program
        ranks_of = {b.spec.name: tuple(b.ranks.all_ranks) for b in self.buckets if not b.is_on_all_ranks}
        state = self._state if self.registry.has_merged else self._state._replace(is_partial=self._is_partial())
        report = Report(program, tuple(self.groups), ranks_of, state)
        return self.control.gather_settled(f"what the {self.text} of a rank sends", report)

    def _agree_on_unused(self, alike: bool) -> None:
        outcome, unused = self._outcome, self._unused
        if outcome.merges:
            unused = {b: frozenset(range(len(b.params))) for b in self.buckets}
        agree_on_unused({b: indices - outcome.used[b.spec.name] for b, indices in unused.items()})
        self._unused = {}  # traces must not keep buckets alive

    def settled_or_merged(self, *arguments: Any) -> Callable[..., Any] | None:
        """Settle the round; return the program of the merged trace, or ``None`` if the rank's own trace runs."""
        self.settle()
        if not self._outcome.merges:
            return None
        assert self._merged is not None
        return self._merged.run

    def serves(self, kind: str, bucket: Bucket, occurrence: int) -> bool:
        """Return whether another rank runs this collective in this round, so that this rank takes part."""
        return (kind, key_of(bucket), occurrence) in self._outcome.active

    def serve_left(self) -> None:
        """Reduce the unreduced gradients of any rank in buckets that no program of this round reduces."""
        for bucket, whole in self._left_buckets():
            reduce_sums(bucket, scatters=whole)

    def _left_buckets(self) -> list[tuple[Bucket, bool]]:
        left = self._outcome.left
        return [(bucket, left[bucket.spec.name]) for bucket in self.buckets if bucket.spec.name in left]


def with_merged(traces: CompiledTraces) -> CompiledTraces:
    """Return these traces, replaced by merged ones where those exist; unchanged if they have been freed."""
    merged: dict[str, TraceCtx] = traces.attached.get("merged", {})
    return replace(traces, **merged) if merged and hasattr(traces, "forward") else traces


def start_of(transform: ShardingTransform, context: Context, trace: TraceCtx, half: str) -> DifferingStart:
    """Return the start of a scheduled trace."""
    program, groups = program_of(read_statements(trace))
    traces, sharded = context.traces, transform.sharded
    kind = half, traces.no_sync, context.trains
    maker = Maker(transform, context, trace)
    text = f"{half} for {traces.call}" + " that needs no gradients" * (not context.trains)
    return DifferingStart(sharded, f"{half}_{traces.number}", kind, text, program, groups, maker)


class Maker:
    """A builder of the merged traces that replace a rank's own trace.

    Args:
        context: the context of that trace's compilation; it is copied.
    """

    def __init__(self, transform: Any, context: Context, trace: TraceCtx) -> None:
        self._transform, self._trace = transform, trace
        self._context = replace(context, computation=None, inputs=None)

    def __call__(self, start: DifferingStart) -> tuple[Callable[..., Any], set[object]]:
        collects_less = CollectsLess()
        collects_less.begin()
        try:
            return self._make(start)
        finally:
            collects_less.end()

    def _make(self, start: DifferingStart) -> tuple[Callable[..., Any], set[object]]:
        context, transform, order = self._context, self._transform, start.registry.order
        bases = {bucket.spec.name: bucket for bucket in start.buckets}
        keys: dict[BucketKey, None] = dict.fromkeys(key_of(bucket) for bucket in start.buckets)
        keys.update((key[1], None) for key in order if key[1][0] in bases)
        merged = build(
            self._trace,
            order=order,
            start=start,
            buckets={key: bucket_with_key(bases[key[0]], key) for key in keys},
            sources=start.registry.sources,
            context=context,
            half=start.half,
        )
        traces, options = context.traces, context.options
        traces.attached.setdefault("merged", {})[start.half] = merged
        if options.max_memory is not None and traces.forward is not None:
            pending = NO_PENDING_GRADS.union(*(one.pending_grads for one in transform.compiled if one.no_sync))
            transform._planner.check_memory(
                with_merged(traces),
                limit=options.max_memory,
                pending_grads=NO_PENDING_GRADS if start.no_sync else pending,
                compiled=[one for one in transform.compiled if one is not traces],
            )
        program, auditing = merged.python_callable(), set[object]()
        if options.debug.audit:
            Auditor(
                program,
                merged,
                forward=context.forward,
                pre_shard_storage=transform.sharded.pre_shard_storage,
                control=start.control,
                start=start,
                pending=auditing,
            )
        return program, auditing


def insert_choice(trace: TraceCtx, *, start: DifferingStart, audit: bool = True) -> TraceCtx:
    """Insert ``fsdp_agree`` and ``fsdp_agreed_or_merged`` after the arguments.

    Runs after ``verify`` and before ``end_backward``, on both traces, with ``ranks_may_differ`` and several ranks. After::

        fsdp_agree(forward_0)
        if (merged := fsdp_agreed_or_merged(forward_0)) is not None: return merged(x, t_blocks_0_weight)

    If all ranks run the same program, the rest of the trace runs. Otherwise the merged trace runs, with the same
    arguments. The round is settled before the first collective on every backend, because it decides which that is.

    With ``audit``, the trace ends with ``fsdp_audit_agreed(forward_0)``, before the statement of ``end_backward``.
    """
    bsyms = list(trace.bound_symbols)
    head = next(at for at, bsym in enumerate(bsyms) if bsym.sym.id not in (PrimIDs.UNPACK_TRIVIAL, PrimIDs.COMMENT))
    arguments = [bsym.output for bsym in bsyms[:head] if bsym.sym.id is PrimIDs.UNPACK_TRIVIAL]
    assert [proxy.name for proxy in arguments] == [name for name, _ in trace.siginfo().args]
    describe(start, list(map(effects, bsyms)))
    if audit:
        bsyms.insert(len(bsyms) - 1, fsdp_audit_agreed.bind(start, output=None))
    bsyms[head:head] = [
        fsdp_agree.bind(start, output=None),
        fsdp_agreed_or_merged.bind(start, *arguments, output=None),
    ]
    return with_bound_symbols(trace, bsyms, "fsdp: choose between the trace and a merged one")


def _print(bsym: BoundSymbol, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    start, *arguments = bsym.args
    given = ", ".join(proxy.name for proxy in arguments)
    return f"if (merged := {bsym.sym.name}({start})) is not None: return merged({given})"


fsdp_agreed_or_merged = register(
    "fsdp_agreed_or_merged",
    DifferingStart.settled_or_merged,
    printer=_print,
    kinds=[AGREEMENT],
)
