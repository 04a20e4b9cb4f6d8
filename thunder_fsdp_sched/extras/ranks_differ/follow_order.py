"""Let a rank's own trace follow the merged order and take part in the collectives that only others need."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag, tracectx

from ...ir.effects import effects
from ...ir.inspection import UNPACKING, args_of, outs_of, statements, with_bound_symbols
from ...ir.statements import Statement, read_statements
from ...runtime.bucket import Bucket
from .merging import ALL_REDUCE, GATHER, REDUCE, SERVED_IN_FLIGHT, BucketKey, Key, Own, Step, place
from .symbols import (
    ServingStart,
    fsdp_serve_all_reduce,
    fsdp_serve_gather,
    fsdp_serve_reduce,
    fsdp_wait_served,
    fsdp_wait_served_grads,
    key_of,
)


def follow_order(
    trace: TraceCtx,
    *,
    order: Sequence[Key],
    start: ServingStart,
    buckets: Mapping[BucketKey, Bucket],
    sources: Mapping[Key, str],
    no_sync: bool = False,
) -> TraceCtx:
    """Reorder the communication of a scheduled trace along the merged order, and insert the collectives of others.

    Runs on a trace after the phase "scheduled", and before ``assign_slots``, which assigns all slots anew. Compute keeps its
    order. Before, on a rank that uses the blocks 0 and 2, if another rank uses the blocks 1 and 2::

        ft146 = fsdp_all_gather(bucket_blocks_0, slot_0, t_blocks_0_weight, reuse_cast=False)  # 16,384 bytes float32
        ft148 = fsdp_all_gather(bucket_blocks_2, slot_1, t_blocks_2_weight, reuse_cast=False)  # 16,384 bytes float32
        (t109,) = fsdp_wait_params(bucket_blocks_0, ft146)
        t110 = torch.nn.functional.linear(x, t109, None)
        (t113,) = fsdp_wait_params(bucket_blocks_2, ft148)

    After, with the merged order 0, 1, 2::

        ft146 = fsdp_all_gather(bucket_blocks_0, slot_0, t_blocks_0_weight, reuse_cast=False)  # 16,384 bytes float32
        # for others: rank 1 reads it at model.py:17; nothing is read here
        ft160 = fsdp_serve_gather(bucket_blocks_1, None, forward_0, 0)  # 16,384 bytes float32
        ft148 = fsdp_all_gather(bucket_blocks_2, slot_1, t_blocks_2_weight, reuse_cast=False)  # 16,384 bytes float32
        (t109,) = fsdp_wait_params(bucket_blocks_0, ft146)
        t110 = torch.nn.functional.linear(x, t109, None)
        (t113,) = fsdp_wait_params(bucket_blocks_2, ft148)
        ...
        # for others: before the return
        fsdp_wait_served(bucket_blocks_1, ft160, forward_0)

    The rules:

    * All collectives are issued in the merged order. The rank's own stay where they are unless the order forces them to
      move: see ``merging.place``.
    * A served one is issued as early as the order allows. At most ``SERVED_IN_FLIGHT`` of them have a slot at a time,
      see [Note: Served collectives in flight] in ``symbols``.
    * Gathers lose the marks of buckets that stay resident. The trace loses its releases, which ``build`` inserts again,
      and its reductions of other buckets' unreduced gradients, which ``fsdp_serve_left`` makes for all ranks.

    Args:
        order: the merged order of all programs that the ranks know.
        start: the start of the trace, which decides at run time which collectives are served.
        buckets: all buckets of this rank, including aliases. It takes part in the collectives of no others.
        sources: which rank reads or reduces, and where: ``"rank 0 reads it at model.py:17"``.
        no_sync: whether gradients accumulate.
    """
    bsyms = [bsym for bsym in statements(trace) if _stays(bsym)]
    steps = steps_at(read_statements(bsyms))
    at: dict[tuple[Key, bool], int] = {(step.key, step.waits): statement.position for statement, step in steps}
    issued = [key for key, waits in at if not waits]
    defined = {out: position for position, bsym in enumerate(bsyms) for out in outs_of(bsym)}
    own, last_gradient = [], 0
    for key in issued:
        planned, waited = at[key, False], at[key, True]
        if key[0] == REDUCE:
            last_gradient = max((defined.get(arg, -1) for arg in args_of(bsyms[planned])), default=-1) + 1
        elif key[0] == ALL_REDUCE:
            last_gradient = at[(REDUCE, *key[1:]), False]
        own.append(Own(key, planned, waited, waited if key[0] == GATHER else last_gradient))
    first = next(i for i, bsym in enumerate(bsyms) if not _begins(bsym))  # after the statements that unpack and check
    takes_part = {key for key in order if key[1] in buckets or (key, False) in at}
    placed = place(order, own, takes_part, len(bsyms) - 1)
    if len(own) != sum(not each.served for each in placed):
        raise AssertionError(f"the merged order lacks {sorted(set(issued).difference(order))}")

    # By position: at each, issues come first, then waits, then the statement itself.
    moved = set(at.values())
    found = [((position, 2, 0), bsym) for position, bsym in enumerate(bsyms) if position not in moved]
    new = with_bound_symbols(trace, (), "fsdp: follow the merged order")
    serving = _ServingStatements(start, sources, no_sync, {key[1:] for key in takes_part if key[0] == ALL_REDUCE})
    with tracectx(new):
        for number, each in enumerate(placed):
            issue, wait = (max(each.issue, first), 0, number), (max(each.wait, first), 1, number)
            if each.served:
                found += [(issue, bsym) for bsym in serving.issue(each.key, buckets[each.key[1]])]
                continue
            found.append((issue, _without_marks(bsyms[at[each.key, False]])))
            waiting = bsyms[at[each.key, True]]
            if effects(waiting).issues is None:  # an all-reduce waits for its reduction
                found.append((wait, waiting.from_bsym()))
        found += [((len(bsyms) - 1, 1, len(placed)), bsym) for bsym in serving.wait("before the return", most=0)]
    new.bound_symbols = [bsym for _, bsym in sorted(found, key=lambda each: each[0])]
    return new


def empty_trace(name: str, *, backward: bool = False) -> TraceCtx:
    """Return the trace of a rank without a batch: a function without arguments that returns nothing."""

    def nothing() -> None: ...

    nothing.__name__ = name
    trace = TraceCtx(nothing)
    trace.args = ()
    if backward:
        trace.tags.add(TraceTag.BACKWARD)
    with tracectx(trace):
        prims.python_return()
    return trace


def steps_at(statements: Iterable[Statement]) -> Iterator[tuple[Statement, Step]]:
    """Yield the issues and waits of collectives with their statements."""
    issued: list[Key] = []
    earlier: Counter[tuple[str, BucketKey]] = Counter()
    for statement in statements:
        if statement.waits_for is not None:
            yield statement, Step(issued[statement.waits_for.number], True)
        if statement.issue is not None and statement.effects.bucket is not None:
            kind = GATHER if statement.issue.gathers else REDUCE if statement.waits_for is None else ALL_REDUCE
            name = kind, key_of(statement.effects.bucket)
            issued.append((*name, earlier[name]))
            earlier[name] += 1
            yield statement, Step(issued[-1], False)


def _stays(bsym: BoundSymbol) -> bool:
    e = effects(bsym)
    return e.runs is None and not e.frees


def _begins(bsym: BoundSymbol) -> bool:
    return bsym.sym.id in UNPACKING or bsym.sym.id is PrimIDs.COMMENT or effects(bsym).ensures is not None


def _without_marks(bsym: BoundSymbol) -> BoundSymbol:
    """Return the issue of an own collective without marks, because nothing is resident."""
    issue = effects(bsym).issues
    marks = {} if issue is None else issue.marks
    return bsym.from_bsym(kwargs={name: value for name, value in bsym.kwargs.items() if name not in marks})


class _ServingStatements:
    """The bound symbols with which a rank serves others, with at most ``SERVED_IN_FLIGHT`` collectives in flight."""

    def __init__(
        self, start: ServingStart, sources: Mapping[Key, str], no_sync: bool, reduced_across: set[tuple[BucketKey, int]]
    ) -> None:
        self._start, self._sources, self._no_sync = start, sources, no_sync
        self._reduced_across = reduced_across
        self._reduced: dict[tuple[BucketKey, int], BoundSymbol] = {}  # those that an all-reduce follows
        self._in_flight: deque[BoundSymbol] = deque()

    def wait(self, why: str, most: int) -> Iterator[BoundSymbol]:
        """Yield waits for the oldest collectives in flight, so that at most ``most`` remain."""
        while len(self._in_flight) > most:
            issue = self._in_flight.popleft()
            bucket, future = issue.args[0], issue.output
            if issue.sym is fsdp_serve_gather:
                wait = fsdp_wait_served.bind(bucket, future, self._start, output=None)
            else:
                wait = fsdp_wait_served_grads.bind(bucket, future, self._start, self._no_sync, output=None)
            yield wait.from_bsym(header=f"for others: {why}")

    def issue(self, key: Key, bucket: Bucket) -> Iterator[BoundSymbol]:
        """Yield the issue of a collective, after a wait if too many are in flight."""
        kind, _, occurrence = key
        yield from self.wait("before the next collective for others", SERVED_IN_FLIGHT - 1)
        symbol, arguments = fsdp_serve_gather, [bucket, None, self._start, occurrence]
        if kind == REDUCE:
            symbol = fsdp_serve_reduce
        elif kind == ALL_REDUCE:
            symbol, arguments = fsdp_serve_all_reduce, [bucket, self._reduced[key[1:]].output]
        remark = f"{self._sources[key]}; " if self._sources.get(key) else ""
        remark += "nothing is read here" if kind == GATHER else "zeros are sent"
        issue = symbol.bind(*arguments, output=symbol.meta(*arguments)).from_bsym(header=f"for others: {remark}")
        if kind == REDUCE and key[1:] in self._reduced_across:
            self._reduced[key[1:]] = issue
        else:
            self._in_flight.append(issue)
        yield issue
