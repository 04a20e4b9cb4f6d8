"""Move chosen values that forward saves for backward to host memory, and copy them back in backward.

[Note: Owners and views]
Memory is freed only if nothing else refers to it. So what is offloaded is the value that owns memory, and all saved views
of it come from the copy: backward computes them again from it. An attention layer saves three views of one projection;
the projection is copied once. The copy has the strides of the original, so views of it are views again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from thunder.core.devices import Device, to_torch_device
from thunder.core.dtypes import is_complex_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

from ...ir.analysis import Lifetime
from ...ir.effects import effects, is_declared
from ...ir.inspection import UNPACKING, first_tensor, forward_part, names, return_of, unused_name, with_bound_symbols
from ...ir.operator_facts import facts_of
from ...transforms.regather_for_backward import BackwardCopies, reads_memory
from ..step_memory.value_memory import MemoryAnalysis
from .host_copies import fsdp_copy_to_device, fsdp_copy_to_host, fsdp_wait_device_copy, fsdp_wait_host_copy

MIN_OFFLOADED_BYTES = 64 * 1024
"""The smallest values (bytes) that are worth a copy: the latency of a transfer is about that of this many bytes."""


def offloadable(trace: TraceCtx, *, min_bytes: int = MIN_OFFLOADED_BYTES) -> dict[str, int]:
    """Return the values of a joint trace that may be offloaded, each with the bytes that this frees, in trace order.

    Such a value owns memory that is saved for backward: itself, or views of it that pure operators compute from it alone.
    Excluded is all memory that something else keeps alive or may change: inputs, parameters and what derives from them
    alone, slots, outputs and views of them, memory that is written in place, and what unknown operators read or return.

    Args:
        min_bytes: smaller values are left out.
    """
    if all(forward_part(trace)[:-1]):
        return {}
    return {a.owner.name: a.nbytes for a in _find(trace).values() if a.nbytes >= min_bytes}


def offloaded_values(trace: TraceCtx) -> set[str]:
    """Return the values that a joint trace copies to host memory."""
    return {e.frees_value for e in map(effects, trace.bound_symbols) if e.frees_value is not None}


def offload_activations(trace: TraceCtx, *, offloaded: Collection[str]) -> TraceCtx:
    """Copy the values named in ``offloaded`` to host memory after forward's last use, and back before backward's first.

    Runs on the joint trace after ``regather_for_backward`` has run for the second time, because earlier a fusion executor
    could move the copies. Does nothing without names or without a backward part. ``sort_host_copies`` moves the copies
    later so that they overlap. Before::

        t110 = torch.nn.functional.linear(x, t109, None)
        t112 = torch.where(t111, t110, 0.0)
        t121 = torch.where(t119, t70, 0)  # backward
        t123 = torch.matmul(t122, t112)

    After::

        t110 = torch.nn.functional.linear(x, t109, None)
        t112 = torch.where(t111, t110, 0.0)
        ft150 = fsdp_copy_to_host(t112)
        (host_t112, x) = fsdp_wait_host_copy(ft150, t112, x)
        t121 = torch.where(t119, t70, 0)
        ft151 = fsdp_copy_to_device(host_t112, 'cpu')
        bw_t112 = fsdp_wait_device_copy(ft151)
        t123 = torch.matmul(t122, bw_t112)

    See [Note: Owners and views], [Note: Tokens of host copies] and [Note: Host copies].

    Args:
        offloaded: names of values, from :func:`offloadable`. Those that a fusion has taken in stay where they are.
    """
    forward = forward_part(trace)
    if not offloaded or all(forward[:-1]):
        return trace
    found = _find(trace)
    new = with_bound_symbols(trace, (), "fsdp: offload activations")
    with tracectx(new):
        offload = _Offload(new, [found[name] for name in found if name in offloaded], first_tensor(trace))
        offload.run(trace.bound_symbols, forward)
    return new


@dataclass(eq=False)
class _Activation:
    """Memory that forward saves for backward.

    Attributes:
        owner: the value that owns it.
        last_use: position of the last bound symbol of forward that uses it.
        derivations: for each saved value in it, the bound symbols that compute it from the owner, in order; none for the
            owner itself.
    """

    owner: TensorProxy
    nbytes: int
    last_use: int
    derivations: dict[str, list[BoundSymbol]]


def _find(trace: TraceCtx) -> dict[str, _Activation]:
    """Return the offloadable memory of a joint trace, by the owner's name."""
    forward, live = forward_part(trace), MemoryAnalysis(trace)
    refused = _refused(trace, live)
    of_owner: dict[Lifetime, list[Lifetime]] = defaultdict(list)
    for value in live.values:
        if value.first >= 0 and forward[value.first]:
            for owner in live.owners_of(value):
                of_owner[owner].append(value)
    found = {}
    for owner, values in of_owner.items():
        saved = [v for v in values if any(reads_memory(live.bsyms[p]) and not forward[p] for p in v.reads)]
        if not saved or owner in refused:
            continue
        derivations = {value.name: _derivation(value, owner, live) for value in saved}
        last_use = max(p for value in values for p in (value.first, *value.reads) if forward[p])
        chains = {name: chain for name, chain in derivations.items() if chain is not None}
        if len(chains) == len(derivations):
            found[owner.name] = _Activation(owner.proxy, owner.nbytes, last_use, chains)
    return found


def _refused(trace: TraceCtx, live: MemoryAnalysis) -> set[Lifetime]:
    """Return the owners of memory that must stay where it is."""
    kept: list[Lifetime] = []
    params: set[str] = set()
    where: set[Device] = set()
    for bsym, e, args, outs in zip(live.bsyms, live.effects, live.args, live.outs, strict=True):
        facts = facts_of(bsym)
        if e.unshards:
            where.update(p.proxy.device for p in outs)
        if e.unshards or (facts.pure and args and all(value.name in params for value in args)):
            params.update(value.name for value in outs)
        if bsym.sym.id in UNPACKING or is_declared(bsym.sym) or not facts.known:
            kept += outs
        if bsym.sym.id is not PrimIDs.RETURN:
            written = facts.writes | facts.by_position
            kept += [value for value in args if not facts.known or value.name in written]
    stays = params.union(names(tree_iter(return_of(trace).args)))
    for value in live.values:
        is_plain = isinstance(value.proxy, TensorProxy) and not is_complex_dtype(value.proxy.dtype)
        movable = is_plain and value.proxy.device in where and len(live.owners_of(value)) == 1
        if value.name in stays or value.first < 0 or not movable:
            kept.append(value)
    return {owner for value in kept for owner in live.owners_of(value)}


def _derivation(value: Lifetime, owner: Lifetime, live: MemoryAnalysis) -> list[BoundSymbol] | None:
    """Return the bound symbols that compute ``value`` from ``owner`` alone, in order; ``None`` if there are none such."""
    chain: dict[int, BoundSymbol] = {}
    pending = [value]
    while pending:
        current = pending.pop()
        if current is owner:
            continue
        if current.first < 0 or owner not in live.owners_of(current):
            return None
        producer = live.bsyms[current.first]
        if producer.sym.is_fusion or not facts_of(producer).pure:
            return None
        if current.first not in chain:
            chain[current.first] = producer
            pending += live.args[current.first]
    return [chain[position] for position in sorted(chain)]


class _Offload(BackwardCopies):
    def __init__(self, new: TraceCtx, activations: Sequence[_Activation], token: TensorProxy) -> None:
        super().__init__(new)
        self.owner_of = {saved: activation for activation in activations for saved in activation.derivations}
        self.due: dict[int, list[TensorProxy]] = defaultdict(list)
        for activation in activations:
            self.due[activation.last_use].append(activation.owner)
        self.token = token
        self.hosts: dict[str, TensorProxy] = {}

    def run(self, bsyms: Sequence[BoundSymbol], forward: Sequence[bool]) -> None:
        for position, bsym in enumerate(bsyms):
            if forward[position]:
                self.new.bound_symbols.append(bsym)
                for owner in self.due[position]:
                    self._copy_to_host(owner)
        for position, bsym in enumerate(bsyms):
            if not forward[position]:
                self.add_reader(bsym)

    def _copy_to_host(self, source: TensorProxy) -> None:
        future = fsdp_copy_to_host.meta(source)
        host = fsdp_wait_host_copy.meta(future, source).replace_name(unused_name(self.new, f"host_{source.name}"))
        self.hosts[source.name] = host
        self.new.bound_symbols += [
            fsdp_copy_to_host.bind(source, output=future),
            fsdp_wait_host_copy.bind(future, source, self.token, output=(host, self.token)),
        ]

    def need(self, name: str) -> None:
        """Copy the memory of a saved value back, once, and compute the value again if it is a view."""
        activation = self.owner_of.get(name)
        if activation is None or name in self.replacements:
            return
        owner = activation.owner
        if owner.name not in self.replacements:
            host, device = self.hosts[owner.name], str(to_torch_device(owner.device))
            future = fsdp_copy_to_device.meta(host, device)
            self.add(fsdp_copy_to_device.bind(host, device, output=future))
            self.add(fsdp_wait_device_copy.bind(future, output=self.rename(owner)))
        for bsym in activation.derivations[name]:
            self.repeat(bsym)
