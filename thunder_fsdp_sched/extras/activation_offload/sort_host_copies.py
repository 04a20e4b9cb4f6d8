"""Move copies of offloaded activations so that they overlap compute. All other bound symbols keep their order."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ...ir.effects import effects, operations
from ...ir.inspection import UNPACKING, nbytes_of, outs_of, short_form, statements, with_bound_symbols
from ..step_memory.value_memory import MemoryAnalysis
from .host_copies import without_token

MAX_HOST_COPIES_IN_FLIGHT = 4
"""How many copies of the largest size may be in flight in each direction, because each occupies device memory. One block
of a transformer saves about as many large values shortly after one another."""


_MARGIN = 1.25
"""How much longer a copy is assumed to take than its simulated time, so that small errors do not expose it."""


_LIMIT = f"in-flight limit: the bytes of the {MAX_HOST_COPIES_IN_FLIGHT} largest copies"


class CopyTimes(NamedTuple):
    """The times by which copies are placed.

    Attributes:
        seconds: returns the time of each bound symbol of a trace on the compute stream.
        copy_seconds: returns the time of a copy of so many bytes.
    """

    seconds: Callable[[TraceCtx], Sequence[float]]
    copy_seconds: Callable[[int], float]


def sort_host_copies(trace: TraceCtx, *, times: CopyTimes) -> TraceCtx:
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
        times: those of compute and of copies.
    """
    others, found = operations(statements(trace), of_buckets=False)
    if not found:
        return trace
    begins = accumulate(times.seconds(with_bound_symbols(trace, others, "fsdp: without host copies")), initial=0.0)
    copies = [
        _Copy(issue, without_token(wait), nbytes := nbytes_of(issue.args[0]), times.copy_seconds(nbytes) * _MARGIN)
        for issue, wait in found
    ]
    sorter = _CopySorter(others, copies, list(begins))
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


class _CopySorter:
    """Sorts the copies of one trace.

    Args:
        others: all other bound symbols, which positions count.
        begins: the time at which each of them begins, and that at which the last one ends.
    """

    def __init__(self, others: Sequence[BoundSymbol], copies: Sequence[_Copy], begins: Sequence[float]) -> None:
        self.others, self.copies, self.begins = others, copies, begins
        self.limit = sum(sorted(copy.nbytes for copy in copies)[-MAX_HOST_COPIES_IN_FLIGHT:])
        self.live = MemoryAnalysis(others)
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
