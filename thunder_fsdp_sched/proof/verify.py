"""Prove the promises of this plugin on the trace that is about to run, and name the bound symbol that breaks one."""

from __future__ import annotations

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.inspection import with_bound_symbols
from .machine import Machine
from .same_operands import check_operands, returned_by


def verify(
    trace: TraceCtx,
    *,
    forward: TraceCtx | None = None,
    original: TraceCtx | None = None,
    max_gathers_in_flight: int | None = None,
    machine: type[Machine] = Machine,
) -> TraceCtx:
    """Check a sorted trace with slots, and return it with the same bound symbols.

    Runs after ``reuse_from_forward`` and before ``insert_agreement``. It always runs.
    It proves:

    * Every value is defined once, before it is read. No bound symbol stands in the trace twice.
    * Every issue has exactly one wait, of its kind and bucket, and nothing else reads its future before. Gradients of a
      bucket with replicas are reduced across them, and passed to the ``all_reduce_hook`` if there is one.
    * Whoever reads a value in a slot, or a view of it, finds there what was gathered or written for it. Nothing writes a
      slot that a collective in flight uses, or that the writer itself reads. Gradients of a bucket may replace its
      parameters one by one.
    * The same holds for kept buckets, of which backward reads what ``forward`` has saved. A guard comes before backward
      reads or writes their private slots, and nothing writes the private slot of another bucket.
    * A gradient that is written in place is written where the reduction of its bucket expects it, and nothing else
      reads it.
    * Gathers are issued in the order of their first consumers, and no more of them are in flight than may be.
    * Between a gather's issue and its first consumer, and between a reduction's last gradient and its issue, nothing
      communicates that is not ours.
    * The outputs of forward alias no slot, and the tensors that it saves for backward alias no shared slot.
    * Memory is freed (``release``) after the last read and wait. The forward of a backward frees no kept bucket, and no
      bucket that it leaves for backward.
    * A gather of backward that expects its bucket to be resident is right: forward has left the bucket in this slot (if
      ``forward`` is given), and nothing overwrites it before that gather.
    * Only gathers of a forward with a backward, into private slots, take part in accumulation windows.
    * Collectives and waits have the operands and results of the ``original`` trace: see [Note: Whose value it is] in
      ``same_values``.
    * Every secondary shard is copied from the gather of its bucket, and backward gathers the bucket from these copies.

    For example, a matmul with a weight in ``slot_0`` is refused if the trace gathers another bucket into ``slot_0`` before.
    See [Note: The abstract machine] in ``machine``.

    Args:
        forward: for a backward trace, its forward trace with slots.
        original: the trace as Thunder has split it; ``None`` if there is none to compare with.
        max_gathers_in_flight: how many gathers may be issued and not waited for; ``None`` for no limit.
        machine: the rules.

    Raises:
        VerificationError: names the bound symbol and the bucket.
    """
    proof = machine(max_gathers_in_flight)
    if forward is not None:
        proof.run(forward)
    proof.run(trace)
    if original is not None:
        check_operands(original, trace)
    return with_bound_symbols(trace, trace.bound_symbols, "fsdp: verified")


def is_unchanged(verified: TraceCtx, final: TraceCtx) -> bool:
    """Return whether two traces have the same bound symbols; Thunder unwraps what a forward without backward returns."""
    same = len(verified.bound_symbols) == len(final.bound_symbols)
    pairs = zip(verified.bound_symbols, final.bound_symbols, strict=False)
    return same and all(old is new or _return_the_same(old, new) for old, new in pairs)


def _return_the_same(old: BoundSymbol, new: BoundSymbol) -> bool:
    return old.sym.id is new.sym.id is PrimIDs.RETURN and returned_by(old) == returned_by(new)
