"""Move communication to where a fusion region may end, so that regions are large and none needs two buckets.

[Note: Cuts]
A fusion executor joins the bound symbols between two that it cannot fuse (fusion type "consecutive"), or those that
data flow connects ("dataflow"). With the first, a region would end wherever a bucket is first used, in the middle of a
layer norm. With the second, all blocks would become one region that waits for every bucket.

So communication moves to *cuts*. A gather may move up from its first consumer, a reduction may move down from its last
gradient, both as long as no other bucket is used in between. Among these positions, the cut is one where a region ends
anyway, or else the one with the fewest live tensors; between two blocks that is the residual stream alone. Tensors that
cross a cut pass through an ``fsdp_fusion_barrier``, which no executor fuses, so the cut also exists in the data flow. The
``token`` of a wait makes values that derive from parameters alone (a cast, a transpose) depend on the cut. Without it,
the casts of all blocks would be fused.

``remove_cuts`` removes both after the fusion executors. ``sort_communication`` decides the final positions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, has_tags
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import FusionExecutor

from ..ir.analysis import Analysis, bytes_at
from ..ir.effects import Effects, bucket_of, declared, effects, is_declared
from ..ir.inspection import args_of, forward_part, outs_of, swap_args, with_bound_symbols, with_token, without_token
from ..ir.registry import register
from ..ir.symbols import only_in_between
from ..runtime.bucket import Bucket

_EXPENSIVE = {OpTags.DONT_AUTO_RECOMPUTE_IN_BACKWARD}  # Thunder's tag of matmuls and attention
_NOT_COMPUTE = frozenset({PrimIDs.UNPACK_TRIVIAL, PrimIDs.GET_GRAD, PrimIDs.RETURN, PrimIDs.COMMENT})


def _cut_meta(*tensors: TensorProxy) -> tuple[TensorProxy, ...]:
    return tuple(TensorProxy(like=t) for t in tensors)


def _cut_effects(bsym: BoundSymbol) -> Effects:
    aliases = {out.name: (arg.name,) for out, arg in zip(bsym.output, bsym.args, strict=True)}
    return Effects(aliases=aliases, is_fusion_barrier=True)


fsdp_fusion_barrier = register("fsdp_fusion_barrier", only_in_between, _cut_effects, _cut_meta)


# Passes between this one and remove_cuts may do anything that respects the data flow through fsdp_fusion_barrier.
def keep_fusions_apart(trace: TraceCtx, *, fusions: Sequence[FusionExecutor]) -> TraceCtx:
    """Move gathers and reductions, with their waits, to where fusion regions may end, and insert cuts there.

    Runs on the joint trace after ``regather_for_backward`` and before the fusion executors. Does nothing if no executor
    can fuse any bound symbol. Compute keeps its order. Before, with blocks of two linear layers and a GELU::

        t85 = prims.linear(t75, t177, t178)
        ft200 = fsdp_all_gather(bucket_blocks_1, None, t_blocks_1_0_weight, ...)  # 320 bytes float32
        (t179, t180, t181, t182,) = fsdp_wait_params(bucket_blocks_1, ft200)
        t103 = prims.linear(t85, t179, t180)

    After::

        t85 = prims.linear(t75, t177, t178)
        (cut_t85,) = fsdp_fusion_barrier(t85)
        ft200 = fsdp_all_gather(bucket_blocks_1, None, t_blocks_1_0_weight, ...)  # 320 bytes float32
        (t179, t180, t181, t182,) = fsdp_wait_params(bucket_blocks_1, ft200, cut_t85)
        t103 = prims.linear(cut_t85, t179, t180)

    The cost is linear in the number of bound symbols. See [Note: Cuts].

    Args:
        fusions: the fusion executors.
    """
    fusible = {id(bsym) for bsym in trace.bound_symbols if _is_compute(bsym) and any(e.can_fuse(bsym) for e in fusions)}
    if not fusible:
        return trace
    forward, live = forward_part(trace), Analysis(trace)
    params = {p.name: e.bucket for outs, e in zip(live.outs, live.effects, strict=True) if e.unshards for p in outs}
    halves = {True: _Half(params, is_backward=False), False: _Half(params, is_backward=True)}
    for bsym, args, is_forward in zip(trace.bound_symbols, live.args, forward, strict=True):
        halves[is_forward].add(bsym, {root.name for arg in args for root in arg.roots})
    for half in halves.values():
        half.assign_positions(fusible)

    new = with_bound_symbols(trace, (), "fsdp: keep fusions apart")
    out = new.bound_symbols
    with tracectx(new):
        for bsym, is_forward in zip(trace.bound_symbols[:-1], forward, strict=False):
            half = halves[is_forward]
            if _is_compute(bsym):
                out += half.emit()
                out.append(swap_args(bsym, half.names))
            elif not half.moves(bsym):
                out.append(bsym)
        out += halves[False].emit()
        out.append(trace.bound_symbols[-1])
    return new


def remove_cuts(trace: TraceCtx) -> TraceCtx:
    """Remove the cuts and tokens that ``keep_fusions_apart`` inserted; each value has one name again.

    Runs on the joint trace right after the fusion executors and before the second ``regather_for_backward``. A trace
    without cuts keeps its bound symbols. Before::

        [t43, t85] = TorchCompile0(x, t175, t176, t177, t178)
        (cut_t85,) = fsdp_fusion_barrier(t85)
        ft200 = fsdp_all_gather(bucket_blocks_1, None, t_blocks_1_0_weight, ...)  # 320 bytes float32
        (t179, t180, t181, t182,) = fsdp_wait_params(bucket_blocks_1, ft200, cut_t85)
        [t103, t145] = TorchCompile1(cut_t85, t179, t180, t181, t182)

    After::

        [t43, t85] = TorchCompile0(x, t175, t176, t177, t178)
        ft200 = fsdp_all_gather(bucket_blocks_1, None, t_blocks_1_0_weight, ...)  # 320 bytes float32
        (t179, t180, t181, t182,) = fsdp_wait_params(bucket_blocks_1, ft200)
        [t103, t145] = TorchCompile1(t85, t179, t180, t181, t182)
    """
    original: dict[str, Proxy] = {}
    bsyms = []
    for bsym in trace.bound_symbols:
        if declared(bsym).is_fusion_barrier:
            for before, after in zip(bsym.args, bsym.output, strict=True):
                original[after.name] = original.get(before.name, before)
            continue
        bsyms.append(swap_args(without_token(bsym), original))
    return with_bound_symbols(trace, bsyms, "fsdp: remove cuts")


def _is_compute(bsym: BoundSymbol) -> bool:
    return not is_declared(bsym.sym) and bsym.sym.id not in _NOT_COMPUTE


@dataclass(eq=False)
class _Comm:
    """A collective and its wait, to be placed before compute number ``position`` of their half if they are ``moved``."""

    bsyms: list[BoundSymbol]
    position: int
    moved: bool = False

    @property
    def is_gather(self) -> bool:
        return effects(self.bsyms[0]).is_gather


class _Half:
    """The forward or backward half of a joint trace: its compute, numbered in order, and its communication.

    Args:
        params: the bucket of each gathered parameter, by the parameter's name.
    """

    def __init__(self, params: Mapping[str, Bucket | None], *, is_backward: bool) -> None:
        self.params = params
        self.is_backward = is_backward
        self.compute: list[BoundSymbol] = []
        self.buckets: list[set[Bucket | None]] = []  # whose parameters, or views of them, each compute reads
        self.comms: list[_Comm] = []
        self.comm_of: dict[str, _Comm] = {}  # by the name of the future
        self.next_position = 0
        self.names: dict[str, Proxy] = {}  # new names of tensors that have crossed a cut

    def add(self, bsym: BoundSymbol, roots: Collection[str]) -> None:
        """Record the next bound symbol of this half, which reads values that may share memory with ``roots``."""
        if _is_compute(bsym):
            self.compute.append(bsym)
            self.buckets.append({self.params[root] for root in roots if root in self.params})
        elif (wait := effects(bsym).waits) is not None:
            comm = self.comm_of[wait.future]
            comm.bsyms.append(bsym)
            self.comm_of.update(dict.fromkeys(outs_of(bsym), comm))
        elif effects(bsym).in_schedule:
            self.comms.append(_Comm([bsym], len(self.compute)))
            self.comm_of.update(dict.fromkeys(outs_of(bsym), self.comms[-1]))

    def assign_positions(self, fusible: Collection[int]) -> None:
        """Choose the position of every gather and reduction.

        Args:
            fusible: the ``id`` of each bound symbol that may be fused.
        """
        count, live = len(self.compute), Analysis(self.compute)
        self.live = live
        made = [v for v in live.values if v.first >= 0 and v.reads and isinstance(v.proxy, TensorProxy)]
        # At each position, the number of live tensors: produced before it and read after it.
        cost = bytes_at(((value.first + 1, value.reads[-1], 1) for value in made), count + 1)
        for position in range(1, count):
            if id(self.compute[position - 1]) not in fusible or id(self.compute[position]) not in fusible:
                cost[position] = 0
        self.barriers = [i for i, e in enumerate(live.effects) if e.communicates]
        self._position_gathers(cost)
        self._position_reductions(cost)
        self.comms_at: dict[int, list[_Comm]] = defaultdict(list)
        for comm in self.comms:
            if comm.moved:
                self.comms_at[comm.position].append(comm)
        self.moved = {id(bsym) for comm in self.comms if comm.moved for bsym in comm.bsyms}
        self.crossing: dict[int, list[TensorProxy]] = defaultdict(list)  # the live tensors, in order of production
        cuts = sorted(self.comms_at)
        for value in made:
            for position in cuts[bisect_right(cuts, value.first) : bisect_right(cuts, value.reads[-1])]:
                self.crossing[position].append(value.proxy)

    def _first_read(self, wait: BoundSymbol) -> int:
        """Return the number of the first compute that reads a result of ``wait``, or the number of all if none does."""
        first = self.live.first_read(outs_of(wait))
        return len(self.compute) if first is None else first

    def _position_gathers(self, cost: list[int]) -> None:
        last_use = {bucket: i for i, buckets in enumerate(self.buckets) for bucket in buckets}
        closed = sorted(set(last_use.values()))
        expensive = [i for i, bsym in enumerate(self.compute) if has_tags(bsym, _EXPENSIVE)]
        first = {comm: self._first_read(comm.bsyms[-1]) for comm in self.comms if comm.is_gather}
        earlier, position = -1, 0  # consumer and position of the previous gather
        for comm, consumer in sorted(first.items(), key=lambda item: item[1]):
            if consumer == len(self.compute):
                continue  # only a reduction reads it, no compute
            if consumer > earlier:
                ready = self.live.defined(args_of(comm.bsyms[0]))
                limits = (max(earlier, 0), _latest(closed, consumer), _latest(self.barriers, consumer), ready)
                positions = range(min(max(limits) + 1, consumer), consumer + 1)
                # The later the better, because compute before the cut hides the gather. But in forward a block's first
                # weights are read at the end of a norm. To keep the norm in one region, only expensive compute stays
                # before the cut there.
                position = _last_cheapest(cost, positions)
                if cost[position] and not self.is_backward and earlier >= 0:
                    positions = range(max(positions[0], _latest(expensive, consumer) + 1), consumer + 1)
                    position = min(positions, key=cost.__getitem__)
                earlier = consumer
            comm.position, comm.moved = position, True
        for comm in first:
            if comm.moved:
                cost[comm.position] = 0

    def _position_reductions(self, cost: list[int]) -> None:
        ready: dict[_Comm, int] = {}
        for comm in self.comms:
            grads = args_of(comm.bsyms[0])
            # A gradient may be a gathered parameter itself: then no compute precedes the reduction, only a wait.
            if not comm.is_gather and not any(grad in self.params for grad in grads):
                made = [self.live.defined([grad]) for grad in grads]  # in compute, or else before it
                ready[comm] = max((comm.position if at < 0 else at + 1 for at in made), default=comm.position)
        order = sorted(ready, key=ready.__getitem__)
        for number, comm in enumerate(order):
            start, bucket = ready[comm], bucket_of(comm.bsyms[0])
            end = min(map(self._first_read, comm.bsyms[1:]), default=len(self.compute))
            if number + 1 < len(order):
                end = min(end, max(start, ready[order[number + 1]] - 1))
            latest = start
            while latest < end and self.buckets[latest] <= {bucket} and latest not in self.barriers:
                latest += 1
            comm.position, comm.moved = _last_cheapest(cost, range(start, latest + 1)), True
            cost[comm.position] = 0

    def moves(self, bsym: BoundSymbol) -> bool:
        """Return whether ``bsym`` is communication that ``emit`` returns at another position."""
        return id(bsym) in self.moved

    def emit(self) -> list[BoundSymbol]:
        """Return the bound symbols to insert before the next compute: reductions, the cut, gathers."""
        position, self.next_position = self.next_position, self.next_position + 1
        comms = self.comms_at.get(position, ())
        bsyms = [bsym for comm in comms if not comm.is_gather for bsym in comm.bsyms]
        token = None
        if crossing := self.crossing.get(position):
            renamed = tuple(proxy.replace_name(f"cut_{proxy.name}", disambiguate=True) for proxy in crossing)
            cut = fsdp_fusion_barrier.bind(*(self.names.get(p.name, p) for p in crossing), output=renamed)
            if self.is_backward:
                cut.tags.add(BoundSymbolTag.BACKWARD)
            bsyms.append(cut)
            self.names.update(zip((p.name for p in crossing), renamed, strict=True))
            token = renamed[-1]
        for comm in comms:
            if comm.is_gather:
                gather, wait = comm.bsyms
                bsyms += [gather, with_token(wait, token)]
        return bsyms


def _last_cheapest(cost: Sequence[int], positions: range) -> int:
    return min(reversed(positions), key=cost.__getitem__)


def _latest(ascending: Sequence[int], position: int) -> int:
    """Return the largest of the numbers below ``position``; -1 if there is none."""
    number = bisect_left(ascending, position)
    return ascending[number - 1] if number else -1
