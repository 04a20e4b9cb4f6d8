"""Runs traces of synthetic buckets in memory that holds NaN wherever a slot has no values that may be read.

It knows nothing of lifetimes, passes or effects: a gather fills its slot with NaN from its issue to its wait, a reduction
sends what is in its slot at its issue and must still find it there at its wait, and an operator that writes a gradient in
place first destroys what was there. Without slots, the same trace computes the expected values.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from internals import Bucket
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

NAN = math.nan

OPERATORS: dict[str, Any] = {
    "matmul": torch.matmul,
    "transpose": lambda x, permutation: x.permute(permutation),
    "neg": torch.neg,
    "mul": torch.mul,
    "where": torch.where,
    "all_reduce": lambda x, group: -x,  # communication of others
}


class SlotExecutor:
    """The values that a trace computes.

    Attributes:
        computed: each value at the time when it was computed, by name.
    """

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        self.values = dict(inputs)
        self.computed: dict[str, torch.Tensor] = {}
        self.memory: dict[Any, torch.Tensor] = defaultdict(lambda: torch.full((1 << 16,), NAN, dtype=torch.float64))
        self.flights: dict[str, Any] = {}

    def run(self, trace: TraceCtx) -> dict[str, torch.Tensor]:
        for bsym in trace.bound_symbols:
            name = bsym.sym.name
            if name in ("unpack_trivial", "python_return"):
                continue
            if name.startswith("fsdp_"):
                getattr(self, f"_{name.removeprefix('fsdp_')}")(bsym, *bsym.args)
            else:
                self._define(bsym, OPERATORS[name](*map(self._value, bsym.args)))
        return self.computed

    def _value(self, arg: Any) -> Any:
        return self.values[arg.name] if isinstance(arg, Proxy) else arg

    def _define(self, bsym: BoundSymbol, *results: torch.Tensor) -> None:
        for name, result in zip((p.name for p in bsym.flat_proxy_outs), results, strict=True):
            self.values[name], self.computed[name] = result, result.clone()

    def _views(self, bucket: Bucket, slot: Any) -> list[torch.Tensor]:
        """Return the memory of each parameter; without a slot, memory of its own."""
        flat = torch.empty(bucket.spec.layout.unsharded_numel, dtype=torch.float64)
        if slot is not None:
            flat = self.memory[slot.arena][slot.offset // 4 : slot.end // 4]
        return list(bucket.spec.layout.unsharded_views(flat[: bucket.spec.layout.unsharded_numel]))

    def _all_gather(self, bsym: BoundSymbol, bucket: Bucket, slot: Any, *shards: Any) -> None:
        views = self._views(bucket, slot)
        for view in views:
            view.fill_(NAN)
        self.flights[bsym.output.name] = views, [self._value(shard) for shard in shards]

    def _wait_params(self, bsym: BoundSymbol, bucket: Bucket, future: Proxy, token: None = None) -> None:
        views, params = self.flights.pop(future.name)
        for view, param in zip(views, params, strict=True):
            view.copy_(param)
        self._define(bsym, *views)

    def _matmul_into(self, bsym: BoundSymbol, bucket: Bucket, slot: Any, index: int, a: Proxy, b: Proxy) -> None:
        view = self._views(bucket, slot)[index]
        view.fill_(NAN)
        view.copy_(self._value(a) @ self._value(b))
        self._define(bsym, view)

    def _reduce_scatter(self, bsym: BoundSymbol, bucket: Bucket, slot: Any, *grads: Proxy) -> None:
        views, values = self._views(bucket, slot), list(map(self._value, grads))
        copied = [pair for pair in zip(views, values, strict=True) if pair[0].data_ptr() != pair[1].data_ptr()]
        for view, _ in copied:
            view.fill_(NAN)
        for view, value in copied:
            view.copy_(value)
        self.flights[bsym.output.name] = views, [view.clone() for view in views]

    def _sent(self, future: Proxy) -> list[torch.Tensor]:
        views, sent = self.flights.pop(future.name)
        return [value if torch.equal(value, view) else value * NAN for view, value in zip(views, sent, strict=True)]

    def _all_reduce(self, bsym: BoundSymbol, bucket: Bucket, future: Proxy) -> None:
        reduced = self._sent(future)
        self.flights[bsym.output.name] = reduced, reduced

    def _wait_grads(self, bsym: BoundSymbol, bucket: Bucket, future: Proxy) -> None:
        self._define(bsym, *self._sent(future))
