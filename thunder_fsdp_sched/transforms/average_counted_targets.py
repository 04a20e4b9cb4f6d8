"""Average the smoothed cross entropy over the targets that count."""

from __future__ import annotations

import inspect
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx

from ..ir.inspection import like, with_bound_symbols


def average_counted_targets(trace: TraceCtx) -> TraceCtx:
    """Compute the mean of a cross entropy with label smoothing from the losses of the targets.

    Runs on the computation after ``recompute_whole_regions``, before ``insert_unshard``. With ``ignore_index``, Thunder
    divides by the number of targets that count, as torch does, but adds the smoothing terms of all. Does nothing without
    such a loss. Before::

        t9 = ltorch.cross_entropy(logits, targets, None, None, -100, None, "mean", 0.1)

    After::

        t10 = ltorch.cross_entropy(logits, targets, None, None, -100, None, "none", 0.1)
        ...
        t17 = ltorch.true_divide(t11, t16)
        t9 = prims.shallow_copy(t17)
    """
    if not any(map(_averages_smoothed, trace.bound_symbols)):
        return trace
    new = with_bound_symbols(trace, (), "fsdp: average counted targets")
    with tracectx(new):
        for bsym in trace.bound_symbols:
            if not _averages_smoothed(bsym):
                new.bound_symbols.append(bsym)
                continue
            scope: list[BoundSymbol] = []
            new.push_scope(scope)
            mean = _mean(**_arguments(bsym))
            new.pop_scope()
            for each in (*scope, prims.shallow_copy.bind(mean, output=bsym.output)):
                each = like(bsym, each)
                if ProxyTag.RECOMPUTE_IN_BACKWARD in bsym.output.tags:
                    each.tags.add(BoundSymbolTag.RECOMPUTE_IN_BACKWARD)
                new.bound_symbols.append(each)
    return new


def _arguments(bsym: BoundSymbol) -> dict[str, Any]:
    bound = inspect.signature(ltorch.cross_entropy.meta).bind(*bsym.args, **bsym.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _averages_smoothed(bsym: BoundSymbol) -> bool:
    if bsym.sym.id != ltorch.cross_entropy.id:
        return False
    given = _arguments(bsym)
    has_classes = given["a"].ndim != given["target"].ndim  # otherwise probabilities, none of which is ignored
    return has_classes and given["reduction"] == "mean" and given["label_smoothing"] != 0.0


def _mean(
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None,
    ignore_index: int,
    label_smoothing: float,
    **_: Any,
) -> TensorProxy:
    # In two dimensions, because Thunder's gradient fails in more if nothing is reduced.
    classes = a.shape[1 if a.ndim > 1 else 0]
    a, target = (
        ltorch.reshape(ltorch.movedim(a, 1, -1) if a.ndim > 2 else a, (-1, classes)),
        ltorch.reshape(target, (-1,)),
    )
    losses = ltorch.cross_entropy(a, target, weight, None, ignore_index, None, "none", label_smoothing)
    counts = ltorch.ne(target, ignore_index)
    if weight is not None:
        counts = ltorch.where(counts, ltorch.index_select(weight, 0, ltorch.where(counts, target, 0)), 0.0)
    return ltorch.true_divide(ltorch.sum(losses), ltorch.sum(counts))
