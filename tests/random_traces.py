"""Random traces of a backward, before the passes that sort and place them."""

from __future__ import annotations

from typing import Any

from thunder_fsdp_sched.extras.replicas import fsdp_all_reduce

import torch
from hypothesis import strategies as st
from internals import (
    Arena,
    Bucket,
    BucketRanks,
    ProcessGroupRef,
    fsdp_all_gather,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
)
from synthetic_traces import SHAPE, FakeProcessGroup, make_bucket, tensor
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors import torchex

GROUPS = (
    BucketRanks(ProcessGroupRef("one", 0, range(2))),
    BucketRanks(ProcessGroupRef("two", 0, range(2))),
    BucketRanks(
        ProcessGroupRef("inner", 0, range(2)),
        replicas=ProcessGroupRef("outer", 0, range(0, 4, 2)),
        grid=((0, 1), (2, 3)),
    ),
)

KINDS = ("product", "product", "product of a parameter", "value", "parameter")
"""Kinds of gradients."""

foreign = Symbol("all_reduce", lambda x, group: TensorProxy(like=x))
"""Communication of another package."""


@st.composite
def traces(draw: Any, *, is_plain: bool = False) -> tuple[TraceCtx, list[Bucket]]:
    """Draw the trace of a backward, in which each gather is at its first use and each reduction at its last gradient.

    Gradients are products that can be written in place, other values, parameters, or views of parameters. A plain trace has
    one arena, one group, no communication of others, and no gradients that read parameters.
    """
    arenas = [Arena(torch.device("cpu")) for _ in range(draw(st.integers(1, 1 if is_plain else 2)))]
    buckets = []
    for number in range(draw(st.integers(1, 5))):
        shapes = [SHAPE] * draw(st.sampled_from([1, 2, 3] if is_plain else [1, 1, 2, 3, 11]))
        arena, ranks = draw(st.sampled_from(arenas)), draw(st.sampled_from(GROUPS[:1] if is_plain else GROUPS))
        bucket = make_bucket(f"b{number}", shapes, arena=arena, ranks=ranks)
        buckets.append(bucket)
    trace = TraceCtx()
    with tracectx(trace):
        shards = {b: [tensor() for _ in b.spec.params] for b in buckets}
        x, condition = tensor(), tensor(dtype=dtypes.bool8)
        trace.args = (x, condition, *(s for b in buckets for s in shards[b]))
        for arg in trace.args:
            prims.unpack_trivial(arg, name=arg.name)
        values, reduced = [x], list[TensorProxy]()
        params: dict[Bucket, tuple[TensorProxy, ...]] = {}

        def param(bucket: Bucket) -> TensorProxy:
            if bucket not in params:
                params[bucket] = fsdp_wait_params(bucket, fsdp_all_gather(bucket, None, *shards[bucket]))
            read = params[bucket][draw(st.integers(0, len(params[bucket]) - 1))]
            return prims.transpose(read, (1, 0)) if draw(st.integers(0, 3)) == 0 else read

        def gradient(bucket: Bucket) -> TensorProxy:
            kind = draw(st.sampled_from(["product", "value"] if is_plain else KINDS))
            if kind == "parameter":
                return param(draw(st.sampled_from(buckets)))
            if kind == "value":
                return prims.neg(values[-1])
            product = torchex.matmul(values[-1], param(bucket) if kind == "product of a parameter" else values[0])
            if draw(st.integers(0, 4)) == 0:
                values.append(prims.neg(product))  # another reader
            return product

        waiting: list[tuple[Bucket, list[TensorProxy]]] = []
        for bucket in draw(st.permutations(buckets)):
            for _ in range(draw(st.integers(1, 3))):
                other = param(bucket)
                if draw(st.integers(0, 5)) == 0:  # reads two buckets, as a fusion may
                    other = prims.where(condition, other, param(draw(st.sampled_from(buckets))))
                values.append(prims.matmul(values[-1], other))
            if not is_plain and draw(st.integers(0, 5)) == 0:
                trace.bound_symbols.append(foreign.bind(values[-1], FakeProcessGroup(), output=tensor()))
            if draw(st.integers(0, 4)):
                waiting.append((bucket, [gradient(bucket) for _ in bucket.spec.params]))
            while waiting and draw(st.booleans()):
                reduced += _reduce(*waiting.pop(0))
                if draw(st.booleans()):  # reads a bucket again that was gathered before
                    values.append(prims.matmul(values[-1], param(draw(st.sampled_from([*params])))))
        for pair in waiting:
            reduced += _reduce(*pair)
        prims.python_return((*values[1:], *reduced))
    return trace, buckets


def _reduce(bucket: Bucket, grads: list[TensorProxy]) -> tuple[TensorProxy, ...]:
    future = fsdp_reduce_scatter(bucket, None, *grads)
    if bucket.ranks.replicas is not None:
        future = fsdp_all_reduce(bucket, future)
    return fsdp_wait_grads(bucket, future)


def inputs_of(trace: TraceCtx) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {a.name: torch.randn(SHAPE, generator=generator, dtype=torch.float64) / 4 for a in trace.args}
    condition = trace.args[1].name
    return {**found, condition: found[condition] > 0}


LIMITS = st.fixed_dictionaries(
    {
        "prefetch": st.integers(0, 3),
        "max_gathers_in_flight": st.sampled_from([None, None, 1, 2]),
        "reductions_in_flight": st.sampled_from([2, 2, 1, 0]),
    }
)
