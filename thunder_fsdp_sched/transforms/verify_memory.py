"""Prove that no position of the traces that run needs more memory than ``max_memory``."""

from __future__ import annotations

import time
from collections.abc import Iterable

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..runtime.bucket import Bucket
from ..runtime.memory import Arena
from ..trace.host_copies import (
    HOST_COPIES,
    fsdp_copy_to_device,
    fsdp_copy_to_host,
    fsdp_wait_device_copy,
    fsdp_wait_host_copy,
)
from ..trace.inspection import (
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
from ..trace.operands import bucket_of
from ..trace.operator_facts import facts_of, observed_call
from ..trace.symbols import (
    GRAD_WRITERS,
    fsdp_all_gather,
    fsdp_all_reduce,
    fsdp_params_unchanged,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
    payload,
)
from .verify import VerificationError

__all__ = ["verify_memory"]

_READ_SHARDS = (fsdp_all_gather, fsdp_params_unchanged)

_NOT_IN_DEVICE_MEMORY = (fsdp_all_gather, fsdp_wait_params, fsdp_copy_to_host, fsdp_wait_host_copy)
"""Symbols whose results are in slots, which count as allocated all the time, or in host memory."""

_CALLER = "the caller"
"""Stands for the names by which the caller keeps the arguments and outputs of forward."""


def verify_memory(
    trace: TraceCtx, *, forward: TraceCtx | None = None, max_memory: int, buckets: Iterable[Bucket]
) -> TraceCtx:
    """Check the memory of a trace that is about to run, and return it unchanged.

    Runs last, after ``del_last_used``, whose ``del`` statements tell until when values are in memory. It shares no code
    with the prediction (``trace.step_memory``): it executes the trace on a table of names instead of tensors. Memory
    counts until the last name of it is deleted. If it is not known whether an operator returns a view, its output counts
    as a view and as new memory.

    Args:
        forward: for a backward trace, its forward trace, which is then checked again, because backward may have
            enlarged an arena.
        max_memory: bytes of all memory of the step, without optimizer state.
        buckets: all buckets of the module.

    Raises:
        VerificationError: names the bound symbol at which more is needed.
    """
    started = time.perf_counter()
    traces = {"forward": trace} if forward is None else {"forward": forward, "backward": trace}
    buckets, bsyms = list(buckets), [bsym for each in traces.values() for bsym in each.bound_symbols]
    slots = {bsym.args[1] for bsym in bsyms if bsym.sym in (fsdp_all_gather, fsdp_reduce_scatter)}
    walk = _Walk(buckets, {bucket.arena for bucket in buckets} | {slot.arena for slot in slots}, max_memory)
    walk.in_shards = {arg for bsym in bsyms if bsym.sym in _READ_SHARDS for arg in args_of(bsym)}
    for which, each in traces.items():
        walk.run(each, which)
    return with_bound_symbols(trace, trace.bound_symbols, "fsdp: verified memory", started)


class _Walk:
    """The memory of values by their names while traces run.

    Attributes:
        allocated: bytes that are allocated all the time: shards and slots.
        in_use: bytes of all pieces in use.
        nbytes: bytes of each piece of memory that is in use, by the name of its first owner.
        users: the names in use that keep it.
        in_shards: names of shards, which count as allocated all the time.
        memory_of: the pieces that a name keeps.
    """

    def __init__(self, buckets: Iterable[Bucket], arenas: Iterable[Arena], limit: int) -> None:
        self.allocated = sum(bucket.shard.nbytes for bucket in buckets) + sum(arena.nbytes for arena in arenas)
        self.limit = limit
        self.in_shards: set[str] = set()
        self.in_use = 0
        self.nbytes: dict[str, int] = {}
        self.users: dict[str, set[str]] = {}
        self.memory_of: dict[str, set[str]] = {}
        self.strides: dict[str, tuple[int, ...]] = {}

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
                        self.allocate(proxy.name, nbytes_of(proxy))
                        if which == "forward":
                            self.share(_CALLER, [proxy.name])
                continue
            self.define(bsym)
            needed = self.allocated + self.in_use
            if needed > self.limit:
                raise VerificationError(
                    f"bound symbol {position} of {which}: the step needs {needed:,} bytes there, {needed - self.limit:,} "
                    f"more than max_memory={self.limit:,}\n    {statement(bsym)}{self._hint(trace, needed)}"
                )
        returned = {_CALLER, *names(tree_iter(return_of(trace).args))}
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

    def define(self, bsym: BoundSymbol) -> None:
        """Record the memory of what ``bsym`` returns."""
        outs = defined_by(bsym)
        if bsym.sym.name in HOST_COPIES and (source := args_of(bsym)[0]) in self.strides:
            self.strides[outs[0].name] = self.strides[source]
        if bsym.sym in _NOT_IN_DEVICE_MEMORY or bsym.sym.name in GRAD_WRITERS:
            for out in outs:
                self.share(out.name, [])
            return
        if bsym.sym is fsdp_copy_to_device:
            self.allocate(outs[0].name, nbytes_of(outs[0]))
            return
        if bsym.sym is fsdp_wait_device_copy:
            self.share(outs[0].name, args_of(bsym))
            return
        if bsym.sym is fsdp_reduce_scatter:
            self.allocate(outs[0].name, payload(fsdp_all_reduce.name, bucket_of(bsym).spec)[0])
            return
        if bsym.sym in (fsdp_all_reduce, fsdp_wait_grads):
            spec = bucket_of(bsym).spec
            is_new = bsym.sym is fsdp_wait_grads and (spec.reduce_dtype != spec.dtype or spec.comm.offload)
            [future] = args_of(bsym)
            if is_new:
                self.allocate(outs[0].name, spec.layout.shard_numel * spec.dtype.itemsize)
            for out in outs:
                self.share(out.name, [outs[0].name if is_new else future])
            return
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
                self.allocate(out.name, nbytes_of(out))

    def allocate(self, name: str, nbytes: int) -> None:
        """Let ``name`` keep new memory."""
        self.nbytes[name] = nbytes
        self.in_use += nbytes
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
