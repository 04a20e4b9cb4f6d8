"""Prove the promises of this plugin on the trace that is about to run, and name the bound symbol that breaks one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from thunder.core.prims import PrimIDs
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.effects import is_declared
from ..ir.inspection import UNPACKING, args_of, is_backward_trace, names, outs_of, statement, with_bound_symbols
from ..ir.registry import handles_of
from .audit import without_audit
from .machine import Machine, VerificationError


def verify(trace: TraceCtx, *, forward: TraceCtx | None = None, max_gathers_in_flight: int | None = None) -> TraceCtx:
    """Check a sorted trace with slots, and return it with the same bound symbols.

    Runs after ``mark_retained_by_forward`` or ``reuse_from_forward`` and before ``insert_agreement``. It always runs.
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
      ``forward`` is given), nothing overwrites it before that gather, and both gathers state the correct number of issues.
    * Only gathers of a forward with a backward, into private slots, take part in accumulation windows.
    * Every secondary shard is copied from the gather of its bucket, and backward gathers the bucket from these copies.
    * Until the wait for a copy of an activation nothing writes its source. After the wait of a copy to host memory nothing
      reads the source. Only copies to the device read what is in host memory, and they return the shape, dtype and
      device of the value that forward copied.

    For example, a matmul with a weight in ``slot_0`` is refused if the trace gathers another bucket into ``slot_0`` before.
    See [Note: The abstract machine] in ``machine``.

    Args:
        forward: for a backward trace, its forward trace after ``mark_retained_by_forward``.
        max_gathers_in_flight: how many gathers may be issued and not waited for; ``None`` for no limit.

    Raises:
        VerificationError: names the bound symbol and the bucket.
    """
    machine = Machine(max_gathers_in_flight)
    if forward is not None:
        machine.run(forward)
    machine.run(trace)
    return with_bound_symbols(trace, trace.bound_symbols, "fsdp: verified")


def check_well_formed(trace: TraceCtx, after: str) -> None:
    """Raise an error unless each name is defined once, and read only after that and before it is deleted.

    Raises:
        VerificationError: names the pass ``after`` which that is so, and the bound symbol.
    """
    defined = set(names(tree_iter((trace.args, trace.kwargs))))
    for position, bsym in enumerate(trace.bound_symbols):
        outs = outs_of(bsym)
        fault = next(
            (f"reads {name!r}, which is not defined here" for name in args_of(bsym) if name not in defined), ""
        )
        # With symbolic values, Thunder's prologue reads the sizes of a tensor several times, under the same names.
        if not fault and bsym.sym.id not in UNPACKING and bsym.sym.id is not PrimIDs.SHAPE:
            fault = next((f"defines {name!r} again" for name in outs if name in defined), "")
        if fault:
            raise VerificationError(f"after {after}, bound symbol {position} {fault}\n    {statement(bsym)}")
        defined.update(outs)
        if bsym.sym.id is PrimIDs.DEL:
            defined.difference_update(args_of(bsym))


def verify_again(
    verified: Sequence[TraceCtx], final: Sequence[TraceCtx], *, max_gathers_in_flight: int | None, after: str
) -> None:
    """Prove the traces that Thunder makes a program of, if later transforms have changed those that were verified.

    Args:
        verified: the forward trace, and the backward trace if there is one, as this plugin has returned them.
        final: the same traces after the transforms that follow.
        max_gathers_in_flight: see :func:`verify`.
        after: those transforms, for messages.

    Raises:
        VerificationError: a transform has removed, added or reordered statements of this plugin, which the ranks have
            agreed on, or the trace breaks a promise.
    """
    if all(map(_is_unchanged, verified, final)):
        return
    verified, final = (list(map(without_audit, traces)) for traces in (verified, final))
    try:
        for old, new in zip(verified, final, strict=True):
            half = "backward" if is_backward_trace(old) else "forward"
            mine, theirs = ([b for b in trace.bound_symbols if is_declared(b.sym)] for trace in (old, new))
            for was, now in itertools.zip_longest(mine, theirs):
                if was is None or now is None or _identity(was) != _identity(now):
                    was_text, now_text = ("nothing" if bsym is None else statement(bsym) for bsym in (was, now))
                    raise VerificationError(
                        f"the {half} trace has another order of this plugin's statements:\n    before: {was_text}\n"
                        f"    now: {now_text}"
                    )
        machine = Machine(max_gathers_in_flight)
        for trace in final:
            machine.run(trace)
    except VerificationError as error:
        raise VerificationError(
            f"after fsdp(...), {after} has changed a trace that was proved, and it is wrong now. Give that transform "
            f"before fsdp(...), or leave it out: {error}"
        ) from None


def _is_unchanged(verified: TraceCtx, final: TraceCtx) -> bool:
    """Return whether two traces have the same bound symbols; Thunder unwraps what a forward without backward returns."""
    same = len(verified.bound_symbols) == len(final.bound_symbols)
    pairs = zip(verified.bound_symbols, final.bound_symbols, strict=False)
    return same and all(old is new or old.sym.id is new.sym.id is PrimIDs.RETURN for old, new in pairs)


def _identity(bsym: BoundSymbol) -> tuple[Any, ...]:
    """Return the symbol and the buckets, slots and the like on which it operates."""
    return bsym.sym, *handles_of(bsym)
