"""Prove that a trace keeps the promises of this plugin before it runs, or name the bound symbol that breaks one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..errors import coded_error
from ..ir.effects import effects, is_declared
from ..ir.inspection import UNPACKING, args_of, names, outs_of, statement, with_bound_symbols, without_token
from .machine import Machine, VerificationError


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
    * Each read of a value in a slot, or of a view of it, finds the bytes that were gathered or written for it. Nothing
      writes a slot that a collective in flight uses, or that the writer itself reads. Gradients of a bucket may replace
      its parameters one by one.
    * The same holds for kept buckets, of which backward reads views that ``forward`` has saved. A guard comes before
      backward reads or writes their private slots, and nothing writes the private slot of another bucket.
    * A gradient that is written in place is written where the reduction of its bucket expects it, and nothing else
      reads it.
    * Gathers are issued in the order of their first consumers, and at most ``max_gathers_in_flight`` are in flight.
    * Between a gather's issue and its first consumer, and between a reduction's last gradient and its issue, nothing
      communicates that is not ours.
    * The outputs of forward alias no slot, and the tensors that it saves for backward alias no shared slot.
    * Memory is freed (``release``) after the last read and wait. The forward of a backward frees no kept bucket, and no
      bucket that it leaves for backward.
    * If a gather of backward expects its bucket to be resident, forward has left the bucket in this slot (if
      ``forward`` is given), and nothing overwrites it before that gather.
    * Only gathers of a forward with a backward, into private slots, take part in accumulation windows.
    * Collectives and waits have the operands and results of the ``original`` trace: see [Note: Whose value it is] in
      ``verify_again``.
    * Every secondary shard is copied from the gather of its bucket, and backward gathers the bucket from these copies.

    For example, a matmul with a weight in ``slot_0`` is refused if the trace gathers another bucket into ``slot_0`` before.
    See [Note: The abstract machine] in ``machine``.

    Args:
        forward: for a backward trace, its forward trace with slots.
        original: the trace as Thunder has split it; ``None`` if there is none to compare with.
        max_gathers_in_flight: how many gathers may be issued and not waited for; ``None`` for no limit.
        machine: the class of the machine, with its rules.

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
    """Return whether two traces have the same bound symbols; Thunder unwraps the return of a forward without backward."""
    same = len(verified.bound_symbols) == len(final.bound_symbols)
    pairs = zip(verified.bound_symbols, final.bound_symbols, strict=False)
    return same and all(old is new or _return_the_same(old, new) for old, new in pairs)


def _return_the_same(old: BoundSymbol, new: BoundSymbol) -> bool:
    return old.sym.id is new.sym.id is PrimIDs.RETURN and returned_by(old) == returned_by(new)


def check_operands(original: TraceCtx, trace: TraceCtx) -> None:
    """Raise an error unless statements of this package read, save and return the same names as in the original trace.

    Statements may have moved, and others may have been added.

    Args:
        original: the trace as Thunder has split it.
        trace: the same trace, sorted and with slots.

    Raises:
        VerificationError: names the statement.
    """
    expected, actual = ({key: bsym for bsym in t.bound_symbols if (key := _operands(bsym))} for t in (original, trace))
    symbols = {key[:2] for key in expected}
    wrong = next((key for key in actual if key[:2] in symbols and key not in expected), None)
    if wrong is not None:
        made = (bsym for key, bsym in expected.items() if key[:2] == wrong[:2] and key not in actual)
        _refuse(actual[wrong], next(made, None))
    made_by = {name: bsym for bsym in original.bound_symbols for name in outs_of(bsym)}
    for bsym in trace.bound_symbols:
        if is_declared(bsym.sym) and effects(bsym).fills is not None:  # it writes what an operator has computed
            source = made_by.get(outs_of(bsym)[0])
            if source is None or args_of(source) != args_of(bsym):
                _refuse(bsym, source)


def _refuse(actual: BoundSymbol, expected: BoundSymbol | None) -> NoReturn:
    raise coded_error(
        VerificationError,
        "proof.statement-with-other-operands",
        statement=statement(actual),
        expected="nothing" if expected is None else statement(expected),
    )


def _operands(bsym: BoundSymbol) -> tuple[Any, ...] | None:
    """Return the symbol, the bucket, and the names of operands and results by position; ``None`` if there are none."""
    is_boundary = bsym.sym.id in UNPACKING or bsym.sym.id is PrimIDs.RETURN
    if not is_boundary and (not is_declared(bsym.sym) or effects(bsym).fills is not None):
        return None
    args = without_token(bsym).args
    read = args_of(bsym) if is_boundary else tuple(arg.name if isinstance(arg, Proxy) else None for arg in args)
    outs = tuple(p.name for p in bsym.flat_proxy_outs)
    has_values = any(read) or bool(outs)
    return (bsym.sym.name, effects(bsym).bucket, read, outs, *names(bsym.kwargs.values())) if has_values else None


def returned_by(last: BoundSymbol) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the outputs and of the saved values in a return statement, also once Thunder has unwrapped it."""
    first, *saved = last.args or (None,)
    outputs = first["output"] if isinstance(first, Mapping) else last.args
    return tuple(names(tree_iter(outputs))), tuple(names(tree_iter(saved))) if outputs is not last.args else ()
