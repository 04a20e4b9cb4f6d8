"""Prove that no position of the traces that run needs more memory than ``max_memory``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.analysis import NOTHING_LEFT, LeftGradients
from ..ir.host_copies import (
    HOST_COPIES,
    fsdp_copy_to_device,
    fsdp_copy_to_host,
    fsdp_wait_device_copy,
    fsdp_wait_host_copy,
)
from ..ir.inspection import (
    UNPACKING,
    args_of,
    defined_by,
    has_backward,
    names,
    nbytes_of,
    return_of,
    statement,
    with_bound_symbols,
)
from ..ir.operands import Wait, bucket_of
from ..ir.operator_facts import facts_of, observed_call
from ..ir.symbols import (
    GRAD_WRITERS,
    fsdp_accumulate_grads,
    fsdp_accumulate_reduced,
    fsdp_all_gather,
    fsdp_all_reduce,
    fsdp_params_unchanged,
    fsdp_reduce_scatter,
    fsdp_reduce_unreduced,
    fsdp_release,
    fsdp_wait_grads,
    fsdp_wait_params,
    is_resident,
    payload,
)
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena
from .verify import VerificationError
from .verify_runtime_memory import ReceiveBuffers, kept_arenas, lasting_bytes, passing_bytes, rounded, slot_used_by

__all__ = ["verify_memory"]

_READ_SHARDS = (fsdp_all_gather, fsdp_params_unchanged)

_IN_HOST_MEMORY = (fsdp_copy_to_host, fsdp_wait_host_copy)

_CALLER = "the caller"
"""Stands for the names by which the caller keeps the arguments and outputs of forward, and buckets their memory."""


def verify_memory(
    trace: TraceCtx,
    *,
    forward: TraceCtx | None = None,
    max_memory: int,
    buckets: Iterable[Bucket],
    left: LeftGradients = NOTHING_LEFT,
) -> TraceCtx:
    """Check the memory of a trace that is about to run, and return it unchanged.

    Runs last, after ``del_last_used``, whose ``del`` statements tell until when values are in memory. A forward trace
    that has a backward is checked together with it. This shares no code with the prediction (``ir.step_memory``), only
    facts about operators, buckets and transports: it executes the traces on a table of names instead of tensors.

    * Memory counts until the last name of it is deleted. If it is not known whether an operator returns a view, its
      output counts as a view and as new memory.
    * An arena that ``fsdp_release`` frees counts from its next use until the release, or until the last view of it is
      deleted if that is later. An arena that is never freed counts all the time.
    * What an operator allocates and frees again counts while it runs, and so does what this package's own symbols
      allocate. Casts, transports' workspaces and receive buffers count all the time; receive buffers only until their
      arena is freed.
    * On CUDA, each allocation counts as the caching allocator rounds it. Memory of other devices than those of the
      buckets does not count.

    The optimizer's state does not count.

    Args:
        forward: for a backward trace, its forward trace.
        max_memory: bytes of all memory of the step, without optimizer state.
        buckets: all buckets of the module.
        left: the gradients that earlier micro-batches under ``no_sync`` have left.

    Raises:
        VerificationError: names the bound symbol at which more is needed.
    """
    started = time.perf_counter()
    if forward is None and has_backward(trace):
        return trace
    traces = {"forward": trace} if forward is None else {"forward": forward, "backward": trace}
    bsyms = list(itertools.chain(*(each.bound_symbols for each in traces.values())))
    walk = _Walk(bsyms, list(buckets), max_memory, left)
    for which, each in traces.items():
        walk.run(each, which)
    return with_bound_symbols(trace, trace.bound_symbols, "fsdp: verified memory", started)


def _unreduced_name(bucket: Bucket) -> str:
    return f"unreduced gradients of {bucket.handle}"


def _reduced_name(bucket: Bucket) -> str:
    return f"reduced gradients of {bucket.handle}"


class _Walk:
    """The memory of values by their names while traces run.

    Args:
        bsyms: the bound symbols of all traces.
        left: the gradients that exist before.

    Attributes:
        allocated: bytes that are allocated all the time: shards, casts, workspaces.
        receive_buffers: the memory into which reductions receive.
        in_use: bytes of all pieces in use.
        nbytes: bytes of each piece of memory that is in use, by the name of its first owner.
        users: the names in use that keep it.
        in_shards: names of shards, which count as allocated all the time.
        memory_of: the pieces that a name keeps.
        arenas: the piece of each arena that is allocated.
        reductions: the reductions in flight, by the names of their futures.
    """

    def __init__(
        self, bsyms: Sequence[BoundSymbol], buckets: Collection[Bucket], limit: int, left: LeftGradients
    ) -> None:
        self.limit = limit
        self.left = left
        self.devices = {bucket.spec.device.type for bucket in buckets}
        self.in_shards = {arg for bsym in bsyms if bsym.sym in _READ_SHARDS for arg in names(bsym.args)}
        self.in_use = 0
        self.nbytes: dict[str, int] = {}
        self.users: dict[str, set[str]] = {}
        self.memory_of: dict[str, set[str]] = {}
        self.strides: dict[str, tuple[int, ...]] = {}
        self.arenas: dict[Arena, str] = {}
        self.reductions: dict[str, BoundSymbol] = {}
        self.receive_buffers = ReceiveBuffers()
        for bsym in bsyms:  # an earlier step
            self.receive_buffers.take(bsym)
            self.receive_buffers.give_back(bsym)
        shards = sum(self.counted(b.shard.nbytes, b.spec.shard_device.type) for b in buckets)
        self.allocated = shards + lasting_bytes(bsyms)
        used = {slot.arena for bsym in bsyms if (slot := slot_used_by(bsym)) is not None}
        others = {bucket.arena for bucket in buckets} - used  # other traces may have left them allocated
        for arena in kept_arenas(bsyms) | others:
            self.use_arena(arena)
        for bucket in left.unsharded:
            self._leave(_unreduced_name(bucket), bucket.spec.grad_bytes, bucket)
        for bucket in left.reduced:
            self._leave(_reduced_name(bucket), bucket.spec.accumulated_bytes, bucket)

    def _leave(self, name: str, nbytes: int, bucket: Bucket) -> None:
        """Let the bucket keep gradients."""
        self.allocate(name, nbytes, bucket.spec.device.type)
        self.share(_CALLER, [name])

    def run(self, trace: TraceCtx, which: str) -> None:
        """Run a trace, after which only what it returns stays in use."""
        for position, bsym in enumerate(trace.bound_symbols):
            if bsym.sym.id is PrimIDs.DEL:
                for name in args_of(bsym):
                    self.drop(name)
                continue
            if bsym.sym.id in UNPACKING:
                for proxy in defined_by(bsym):
                    known = proxy.name in self.in_shards or proxy.name in self.memory_of
                    if isinstance(proxy, TensorProxy) and not known:
                        self.allocate_tensor(proxy)
                        if which == "forward":
                            self.share(_CALLER, [proxy.name])
                continue
            needed = self.define(bsym) + self.allocated + self.receive_buffers.nbytes + self.in_use
            if needed > self.limit:
                raise VerificationError(
                    f"bound symbol {position} of {which}: the step needs {needed:,} bytes there, {needed - self.limit:,} "
                    f"more than max_memory={self.limit:,}\n    {statement(bsym)}{self._hint(trace, needed)}"
                )
            self.receive_buffers.give_back(bsym)
            if bsym.sym is fsdp_release:
                for arena in {slot.arena for slot in bsym.args} & self.arenas.keys():
                    self.drop(self.arenas.pop(arena))
        returned = {_CALLER, *self.arenas.values(), *names(tree_iter(return_of(trace).args))}
        if has_backward(trace):
            self.share(_CALLER, names(tree_iter(return_of(trace).args[0]["output"])))
        for name in [name for name in self.memory_of if name not in returned]:
            self.drop(name)

    def _hint(self, trace: TraceCtx, needed: int) -> str:
        """Return what to do if fusions are the reason."""
        if not any(bsym.sym.is_fusion for bsym in trace.bound_symbols):
            return ""
        lower = 2 * self.limit - needed
        return (
            f"\nWhat to recompute is chosen before operators are fused, and a fusion may keep other values: set a lower "
            f"limit, such as max_memory={lower:,}"
        )

    def define(self, bsym: BoundSymbol) -> int:
        """Record the memory of what ``bsym`` returns, and return the bytes that it allocates and frees again."""
        outs = defined_by(bsym)
        if bsym.sym.name in HOST_COPIES and (source := args_of(bsym)[0]) in self.strides:
            self.strides[outs[0].name] = self.strides[source]
        self.receive_buffers.take(bsym)
        passing = passing_bytes(bsym, self.reductions, self.left)
        if (slot := slot_used_by(bsym)) is not None:
            piece = self.use_arena(slot.arena)
            if bsym.sym is not fsdp_reduce_scatter:  # its future becomes the sharded gradients
                for out in outs:
                    self.share(out.name, [piece])
        if bsym.sym.name in GRAD_WRITERS or self._define_own(bsym, outs):
            return passing
        call = observed_call(bsym, self.strides)
        observed = None if call is None else call.outputs
        facts = facts_of(bsym)
        for out in outs:
            if not isinstance(out, TensorProxy):
                continue
            if observed is not None and out.name in observed:
                self.strides[out.name] = observed[out.name].strides
                views = list(observed[out.name].views)
                is_new = not views
            else:
                self.strides.pop(out.name, None)
                views = list(facts.aliases.get(out.name, ()))
                is_new = not (views and facts.known)
            self.share(out.name, views)
            if is_new:
                self.allocate_tensor(out)
        device = next((p.device.type for p in (*outs, *bsym.flat_proxy_args) if isinstance(p, TensorProxy)), "cpu")
        return passing if call is None else passing + self.counted(call.temporary_bytes, device)

    def _define_own(self, bsym: BoundSymbol, outs: Sequence[Any]) -> bool:
        """Record what a symbol of this package returns; return whether it is one."""
        if bsym.sym is fsdp_all_gather:
            spec = bucket_of(bsym).spec
            if spec.comm.offload and not is_resident(bsym):  # the copy on the device that is sent
                self.allocate(outs[0].name, spec.layout.shard_numel * spec.param_dtype.itemsize, spec.device.type)
            if not is_resident(bsym):  # a secondary shard is kept until it has been sent
                self.share(outs[0].name, names(bsym.kwargs.values()))
        elif bsym.sym is fsdp_wait_params:
            arenas = set(self.arenas.values()) & self.memory_of.get(Wait(bsym).future.name, set())
            for out in outs:
                self.share(out.name, arenas)
        elif bsym.sym is fsdp_reduce_scatter:
            self.reductions[outs[0].name] = bsym
            spec = bucket_of(bsym).spec
            self.allocate(outs[0].name, payload(fsdp_all_reduce.name, spec)[0], spec.device.type)
        elif bsym.sym in (fsdp_all_reduce, fsdp_wait_grads):
            spec, future = bucket_of(bsym).spec, Wait(bsym).future.name
            self.reductions.pop(future, None)
            is_new = bsym.sym is fsdp_wait_grads and (spec.reduce_dtype != spec.dtype or spec.comm.offload)
            if is_new:
                self.allocate(outs[0].name, spec.layout.shard_numel * spec.dtype.itemsize, spec.shard_device.type)
            for out in outs:
                self.share(out.name, [outs[0].name if is_new else future])
        elif bsym.sym is fsdp_accumulate_grads:
            if (name := _unreduced_name(bucket_of(bsym))) not in self.nbytes:
                self._leave(name, bucket_of(bsym).spec.grad_bytes, bucket_of(bsym))
        elif bsym.sym is fsdp_accumulate_reduced:  # keeps the result of the first reduction, and adds others to it
            future, bucket = Wait(bsym).future.name, bucket_of(bsym)
            self.reductions.pop(future, None)
            if bucket not in self.left.reduced and (name := _reduced_name(bucket)) not in self.memory_of:
                if bucket.spec.accumulate_dtype != bucket.spec.reduce_dtype:
                    self.allocate(name, bucket.spec.accumulated_bytes, bucket.spec.device.type)
                else:
                    self.share(name, [future])
                self.share(_CALLER, [name])
        elif bsym.sym is fsdp_reduce_unreduced and bucket_of(bsym) in self.left.unsharded | self.left.reduced:
            spec, name = bucket_of(bsym).spec, f"sharded gradients of {bucket_of(bsym).handle}"
            self.allocate(name, spec.layout.shard_numel * spec.dtype.itemsize, spec.shard_device.type)
            self.share(_CALLER, [name])
        elif bsym.sym is fsdp_copy_to_device:
            self.allocate_tensor(outs[0])
        elif bsym.sym is fsdp_wait_device_copy:
            self.share(outs[0].name, args_of(bsym))
        elif bsym.sym in _IN_HOST_MEMORY:
            for out in outs:
                self.share(out.name, [])
        else:
            return False
        return True

    def use_arena(self, arena: Arena) -> str:
        """Allocate the memory of an arena if it is free, and return its piece."""
        if arena not in self.arenas:
            name = self.arenas[arena] = f"arena {id(arena)}"
            while name in self.nbytes:  # a view keeps what was released
                name = self.arenas[arena] = f"{name}, again"
            self.allocate(name, arena.nbytes, arena.device.type)
        return self.arenas[arena]

    def counted(self, nbytes: int, device_type: str) -> int:
        """Return the bytes that count of an allocation on a device."""
        return rounded(nbytes, device_type) if device_type in self.devices or not self.devices else 0

    def allocate_tensor(self, proxy: Any) -> None:
        """Let a tensor keep new memory."""
        self.allocate(proxy.name, nbytes_of(proxy), proxy.device.type)

    def allocate(self, name: str, nbytes: int, device_type: str) -> None:
        """Let ``name`` keep new memory."""
        self.nbytes[name] = self.counted(nbytes, device_type)
        self.in_use += self.nbytes[name]
        self.users[name] = {name}
        self.memory_of.setdefault(name, set()).add(name)

    def share(self, name: str, of: Iterable[str]) -> None:
        """Let ``name`` keep the memory of other names."""
        self.memory_of.setdefault(name, set())
        for piece in {piece for other in of for piece in self.memory_of.get(other, ())}:
            self.users[piece].add(name)
            self.memory_of[name].add(piece)

    def drop(self, name: str) -> None:
        """Delete ``name``, and the memory that no other name keeps."""
        for piece in self.memory_of.pop(name, ()):
            self.users[piece].discard(name)
            if not self.users[piece]:
                self.in_use -= self.nbytes.pop(piece)
                del self.users[piece]
