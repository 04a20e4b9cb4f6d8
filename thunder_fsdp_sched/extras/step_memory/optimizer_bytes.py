"""The bytes of an optimizer: of its state, and what its step allocates and frees."""

from __future__ import annotations

from collections.abc import Iterable

from ...runtime.bucket import Bucket
from ...runtime.row_dtensor import local_rows


def optimizer_state_bytes(buckets: Iterable[Bucket], per_element: float | None = None) -> int:
    """Return the bytes of optimizer state on this rank's device.

    The state of shards that ``CPUOffloadPolicy`` keeps on the host is there, too, so it does not count.

    Args:
        per_element: bytes for each element that trains. By default those of Adam and AdamW: two values in the dtype of
            the shards.
    """
    shards = [b.shard for b in _trained_on_device(buckets)]
    return sum(2 * s.nbytes if per_element is None else int(per_element * s.numel()) for s in shards)


def optimizer_step_bytes(buckets: Iterable[Bucket], per_element: float | None = None, *, foreach: bool = True) -> int:
    """Return the bytes that ``optimizer.step`` allocates and frees on this rank's device.

    Args:
        per_element: bytes for each element that trains; 0 with ``fused=True``. By default those of Adam and AdamW: with
            ``foreach`` the roots of all second moments exist at once, in a loop two results for one parameter.
        foreach: whether the optimizer updates all parameters at once, torch's default on GPUs but not on CPUs.
    """
    trained = _trained_on_device(buckets)
    if per_element is not None:
        return sum(int(per_element * b.shard.numel()) for b in trained)
    rows = [local_rows(param).nbytes for b in trained for param in b.params]
    return sum(rows) if foreach else 2 * max(rows, default=0)


def _trained_on_device(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Return the buckets whose shards an optimizer updates on the device, not on the host."""
    return [b for b in buckets if b.spec.requires_grad and not b.spec.comm.offload]
