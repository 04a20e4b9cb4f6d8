"""When inputs and other values of traces occupy how many bytes, views counted once; slots are in ``liveness``.

[Note: Bytes of values]
A value occupies memory from the bound symbol that defines it to the last one that reads it or a view of it: there
Thunder deletes it. What a trace returns lives on, outputs to the end of the last trace, and what is saved for backward
until backward has read it.

A value that shares memory with others counts as their view. Whether it does can depend on strides: a reshape copies a
transposed tensor. So each operator is observed on inputs of the strides that earlier operators have returned; inputs of
the traces count as contiguous. If nothing is known about an operator, its outputs count as views of all inputs and as
new memory, so the bytes are an upper bound. Temporary memory within a bound symbol, such as a fusion's, and padding of
an allocator are not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from .host_copies import HOST_COPIES, fsdp_copy_to_device, fsdp_wait_device_copy
from .inspection import UNPACKING, names, nbytes_of
from .liveness import BEFORE_TRACE, Liveness, Value
from .operands import bucket_of
from .operator_facts import facts_of, outputs_of
from .symbols import (
    GRAD_WRITERS,
    executor,
    fsdp_all_gather,
    fsdp_all_reduce,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
    payload,
)

__all__ = ["MemoryInterval", "memory_intervals", "owners_of"]


class MemoryInterval(NamedTuple):
    """Memory that is in use between two positions, first and last included.

    Attributes:
        kind: ``"input"`` for an argument of the first trace, or for what a trace unpacks and no earlier one defines;
            ``"value"`` for everything else.
        name: name of the value that owns the memory.
        nbytes: bytes of the tensor.
        start: position of the bound symbol that defines it, ``BEFORE_TRACE`` for what exists earlier.
        end: position of the last bound symbol that uses it.
    """

    kind: Literal["input", "value"]
    name: str
    nbytes: int
    start: int
    end: int


def memory_intervals(traces: Sequence[TraceCtx]) -> list[MemoryInterval]:
    """Return the memory of values, without slots, in traces that run one after the other; see [Note: Bytes of values].

    Positions count the bound symbols of all traces.
    """
    parts = [trace.bound_symbols for trace in traces]
    starts = tuple(itertools.accumulate(map(len, parts[:-1]), initial=0))
    return list(_intervals(Liveness(*parts), list(itertools.chain(*parts)), starts))


def _intervals(live: Liveness, bsyms: Sequence[BoundSymbol], starts: Sequence[int]) -> Iterator[MemoryInterval]:
    owners = owners_of(live, bsyms)
    begins: dict[Value, int] = {}
    ends: dict[Value, int] = {}
    last = len(bsyms) - 1
    for value in live.values:
        for owner in owners.get(value, {}):
            end = value.reads[-1] if value.reads else value.defined
            ends[owner] = max(ends.get(owner, BEFORE_TRACE), end)
    for position, bsym in enumerate(bsyms):
        if bsym.sym.id is PrimIDs.RETURN:
            outputs = set(_outputs(bsym))
            for value in live.args[position]:
                if value.proxy.name in outputs:
                    ends.update(dict.fromkeys(owners.get(value, {}), last))
        elif bsym.sym.id in UNPACKING:
            begin = max(start for start in starts if start <= position)
            begins.update(dict.fromkeys(live.outs[position], begin or BEFORE_TRACE))
    for owner, end in ends.items():
        nbytes = owners[owner][owner]
        if not nbytes:
            continue
        if owner.defined == BEFORE_TRACE:  # an argument, which the caller keeps
            yield MemoryInterval("input", owner.proxy.name, nbytes, BEFORE_TRACE, last)
        elif owner in begins:
            begin = begins[owner]
            yield MemoryInterval("input", owner.proxy.name, nbytes, begin, last if begin == BEFORE_TRACE else end)
        else:
            yield MemoryInterval("value", owner.proxy.name, nbytes, owner.defined, end)


def owners_of(live: Liveness, bsyms: Sequence[BoundSymbol]) -> dict[Value, _Owners]:
    """Return for each value the values that own its memory, each with its bytes (0 in a slot).

    Args:
        live: the liveness of ``bsyms``.
    """
    owners: dict[Value, _Owners] = {}
    strides: dict[str, tuple[int, ...]] = {}
    on_host = {bsym.args[0].name for bsym in bsyms if bsym.sym is fsdp_copy_to_device}  # perhaps by an earlier trace
    owners.update({value: {value: 0} for value in live.values if value.proxy.name in on_host})
    for position, bsym in enumerate(bsyms):
        args = {value.proxy.name: value for value in live.args[position]}
        for value in args.values():
            owners.setdefault(value, {value: _bytes(value)})
        outs = live.outs[position]
        owners.update(_of_own_symbol(bsym, outs, live.args[position], owners))
        if bsym.sym.name in HOST_COPIES and (source := bsym.args[0].name) in strides:
            strides.update((value.proxy.name, strides[source]) for value in outs)
        new = [value for value in outs if value not in owners]
        observed = outputs_of(bsym, strides) if new else None
        facts = facts_of(bsym)
        for value in new:
            name = value.proxy.name
            if observed is not None and name in observed:
                strides[name] = observed[name].strides
                sources = [args[source] for source in observed[name].views]
            else:
                strides.pop(name, None)
                sources = [args[source] for source in facts.aliases.get(name, ())]
                sources = [source for source in sources if _may_be_view(value, source)]
            shared = {owner: nbytes for source in sources for owner, nbytes in owners[source].items()}
            owners[value] = shared if shared and facts.known else {value: _bytes(value), **shared}
    return owners


_Owners = dict[Value, int]
"""Values that own memory, each with its bytes; 0 for what is in a slot."""


def _of_own_symbol(
    bsym: BoundSymbol, outs: Sequence[Value], args: Sequence[Value], owners: dict[Value, _Owners]
) -> dict[Value, _Owners]:
    """Return the owners of the outputs of a symbol of this package; empty for other symbols."""
    if bsym.sym.executor is not executor:
        return {}
    if bsym.sym in (fsdp_all_gather, fsdp_wait_params) or bsym.sym.name in GRAD_WRITERS:
        return {value: {value: 0} for value in outs}
    if bsym.sym is fsdp_copy_to_device:
        return {value: {value: nbytes_of(value.proxy)} for value in outs}
    if bsym.sym.name in HOST_COPIES:  # in host memory, or what a copy to the device has allocated
        return {value: owners[args[0]] if bsym.sym is fsdp_wait_device_copy else {value: 0} for value in outs}
    if bsym.sym is fsdp_reduce_scatter:  # its result is new memory, see runtime.ops
        return {value: {value: payload(fsdp_all_reduce.name, bucket_of(bsym).spec)[0]} for value in outs}
    if bsym.sym in (fsdp_all_reduce, fsdp_wait_grads):
        spec = bucket_of(bsym).spec
        flat = owners[args[0]]
        if bsym.sym is fsdp_wait_grads and (spec.reduce_dtype != spec.dtype or spec.comm.offload):
            flat = {outs[0]: spec.layout.shard_numel * spec.dtype.itemsize}
        return dict.fromkeys(outs, flat)
    return {}


def _bytes(value: Value) -> int:
    return nbytes_of(value.proxy) if isinstance(value.proxy, TensorProxy) else 0


def _may_be_view(value: Value, of: Value) -> bool:
    """Return whether dtype and device allow that a value, whose operator may return a view, is one."""
    a, b = value.proxy, of.proxy
    return isinstance(a, TensorProxy) and isinstance(b, TensorProxy) and (a.dtype, a.device) == (b.dtype, b.device)


def _outputs(last: BoundSymbol) -> Iterator[str]:
    """Return the names of the values that a trace returns to its caller, without those that it saves for backward."""
    returned = last.args[0] if last.args else None
    return names(tree_iter(returned["output"] if isinstance(returned, dict) and "output" in returned else last.args))
