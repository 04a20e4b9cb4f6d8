"""The costs of bound symbols in bytes and time, and the memory of operations on a bucket.

[Note: Costs]
Effects (``ir.effects``) are the facts about a bound symbol that passes and proofs need. Its costs, in bytes and in
time, are read by predictions alone, so they are not loaded for a step that nobody predicts. The costs of this package's
symbols are in ``symbol_costs``; those of all other operators are observed: see ``rows.observed_costs``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from ...ir.analysis import Lifetime
from ...ir.effects import Effects, left_reduced, left_unsharded
from ...ir.inspection import nbytes_of
from ...runtime.bucket import Bucket
from ...transports.base import Buffer


class LocalWork(NamedTuple):
    """Work of a symbol on the host and on the compute stream, besides communication.

    Attributes:
        launches: calls of the communication library.
        moved: bytes that it reads and writes on the compute stream of a GPU.
        moved_at_once: the same if the host computes; it includes the work that a GPU does on the communication stream.
        touches: the number of reads and writes of each tensor that it reads and that is not in place already.
        to_host: bytes that it copies to the host's memory.
    """

    launches: int = 1
    moved: int = 0
    moved_at_once: int = 0
    touches: int = 0
    to_host: int = 0


class Allocation(NamedTuple):
    """Memory that a symbol allocates.

    Attributes:
        owner: the name of the result that it belongs to, or a key. Idle memory of a pool is used again by an equal key.
        nbytes: its bytes, without rounding.
        device: the type of its device.
        scope: its lifetime. ``"value"``: until the last use of the result or a view of it; ``"call"``: while the symbol
            runs; ``"wait"``: while the symbol runs that waits for the issued collective; ``"pool"``: it is taken from
            idle memory, and given back by the wait; ``"steps"``: in all steps; ``"persistent"``: until a symbol
            ``forgets`` the key; ``"persistent later"``: the same, but before that it is the memory of the operation for
            which the symbol waits.
        kind: its kind in reports: ``"communication"``, ``"gradients"``, ``"temporaries"``, or ``"values"`` if the kind
            depends on its lifetime.
        label: its description in reports; results have names instead.
        only_with: a key; it is allocated only if this key has memory.
        on_host: whether it is in host memory, even in a plan on a CPU for a GPU.
    """

    owner: Hashable
    nbytes: int
    device: str
    scope: Literal["value", "call", "wait", "pool", "steps", "persistent", "persistent later"] = "value"
    kind: str = "communication"
    label: str = ""
    only_with: Hashable = None
    on_host: bool = False


PERSISTENT = ("persistent", "persistent later")
"""The scopes of memory that is left for a later micro-batch."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of one bound symbol. Values are identified by their names.

    Attributes:
        shards: the shards that it sends.
        views: results that certainly own no memory, but keep that of others alive.
        strides: strides of results that are not contiguous.
        layouts: results with the strides of another value.
        allocates: memory that it allocates.
        forgets: keys whose memory it frees.
        work: its work besides communication; ``None`` for computation.
        operators: names of the base operators of torch that it calls; ``None`` if they cannot be observed.
        flops: their additions and multiplications by dtype; ``None`` if they cannot be observed.
    """

    shards: tuple[str, ...] = ()
    views: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    allocates: tuple[Allocation, ...] = ()
    forgets: tuple[Hashable, ...] = ()
    work: LocalWork | None = None
    operators: frozenset[str] | None = None
    flops: Mapping[torch.dtype, int] | None = None


FREE = Costs()


def unsharded_gradients(bucket: Bucket) -> Allocation:
    """Return the memory of the gradients that ``no_sync`` leaves unsharded."""
    spec = bucket.spec
    label = f"unreduced gradients of {spec.name}"
    return Allocation(left_unsharded(bucket), spec.grad_bytes, spec.device.type, "persistent", "gradients", label)


def reduced_gradients(bucket: Bucket) -> Allocation:
    """Return the memory of this rank's rows of the gradients that ``no_sync`` reduces and accumulates."""
    spec = bucket.spec
    label = f"reduced gradients of {spec.name}"
    return Allocation(left_reduced(bucket), spec.accumulated_bytes, spec.device.type, "persistent", "gradients", label)


def call_memory(bucket: Bucket, label: str, nbytes: int, only_with: Hashable = None) -> tuple[Allocation, ...]:
    """Return memory that exists only during a call."""
    memory = Allocation(
        None, nbytes, bucket.spec.device.type, "call", label=f"{label} ({bucket.spec.name})", only_with=only_with
    )
    return (memory,) if nbytes else ()


def memory_of_sums(bucket: Bucket, grads: Sequence[object]) -> tuple[Allocation, ...]:
    """Return the memory of the sums of gradients that do not have the shape of their parameters."""
    pairs = zip(bucket.spec.params, grads, strict=False)
    sums = (
        param.numel * grad.dtype.bytes
        for param, grad in pairs
        if isinstance(grad, TensorProxy) and tuple(map(int, grad.shape)) != param.shape and nbytes_of(grad)
    )
    return call_memory(bucket, "sum of broadcast gradients", sum(sums))


def memory_afterwards(bucket: Bucket, what: str, nbytes: int) -> tuple[Allocation, ...]:
    """Return memory that a transport needs after its collective: on a GPU in the issue, elsewhere in the wait."""
    spec = bucket.spec
    scope: Literal["call", "wait"] = "call" if spec.comm.computes_on == "cuda" else "wait"
    return (Allocation(None, nbytes, spec.device.type, scope, label=f"{what} ({spec.name})"),) if nbytes else ()


def pooled_memory(bucket: Bucket, buffers: Sequence[Buffer], only_with: Hashable = None) -> list[Allocation]:
    device = bucket.spec.device.type
    return [
        Allocation(b, b.nbytes, device, "pool", label="buffer of a transport", only_with=only_with) for b in buffers
    ]


def transport_memory(bucket: Bucket, only_with: Hashable = None) -> tuple[Allocation, ...]:
    """Return the receive buffers and the workspace of a reduction."""
    spec, transport = bucket.spec, bucket.transport
    device, key = spec.device.type, ("workspace", spec.comm.transport, bucket.ranks.reductions.description)
    buffers = pooled_memory(bucket, transport.reduce_buffers(spec), only_with)
    if spec.has_error_feedback:
        label = f"error feedback of {spec.name}"
        buffers.append(Allocation(("feedback", bucket), spec.grad_bytes, device, "steps", "gradients", label))
    workspace = transport.reduce_workspace(spec)
    if workspace and spec.requires_grad:
        label = f"workspace of {spec.comm.transport}"
        return (*buffers, Allocation(key, workspace, device, "steps", label=label))
    return tuple(buffers)


def sharded_gradients(bucket: Bucket, only_with: Hashable = None) -> Allocation:
    """Return the memory of gradients that a backward adds to ``.grad`` itself."""
    spec = bucket.spec
    label, key = f"sharded gradients of {spec.name}", ("sharded gradients", bucket)
    device, on_host = spec.shard_device.type, spec.comm.offload
    return Allocation(key, spec.shard_bytes, device, "persistent", "gradients", label, only_with, on_host)


Strides = Mapping[str, tuple[int, ...]]
"""Strides by name, of values that are not contiguous."""


class Row(NamedTuple):
    """One bound symbol of a step.

    Attributes:
        bsym: the bound symbol.
        trace: the index of its trace.
        position: its schedule position, where those of backward follow those of forward; without one, that of the next
            row that has one.
        effects: its effects.
        costs: its costs for inputs with these strides.
        strides: the strides of its inputs.
        args: the values that it reads, one for each operand.
        outs: the values that it defines.
        copied: the tensors that it copies, without those that are in place already, such as gradients in a slot.
    """

    bsym: BoundSymbol
    trace: int
    position: int
    effects: Effects
    costs: Costs
    strides: Strides
    args: tuple[Lifetime, ...] = ()
    outs: tuple[Lifetime, ...] = ()
    copied: tuple[TensorProxy, ...] = ()


def device_of(proxy: object) -> str:
    """Return the type of the device of a value."""
    return proxy.device.type if isinstance(proxy, (TensorProxy, FutureTensorProxy)) else "cpu"
