"""Transports, which send and receive buckets: one file per transport, all with the interface in ``base``."""

from __future__ import annotations

from collections.abc import Sequence

from ..extensions import load
from ..plan.layout import make_layout
from ..plan.specs import BucketSpec
from .base import Traffic, Transport, Work

__all__ = [
    "TRANSPORTS",
    "Traffic",
    "Transport",
    "Work",
    "choose_transport",
    "find_transport",
    "register_transport",
    "transport_of",
]

TRANSPORTS: dict[str, Transport | str] = {
    "flat": "transports.flat:Flat",
    "all_to_all": "transports.all_to_all:AllToAll",
    "coalesced": "transports.coalesced:Coalesced",
    "all_reduce": "transports.all_reduce:AllReduce",
    "symmetric_memory": "extras.symmetric_memory:SymmetricMemory",
}
"""All transports, keyed by name; before its first use, the path of its class instead."""


def register_transport(transport: Transport) -> None:
    """Register a transport, so that ``fsdp(transport=transport.name)`` finds it."""
    TRANSPORTS[transport.name] = transport


def find_transport(name: str) -> Transport:
    """Return the transport with this name."""
    transport = TRANSPORTS[name]
    if isinstance(transport, str):
        transport = TRANSPORTS[name] = load(transport)()
    return transport


def transport_of(spec: BucketSpec) -> Transport:
    """Return the transport of a bucket."""
    transport = find_transport(spec.comm.transport)
    if spec.gather_wire is spec.reduce_wire is None:
        return transport
    encoded: Transport = load("extras.low_precision.encoded:Encoded")(transport, spec)
    return encoded


def choose_transport(
    shapes: Sequence[tuple[int, ...]], world_size: int, itemsize: int, backend: str
) -> tuple[str, str]:
    """Return the transport that ``"auto"`` chooses for a bucket of parameters with these shapes, and the reason.

    ``flat`` needs one collective and no copy. If row widths have no small common multiple, it needs one collective for
    each width; ``coalesced`` then lets NCCL launch them as one kernel. gloo cannot do that, and its reduce-scatter
    sends everything twice, which ``all_to_all`` avoids. The other transports send or copy more bytes, or, like
    ``symmetric_memory``, need memory and a topology that only the user can vouch for. They are used only on request.
    """
    if backend == "gloo" and world_size > 1:
        return "all_to_all", "auto, no copy, and gradients are sent once (gloo's reduce-scatter sends them twice)"
    flat = make_layout(shapes, world_size, itemsize)
    segments = sum(1 for s in flat.segments if s.shard_numel)
    if segments <= 1:
        return "flat", "auto, one collective and no copy"
    if backend == "nccl":
        coalesced = make_layout(shapes, world_size, itemsize, per_param=True)
        if coalesced.unsharded_numel <= flat.unsharded_numel:
            return "coalesced", f"auto, one launch where one vector would need {segments} collectives"
    return "flat", "auto, no copy"
