"""Memory that this package's symbols allocate besides their outputs: casts, transports' buffers, ``no_sync`` gradients.

[Note: Memory of communication]
Three things exist in every step once the first one has run, and count during the whole step: the cast of each shard that
is sent in lower precision (see [Note: Reuse of casts] in ``runtime.shard_source``), the buffers into which reductions
receive, and a transport's workspace. A step that releases memory frees the receive buffers with it, so they exist from
their first use to the release. The copy of an offloaded shard exists from the issue of its gather to the wait.
Within a single symbol exist sums of broadcast gradients, copies to the host in another dtype, and what a transport needs
as it reduces.

Gradients that ``no_sync`` accumulates outlive their backward, unsharded or reduced (see [Note: Two ways to accumulate] in
``runtime.accumulation``). The first backward of a window allocates them where it accumulates them; reduced ones stay where
the reduction has put them, unless they are added up in a wider dtype. Later ones, and the one that returns them, find them
allocated. Which buckets have such gradients depends on the micro-batches that ran before, so the caller names these buckets.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from ..runtime.bucket import Bucket
from .inspection import is_statement, nbytes_of
from .left_gradients import NOTHING_LEFT, LeftGradients
from .liveness import BEFORE_TRACE, Liveness
from .operands import Reduction, bucket_of
from .symbols import (
    GRAD_WAITS,
    fsdp_accumulate_grads,
    fsdp_accumulate_reduced,
    fsdp_all_gather,
    fsdp_all_reduce,
    fsdp_backward_done,
    fsdp_reduce_scatter,
    fsdp_reduce_unreduced,
    fsdp_release,
    fsdp_wait_grads,
    is_resident,
    payload,
)

__all__ = ["RuntimeMemory", "allocated_for_all_steps", "allocated_in_step"]


class RuntimeMemory(NamedTuple):
    """Memory that a symbol of this package allocates.

    Attributes:
        kind: ``"communication"`` or ``"gradients"``.
        name: what it is.
        nbytes: its bytes.
        start: position of the bound symbol that allocates it, ``BEFORE_TRACE`` for what exists earlier.
        end: position of the last bound symbol during which it exists.
        device: the type of its device.
    """

    kind: str
    name: str
    nbytes: int
    start: int
    end: int
    device: str


def allocated_for_all_steps(
    own: Sequence[BoundSymbol],
    others: Iterable[Sequence[BoundSymbol]] = (),
    *,
    accumulated: LeftGradients = NOTHING_LEFT,
) -> Iterator[RuntimeMemory]:
    """Return the casts, receive buffers and workspaces that stay allocated; see [Note: Memory of communication].

    Receive buffers that other steps have left stay until the first release of this one.

    Args:
        own: the bound symbols of a step.
        others: those of other steps that have run.
        accumulated: further gradients that backwards under ``no_sync`` have left.
    """
    others = list(others)
    bsyms = [*own, *itertools.chain.from_iterable(others)]
    last = len(own) - 1
    unreduced = {*accumulated.unsharded, *(bucket_of(bsym) for bsym in bsyms if bsym.sym is fsdp_accumulate_grads)}
    casts = {bucket_of(b): None for b in bsyms if b.sym is fsdp_all_gather and not bucket_of(b).spec.comm.offload}
    for bucket in casts:
        spec = bucket.spec
        if spec.param_dtype != spec.dtype:
            nbytes = spec.layout.shard_numel * spec.param_dtype.itemsize
            yield _memory("communication", f"cast of {spec.name}", nbytes, BEFORE_TRACE, last, bucket)
    workspaces: dict[tuple[str, str], tuple[int, Bucket]] = {}
    for bsym in bsyms:
        if bsym.sym is fsdp_reduce_scatter or _reduces_unreduced(bsym):
            bucket = bucket_of(bsym)
            key = bucket.spec.comm.transport, bucket.ranks.reductions.description
            needed = bucket.transport.reduce_workspace(bucket.spec)
            workspaces[key] = max((needed, bucket), workspaces.get(key, (0, bucket)), key=lambda found: found[0])
    leaving = [] if _releases(own) else list(own)
    leaving += itertools.chain.from_iterable(other for other in others if not _releases(other))
    end = next((position for position, bsym in enumerate(own) if bsym.sym is fsdp_release), last)
    yield from (b._replace(start=BEFORE_TRACE, end=end) for b in _receive_buffers(leaving, unreduced))
    for (transport, _), (nbytes, bucket) in workspaces.items():
        if nbytes:
            yield _memory("communication", f"workspace of {transport}", nbytes, BEFORE_TRACE, last, bucket)


def allocated_in_step(
    live: Liveness, bsyms: Sequence[BoundSymbol], *, accumulated: LeftGradients
) -> Iterator[RuntimeMemory]:
    """Return what exists during a part of a step only.

    Args:
        live: the liveness of ``bsyms``.
        accumulated: the gradients that earlier backwards under ``no_sync`` have left.
    """
    for position, bsym in enumerate(bsyms):
        if bsym.sym is fsdp_all_gather and bucket_of(bsym).spec.comm.offload and not is_resident(bsym):
            spec = bucket_of(bsym).spec
            end = max((value.last_use for value in live.outs[position]), default=position)
            nbytes = spec.layout.shard_numel * spec.param_dtype.itemsize
            yield _memory("communication", f"copy of {spec.name}", nbytes, position, end, bucket_of(bsym))
        elif bsym.sym is fsdp_reduce_scatter:
            bucket, reduction = bucket_of(bsym), Reduction(bsym)
            yield from _at(position, bucket, "sum of broadcast gradients", _broadcast(bucket, reduction.grads))
            on_stream = bucket.spec.device.type == "cuda"  # elsewhere what follows the collectives runs in the wait
            end = position if on_stream else max((v.last_use for v in live.outs[position]), default=position)
            name = f"temporary memory of {bucket.spec.comm.transport}"
            yield from _at(end, bucket, name, bucket.transport.reduce_temporary(bucket.spec))
        elif bsym.sym is fsdp_all_reduce:
            bucket = bucket_of(bsym)
            if bucket in accumulated.reduced and bucket.spec.accumulate_dtype != bucket.spec.reduce_dtype:
                yield from _at(position, bucket, "sum of sharded gradients", bucket.spec.accumulated_bytes)
        elif bsym.sym is fsdp_wait_grads:
            spec = bucket_of(bsym).spec
            if bucket_of(bsym) in accumulated.reduced and bucket_of(bsym).ranks.replicas is None:
                if spec.accumulate_dtype not in (spec.reduce_dtype, spec.dtype):
                    yield from _at(position, bucket_of(bsym), "sum of sharded gradients", spec.accumulated_bytes)
            if spec.comm.offload and spec.reduce_dtype != spec.dtype:
                nbytes = spec.layout.shard_numel * spec.dtype.itemsize
                yield from _at(position, bucket_of(bsym), "cast of sharded gradients", nbytes)
        elif bsym.sym is fsdp_accumulate_grads:
            bucket = bucket_of(bsym)
            yield from _at(position, bucket, "sum of broadcast gradients", _broadcast(bucket, bsym.args[1:]))
        elif bsym.sym is fsdp_reduce_unreduced:
            yield from _reduced(bucket_of(bsym), accumulated, position, len(bsyms) - 1)
    if _releases(bsyms):
        yield from _receive_buffers(bsyms, accumulated.unsharded)
    yield from _unreduced(bsyms, accumulated)


def _releases(bsyms: Sequence[BoundSymbol]) -> bool:
    return any(bsym.sym is fsdp_release for bsym in bsyms)


def _receive_buffers(bsyms: Sequence[BoundSymbol], accumulated: Collection[Bucket]) -> Iterator[RuntimeMemory]:
    """Return the buffers into which reductions receive, each from its first use until it is freed.

    A reduction uses an idle buffer again. A release frees the idle ones, and those in use when they have been waited for.

    Args:
        accumulated: the buckets whose gradients ``fsdp_reduce_unreduced`` reduces.
    """
    since: dict[tuple[torch.dtype, int], list[int]] = defaultdict(list)  # when each idle buffer was allocated
    taken: dict[str, tuple[dict, list[tuple[tuple[torch.dtype, int], int]]]] = {}  # by the name of the future
    for position, bsym in enumerate(bsyms):
        if bsym.sym is fsdp_reduce_scatter or (bsym.sym is fsdp_reduce_unreduced and bucket_of(bsym) in accumulated):
            bucket = bucket_of(bsym)
            keys = [(bucket.spec.reduce_dtype, nbytes) for nbytes in bucket.transport.reduce_buffers(bucket.spec)]
            used = [(key, since[key].pop() if since[key] else position) for key in keys]
            device = bucket.spec.device.type
            if bsym.sym is fsdp_reduce_scatter:
                taken[bsym.output.name] = since, used
            else:  # it waits for what it issues
                for key, begin in used:
                    since[key].append(begin)
        elif bsym.sym in (fsdp_all_reduce, *GRAD_WAITS):
            pool, buffers = taken.pop(bsym.args[1].name, (since, []))
            for key, begin in buffers:
                if pool is since:
                    since[key].append(begin)
                else:
                    yield RuntimeMemory("communication", "receive buffer", key[1], begin, position, device)
        elif bsym.sym is fsdp_release:
            for (_, nbytes), begins in since.items():
                for begin in begins:
                    yield RuntimeMemory("communication", "receive buffer", nbytes, begin, position, device)
            since = defaultdict(list)
    for (_, nbytes), begins in since.items():
        for begin in begins:
            yield RuntimeMemory("communication", "receive buffer", nbytes, begin, len(bsyms) - 1, device)


def _reduces_unreduced(bsym: BoundSymbol) -> bool:
    return bsym.sym is fsdp_reduce_unreduced and bucket_of(bsym).spec.requires_grad


def _unreduced(bsyms: Sequence[BoundSymbol], accumulated: LeftGradients) -> Iterator[RuntimeMemory]:
    """Return the gradients that ``no_sync`` accumulates."""
    last = len(bsyms) - 1
    # A backward that reduces gradients drops them where it ends.
    ends = {
        bucket: position
        for position, bsym in enumerate(bsyms)
        if bsym.sym is fsdp_backward_done and not bsym.args[0]
        for bucket in bsym.args[1:]
    }
    unsharded = {bucket: (BEFORE_TRACE, ends.get(bucket, last)) for bucket in _in_order(accumulated.unsharded)}
    reduced = {bucket: (BEFORE_TRACE, ends.get(bucket, last)) for bucket in _in_order(accumulated.reduced)}
    for position, bsym in enumerate(bsyms):
        if bsym.sym is fsdp_accumulate_grads:
            unsharded.setdefault(bucket_of(bsym), (position, last))
        elif bsym.sym is fsdp_accumulate_reduced:
            spec, start = bucket_of(bsym).spec, position
            if spec.accumulate_dtype == spec.reduce_dtype:  # until then it is the result of the reduction
                start = next(i for i in range(position + 1, last + 1) if is_statement(bsyms[i]))
            reduced.setdefault(bucket_of(bsym), (start, last))
    for bucket, (start, end) in unsharded.items():
        name = f"unreduced gradients of {bucket.spec.name}"
        yield _memory("gradients", name, bucket.spec.grad_bytes, start, end, bucket)
    for bucket, (start, end) in reduced.items():
        name = f"reduced gradients of {bucket.spec.name}"
        yield _memory("gradients", name, bucket.spec.accumulated_bytes, start, end, bucket)


def _in_order(buckets: Collection[Bucket]) -> list[Bucket]:
    return sorted(buckets, key=lambda bucket: bucket.handle)


def _reduced(bucket: Bucket, accumulated: LeftGradients, position: int, last: int) -> Iterator[RuntimeMemory]:
    """Return what the reduction of gradients allocates that only earlier backwards have computed."""
    spec, transport = bucket.spec, bucket.transport
    if bucket not in accumulated.unsharded | accumulated.reduced:
        return
    temporary, flat = 0, spec.layout.shard_numel * spec.dtype.itemsize
    is_wider = spec.accumulate_dtype != spec.reduce_dtype
    if bucket in accumulated.unsharded:
        staging = spec.sent_numel * spec.reduce_dtype.itemsize if spec.comm.staging else 0
        temporary = spec.grad_bytes + staging + transport.reduce_temporary(spec)
    if bucket in accumulated.reduced and (spec.accumulate_dtype != spec.dtype or spec.comm.offload):
        temporary += spec.accumulated_bytes
    sends = bucket in accumulated.unsharded or (is_wider and bucket.ranks.replicas is not None)
    if sends and (spec.reduce_dtype != spec.dtype or spec.comm.offload):
        temporary += payload(fsdp_all_reduce.name, spec)[0]
    yield from _at(position, bucket, "copy of accumulated gradients", temporary)
    name = f"sharded gradients of {spec.name}"
    yield RuntimeMemory("gradients", name, flat, position, last, spec.shard_device.type)


def _broadcast(bucket: Bucket, grads: Sequence[TensorProxy | None]) -> int:
    """Return the bytes of the sums of gradients that do not have the shape of their parameter."""
    pairs = itertools.zip_longest(bucket.spec.params, grads)
    return sum(
        param.numel * grad.dtype.bytes
        for param, grad in pairs
        if grad is not None and tuple(map(int, grad.shape)) != param.shape and nbytes_of(grad)
    )


def _at(position: int, bucket: Bucket, name: str, nbytes: int) -> Iterator[RuntimeMemory]:
    if nbytes:
        yield _memory("communication", f"{name} ({bucket.spec.name})", nbytes, position, position, bucket)


def _memory(kind: str, name: str, nbytes: int, start: int, end: int, bucket: Bucket) -> RuntimeMemory:
    return RuntimeMemory(kind, name, nbytes, start, end, bucket.spec.device.type)
