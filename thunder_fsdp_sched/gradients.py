"""Norm and clipping of sharded gradients."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule

from .transform import find_transform

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    model: ThunderModule, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for a sharded model: the norm is that of the unsharded gradients; one collective.

    Every parameter counts once: shards and their replicas, tied and frozen parameters, parameters over several process
    groups. Of ``ignored_params``, which every rank has, the mean over ranks counts. To be called on all ranks, also on those
    that have no gradients.

    Args:
        max_norm: gradients are scaled down to this norm if theirs is larger.
        norm_type: p of the p-norm, or ``math.inf``.
        error_if_nonfinite: raise if the norm is nan or infinite, on all ranks, before anything is scaled.

    Returns:
        The norm before clipping, a 0-dim tensor, bit for bit the same on all ranks; float64 if a gradient is, else float32.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``.
        ValueError: ``norm_type`` is not positive, or ``max_norm`` is negative.
        RuntimeError: the norm is not finite (``error_if_nonfinite``); it names this rank's parameters that are to blame.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a positive number or inf, got {norm_type!r}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm: expected a number of at least 0, got {max_norm!r}")
    sharded = find_transform(model).sharded
    everyone = sharded.everyone
    weighed: list[tuple[float, list[torch.Tensor]]] = [
        (1 / bucket.spec.replicas, [p.grad for p in bucket.params if p.grad is not None and p.grad.numel()])
        for bucket in sharded.buckets
    ]
    whole = [p.grad for n, p in model.named_parameters() if n not in sharded.places and p.grad is not None]
    weighed.append((1 / everyone.size, whole))
    device = sharded.buckets[0].spec.device if sharded.buckets else torch.device("cpu")
    dtype = torch.float64 if any(b.spec.dtype == torch.float64 for b in sharded.buckets) else torch.float32
    total = torch.zeros((), dtype=dtype, device=device)
    for weight, of_bucket in weighed:
        if not of_bucket:
            continue
        norms = torch.stack([n.to(device) for n in torch._foreach_norm(of_bucket, norm_type, dtype=dtype)])
        if math.isinf(norm_type):
            total = torch.maximum(total, norms.max())
        else:
            total += weight * norms.pow(norm_type).sum()
    if everyone.size > 1 and everyone.backend != "fake":
        reduce = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        dist.all_reduce(total, reduce, group=everyone.process_group)
    if not math.isinf(norm_type):
        total = total.pow(1 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        names = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {total.item()}, so they cannot be clipped; not finite on rank "
            f"{dist.get_rank() if dist.is_initialized() else 0}: {', '.join(names) or 'nothing (see the other ranks)'}"
        )
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, total)
    return total
