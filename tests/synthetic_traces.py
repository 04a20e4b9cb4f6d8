"""Traces built directly from symbols, without compiling a model.

Use them to test a pass, the schedule or the simulator on many trace shapes in little time: :func:`chain` builds the forward
of equal blocks, :func:`make_buckets` buckets of chosen sizes. Nothing communicates, so no process group is needed.
"""

import functools
from collections.abc import Sequence
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched import BucketSpec, ParamSpec

import torch
from internals import (
    Arena,
    Bucket,
    BucketOptions,
    BucketRanks,
    ProcessGroupRef,
    fsdp_all_gather,
    fsdp_wait_params,
    make_layout,
)
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx

SHAPE = (16, 16)  # of each parameter: 1,024 bytes


def make_bucket(
    name: str,
    shapes: Sequence[tuple[int, ...]],
    *,
    world_size: int = 2,
    dtype: torch.dtype = torch.float32,
    zero3: bool = True,
    arena: Arena | None = None,
    ranks: BucketRanks | None = None,
    **more: Any,
) -> Bucket:
    cpu = torch.device("cpu")
    params = tuple(ParamSpec((f"{name}.p{i}",), shape, dtype, cpu, True) for i, shape in enumerate(shapes))
    layout, options = make_layout(shapes, world_size, dtype.itemsize), BucketOptions("zero3" if zero3 else "zero2")
    spec = BucketSpec(name, params, layout, options)
    return Bucket(spec, ranks or _ranks(world_size), arena or Arena(cpu), f"bucket_{name}", **more)


@functools.cache
def _ranks(world_size: int) -> BucketRanks:
    """Return the ranks of all buckets for this many, whose collectives share a limit."""
    return BucketRanks(ProcessGroupRef("none", 0, range(world_size)))


def make_buckets(sizes: list[int], *, zero3: bool = True) -> list[Bucket]:
    """Return buckets of so many parameters each, in one arena."""
    arena = Arena(torch.device("cpu"))
    return [make_bucket(f"b{i}", [SHAPE] * size, zero3=zero3, arena=arena) for i, size in enumerate(sizes)]


def tensor(*shape: int, dtype: dtypes.dtype = dtypes.float32) -> TensorProxy:
    return TensorProxy(shape=shape or SHAPE, device=devices.cpu, dtype=dtype)


def chain(blocks: int, *, sizes: Sequence[int] = (), zero3: bool = True) -> TraceCtx:
    """Return the forward trace of blocks of one parameter or of ``sizes``, each gathered right before its use."""
    buckets = make_buckets(list(sizes) or [1] * blocks, zero3=zero3)
    trace = TraceCtx()
    with tracectx(trace):
        x = tensor()
        shards = [tensor() for _ in buckets]
        trace.args = (x, *shards)
        for arg in trace.args:
            prims.unpack_trivial(arg, name=arg.name)
        for bucket, shard in zip(buckets, shards, strict=True):
            weight, *_ = fsdp_wait_params(bucket, fsdp_all_gather(bucket, None, shard))
            x = prims.neg(prims.matmul(x, weight))
        prims.python_return({"output": x, "flat_args": list(trace.args)}, ())
    return trace


class FakeProcessGroup:
    """A stand-in for the process group that Thunder passes to a communication prim which an executor has claimed."""

    def _get_backend(self) -> None: ...
