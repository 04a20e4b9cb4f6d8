"""When inputs and other values of traces occupy how many bytes, views counted once; slots are in ``liveness``.

[Note: Bytes of values]
A value occupies memory from the bound symbol that defines it to the last one that reads it or a view of it: there
Thunder deletes it. What a trace returns lives on, outputs to the end of the last trace, and what is saved for backward
until backward has read it.

A value that shares memory with others counts as their view. Whether it does can depend on strides: a reshape copies a
transposed tensor. So each operator is observed on inputs of the strides that earlier operators have returned; inputs of
the traces count as contiguous. If nothing is known about an operator, its outputs count as views of all inputs and as
new memory, so the bytes are an upper bound. What a function of torch allocates and frees again is observed, too: the most
bytes of what its base operators return. What a base operator or a fusion allocates inside itself is in
``unknown_memory``, and what this package's symbols allocate besides their outputs is in ``communication_memory``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from thunder.core.prims import PrimIDs
from thunder.core.proxies import FutureTensorProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from .host_copies import HOST_COPIES, fsdp_copy_to_device, fsdp_wait_device_copy
from .inspection import UNPACKING, names, nbytes_of
from .liveness import BEFORE_TRACE, Liveness, Value
from .operands import Gather, bucket_of
from .operator_facts import ObservedCall, facts_of, observed_call
from .registry import executor
from .symbols import (
    GRAD_WRITERS,
    fsdp_all_gather,
    fsdp_all_reduce,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
    is_resident,
    payload,
)

__all__ = ["MemoryAnalysis", "MemoryInterval", "analyze_memory", "memory_intervals", "owners_of"]


class MemoryInterval(NamedTuple):
    """Memory that is in use between two positions, first and last included.

    Attributes:
        kind: ``"input"`` for an argument of the first trace, or for what a trace unpacks and no earlier one defines;
            ``"temporary"`` for what exists only inside one bound symbol; ``"value"`` for everything else.
        name: name of the value that owns the memory; of temporary memory, the name of the symbol.
        nbytes: bytes of the storage.
        start: position of the bound symbol that defines it, ``BEFORE_TRACE`` for what exists earlier.
        end: position of the last bound symbol that uses it.
        device: the type of its device.
    """

    kind: Literal["input", "value", "temporary"]
    name: str
    nbytes: int
    start: int
    end: int
    device: str


class MemoryAnalysis(NamedTuple):
    """The results of analyzing the memory of traces that run one after the other.

    Attributes:
        bsyms: the bound symbols of all traces, which positions count.
        live: their liveness.
        owners: for each value the values that own its memory, each with its bytes (0 in a slot).
        intervals: the memory of values, without slots, and temporary memory.
        calls: the calls that could be observed, by position.
    """

    bsyms: list[BoundSymbol]
    live: Liveness
    owners: dict[Value, _Owners]
    intervals: list[MemoryInterval]
    calls: dict[int, ObservedCall]


def memory_intervals(traces: Sequence[TraceCtx]) -> list[MemoryInterval]:
    """Return the memory of values, without slots, in traces that run one after the other; see [Note: Bytes of values].

    Positions count the bound symbols of all traces.
    """
    return analyze_memory(traces).intervals


def analyze_memory(traces: Sequence[TraceCtx]) -> MemoryAnalysis:
    """Return the memory of traces that run one after the other; see [Note: Bytes of values]."""
    parts = [trace.bound_symbols for trace in traces]
    starts = tuple(itertools.accumulate(map(len, parts[:-1]), initial=0))
    bsyms, live = list(itertools.chain(*parts)), Liveness(*parts)
    owners, calls = _observed_owners(live, bsyms)
    intervals = [*_intervals(live, bsyms, starts, owners), *_temporary(bsyms, calls)]
    return MemoryAnalysis(bsyms, live, owners, intervals, calls)


def _intervals(
    live: Liveness, bsyms: Sequence[BoundSymbol], starts: Sequence[int], owners: dict[Value, _Owners]
) -> Iterator[MemoryInterval]:
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
        nbytes, device = owners[owner][owner], _device_type(owner.proxy)
        if not nbytes:
            continue
        if owner.defined == BEFORE_TRACE:  # an argument, which the caller keeps
            yield MemoryInterval("input", owner.proxy.name, nbytes, BEFORE_TRACE, last, device)
        elif owner in begins:
            begin = begins[owner]
            end = last if begin == BEFORE_TRACE else end
            yield MemoryInterval("input", owner.proxy.name, nbytes, begin, end, device)
        else:
            yield MemoryInterval("value", owner.proxy.name, nbytes, owner.defined, end, device)


def _temporary(bsyms: Sequence[BoundSymbol], calls: dict[int, ObservedCall]) -> Iterator[MemoryInterval]:
    for position, call in calls.items():
        if call.temporary_bytes:
            bsym = bsyms[position]
            tensors = (p for p in (*bsym.flat_proxy_outs, *bsym.flat_proxy_args) if isinstance(p, TensorProxy))
            device = next(map(_device_type, tensors), "cpu")
            yield MemoryInterval("temporary", bsym.sym.name, call.temporary_bytes, position, position, device)


def owners_of(live: Liveness, bsyms: Sequence[BoundSymbol]) -> dict[Value, _Owners]:
    """Return for each value the values that own its memory, each with its bytes (0 in a slot).

    Args:
        live: the liveness of ``bsyms``.
    """
    return _observed_owners(live, bsyms)[0]


def _observed_owners(
    live: Liveness, bsyms: Sequence[BoundSymbol]
) -> tuple[dict[Value, _Owners], dict[int, ObservedCall]]:
    """Return the owners of values, and the calls that could be observed, by position."""
    owners: dict[Value, _Owners] = {}
    calls: dict[int, ObservedCall] = {}
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
        if not new and bsym.sym.executor is executor:
            continue
        if (observed := observed_call(bsym, strides)) is not None:
            calls[position] = observed
        facts, returned = facts_of(bsym), {value.proxy.name: value for value in outs}
        for value in new:
            name = value.proxy.name
            own = {value: _bytes(value)}
            if observed is not None and name in observed.outputs:
                out = observed.outputs[name]
                strides[name] = out.strides
                sources = [args.get(source) or returned[source] for source in out.views]
                own = {value: out.nbytes}
            else:
                strides.pop(name, None)
                sources = [args[source] for source in facts.aliases.get(name, ())]
                sources = [source for source in sources if _may_be_view(value, source)]
            shared = {owner: nbytes for source in sources for owner, nbytes in owners[source].items()}
            owners[value] = shared if shared and facts.known else {**own, **shared}
    return owners, calls


_Owners = dict[Value, int]
"""Values that own memory, each with its bytes; 0 for what is in a slot."""


def _of_own_symbol(
    bsym: BoundSymbol, outs: Sequence[Value], args: Sequence[Value], owners: dict[Value, _Owners]
) -> dict[Value, _Owners]:
    """Return the owners of the outputs of a symbol of this package; empty for other symbols."""
    if bsym.sym.executor is not executor:
        return {}
    if bsym.sym is fsdp_all_gather and (secondary := Gather(bsym).secondary) is not None and not is_resident(bsym):
        # It is sent until the wait.
        (kept,) = (value for value in args if value.proxy.name == secondary.name)
        return dict.fromkeys(outs, owners[kept])
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


def _device_type(proxy: Proxy) -> str:
    return proxy.device.type if isinstance(proxy, (TensorProxy, FutureTensorProxy)) else "cpu"


def _may_be_view(value: Value, of: Value) -> bool:
    """Return whether dtype and device allow that a value, whose operator may return a view, is one."""
    a, b = value.proxy, of.proxy
    return isinstance(a, TensorProxy) and isinstance(b, TensorProxy) and (a.dtype, a.device) == (b.dtype, b.device)


def _outputs(last: BoundSymbol) -> Iterator[str]:
    """Return the names of the values that a trace returns to its caller, without those that it saves for backward."""
    returned = last.args[0] if last.args else None
    return names(tree_iter(returned["output"] if isinstance(returned, dict) and "output" in returned else last.args))
