"""Norm, clipping and scale of sharded gradients, and discarding of unreduced ones.

[Note: Catching up]
Exceptions may stop the ranks at different collectives of a trace. Each process group matches collectives by their
order, so the next one of one rank would match an earlier one of another, and agreement refuses to go on. The ranks
began this trace together, and it has the same order of collectives on all of them. So the collectives that a rank has
issued are the first ones of the rank that came farthest. Each rank issues those that it lacks, into memory that nobody
reads. It must not do so alone, because a rank that still waits for a collective would take zeros for gradients. So all
ranks first meet in a round, after all have failed. A rank that had issued all collectives of the trace when it failed
cannot know whether others have, so it meets them as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule

from ... import option_checks as checks
from ...errors import coded_error
from ...ranks.control import Control
from ...ranks.joint_control import joint
from ...ranks.rounds import ScheduleDisagreement
from ...runtime.bucket import Bucket
from ...runtime.ops import gather_again, reduce_scatter
from ...runtime.row_dtensor import local_rows
from ...sharding.sharded_module import ShardedModule, find_jitted

_WHAT = "discard_unreduced"


def clip_grad_norm_(
    model: ThunderModule, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the gradients of a sharded model by the norm of the unsharded gradients; one collective.

    It replaces ``torch.nn.utils.clip_grad_norm_``. Every parameter counts once, whether it has replicas, is tied, is
    frozen or is sharded over another process group. For ``ignored_params``, which are whole on every rank, the mean
    over ranks counts. Call it on all ranks, even on those without gradients.

    Args:
        max_norm: gradients are scaled down to this norm if theirs is larger.
        norm_type: p of the p-norm, or ``math.inf``.
        error_if_nonfinite: raise an error on all ranks if the norm is nan or infinite, before anything is scaled.

    Cost, on any number of ranks: a round of agreement and an all-reduce of one number.

    torch's own function gives the same norm, up to rounding, if all parameters are sharded over the same ranks. This
    one issues a single collective and names the gradients that are not finite.

    Returns:
        The norm before clipping, a 0-dim tensor, bit for bit the same on all ranks; float64 if a gradient is, else
        float32.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``.
        ValueError: ``norm_type`` is not positive, or ``max_norm`` is negative.
        RuntimeError: the norm is not finite (``error_if_nonfinite``); it names the ranks and parameters whose gradients
            are not finite, or says that the norm of finite gradients overflows.
        ScheduleDisagreement: other ranks do something else.
    """
    if not norm_type > 0:
        raise coded_error(ValueError, "gradient.norm-type-not-positive", norm_type=norm_type)
    if not max_norm >= 0:
        raise coded_error(ValueError, "gradient.max-norm-negative", max_norm=max_norm)
    model, sharded = find_jitted(model)
    world_group, control = sharded.world_group, sharded.control
    if control.agrees_in_steps:
        control.begin("clip_grad_norm_", f"with norm_type={norm_type}")
    weighed: list[tuple[float, list[torch.Tensor]]] = [
        (
            1 / bucket.spec.replicas,
            [g for p in bucket.params if p.grad is not None and (g := local_rows(p.grad)).numel()],
        )
        for bucket in sharded.buckets
    ]
    whole = [p.grad for n, p in model.named_parameters() if n not in sharded.locations and p.grad is not None]
    weighed.append((1 / world_group.size, whole))
    device = sharded.buckets[0].spec.device if sharded.buckets else torch.device("cpu")
    dtype = torch.float64 if any(p.dtype is torch.float64 for p in model.parameters()) else torch.float32
    total = torch.zeros((), dtype=dtype, device=device)
    for weight, of_bucket in weighed:
        if not of_bucket:
            continue
        norms = _stacked(torch._foreach_norm(of_bucket, norm_type, dtype=dtype), device)
        if math.isinf(norm_type):
            total = torch.maximum(total, norms.max())
        else:
            total += weight * norms.pow(norm_type).sum()
    if not control.is_single_rank:
        reduce = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        control.settle()
        if world_group.backend_for(device):
            with control.doing("the all-reduce of clip_grad_norm_"):
                dist.all_reduce(total, reduce, group=world_group.process_group)
        else:  # nothing is sharded, and all gradients are on the CPU
            (norm,) = control.reduce("clip_grad_norm_", [total.item()], reduce)
            total.fill_(norm)
    if not math.isinf(norm_type):
        total = total.pow(1 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        names = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        per_rank = zip(
            world_group.global_ranks, control.exchange("the names of gradients that are not finite", names), strict=True
        )
        culprits = [f"not finite on rank {rank}: {', '.join(theirs)}" for rank, theirs in per_rank if theirs]
        why = "; ".join(culprits) or f"every gradient is finite, but their norm overflows {dtype}"
        raise coded_error(RuntimeError, "gradient.norm-not-finite", norm_type=norm_type, norm=total.item(), reason=why)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as in torch
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for param in model.parameters():
        if param.grad is not None:
            by_device.setdefault(param.grad.device, []).append(local_rows(param.grad))
    for on, grads in by_device.items():
        torch._foreach_mul_(grads, scale.to(on))
    return total


def discard_unreduced(model: ThunderModule) -> None:
    """Discard unreduced gradients: those that ``no_sync`` has accumulated and no backward has returned yet.

    Call it on all ranks to restart an accumulation; ``zero_grad()`` clears only ``.grad``. With ``agree="step"``, the
    ranks meet here: if only some call it, all ranks raise an error, and nothing is discarded. It is the only way to
    continue after a backward under ``no_sync`` has failed halfway, or after exceptions have stopped ranks at different
    collectives. Then call it before any collective of your own: another rank may be in backward and wait until all
    gather a bucket that it alone has lost.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``.
        RuntimeError: exceptions have stopped ranks at different collectives, and some of these cannot be repeated, for
            example because only a part of the ranks takes part.
        ScheduleDisagreement: another rank does something else.
    """
    _, sharded = find_jitted(model)
    catch_up(sharded)
    for bucket in sharded.buckets:
        bucket.accumulation.discard()


def set_gradient_divide_factor(model: ThunderModule, factor: float | None, *, module_name: str = "") -> None:
    """Set the divisor of the sum of gradients over ranks, like FSDP2's method of the same name.

    It applies to every reduction that is waited for from now on, with or without replicas, even in traces that are
    already compiled. With ``no_sync``, it applies to the whole sum when that is reduced. Call it on all ranks: they
    compare the arguments in a round of agreement, 0.3 ms for 2 ranks on one machine.

    A factor other than the number of ranks costs each backward one more pass over this rank's rows of the gradients,
    right after the wait, because transports compute the mean. Results are bit for bit those of FSDP2 if the number of
    ranks is a power of two; otherwise they may differ in the last bit.

    Args:
        model: the result of ``thunder.jit(module, transforms=[fsdp(...)])``.
        factor: a positive number; ``None`` for the number of ranks that share a parameter, replicas included (the mean).
        module_name: set it only for the parameters below this submodule. Each bucket must be entirely inside or
            outside: ``fsdp(gradient_divide_factor=...)`` with a callable makes such buckets.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``, or ``factor`` is not a number.
        ValueError: ``factor`` is not positive; no parameter is sharded below ``module_name``, or a bucket has other
            parameters, too.
        ScheduleDisagreement: other ranks do something else or pass other arguments.
    """
    factor = checks.factor("gradient_divide_factor", factor)
    _, sharded = find_jitted(model)
    prefix = f"{module_name}." if module_name else ""
    chosen = []
    for bucket in sharded.buckets:
        inside = [any(name.startswith(prefix) for name in param.names) for param in bucket.spec.params]
        if all(inside):
            chosen.append(bucket)
        elif any(inside):
            other = bucket.spec.params[inside.index(False)].name
            raise coded_error(
                ValueError,
                "gradient.bucket-shared-with-other-modules",
                bucket=bucket.spec.name,
                other=other,
                module_name=module_name,
            )
    if not chosen:
        raise coded_error(ValueError, "gradient.no-sharded-parameter-below-module", module_name=module_name)
    sharded.control.rendezvous("set_gradient_divide_factor", f"to {factor}", f"below {module_name!r}")
    sharded.set_gradient_divide_factor({bucket.spec.name for bucket in chosen}, factor)


def _stacked(norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Stack norms on ``device``, with one copy from each device."""
    if all(norm.device == norms[0].device for norm in norms):
        return torch.stack(list(norms)).to(device)
    return torch.stack([norm.to(device) for norm in norms])


def catch_up(sharded: ShardedModule) -> None:
    """Issue the collectives that this rank lacks if exceptions have stopped ranks in a trace; otherwise one round.

    Without agreement in steps, it does nothing.

    Raises:
        RuntimeError: this rank cannot issue them.
        ScheduleDisagreement: another rank cannot, or does something else.
    """
    control, counts = sharded.control, sharded.control.issue_counts
    if counts.log is None:
        return
    control = joint(control)
    try:
        _meet(control)
    except ScheduleDisagreement:
        if not control.channel.is_open:
            raise
        _meet(control)  # an exception may have stopped some ranks in a trace that they alone had announced
    if control.is_alike and not counts.surplus_issues:
        return
    logs = control.gather_settled(_WHAT, counts.log)
    farthest, fewest = max(logs.values(), key=len), min(map(len, logs.values()))
    buckets = {b.handle: b for base in sharded.buckets for b in (base, *base.aliases.values())}
    is_possible = all(log == farthest[: len(log)] for log in logs.values()) and all(
        _can_repeat(kind, buckets.get(handle)) for kind, handle in farthest[fewest:]
    )
    failure = coded_error(RuntimeError, "ranks.cannot-catch-up-after-exceptions")
    control.report(_WHAT, None if is_possible else failure)
    for kind, handle in farthest[len(counts.log) :]:
        if kind == "all-gather":
            gather_again(buckets[handle], None)
        else:
            _reduce_zeros(buckets[handle])
    counts.issued = counts.expected = 0
    counts.log.clear()


def _meet(control: Control) -> None:
    control.settle()  # the round of a trace that an exception has stopped
    control.report(_WHAT, None, digest=control.issue_counts.surplus_issues)


def _can_repeat(kind: str, bucket: Bucket | None) -> bool:
    if bucket is None or not bucket.is_on_all_ranks or kind not in ("all-gather", "reduce-scatter"):
        return False
    # Zeros would send the rounding errors that are kept for the next reduction.
    is_stateless = kind == "all-gather" or not bucket.spec.has_error_feedback
    return is_stateless and bucket.ranks.replicas is None and bucket.secondary_ranks is None


def _reduce_zeros(bucket: Bucket) -> None:
    slot = bucket.temporary_slot(bucket.spec.reduce_dtype)
    flight = reduce_scatter(bucket, slot, *[None] * len(bucket.spec.params), adds_left=False)
    slot.arena.finish(flight)
    slot.arena.release()
