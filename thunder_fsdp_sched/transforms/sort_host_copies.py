"""Move copies of offloaded activations so that they overlap compute. All other bound symbols keep their order."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.analysis import Analysis
from ..ir.effects import effects
from ..ir.host_copies import HOST_COPIES, HOST_COPY_ISSUES, fsdp_copy_to_host, without_token
from ..ir.inspection import UNPACKING, nbytes_of, outs_of, short_form, statements, with_bound_symbols

MAX_HOST_COPIES_IN_FLIGHT = 4
"""How many copies of the largest size may be in flight in each direction, because each occupies device memory. One block
of a transformer saves about as many large values shortly after one another."""

_MARGIN = 1.25
"""How much longer a copy is assumed to take than its simulated time, so that small errors do not expose it."""


@dataclass(eq=False)
class _Copy:
    """A copy in one direction, and positions counted in the other bound symbols.

    Attributes:
        position: of the last use of its source in forward; of the first consumer of its result in backward.
        due: in backward, the position before which it is issued.
    """

    issue: BoundSymbol
    wait: BoundSymbol
    seconds: float
    position: int = -1
    due: int = -1
    finish: float = 0.0

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.issue.args[0])


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
    if not any(bsym.sym.name in HOST_COPIES for bsym in trace.bound_symbols):
        return trace
    others = [b for b in statements(trace) if b.sym.name not in HOST_COPIES]
    work = seconds(with_bound_symbols(trace, others, "fsdp: without host copies"))
    begins = list(accumulate(work, initial=0.0))
    copies = _pair(trace, copy_seconds)
    to_host = [c for c in copies if c.issue.sym is fsdp_copy_to_host]
    out = others
    if to_host:
        out = _sort_forward(others, to_host, begins)
    if to_device := [c for c in copies if c.issue.sym is not fsdp_copy_to_host]:
        out = _sort_backward(others, to_device, begins)
    assert not (to_host and to_device), "a forward or a backward trace has one kind of copies"
    return with_bound_symbols(trace, out, "fsdp: sort host copies")


def _pair(trace: TraceCtx, copy_seconds: Callable[[int], float]) -> list[_Copy]:
    issues: dict[str, BoundSymbol] = {}
    copies = []
    for bsym in trace.bound_symbols:
        if bsym.sym.name in HOST_COPY_ISSUES:
            issues[bsym.output.name] = bsym
        elif bsym.sym.name in HOST_COPIES:
            issue = issues[bsym.args[0].name]
            copies.append(_Copy(issue, without_token(bsym), copy_seconds(nbytes_of(issue.args[0])) * _MARGIN))
    return copies


def _limit(copies: Iterable[_Copy]) -> int:
    return sum(sorted(copy.nbytes for copy in copies)[-MAX_HOST_COPIES_IN_FLIGHT:])


def _sort_forward(others: Sequence[BoundSymbol], copies: Sequence[_Copy], begins: Sequence[float]) -> list[BoundSymbol]:
    live = Analysis(others)
    last_use: dict[str, int] = defaultdict(int)
    for value in live.values:
        for owner in live.owners_of(value):
            last_use[owner.name] = max(last_use[owner.name], value.first, *value.reads, 0)
    issued_after: dict[int, list[_Copy]] = defaultdict(list)
    for copy in copies:
        copy.position = last_use[copy.issue.args[0].name]
        issued_after[copy.position].append(copy)
    limit = _limit(copies)
    in_flight: deque[_Copy] = deque()
    link_free = 0.0
    out: list[BoundSymbol] = []

    def wait(reason: str) -> None:
        out.append(in_flight.popleft().wait.from_bsym(header=reason))

    for position, bsym in enumerate(others):
        while in_flight and in_flight[0].finish <= begins[position]:
            wait("finished by now")
        while in_flight and position == len(others) - 1:
            wait("end of forward")
        out.append(bsym)
        for copy in issued_after.get(position, ()):
            while in_flight and sum(c.nbytes for c in in_flight) + copy.nbytes > limit:
                wait(f"in-flight limit: the bytes of the {MAX_HOST_COPIES_IN_FLIGHT} largest copies")
            out.append(copy.issue.from_bsym(header=f"offload: after the last use in forward, by {short_form(bsym)}"))
            copy.finish = link_free = max(link_free, begins[position + 1]) + copy.seconds
            in_flight.append(copy)
    return out


def _sort_backward(
    others: Sequence[BoundSymbol], copies: Sequence[_Copy], begins: Sequence[float]
) -> list[BoundSymbol]:
    live = Analysis(others)
    for copy in copies:
        first = live.first_read(outs_of(copy.wait))
        copy.position = len(others) - 1 if first is None else first
    ordered = sorted(copies, key=lambda copy: copy.position)
    head = 1 + max((i for i, b in enumerate(others) if _comes_first(b)), default=-1)
    start = begins[-1]
    for copy in reversed(ordered):
        start = min(start, begins[copy.position]) - copy.seconds
        copy.due = min(max(bisect_right(begins, start) - 1, head), copy.position)
    limit = _limit(copies)
    waiting, in_flight = deque(ordered), deque[_Copy]()
    out: list[BoundSymbol] = []

    def issue(position: int) -> None:
        while waiting and waiting[0].due <= position:
            copy = waiting[0]
            if in_flight and sum(c.nbytes for c in in_flight) + copy.nbytes > limit:
                return
            reason = "prefetch: as late as it can still overlap" if copy.due > head else "prefetch: from the start"
            if copy.due < position:
                reason = f"in-flight limit: the bytes of the {MAX_HOST_COPIES_IN_FLIGHT} largest copies"
            out.append(copy.issue.from_bsym(header=reason))
            in_flight.append(waiting.popleft())

    for position, bsym in enumerate(others):
        issue(position)
        while in_flight and in_flight[0].position == position:
            out.append(in_flight.popleft().wait.from_bsym(header=f"first consumer: {short_form(bsym)}"))
            issue(position)
        out.append(bsym)
    return out


def _comes_first(bsym: BoundSymbol) -> bool:
    """Return whether ``bsym`` belongs to the start of a backward trace, where nothing is computed yet."""
    return bsym.sym.id in UNPACKING or effects(bsym).ensures is not None
