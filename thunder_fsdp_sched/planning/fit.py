"""Whether a step fits into the memory of a device, and what its peak consists of."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.step_memory import StepMemory
from ..runtime.bucket import Bucket

__all__ = ["describe_fit", "optimizer_state_bytes", "readable_bytes"]


def optimizer_state_bytes(buckets: Iterable[Bucket], per_element: float | None = None) -> int:
    """Return the bytes of optimizer state on this rank's device.

    The state of shards that ``CPUOffloadPolicy`` keeps on the host is there, too, so it does not count.

    Args:
        per_element: bytes for each element that trains. By default those of Adam and AdamW: two values in the dtype of
            the shards.
    """
    shards = [b.shard for b in buckets if b.spec.requires_grad and not b.spec.comm.offload]
    return sum(2 * s.nbytes if per_element is None else int(per_element * s.numel()) for s in shards)


def describe_fit(memory: StepMemory, device_bytes: int, device: str) -> str:
    """Return lines that say whether a step fits, by how much, what its peak consists of, and its largest tensors.

    Args:
        memory: the memory of the step, optimizer state included.
        device_bytes: bytes of the device's memory.
        device: the name of the device.
    """
    peak = memory.peak
    free = device_bytes - peak.nbytes
    verdict = (
        f"fits on {device}: {readable_bytes(free)} free"
        if free >= 0
        else f"does not fit on {device}: {readable_bytes(-free)} too much"
    )
    kinds = [f"  {readable_bytes(nbytes):>10}  {kind}" for kind, nbytes in peak.by_kind.items() if nbytes]
    tensors = [f"  {readable_bytes(tensor.nbytes):>10}  {tensor.name}, {tensor.kind}" for tensor in peak.largest]
    sources = [f", {tensor.source.rpartition('/')[2]}" if tensor.source else "" for tensor in peak.largest]
    lines = [
        f"{verdict} of {readable_bytes(device_bytes)}",
        f"peak {readable_bytes(peak.nbytes)} in {peak.phase}, at position {peak.position}:",
        *kinds,
        "largest tensors there, with the lines that made them:",
        *(tensor + source for tensor, source in zip(tensors, sources, strict=True)),
    ]
    return "\n".join(lines)


def readable_bytes(nbytes: int) -> str:
    """Return a number of bytes in GB, or in MB if it is smaller."""
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.2f} MB"
