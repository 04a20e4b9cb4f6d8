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

from ..ir.analysis import Analysis, Lifetime
from ..ir.effects import effects, is_declared
from ..ir.host_copies import fsdp_copy_to_device, fsdp_copy_to_host, fsdp_wait_device_copy, fsdp_wait_host_copy
from ..ir.inspection import (
    UNPACKING,
    args_of,
    forward_part,
    names,
    outs_of,
    return_of,
    swap_args,
    unused_name,
    with_bound_symbols,
)
from ..ir.operator_facts import facts_of
from .regather_for_backward import BackwardCopies

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
        offloaded: names of values, from :func:`offloadable`.

    Raises:
        ValueError: a name is not offloadable.
    """
    forward = forward_part(trace)
    if not offloaded or all(forward[:-1]):
        return trace
    found = _find(trace)
    if unknown := sorted(set(offloaded) - found.keys()):
        raise ValueError(f"offloaded: {', '.join(unknown)} cannot be offloaded; offloadable(trace) names what can")
    new = with_bound_symbols(trace, (), "fsdp: offload activations")
    with tracectx(new):
        token = next(arg for arg in return_of(trace).args[0]["flat_args"] if isinstance(arg, TensorProxy))
        offload = _Offload(new, {name: found[name] for name in found if name in offloaded}, token)
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
    bsyms = trace.bound_symbols
    forward = forward_part(trace)
    live = Analysis(bsyms)
    refused = _refused(trace, live)
    last_use: dict[Lifetime, int] = {}
    saved: dict[Lifetime, list[Lifetime]] = defaultdict(list)
    for value in live.values:
        if not 0 <= value.first < len(bsyms) or not forward[value.first]:
            continue
        uses = [value.first, *(p for p in value.reads if forward[p])]
        in_backward = any(_reads(bsyms[p]) and not forward[p] for p in value.reads)
        for owner in live.owners_of(value):
            last_use[owner] = max(last_use.get(owner, -1), *uses)
            if in_backward:
                saved[owner].append(value)
    found = {}
    for owner in live.values:
        proxy = owner.proxy
        if owner in refused or owner not in saved or not isinstance(proxy, TensorProxy):
            continue
        derivations: dict[str, list[BoundSymbol]] = {}
        for value in saved[owner]:
            chain = _derivation(value, owner, live)
            if chain is None:
                break
            derivations[value.name] = chain
        else:
            found[proxy.name] = _Activation(proxy, owner.nbytes, last_use[owner], derivations)
    return found


def _refused(trace: TraceCtx, live: Analysis) -> set[Lifetime]:
    """Return the owners of memory that must stay where it is."""
    returned = set(names(tree_iter(return_of(trace).args)))
    params: set[str] = set()
    where: set[Device] = set()
    refused: set[Lifetime] = set()
    for position, bsym in enumerate(trace.bound_symbols):
        facts, args, outs = facts_of(bsym), live.args[position], live.outs[position]
        if (e := live.effects[position]).waits is not None and e.in_place:
            params.update(outs_of(bsym))
            where.update(p.device for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy))
        elif facts.pure and (inputs := args_of(bsym)) and all(name in params for name in inputs):
            params.update(outs_of(bsym))
        kept: list[Lifetime] = []
        if bsym.sym.id in UNPACKING or is_declared(bsym.sym) or not facts.known:
            kept += outs
        if bsym.sym.id is not PrimIDs.RETURN:
            written = facts.writes | facts.by_position
            kept += [value for value in args if not facts.known or value.proxy.name in written]
        for value in kept:
            refused.update(live.owners_of(value))
    for value in live.values:
        proxy, of = value.proxy, live.owners_of(value)
        is_plain = isinstance(proxy, TensorProxy) and proxy.device in where and not is_complex_dtype(proxy.dtype)
        if proxy.name in returned or proxy.name in params or value.first < 0 or not is_plain or len(of) != 1:
            refused.update(of)
    return refused


def _derivation(value: Lifetime, owner: Lifetime, live: Analysis) -> list[BoundSymbol] | None:
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


def _reads(bsym: BoundSymbol) -> bool:
    """Return whether ``bsym`` needs the memory of what it names."""
    return bsym.sym.id not in (PrimIDs.GET_GRAD, PrimIDs.RETURN, PrimIDs.DEL)


class _Offload(BackwardCopies):
    def __init__(self, new: TraceCtx, activations: dict[str, _Activation], token: TensorProxy) -> None:
        super().__init__(new)
        self.owner_of = {saved: activation for activation in activations.values() for saved in activation.derivations}
        self.due: dict[int, list[_Activation]] = defaultdict(list)
        for activation in activations.values():
            self.due[activation.last_use].append(activation)
        self.token = token
        self.hosts: dict[str, TensorProxy] = {}

    def run(self, bsyms: Sequence[BoundSymbol], forward: Sequence[bool]) -> None:
        for position, bsym in enumerate(bsyms[:-1]):
            if forward[position]:
                self.new.bound_symbols.append(bsym)
                for activation in self.due.get(position, ()):
                    self._copy_to_host(activation.owner)
        for position, bsym in enumerate(bsyms):
            if forward[position]:
                continue
            if _reads(bsym):
                for name in args_of(bsym):
                    self._bring_back(name)
                bsym = swap_args(bsym, self.replacements)
            self.new.bound_symbols.append(bsym)

    def _copy_to_host(self, source: TensorProxy) -> None:
        future = fsdp_copy_to_host.meta(source)
        host = fsdp_wait_host_copy.meta(future, source).replace_name(unused_name(self.new, f"host_{source.name}"))
        self.hosts[source.name] = host
        self.new.bound_symbols += [
            fsdp_copy_to_host.bind(source, output=future),
            fsdp_wait_host_copy.bind(future, source, self.token, output=(host, self.token)),
        ]

    def _bring_back(self, name: str) -> None:
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
