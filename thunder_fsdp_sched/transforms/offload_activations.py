"""Move chosen values that forward saves for backward to host memory, and copy them back in backward.

[Note: Owners and views]
Memory is freed only if nothing else refers to it. So what is offloaded is the value that owns memory, and all saved views
of it come from the copy: backward computes them again from it. An attention layer saves three views of one projection;
the projection is copied once. The copy has the strides of the original, so views of it are views again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from thunder.core.devices import Device, to_torch_device
from thunder.core.dtypes import is_complex_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

from ..ir.analysis import Analysis, Lifetime
from ..ir.effects import effects, is_declared, operations
from ..ir.host_copies import (
    fsdp_copy_to_device,
    fsdp_copy_to_host,
    fsdp_wait_device_copy,
    fsdp_wait_host_copy,
    without_token,
)
from ..ir.inspection import (
    UNPACKING,
    forward_part,
    names,
    nbytes_of,
    outs_of,
    return_of,
    short_form,
    statements,
    unused_name,
    with_bound_symbols,
)
from ..ir.operator_facts import facts_of
from .regather_for_backward import BackwardCopies, first_tensor, reads_memory

MIN_OFFLOADED_BYTES = 64 * 1024
"""The smallest values (bytes) that are worth a copy: the latency of a transfer is about that of this many bytes."""

MAX_HOST_COPIES_IN_FLIGHT = 4
"""How many copies of the largest size may be in flight in each direction, because each occupies device memory. One block
of a transformer saves about as many large values shortly after one another."""

_MARGIN = 1.25
"""How much longer a copy is assumed to take than its simulated time, so that small errors do not expose it."""

_LIMIT = f"in-flight limit: the bytes of the {MAX_HOST_COPIES_IN_FLIGHT} largest copies"


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
    forward, live = forward_part(trace), Analysis(trace)
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


def _refused(trace: TraceCtx, live: Analysis) -> set[Lifetime]:
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


def sort_host_copies(
    trace: TraceCtx, *, seconds: Callable[[TraceCtx], Sequence[float]], copy_seconds: Callable[[int], float]
) -> TraceCtx:
    """Reorder the copies of offloaded activations in a forward or backward execution trace.

    Runs after ``guard_first`` and before ``sort_communication`` or ``replay_schedule``, to which the copies are compute
    that keeps its order. Does nothing if the trace has no copies. Forward, before::

        ft150 = fsdp_copy_to_host(t112)
        (host_t112, x) = fsdp_wait_host_copy(ft150, t112, x)
        t114 = torch.nn.functional.linear(t110, t113, None)
        t115 = torch.gt(t114, 0.0)

    After::

        # offload: after the last use in forward, by t112 = where
        ft150 = fsdp_copy_to_host(t112)
        t114 = torch.nn.functional.linear(t110, t113, None)
        # finished by now
        host_t112 = fsdp_wait_host_copy(ft150, t112)
        t115 = torch.gt(t114, 0.0)

    The rules:

    * A copy to host memory is issued right after the last use of its source in forward. It is waited for, which frees
      the source, when it has probably finished: by the times of compute and of the copies, which run one after the
      other. At the latest it is waited for at the end of forward.
    * A copy to the device is waited for right before the first consumer of its result. It is issued as late as it
      probably still finishes by then, in the order of first consumers.
    * In each direction the bytes in flight are limited to those of the ``MAX_HOST_COPIES_IN_FLIGHT`` largest copies.
      Forward then waits for the oldest copy first; backward issues a copy only after the wait that makes room for it.

    The reason for each position is the header of the bound symbol, which the trace prints.

    Args:
        seconds: returns the time of each bound symbol of a trace on the compute stream.
        copy_seconds: returns the time of a copy of so many bytes.
    """
    others, found = operations(statements(trace), of_buckets=False)
    if not found:
        return trace
    begins = accumulate(seconds(with_bound_symbols(trace, others, "fsdp: without host copies")), initial=0.0)
    copies = [
        _Copy(issue, without_token(wait), nbytes := nbytes_of(issue.args[0]), copy_seconds(nbytes) * _MARGIN)
        for issue, wait in found
    ]
    sorter = _Sorter(others, copies, list(begins))
    if effects(found[0][-1]).frees_value is not None:
        sorter.sort_forward()
    else:
        sorter.sort_backward()
    return with_bound_symbols(trace, sorter.out, "fsdp: sort host copies")


@dataclass(eq=False)
class _Copy:
    """A copy in one direction. Positions count the other bound symbols.

    Attributes:
        position: in backward, that of the first consumer of its result.
        due: in backward, the position before which it is issued.
        finish: in forward, the time at which it has probably finished.
    """

    issue: BoundSymbol
    wait: BoundSymbol
    nbytes: int
    seconds: float
    position: int = -1
    due: int = -1
    finish: float = 0.0


class _Sorter:
    """Sorts the copies of one trace.

    Args:
        others: all other bound symbols, which positions count.
        begins: the time at which each of them begins, and that at which the last one ends.
    """

    def __init__(self, others: Sequence[BoundSymbol], copies: Sequence[_Copy], begins: Sequence[float]) -> None:
        self.others, self.copies, self.begins = others, copies, begins
        self.limit = sum(sorted(copy.nbytes for copy in copies)[-MAX_HOST_COPIES_IN_FLIGHT:])
        self.live = Analysis(others)
        self.in_flight: deque[_Copy] = deque()
        self.out: list[BoundSymbol] = []

    def fits(self, copy: _Copy) -> bool:
        """Return whether a copy may be in flight besides those that are."""
        return not self.in_flight or sum(c.nbytes for c in self.in_flight) + copy.nbytes <= self.limit

    def issue(self, copy: _Copy, reason: str) -> None:
        self.out.append(copy.issue.from_bsym(header=reason))
        self.in_flight.append(copy)

    def wait(self, reason: str) -> None:
        self.out.append(self.in_flight.popleft().wait.from_bsym(header=reason))

    def sort_forward(self) -> None:
        issued_after: dict[int, list[_Copy]] = defaultdict(list)
        for copy in self.copies:
            source = self.live.value(copy.issue.args[0].name)
            assert source is not None
            issued_after[self.live.owners_of(source)[0].last].append(copy)
        link_free = 0.0
        for position, bsym in enumerate(self.others):
            while self.in_flight and self.in_flight[0].finish <= self.begins[position]:
                self.wait("finished by now")
            while self.in_flight and position == len(self.others) - 1:
                self.wait("end of forward")
            self.out.append(bsym)
            for copy in issued_after.get(position, ()):
                while not self.fits(copy):
                    self.wait(_LIMIT)
                self.issue(copy, f"offload: after the last use in forward, by {short_form(bsym)}")
                copy.finish = link_free = max(link_free, self.begins[position + 1]) + copy.seconds

    def sort_backward(self) -> None:
        for copy in self.copies:
            first = self.live.first_read(outs_of(copy.wait))
            copy.position = len(self.others) - 1 if first is None else first
        waiting = deque(sorted(self.copies, key=lambda copy: copy.position))
        head = 1 + max((i for i, b in enumerate(self.others) if _comes_first(b)), default=-1)
        start = self.begins[-1]
        for copy in reversed(waiting):
            start = min(start, self.begins[copy.position]) - copy.seconds
            copy.due = min(max(bisect_right(self.begins, start) - 1, head), copy.position)

        def issue_due(position: int) -> None:
            while waiting and waiting[0].due <= position and self.fits(waiting[0]):
                copy = waiting.popleft()
                reason = "prefetch: as late as it can still overlap" if copy.due > head else "prefetch: from the start"
                self.issue(copy, _LIMIT if copy.due < position else reason)

        for position, bsym in enumerate(self.others):
            issue_due(position)
            while self.in_flight and self.in_flight[0].position == position:
                self.wait(f"first consumer: {short_form(bsym)}")
                issue_due(position)
            self.out.append(bsym)


def _comes_first(bsym: BoundSymbol) -> bool:
    """Return whether ``bsym`` belongs to the start of a backward trace, where nothing is computed yet."""
    return bsym.sym.id in UNPACKING or effects(bsym).ensures is not None
