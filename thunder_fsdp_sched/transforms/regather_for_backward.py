"""Save less for backward: it gathers parameters again (ZeRO-3), and computes again what derives from them or is chosen.

[Note: Recomputation of values]
``max_memory`` chooses values of forward that backward computes again instead of reading what forward has saved
(``planning.recomputation``). This pass repeats the operators that compute them, right before their first reader in
backward. So recomputation is by value, not by module: an operator runs again only if something in backward needs it.
Operators and inputs are those of forward, so the values have the same bits. Only operators qualify that are known to be
pure, so none that draws random numbers, writes to an input or communicates; what they return is saved. Regions of
``torch.utils.checkpoint`` are recomputed by Thunder, before this pass, and stay as they are; see [Note: One sample] in
``draw_once``.

[Note: Twice, before and after fusion]
The pass runs on the joint trace before the fusion executors, so that regions of backward already read parameters that
backward gathers. It runs once more after them, for two reasons. Fusion executors rematerialize: they recompute a saved
value from its inputs, which can make backward read a parameter that forward gathered. And a region may return a
transposed or cast parameter.
"""

from __future__ import annotations

from collections import defaultdict
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
from ..ir.symbols import gather_and_wait
from ..runtime.bucket import Bucket


def regather_for_backward(trace: TraceCtx, *, kept: Collection[Bucket], recomputed: Collection[str] = ()) -> TraceCtx:
    """Insert a second gather of every bucket that backward reads, except those that are ``kept``.

    Runs on the joint trace after ``fuse_downcast`` and before ``guard_kept``, and again after the fusion executors and
    ``remove_cuts``; see [Note: Twice, before and after fusion]. Does nothing if the trace has no backward part, or if
    all its buckets are kept and nothing is recomputed. Before, in the backward part::

        t123 = torch.matmul(t122, t117)  # t117 was gathered in forward

    After::

        ft157 = fsdp_all_gather(bucket_blocks_2, None, t_blocks_2_weight, again=False)  # 16,384 bytes float32
        (bw_t117,) = fsdp_wait_params(bucket_blocks_2, ft157)
        t123 = torch.matmul(t122, bw_t117)

    A value that derives from parameters and constants alone, such as a transposed weight, is recomputed in backward
    from the parameters gathered there. Its name gets the prefix ``bw_``. So are the values in ``recomputed``: see
    [Note: Recomputation of values].

    Args:
        kept: buckets that stay unsharded from forward to backward.
        recomputed: names of values of forward that backward computes again. Their operators must be pure.
    """
    forward = forward_part(trace)
    regathers = any(effects(b).is_gather and bucket_of(b).base not in kept for b in trace.bound_symbols)
    if all(forward[:-1]) or not (regathers or recomputed):
        return trace
    new = with_bound_symbols(trace, (), "fsdp: regather for backward")
    with tracectx(new):
        _Regather(new, kept, recomputed).run(trace, forward)
    return new


class BackwardCopies:
    """Values of forward that backward computes again under other names.

    Attributes:
        new: the trace that gets the copies.
        replacements: the proxies that take the place of forward's in backward, by the names of those.
    """

    def __init__(self, new: TraceCtx) -> None:
        self.new = new
        self.replacements: dict[str, Proxy] = {}

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
        """Add a copy of a bound symbol of forward, unless all that it defines has been computed for another value."""
        if all(name in self.replacements for name in outs_of(bsym)):
            return
        for part in nested([bsym]):
            for proxy in defined_by(part):
                self.rename(proxy)
        proxies = (p for part in nested([bsym]) for p in (*part.flat_proxy_args, *part.flat_proxy_outs))
        new = {variableify(p): self.replacements[p.name] for p in proxies if p.name in self.replacements}
        self.add(bsym.from_bsym_swap_proxies(new))


class _Regather(BackwardCopies):
    def __init__(self, new: TraceCtx, kept: Collection[Bucket], recomputed: Collection[str]) -> None:
        super().__init__(new)
        self.kept = kept
        self.recomputed = recomputed
        self.producers: dict[str, BoundSymbol] = {}
        self.order: dict[str, int] = {}  # in which forward defines values
        self.gathers: dict[Bucket, BoundSymbol] = {}
        self.waits: dict[Bucket, BoundSymbol] = {}
        self.from_params: set[str] = set()
        self.constants: set[str] = set()
        # Backward's gathers and waits that an earlier run of this pass inserted, by bucket; moved up if needed.
        self.again: dict[Bucket, list[BoundSymbol]] = defaultdict(list)
        self.read_again: dict[str, Bucket] = {}
        self.gathered_again: set[Bucket] = set()

    def run(self, trace: TraceCtx, forward: Sequence[bool]) -> None:
        for bsym, is_forward in zip(trace.bound_symbols, forward, strict=True):
            if is_forward:
                self._classify(bsym)
            elif _is_of_gather(bsym):
                self.again[bucket_of(bsym)].append(bsym)
                self.read_again.update(dict.fromkeys(outs_of(bsym), bucket_of(bsym)))
        for bsym, is_forward in zip(trace.bound_symbols, forward, strict=True):
            # `get_grad` names a forward output but does not read it.
            if is_forward or bsym.sym.id in (PrimIDs.GET_GRAD, PrimIDs.RETURN):
                self.new.bound_symbols.append(bsym)
            elif _is_of_gather(bsym):
                self._gather(bucket_of(bsym))
            else:
                for name in args_of(bsym):
                    self._regenerate(name)
                    if name in self.read_again:
                        self._gather(self.read_again[name])
                self.new.bound_symbols.append(swap_args(bsym, self.replacements))

    def _classify(self, bsym: BoundSymbol) -> None:
        self.producers.update(dict.fromkeys(outs_of(bsym), bsym))
        parts = bsym.subsymbols if bsym.sym.is_fusion else (bsym,)
        for out in (out for part in parts for out in outs_of(part)):
            self.order[out] = len(self.order)
        if effects(bsym).is_gather:
            self.gathers[bucket_of(bsym)] = bsym
        elif effects(bsym).unshards:
            self.waits[bucket_of(bsym)] = bsym
            if bucket_of(bsym).base not in self.kept:
                self.from_params.update(outs_of(bsym))
        elif bsym.sym.id is not PrimIDs.UNPACK_TRIVIAL:
            for part in filter(is_pure, parts):
                # Numbers (sizes, under symbolic values) count as constants.
                self.constants.update(p.name for p in part.flat_proxy_args if isinstance(p, NumberProxy))
                inputs = args_of(part)
                if all(a in self.constants for a in inputs):
                    self.constants.update(outs_of(part))
                elif all(a in self.constants or a in self.from_params for a in inputs):
                    self.from_params.update(outs_of(part))

    def _regenerate(self, name: str) -> None:
        """Recompute ``name`` in backward if it is a value of forward that derives from parameters alone or is chosen.

        So are the values that it derives from, in the order of forward.
        """
        parts: dict[str, BoundSymbol] = {}  # by the name of an output
        pending = [name]
        while pending:
            current = pending.pop()
            if current in self.replacements or not (current in self.from_params or current in self.recomputed):
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
        if bucket in self.gathered_again:
            return
        self.gathered_again.add(bucket)
        if bucket in self.again:
            self.new.bound_symbols += self.again[bucket]
        else:
            _, _, *shards = self.gathers[bucket].args
            params = [self.rename(p) for p in self.waits[bucket].output]
            for bsym in gather_and_wait(bucket, shards, params, **_again(bucket)):
                self.add(bsym)
        if bucket in self.waits:  # or forward does not read it at all
            params = self.new.bound_symbols[-1].output
            self.replacements.update(
                (old.name, new) for old, new in zip(self.waits[bucket].output, params, strict=True)
            )


def _is_of_gather(bsym: BoundSymbol) -> bool:
    e = effects(bsym)
    return e.is_gather or e.unshards


def _again(bucket: Bucket) -> dict[str, bool]:
    """Return the keyword arguments of a gather in backward; see [Note: Reuse of casts] in ``shard_source``."""
    return {"again": True} if bucket.spec.param_dtype != bucket.spec.dtype else {}
