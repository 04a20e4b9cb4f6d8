"""Gather parameters again in backward (ZeRO-3), and recompute values that derive from them or are chosen.

[Note: Recomputation of values]
With ``max_memory``, backward recomputes chosen values of forward instead of reading saved ones
(``extras.planning.recomputation``). This pass repeats the operators that compute them, right before their first reader in
backward. So recomputation is by value, not by module: an operator runs again only if something in backward needs it.
Operators and inputs are those of forward, so the values have the same bits. Only operators that are known to be pure
qualify: they draw no random numbers, write to no input and do not communicate. Results of all others are saved. Regions
of ``torch.utils.checkpoint`` are recomputed by Thunder, before this pass, and stay as they are; see [Note: One sample]
in ``mends.random_draws``.

[Note: Twice, before and after fusion]
The pass runs on the joint trace before the fusion executors, so that regions of backward already read parameters that
backward gathers. It runs once more after them, for two reasons. Fusion executors rematerialize: they recompute a saved
value from its inputs, which can make backward read a parameter that forward gathered. And a region may return a
transposed or cast parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from thunder.core.prims import PrimIDs
from thunder.core.proxies import NumberProxy, Proxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx

from ..ir.effects import bucket_of, effects
from ..ir.inspection import (
    args_of,
    defined_by,
    derivation,
    forward_part,
    nested,
    outs_of,
    swap_args,
    unused_name,
    with_bound_symbols,
)
from ..ir.operator_facts import is_pure
from ..ir.statements import operations, read_statements
from ..ir.symbols import gather_and_wait
from ..runtime.bucket import Bucket


def regather_for_backward(
    trace: TraceCtx, *, kept_buckets: Collection[Bucket], recomputed: Collection[str] = ()
) -> TraceCtx:
    """Insert a second gather of every bucket that backward reads, except those that are ``kept_buckets``.

    Runs on the joint trace after ``fuse_downcast`` and before ``keep_fusions_apart``, and again after the fusion
    executors and ``remove_cuts``; see [Note: Twice, before and after fusion]. Does nothing if the trace has no backward
    part, or if all its buckets are kept and nothing is recomputed. Before, in the backward part::

        t123 = torch.matmul(t122, t117)  # t117 was gathered in forward

    After::

        ft157 = fsdp_all_gather(bucket_blocks_2, None, t_blocks_2_weight, reuse_cast=False)  # 16,384 bytes float32
        (bw_t117,) = fsdp_wait_params(bucket_blocks_2, ft157)
        t123 = torch.matmul(t122, bw_t117)

    A value that derives from parameters and constants alone, such as a transposed weight, is recomputed in backward
    from the parameters gathered there. Its name gets the prefix ``bw_``. Values in ``recomputed`` are treated alike:
    see [Note: Recomputation of values].

    Args:
        kept_buckets: buckets that stay unsharded from forward to backward.
        recomputed: names of values of forward that backward computes again. Their operators must be pure.
    """
    forward = forward_part(trace)
    regathers = any(effects(b).is_gather and bucket_of(b).base not in kept_buckets for b in trace.bound_symbols)
    if all(forward[:-1]) or not (regathers or recomputed):
        return trace
    new = with_bound_symbols(trace, (), "fsdp: regather for backward")
    with tracectx(new):
        _Regather(new, kept_buckets, recomputed).run(trace, forward)
    return new


def reads_memory(bsym: BoundSymbol) -> bool:
    """Return whether ``bsym`` needs the memory of its arguments; ``get_grad`` only names an output of forward."""
    return bsym.sym.id not in (PrimIDs.GET_GRAD, PrimIDs.RETURN, PrimIDs.DEL)


class BackwardCopies:
    """Values of forward that backward computes again under other names.

    Attributes:
        new: the trace that gets the copies.
        replacements: the proxies that replace forward's in backward, keyed by the names of forward's.
    """

    def __init__(self, new: TraceCtx) -> None:
        self.new = new
        self.replacements: dict[str, Proxy] = {}

    def need(self, name: str) -> None:
        """Add the bound symbols that compute a value again, if it is to be recomputed, before its first reader."""
        raise NotImplementedError

    def add_reader(self, bsym: BoundSymbol) -> None:
        """Add an original bound symbol of backward, after what it needs."""
        if reads_memory(bsym):
            for name in args_of(bsym):
                self.need(name)
            bsym = swap_args(bsym, self.replacements)
        self.new.bound_symbols.append(bsym)

    def rename(self, proxy: Proxy) -> Proxy:
        """Return the proxy that takes the place of ``proxy`` in backward."""
        if proxy.name not in self.replacements:
            self.replacements[proxy.name] = proxy.replace_name(unused_name(self.new, f"bw_{proxy.name}"))
        return self.replacements[proxy.name]

    def add(self, bsym: BoundSymbol) -> None:
        """Add a bound symbol of backward."""
        bsym.tags.add(BoundSymbolTag.BACKWARD)
        self.new.bound_symbols.append(bsym)

    def repeat(self, bsym: BoundSymbol) -> None:
        """Add a copy of a bound symbol of forward, unless all of its results have been computed again already."""
        if all(name in self.replacements for name in outs_of(bsym)):
            return
        for part in nested([bsym]):
            for proxy in defined_by(part):
                self.rename(proxy)
        proxies = (p for part in nested([bsym]) for p in (*part.flat_proxy_args, *part.flat_proxy_outs))
        new = {variableify(p): self.replacements[p.name] for p in proxies if p.name in self.replacements}
        self.add(bsym.from_bsym_swap_proxies(new))


class _Regather(BackwardCopies):
    def __init__(self, new: TraceCtx, kept_buckets: Collection[Bucket], recomputed: Collection[str]) -> None:
        super().__init__(new)
        self.kept_buckets = kept_buckets
        self.recomputed = recomputed
        self.producers: dict[str, BoundSymbol] = {}
        self.order: dict[str, int] = {}  # the order in which forward defines values
        self.derived: dict[str, bool] = {}  # values of parameters or constants alone, and whether any is a parameter
        # Gather and wait of each bucket. Those in backward are from an earlier run of this pass, and moved up if needed.
        self.in_forward: dict[Bucket, list[BoundSymbol]] = {}
        self.in_backward: dict[Bucket, list[BoundSymbol]] = {}
        self.of_param: dict[str, Bucket] = {}  # by the name of a parameter that backward has gathered
        self.gathered: set[Bucket] = set()

    def run(self, trace: TraceCtx, forward: Sequence[bool]) -> None:
        is_forward = dict(zip(map(id, trace.bound_symbols), forward, strict=True))
        for operation in operations(read_statements(trace))[1]:
            if effects(wait := operation[-1]).unshards:
                (self.in_forward if is_forward[id(wait)] else self.in_backward)[bucket_of(wait)] = operation
        for bucket, (_, wait) in self.in_backward.items():
            self.of_param.update(dict.fromkeys(outs_of(wait), bucket))
        for bsym in trace.bound_symbols:
            if is_forward[id(bsym)]:
                self._classify(bsym)
        for bsym in trace.bound_symbols:
            if is_forward[id(bsym)]:
                self.new.bound_symbols.append(bsym)
            elif (e := effects(bsym)).is_gather or e.unshards:
                self._gather(bucket_of(bsym))
            else:
                self.add_reader(bsym)

    def _classify(self, bsym: BoundSymbol) -> None:
        self.producers.update(dict.fromkeys(outs_of(bsym), bsym))
        parts = bsym.subsymbols if bsym.sym.is_fusion else (bsym,)
        for out in (out for part in parts for out in outs_of(part)):
            self.order[out] = len(self.order)
        if effects(bsym).unshards:
            if bucket_of(bsym).base not in self.kept_buckets:
                self.derived.update(dict.fromkeys(outs_of(bsym), True))
        elif not effects(bsym).is_gather and bsym.sym.id is not PrimIDs.UNPACK_TRIVIAL:
            for part in filter(is_pure, parts):
                for proxy in part.flat_proxy_args:
                    if isinstance(proxy, NumberProxy):  # a size, under symbolic values
                        self.derived.setdefault(proxy.name, False)
                inputs = args_of(part)
                if all(name in self.derived for name in inputs):
                    self.derived.update(dict.fromkeys(outs_of(part), any(self.derived[name] for name in inputs)))

    def need(self, name: str) -> None:
        """Gather ``name``, or recompute it if it is a value of forward that derives from parameters alone or is chosen.

        Before it, do the same for the values that it derives from, in the order of forward.
        """
        if name in self.of_param:
            self._gather(self.of_param[name])
        parts: dict[str, BoundSymbol] = {}  # by the name of an output
        pending = [name]
        while pending:
            current = pending.pop()
            if current in self.replacements or not (self.derived.get(current) or current in self.recomputed):
                continue
            producer = self.producers[current]
            if effects(producer).unshards:
                parts[current] = producer
                continue
            for part in derivation(producer, current):
                out = outs_of(part)[0]
                if out not in parts:
                    parts[out] = part
                    pending += args_of(part)
        for out in sorted(parts, key=self.order.__getitem__):
            if effects(parts[out]).unshards:
                self._gather(bucket_of(parts[out]))
            else:
                self.repeat(parts[out])

    def _gather(self, bucket: Bucket) -> None:
        """Emit backward's gather and wait of ``bucket`` before the first bound symbol that needs it, once."""
        if bucket in self.gathered:
            return
        self.gathered.add(bucket)
        in_forward = self.in_forward.get(bucket)
        if bucket in self.in_backward:
            self.new.bound_symbols += self.in_backward[bucket]
        elif in_forward is not None:
            _, _, *shards = in_forward[0].args
            # See [Note: Reuse of casts] in `cast_source`.
            marks = {"reuse_cast": True} if bucket.spec.sends_copy else {}
            for bsym in gather_and_wait(bucket, shards, [self.rename(p) for p in in_forward[1].output], **marks):
                self.add(bsym)
        if in_forward is not None:
            params = self.new.bound_symbols[-1].output
            self.replacements |= {old.name: new for old, new in zip(in_forward[1].output, params, strict=True)}
