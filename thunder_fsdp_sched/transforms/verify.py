"""Prove the promises of this plugin on the trace that is about to run, and name the bound symbol that breaks one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NoReturn

from thunder.core.prims import PrimIDs
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.analysis import BEFORE_TRACE
from ..ir.inspection import (
    Aliases,
    args_of,
    communicates,
    has_backward,
    names,
    outs_of,
    return_of,
    statement,
    with_bound_symbols,
)
from ..ir.operands import GradWrite, Issue, Wait, bucket_of
from ..ir.slots import retained_by_forward
from ..ir.symbols import (
    GRAD_WRITERS,
    ISSUES,
    fsdp_accumulate_reduced,
    fsdp_all_gather,
    fsdp_all_reduce,
    fsdp_params_unchanged,
    fsdp_reduce_scatter,
    fsdp_release,
    fsdp_wait_grads,
    fsdp_wait_params,
    is_resident,
    residency_marks,
    window_of,
)
from ..runtime.bucket import Bucket
from ..runtime.memory import Slot
from .verify_host_copies import host_copy_faults
from .verify_secondary import secondary_faults

__all__ = ["VerificationError", "verify"]

_WAITED_BY = {
    fsdp_wait_params: (fsdp_all_gather,),
    fsdp_all_reduce: (fsdp_reduce_scatter,),
    fsdp_wait_grads: (fsdp_reduce_scatter, fsdp_all_reduce),
    fsdp_accumulate_reduced: (fsdp_reduce_scatter,),
}


class VerificationError(AssertionError):
    """A broken promise of a trace: a defect of this plugin or of a later pass, found before or during the first run."""


@dataclass
class _Occupancy:
    """A slot in use by a collective, from the position of its first write to that of its last use.

    Attributes:
        reads: for a gather, the position of the last use of each parameter, by index. The wait counts as a use.
        writes: for a reduction, the position where each gradient is written in place, by index. The others are written
            at ``issue``.
        freed: the position where its memory is freed, if it is.
    """

    bucket: Bucket
    slot: Slot
    begin: int
    last_use: int
    issue: int = -1
    reads: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    freed: int | None = None

    def replaces(self, old: _Occupancy) -> bool:
        """Return whether each gradient here replaces its own parameter in ``old``, after the parameter's last read."""
        spec = self.bucket.spec
        return (
            self.bucket is old.bucket.primary
            and (self.slot.arena, self.slot.offset) == (old.slot.arena, old.slot.offset)
            and spec.param_dtype == spec.reduce_dtype
            and len(old.reads) == len(spec.params)
            and old.last_use < self.issue
            and all(read < self.writes.get(index, self.issue) for index, read in old.reads.items())
        )


def verify(trace: TraceCtx, *, forward: TraceCtx | None = None, max_gathers_in_flight: int | None = None) -> TraceCtx:
    """Check a sorted trace with slots, and return it with the same bound symbols.

    Runs after ``mark_retained_by_forward`` or ``reuse_from_forward`` and before ``insert_agreement``. It always runs.
    It proves:

    * Every value is defined before it is read.
    * Every issue has exactly one wait, of its kind and bucket. Gradients of a bucket with replicas are reduced across
      them, and passed to the ``all_reduce_hook`` if there is one.
    * No collective writes a slot while an earlier value in overlapping memory, views included, is yet to be read. The
      first write of a gradient in place counts as the start of its reduction. Gradients of a bucket may replace its
      parameters, if each is written after the last read of its parameter. That includes kept buckets, of which backward
      reads what ``forward`` has saved; a guard comes before backward reads or writes their private slots.
    * A gradient that is written in place is written where the reduction of its bucket expects it, and nothing else
      reads it.
    * Gathers are issued in the order of their first consumers, and no more of them are in flight than may be.
    * Between a gather's issue and its first consumer, and between a reduction's last gradient and its issue, nothing
      communicates that is not ours.
    * The outputs of forward alias no slot, and the tensors that it saves for backward alias no shared slot.
    * A slot whose memory is freed (``release``) holds nothing that is yet to be read, waited for or reduced. The forward
      of a backward frees no kept bucket, and no bucket that it leaves for backward.
    * A gather of backward that expects its bucket to be resident is right: nothing writes its memory later in forward
      (if ``forward`` is given) or earlier in backward, and both gathers state the correct number of issues.
    * Only gathers of a forward with a backward, into private slots, take part in accumulation windows.
    * Every secondary shard is copied from the gather of its bucket, and backward gathers the bucket from these copies.
    * Every copy of an offloaded activation has exactly one wait, and until then nothing writes its source or reads its
      result. After the wait of a copy to host memory nothing reads the source. Only copies to the device read what is in
      host memory, and they return the shape, dtype and device of the value that forward copied.

    These lines break the third promise, because block 2 overwrites block 0 in ``slot_0`` before its last read::

        ft150 = fsdp_all_gather(bucket_blocks_2, slot_0, t_blocks_2_weight, again=False)  # 16,384 bytes float32
        t110 = torch.nn.functional.linear(x, t109, None)  # t109 is in slot_0

    Args:
        forward: for a backward trace, its forward trace after ``mark_retained_by_forward``.
        max_gathers_in_flight: how many gathers may be issued and not waited for; ``None`` for no limit.

    Raises:
        VerificationError: names the bound symbol and the bucket.
    """
    started = time.perf_counter()
    _Verifier(trace, forward, max_gathers_in_flight).run()
    return with_bound_symbols(trace, trace.bound_symbols, "fsdp: verified", started)


class _Verifier:
    def __init__(self, trace: TraceCtx, forward: TraceCtx | None, max_gathers_in_flight: int | None) -> None:
        self.trace = trace
        self.forward = forward
        self.max_gathers_in_flight = max_gathers_in_flight
        self.defined: set[str] = set(names(tree_iter((trace.args, trace.kwargs))))
        self.open: dict[str, BoundSymbol] = {}
        self.closed: dict[str, BoundSymbol] = {}
        self.occupied: list[_Occupancy] = []
        self.of_param: dict[str, _Occupancy] = {}
        self.index_of: dict[str, int] = {}  # a parameter's index in its bucket
        self.reduction_of = {a: b for b in trace.bound_symbols if b.sym is fsdp_reduce_scatter for a in args_of(b)}
        self.in_place: set[str] = set()
        self.filling: dict[str, _Occupancy] = {}  # slots of reductions yet to be issued, by their futures
        self.aliases = Aliases()
        self.guarded: set[Bucket] = set()

    def fail(self, position: int, what: str) -> NoReturn:
        raise VerificationError(f"bound symbol {position}: {what}\n    {statement(self.trace.bound_symbols[position])}")

    def run(self) -> None:
        if self.forward is not None:
            self._adopt_kept(self.forward)
        for position, bsym in enumerate(self.trace.bound_symbols):
            if bsym.sym.id in (PrimIDs.UNPACK_TRIVIAL, PrimIDs.DEL):
                self.defined.update(outs_of(bsym))
                continue
            for arg in args_of(bsym):
                if arg not in self.defined:
                    self.fail(position, f"reads {arg!r}, which nothing before it defines")
            self._use_slots(position, bsym)
            if bsym.sym in _WAITED_BY:
                self._wait(position, bsym)
            if bsym.sym is fsdp_release:
                for slot in bsym.args:
                    self._free(position, slot)
            if bsym.sym is fsdp_params_unchanged:
                self._guard(position, bucket_of(bsym))
            if bsym.sym.name in GRAD_WRITERS:
                self._write_grad(position, bsym)
            if bsym.sym.name in ISSUES:
                self._issue(position, bsym)
            elif bsym.sym not in _WAITED_BY:
                self.aliases.add(bsym)
            self.defined.update(outs_of(bsym))
        for issue in self.open.values():
            raise VerificationError(f"{issue.sym.name} of bucket {bucket_of(issue).spec.name!r} is never waited for")
        self._check_memory()
        self._check_order()
        self._check_barriers()
        self._check_return()
        self._check_retained()
        for faults in (host_copy_faults, secondary_faults):
            for position, what in faults(self.trace, self.forward):
                self.fail(position, what)

    def _adopt_kept(self, forward: TraceCtx) -> None:
        """Count the buckets in private slots as gathered before the trace, and follow what forward has saved of them."""
        futures = {}
        for bsym in forward.bound_symbols:
            if bsym.sym is fsdp_all_gather and Issue(bsym).slot is bucket_of(bsym).private_slot:
                futures[bsym.output.name] = Issue(bsym).slot
            elif bsym.sym is fsdp_wait_params and Wait(bsym).future.name in futures:
                kept = self._occupy(bucket_of(bsym), futures[Wait(bsym).future.name], BEFORE_TRACE)
                kept.reads = dict.fromkeys(range(len(bsym.output)), BEFORE_TRACE)
                for index, param in enumerate(bsym.output):
                    self.of_param[param.name], self.index_of[param.name] = kept, index
            elif bsym.sym.name not in ISSUES and bsym.sym not in _WAITED_BY:
                self.aliases.add(bsym)

    def _guard(self, position: int, bucket: Bucket) -> None:
        if any(o.bucket is bucket and o.begin > BEFORE_TRACE and o.slot is bucket.private_slot for o in self.occupied):
            self.fail(position, f"may gather bucket {bucket.spec.name!r} again where its gradients are")
        self.guarded.add(bucket)

    def _free(self, position: int, slot: Slot) -> None:
        for occupied in self.occupied:
            if occupied.slot.arena is slot.arena and occupied.freed is None:
                occupied.freed = position
                if occupied in self.filling.values():
                    self.fail(position, f"frees {occupied.slot}, whose gradients are yet to be reduced")
                if occupied.slot is occupied.bucket.private_slot and has_backward(self.trace):
                    self.fail(position, f"frees {occupied.slot}, which backward reads")
        for issue in self.open.values():
            if issue.sym is not fsdp_all_reduce and Issue(issue).slot.arena is slot.arena:
                self.fail(
                    position, f"frees {Issue(issue).slot} before the wait for bucket {bucket_of(issue).spec.name!r}"
                )

    def _issue(self, position: int, bsym: BoundSymbol) -> None:
        bucket, slot = bucket_of(bsym), bsym.args[1]
        self.open[bsym.output.name] = bsym
        if bsym.sym is fsdp_all_gather and self.max_gathers_in_flight is not None:
            in_flight = [bucket_of(b).spec.name for b in self.open.values() if b.sym is fsdp_all_gather]
            if len(in_flight) > self.max_gathers_in_flight:
                self.fail(
                    position,
                    f"gathers bucket {in_flight[-1]!r} while {in_flight[:-1]} are in flight, but "
                    f"max_gathers_in_flight={self.max_gathers_in_flight}",
                )
        if bsym.sym is fsdp_all_reduce:  # operates on the shard, not on a slot
            return
        if not isinstance(slot, Slot):
            self.fail(position, f"bucket {bucket.spec.name!r} has no slot")
        future = bsym.output.name
        begin = BEFORE_TRACE if is_resident(bsym) else position
        occupied = self.filling.pop(future) if future in self.filling else self._occupy(bucket, slot, begin)
        occupied.last_use = occupied.issue = position
        self.of_param[future] = occupied

    def _occupy(self, bucket: Bucket, slot: Slot, position: int) -> _Occupancy:
        is_reduction = position >= 0 and self.trace.bound_symbols[position].sym is not fsdp_all_gather
        if is_reduction and slot is bucket.private_slot and not (self.forward and bucket in self.guarded):
            self.fail(
                position, f"writes gradients into {slot} without a guard of bucket {bucket.spec.name!r} before it"
            )
        self.occupied.append(_Occupancy(bucket, slot, position, position))
        return self.occupied[-1]

    def _write_grad(self, position: int, bsym: BoundSymbol) -> None:
        write = GradWrite(bsym)
        bucket, slot, index = write.bucket, write.slot, write.index
        grad = bsym.output.name
        param = bucket.spec.params[index].name
        reduction = self.reduction_of.get(grad)
        if reduction is None:
            self.fail(
                position, f"writes the gradient of {param!r} for bucket {bucket.spec.name!r}, which never reduces it"
            )
        if not isinstance(slot, Slot):
            self.fail(position, f"bucket {bucket.spec.name!r} has no slot")
        expected, its_slot, *grads = reduction.args
        places = [i for i, g in enumerate(grads) if g is not None and g.name == grad]
        if (expected, its_slot, places) != (bucket, slot, [index]):
            self.fail(
                position,
                f"writes the gradient of {param!r} at index {index} of bucket {bucket.spec.name!r} in {slot}, but bucket "
                f"{expected.spec.name!r} reduces it in {its_slot}, index {', '.join(map(str, places))}",
            )
        self.in_place.add(grad)
        if reduction.output.name not in self.filling:
            self.filling[reduction.output.name] = self._occupy(bucket, slot, position)
        self.filling[reduction.output.name].writes[index] = position

    def _wait(self, position: int, bsym: BoundSymbol) -> None:
        bucket, future = bucket_of(bsym), Wait(bsym).future.name
        if future in self.closed:
            self.fail(position, f"waits a second time for {future!r} of bucket {bucket.spec.name!r}")
        issue = self.open.pop(future, None)
        if issue is None or issue.sym not in _WAITED_BY[bsym.sym] or bucket_of(issue) is not bucket:
            self.fail(position, f"waits for {future!r}, which bucket {bucket.spec.name!r} did not issue")
        self.closed[future] = bsym
        if bsym.sym is fsdp_wait_params:
            self.of_param.update(dict.fromkeys(outs_of(bsym), self.of_param[future]))
            self.of_param[future].reads = dict.fromkeys(range(len(bsym.output)), position)
            self.index_of.update({param.name: index for index, param in enumerate(bsym.output)})
        elif bsym.sym is fsdp_wait_grads and (issue.sym is fsdp_all_reduce) is (bucket.ranks.replicas is None):
            self.fail(position, f"bucket {bucket.spec.name!r} is not reduced across its replicas, or has none")
        elif bsym.sym is fsdp_wait_grads and bsym.kwargs.get("hook") != bucket.hook_name:
            self.fail(position, f"calls all_reduce_hook {bsym.kwargs.get('hook')}, expected {bucket.hook_name}")

    def _use_slots(self, position: int, bsym: BoundSymbol) -> None:
        for arg in args_of(bsym):
            for root in self.aliases.roots(arg):
                if root in self.of_param:
                    used = self.of_param[root]
                    if used.begin == used.issue == BEFORE_TRACE and used.bucket not in self.guarded:
                        self.fail(
                            position,
                            f"reads {arg!r} in {used.slot} before the guard of bucket {used.bucket.spec.name!r}",
                        )
                    used.last_use = position
                    if root in self.index_of:
                        self.of_param[root].reads[self.index_of[root]] = position
                if root in self.in_place and bsym is not self.reduction_of[root]:
                    bucket = bucket_of(self.reduction_of[root])
                    self.fail(
                        position,
                        f"reads {arg!r}, a gradient in the slot of bucket {bucket.spec.name!r} for its reduction",
                    )

    def _check_memory(self) -> None:
        live: list[_Occupancy] = []
        for occupied in self.occupied:
            if occupied.freed is not None and occupied.last_use > occupied.freed:
                self.fail(
                    occupied.freed,
                    f"frees {occupied.slot} of bucket {occupied.bucket.spec.name!r}, which is read until bound symbol "
                    f"{occupied.last_use}",
                )
        for new in sorted(self.occupied, key=lambda o: o.begin):
            live = [old for old in live if old.last_use >= new.begin]
            for old in live:
                if old.slot.overlaps(new.slot) and not new.replaces(old):
                    self.fail(
                        new.begin,
                        f"writes {new.slot} for bucket {new.bucket.spec.name!r} while bucket {old.bucket.spec.name!r} "
                        f"in {old.slot} is read until bound symbol {old.last_use}",
                    )
            live.append(new)

    def _first_consumers(self) -> list[tuple[int, int, Bucket]]:
        """Return (position of the issue, position of the first consumer, bucket) of each gather, in trace order."""
        issues: dict[str, list] = {}
        of_param: dict[str, str] = {}
        for position, bsym in enumerate(self.trace.bound_symbols):
            if bsym.sym is fsdp_all_gather:
                issues[bsym.output.name] = [position, len(self.trace.bound_symbols), bucket_of(bsym)]
            elif bsym.sym is fsdp_wait_params:
                of_param.update(dict.fromkeys(outs_of(bsym), Wait(bsym).future.name))
            elif bsym.sym.id is not PrimIDs.DEL:
                for arg in args_of(bsym):
                    if arg in of_param:
                        entry = issues[of_param[arg]]
                        entry[1] = min(entry[1], position)
        return [tuple(entry) for entry in issues.values()]

    def _check_order(self) -> None:
        before = -1
        for issue, consumer, bucket in self._first_consumers():
            if consumer < before:
                self.fail(issue, f"gathers bucket {bucket.spec.name!r} after a bucket whose first consumer is later")
            before = consumer

    def _check_barriers(self) -> None:
        foreign = [i for i, b in enumerate(self.trace.bound_symbols) if communicates(b)]
        if not foreign:
            return
        produced = {o: i for i, b in enumerate(self.trace.bound_symbols) for o in outs_of(b)}
        spans = [(issue, consumer, bucket) for issue, consumer, bucket in self._first_consumers()]
        for position, bsym in enumerate(self.trace.bound_symbols):
            if bsym.sym is fsdp_reduce_scatter:
                last_grad = max((produced.get(a, -1) for a in args_of(bsym)), default=-1)
                spans.append((last_grad, position, bucket_of(bsym)))
        for begin, end, bucket in spans:
            for position in foreign:
                if begin < position < end:
                    self.fail(
                        position, f"communicates, but a collective of bucket {bucket.spec.name!r} was moved across it"
                    )

    def _check_return(self) -> None:
        last = return_of(self.trace)
        position = len(self.trace.bound_symbols) - 1
        if has_backward(self.trace):
            returned, saved = last.args[0]["output"], last.args[1:]
        else:  # gradients, the outputs of backward, are fresh memory
            returned, saved = last.args, ()
        for name in names(tree_iter(returned)):
            for root in self.aliases.roots(name):
                if root in self.of_param:
                    self.fail(position, f"returns {name!r}, which is stored in {self.of_param[root].slot}")
        for name in names(tree_iter(saved)):
            for root in self.aliases.roots(name):
                occupied = self.of_param.get(root)
                if occupied is not None and occupied.slot is not occupied.bucket.private_slot:
                    self.fail(
                        position,
                        f"saves {name!r} for backward, which is stored in {occupied.slot} of bucket "
                        f"{occupied.bucket.spec.name!r}; other buckets reuse that slot",
                    )

    def _check_retained(self) -> None:
        """Check the marks of gathers: the number of issues that they state, and that none overwrites the bucket."""
        retained = retained_by_forward(self.forward) if self.forward is not None else None
        kinds = (fsdp_all_gather, fsdp_reduce_scatter)
        issues = [(i, b) for i, b in enumerate(self.trace.bound_symbols) if b.sym in kinds]
        for number, (position, bsym) in enumerate(issues):
            bucket, slot = bucket_of(bsym), Issue(bsym).slot
            if window_of(bsym) is not None and not (slot is bucket.private_slot and has_backward(self.trace)):
                self.fail(position, f"reuses {slot}, which does not keep bucket {bucket.spec.name!r} until backward")
            for mark, said in residency_marks(bsym).items():
                others = issues[:number] if mark == "preceded_by" else issues[number + 1 :]
                slots = [s for _, b in others if (s := Issue(b).slot).arena is slot.arena]
                if said != len(slots):
                    self.fail(
                        position,
                        f"states {mark}={said} for bucket {bucket.spec.name!r}, but the trace has {len(slots)}",
                    )
                if mark == "followed_by" and self.of_param[bsym.output.name].freed is not None:
                    self.fail(position, f"leaves bucket {bucket.spec.name!r} in {slot}, which is freed")
                if mark == "followed_by" and any(map(slot.overlaps, slots)):
                    self.fail(
                        position, f"leaves bucket {bucket.spec.name!r} in {slot}, which a later collective writes"
                    )
                if mark == "preceded_by" and retained is not None and retained.pop(bucket.primary, None) is not slot:
                    self.fail(
                        position, f"expects bucket {bucket.spec.name!r} in {slot}, where forward did not leave it"
                    )
