"""The memory that this package's runtime allocates besides values, followed symbol by symbol for ``verify_memory``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from ..ir.analysis import LeftGradients
from ..ir.inspection import nbytes_of
from ..ir.operands import Issue, Reduction, Wait, bucket_of
from ..ir.symbols import (
    GRAD_WAITS,
    GRAD_WRITERS,
    fsdp_accumulate_grads,
    fsdp_all_gather,
    fsdp_all_reduce,
    fsdp_reduce_scatter,
    fsdp_reduce_unreduced,
    fsdp_release,
    fsdp_wait_grads,
)
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, Slot

__all__ = ["ReceiveBuffers", "kept_arenas", "lasting_bytes", "passing_bytes", "rounded", "slot_used_by"]

_CUDA_BLOCK = 512
"""Bytes to a multiple of which CUDA's caching allocator rounds each allocation."""


def rounded(nbytes: int, device_type: str) -> int:
    """Return the bytes that the allocator of a device takes for a tensor of ``nbytes``."""
    return -(-nbytes // _CUDA_BLOCK) * _CUDA_BLOCK if device_type == "cuda" else nbytes


def slot_used_by(bsym: BoundSymbol) -> Slot | None:
    """Return the slot into which ``bsym`` gathers or writes gradients; ``None`` if there is none."""
    if bsym.sym in (fsdp_all_gather, fsdp_reduce_scatter) or bsym.sym.name in GRAD_WRITERS:
        return Issue(bsym).planned_slot
    return None


def kept_arenas(bsyms: Iterable[BoundSymbol]) -> set[Arena]:
    """Return the arenas that are still allocated after these bound symbols, and so are when the next step begins."""
    allocated: set[Arena] = set()
    for bsym in bsyms:
        if bsym.sym is fsdp_release:
            allocated -= {slot.arena for slot in bsym.args}
        elif (slot := slot_used_by(bsym)) is not None:
            allocated.add(slot.arena)
    return allocated


def lasting_bytes(bsyms: Sequence[BoundSymbol]) -> int:
    """Return the bytes of casts and of transports' workspaces, which the first step allocates and later ones reuse."""
    casts: dict[Bucket, int] = {}
    workspaces: dict[tuple[str, str], int] = {}
    for bsym in bsyms:
        if bsym.sym is fsdp_all_gather:
            spec = bucket_of(bsym).spec
            if spec.param_dtype != spec.dtype and not spec.comm.offload:
                nbytes = spec.layout.shard_numel * spec.param_dtype.itemsize
                casts[bucket_of(bsym)] = rounded(nbytes, spec.device.type)
        elif bsym.sym is fsdp_reduce_scatter:
            bucket = bucket_of(bsym)
            key = bucket.spec.comm.transport, bucket.ranks.reductions.description
            nbytes = rounded(bucket.transport.reduce_workspace(bucket.spec), bucket.spec.device.type)
            workspaces[key] = max(workspaces.get(key, 0), nbytes)
    return sum(casts.values()) + sum(workspaces.values())


def passing_bytes(bsym: BoundSymbol, issues: dict[str, BoundSymbol], left: LeftGradients) -> int:
    """Return the bytes that a symbol of this package allocates and frees again.

    Args:
        issues: the reductions that are not waited for, by the names of their futures.
        left: the gradients that earlier micro-batches under ``no_sync`` have left.
    """
    if bsym.sym is fsdp_reduce_scatter:
        bucket, grads = bucket_of(bsym), Reduction(bsym).grads
        # On a GPU all of a reduction is queued at once; elsewhere its wait does what follows the collective.
        at_once = _temporary(bucket) if bucket.spec.device.type == "cuda" else 0
        return at_once + sum(_broadcast(bucket, grads))
    if bsym.sym is fsdp_accumulate_grads:
        return max(_broadcast(bucket_of(bsym), bsym.args[1:]), default=0)
    if bsym.sym is fsdp_reduce_unreduced:
        return _reduced_apart(bucket_of(bsym), left)
    nbytes = 0
    if bsym.sym in (fsdp_all_reduce, *GRAD_WAITS):
        bucket, spec = bucket_of(bsym), bucket_of(bsym).spec
        if Wait(bsym).future.name in issues and spec.device.type != "cuda":
            nbytes += _temporary(bucket)
        if bsym.sym is fsdp_wait_grads and spec.comm.offload and spec.reduce_dtype != spec.dtype:
            nbytes = max(nbytes, rounded(spec.layout.shard_numel * spec.dtype.itemsize, spec.device.type))
        is_added = bsym.sym is (fsdp_wait_grads if bucket.ranks.replicas is None else fsdp_all_reduce)
        if is_added and bucket in left.reduced and spec.accumulate_dtype != spec.reduce_dtype:
            if bsym.sym is fsdp_all_reduce or spec.accumulate_dtype != spec.dtype:
                nbytes += rounded(spec.accumulated_bytes, spec.device.type)
    return nbytes


def _reduced_apart(bucket: Bucket, left: LeftGradients) -> int:
    """Return the bytes that the reduction of gradients needs that only earlier micro-batches have."""
    spec, nbytes = bucket.spec, 0
    sends = bucket in left.unsharded
    if bucket in left.unsharded:
        staging = spec.sent_numel * spec.reduce_dtype.itemsize if spec.comm.staging else 0
        nbytes = rounded(spec.grad_bytes, spec.device.type) + rounded(staging, spec.device.type) + _temporary(bucket)
    if bucket in left.reduced:
        if spec.accumulate_dtype != spec.dtype or spec.comm.offload:
            nbytes += rounded(spec.accumulated_bytes, spec.device.type)
        sends |= spec.accumulate_dtype != spec.reduce_dtype and bucket.ranks.replicas is not None
    if sends and (spec.reduce_dtype != spec.dtype or spec.comm.offload):
        nbytes += rounded(spec.layout.shard_numel * spec.reduce_dtype.itemsize, spec.device.type)
    return nbytes


def _temporary(bucket: Bucket) -> int:
    return rounded(bucket.transport.reduce_temporary(bucket.spec), bucket.spec.device.type)


def _broadcast(bucket: Bucket, grads: Sequence[TensorProxy | None]) -> list[int]:
    """Return the bytes of the sum of each gradient that has not the shape of its parameter."""
    return [
        rounded(param.numel * grad.dtype.bytes, bucket.spec.device.type)
        for param, grad in itertools.zip_longest(bucket.spec.params, grads)
        if grad is not None and tuple(map(int, grad.shape)) != tuple(param.shape) and nbytes_of(grad)
    ]


_Buffer = tuple[torch.dtype, int]
"""Dtype and bytes: what must be equal for a buffer to be used again."""


class ReceiveBuffers:
    """The buffers into which reductions receive, taken and given back as transports do.

    Attributes:
        nbytes: bytes of all buffers, idle ones included.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._idle: dict[int, list[_Buffer]] = {}  # by the identity of the memory pool
        self._taken: dict[str, tuple[list[_Buffer], Bucket, list[_Buffer]]] = {}  # by the name of the future

    def take(self, bsym: BoundSymbol) -> None:
        """Take or allocate what ``bsym`` receives into."""
        if bsym.sym is fsdp_reduce_scatter:
            bucket = bucket_of(bsym)
            idle = self._idle.setdefault(id(bucket.scratch), [])
            buffers = [(bucket.spec.reduce_dtype, n) for n in bucket.transport.reduce_buffers(bucket.spec)]
            for buffer in buffers:
                if buffer in idle:
                    idle.remove(buffer)
                else:
                    self.nbytes += rounded(buffer[1], bucket.spec.device.type)
            self._taken[bsym.output.name] = idle, bucket, buffers

    def give_back(self, bsym: BoundSymbol) -> None:
        """Give back what ``bsym`` has waited for, and free what it releases."""
        if bsym.sym in (fsdp_all_reduce, *GRAD_WAITS) and Wait(bsym).future.name in self._taken:
            idle, bucket, buffers = self._taken.pop(Wait(bsym).future.name)
            idle += buffers
            if all(idle is not other for other in self._idle.values()):  # the pool was freed since
                self._free(idle, bucket.spec.device.type)
        elif bsym.sym is fsdp_release:
            for arena in {slot.arena for slot in bsym.args}:
                self._free(self._idle.pop(id(arena.scratch), []), arena.device.type)

    def _free(self, buffers: list[_Buffer], device_type: str) -> None:
        self.nbytes -= sum(rounded(nbytes, device_type) for _, nbytes in buffers)
        buffers.clear()
