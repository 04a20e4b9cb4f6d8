"""The part of ``verify`` that proves the copies of offloaded activations right."""

from __future__ import annotations

from collections.abc import Iterator

from thunder.core.prims import PrimIDs
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.host_copies import (
    HOST_COPIES,
    HOST_COPY_ISSUES,
    fsdp_copy_to_device,
    fsdp_copy_to_host,
    fsdp_wait_device_copy,
    fsdp_wait_host_copy,
)
from ..ir.inspection import UNPACKING, Aliases, args_of, has_backward, names
from ..ir.operator_facts import facts_of

__all__ = ["host_copy_faults"]

_ISSUED_BY = {fsdp_wait_host_copy: fsdp_copy_to_host, fsdp_wait_device_copy: fsdp_copy_to_device}


def host_copy_faults(trace: TraceCtx, forward: TraceCtx | None) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with the copies of offloaded activations in a trace, each with a position.

    ``verify`` lists what must hold, and checks itself that nothing reads the result of a copy before its wait.

    Args:
        forward: for a backward trace, its forward trace.
    """
    of_forward = _copied_by(forward) if forward is not None else {}
    if of_forward or any(bsym.sym.name in HOST_COPIES for bsym in trace.bound_symbols):
        yield from _Walk(trace, of_forward).run()


def _copied_by(forward: TraceCtx) -> dict[str, BoundSymbol]:
    """Return the waits of a forward trace by the names of their host copies."""
    return {bsym.output.name: bsym for bsym in forward.bound_symbols if bsym.sym is fsdp_wait_host_copy}


class _Walk:
    def __init__(self, trace: TraceCtx, of_forward: dict[str, BoundSymbol]) -> None:
        self.trace = trace
        self.of_forward = of_forward
        self.on_host = set(of_forward)
        self.open: dict[str, tuple[int, BoundSymbol]] = {}  # by future
        self.freed: dict[str, int] = {}  # position of the wait, by source
        self.aliases = Aliases()

    def run(self) -> Iterator[tuple[int, str]]:
        for position, bsym in enumerate(self.trace.bound_symbols):
            if bsym.sym.id in UNPACKING or bsym.sym.id is PrimIDs.DEL:
                continue
            yield from ((position, what) for what in self._reads(bsym))
            if bsym.sym.name in HOST_COPY_ISSUES:
                yield from ((position, what) for what in self._issue(bsym))
                self.open[bsym.output.name] = position, bsym
            elif bsym.sym.name in HOST_COPIES:
                yield from ((position, what) for what in self._wait(position, bsym))
            else:
                yield from ((position, what) for what in self._writes(bsym))
                self.aliases.add(bsym)
        for position, issue in self.open.values():
            yield position, f"copies {issue.args[0].name!r}, and nothing waits for the copy"

    def _reads(self, bsym: BoundSymbol) -> Iterator[str]:
        args = set(args_of(bsym))
        if bsym.sym not in _ISSUED_BY:
            for future in sorted(args & self.open.keys()):
                yield f"reads {future!r}, a copy in flight that it does not wait for"
        for source in sorted(args & self.freed.keys()):
            yield f"reads {source!r} after bound symbol {self.freed[source]}, where its memory was freed"
        for host in sorted(args & self.on_host):
            if bsym.sym.id is PrimIDs.RETURN:
                outputs = bsym.args[0]["output"] if has_backward(self.trace) else bsym.args
                if host in names(tree_iter(outputs)):
                    yield f"returns {host!r}, which is in host memory"
            elif bsym.sym is not fsdp_copy_to_device:
                yield f"reads {host!r}, which is in host memory"

    def _issue(self, bsym: BoundSymbol) -> Iterator[str]:
        source = bsym.args[0]
        if bsym.sym is fsdp_copy_to_device and source.name not in self.of_forward:
            yield f"copies {source.name!r}, which forward has not copied to host memory"

    def _wait(self, position: int, bsym: BoundSymbol) -> Iterator[str]:
        future, *others = bsym.args
        _, issue = self.open.pop(future.name, (position, None))
        if issue is None or issue.sym is not _ISSUED_BY[bsym.sym]:
            yield f"waits for {future.name!r}, which is no such copy in flight"
            return
        source, result = issue.args[0], bsym.output
        if bsym.sym is fsdp_wait_host_copy:
            if [other.name for other in others] != [source.name]:
                yield f"waits for a copy of {source.name!r} with other operands, {[other.name for other in others]}"
                return
            self.freed[source.name] = position
            self.on_host.add(result.name)
        elif source.name in self.of_forward:
            original = self.of_forward[source.name].args[1]
            if (result.shape, result.dtype, result.device) != (original.shape, original.dtype, original.device):
                yield f"returns {result.name!r} with another shape, dtype or device than {original.name!r} in forward"

    def _writes(self, bsym: BoundSymbol) -> Iterator[str]:
        facts = facts_of(bsym)
        written = facts.writes if facts.known else set(args_of(bsym))
        if bsym.sym.id is PrimIDs.RETURN or not written or not self.open:
            return
        roots = frozenset().union(*(self.aliases.roots(name) for name in written))
        for _, issue in self.open.values():
            source = issue.args[0].name
            if roots & self.aliases.roots(source):
                yield f"may write {source!r} while it is being copied"
