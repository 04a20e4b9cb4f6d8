"""The one function a user calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import torch
from thunder.distributed import FSDPBucketingStrategy, FSDPType
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from .buckets import ParamSpec
from .clusters import ClusterSpec
from .options import check_options
from .schedule import StepSchedule
from .transform import FSDPTransform

__all__ = ["fsdp"]


def fsdp(
    *,
    sharding_strategy: str | FSDPType = "zero3",
    bucketing_strategy: str | FSDPBucketingStrategy | int | Callable[[str, torch.nn.Parameter], str] = "block",
    prefetch: int | Literal["auto"] = 1,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    process_group: ProcessGroup | None = None,
    broadcast_from: int | None = None,
    ignored_params: Iterable[torch.nn.Parameter | str] | None = None,
    move_state_dict_to_cpu: bool = False,
    schedule: str | Path | StepSchedule | None = None,
    max_unsharded_bytes: int | str | None = None,
    cluster: ClusterSpec | str | None = None,
    transport: str | Callable[[str, tuple[ParamSpec, ...]], str] = "auto",
    mp_policy: MixedPrecisionPolicy | None = None,
    process_group_for: Callable[[str, torch.nn.Parameter], ProcessGroup | DeviceMesh | None] | None = None,
    separate_reduce_scatter_group: bool = False,
    param_init_fn: Callable[[torch.nn.Module], object] | None = None,
    offload_policy: OffloadPolicy | None = None,
    allow_different_computation: bool = False,
    audit: bool = True,
) -> FSDPTransform:
    """Fully sharded data parallel training for ``thunder.jit(model, transforms=[fsdp(...)])``.

    ``thunder.jit`` shards the module at once: each rank keeps its rows of every parameter, as views of one flat buffer
    a bucket. The module's own ``nn.Parameter`` objects are these rows from then on, so optimizers and hooks may have been
    made before. What takes rows for parameters is refused; initializing in place afterwards (``nn.init``) is not,
    and sees rows.

    Args:
        sharding_strategy: ``"zero3"`` frees unsharded parameters after their last use in forward and gathers them again
            in backward: least memory, half as much communication again. The last ones lie in their slots still when
            backward begins with them, and do not travel again. ``"zero2"`` keeps all until backward.
        bucketing_strategy: which parameters travel in one collective. ``"block"``: those of one block of the module
            tree (a child of a ModuleList or Sequential), and of each module outside any block; the first and the last
            block in several parts if they have 3 MiB or more, as nothing hides them whole. ``"layer"``: those that one
            module owns. ``"none"``: each parameter alone. An int: consecutive parameters, until the bucket holds
            that many bytes. A callable ``(parameter name, parameter) -> bucket name``. No bucket spans dtypes, devices,
            or trainable and frozen parameters.
        prefetch: how many buckets ahead of its own wait an all-gather is issued (smaller ones in between, norms or parts
            of a block, count for their share of its bytes). ZeRO-3 needs memory for about
            ``prefetch + 1`` unsharded buckets. 0 overlaps nothing. ``"auto"`` takes the distance with the least
            simulated step time.
        device: where shards and unsharded parameters live; default is where each parameter is. ``"cuda"`` without an index
            is the GPU that is current when ``thunder.jit`` is called.
        mesh: a device mesh to shard over, instead of ``process_group``. With two dimensions parameters are replicated
            across the first and sharded over the second, as FSDP2 does (hybrid sharding).
        process_group: the ranks to shard over; default is the default process group.
        broadcast_from: global rank whose parameters and buffers all ranks take over; default is that every rank has
            initialized them alike.
        ignored_params: parameters, or their names, that stay whole on every rank; their gradients are not reduced.
        move_state_dict_to_cpu: ``original_state_dict`` moves each parameter to the CPU as soon as it is gathered.

        schedule: a schedule to replay instead of sorting: a file that ``transform.save_schedules(path)`` wrote, or a
            :class:`StepSchedule`. One that does not fit is refused, naming the line.

        max_unsharded_bytes: bytes (or ``"40GiB"``) that all unsharded memory may take: gathered buckets and unsharded
            gradients. With ``sharding_strategy="zero3"`` as many buckets stay unsharded until backward as fit, and with
            ``prefetch="auto"`` both are chosen together for the least simulated step time. ``.compiled[-1].choice``
            shows what was considered.
        transport: how buckets travel, or a callable ``(bucket name, parameters) -> transport``. ``"flat"``: the bucket as
            one vector, one collective, no copy; cuts between ranks fall between rows. ``"all_to_all"``: the same, but for
            reductions ranks exchange pieces and add them up themselves, at half the bytes of gloo's reduce-scatter.
            ``"coalesced"``: each parameter cut evenly, one launch of one collective each, no copy. ``"all_reduce"``:
            completes a buffer in which each rank's shards stand at their place; twice the bytes.
            ``"symmetric_memory"``: copy engines pull from peers' memory,
            CUDA within a node. ``"staged"``: one collective and one copy. ``"auto"``: flat, or with NCCL coalesced where
            flat would need several collectives, or with gloo all_to_all; the plan says why.
        mp_policy: torch's own :class:`~torch.distributed.fsdp.MixedPrecisionPolicy`. Shards are cast once when they have
            changed and gathered in ``param_dtype``; gradients are averaged in ``reduce_dtype`` (default ``param_dtype``) and
            summed up in it under ``no_sync``; shards, their gradients and the optimizer keep the parameters' dtype.
            ``cast_forward_inputs`` and ``output_dtype`` concern the inputs and outputs of the jitted module.
        process_group_for: ``(parameter name, parameter) -> process group``, 1-D or 2-D mesh, or ``None`` for the usual one:
            for parameters, such as experts, that are sharded over other ranks, all of them among ``mesh`` or
            ``process_group``. Their gradients are averaged over those ranks.
        separate_reduce_scatter_group: reductions get communicators of their own, so that a gather never queues behind one.
        param_init_fn: for a module on the meta device: initializes the parameters and buffers that one submodule owns
            itself, ``lambda module: module.reset_parameters()``. It is called with one submodule after the other, each
            materialized on ``device`` alone, so that the module never exists as a whole. Without it parameters on the meta
            device have to be loaded (:func:`load_checkpoint`, :func:`load_safetensors`) before the first call.
        offload_policy: torch's own :class:`~torch.distributed.fsdp.CPUOffloadPolicy`: shards, their gradients and so the
            optimizer's state are on the CPU, in pinned memory if the policy says so and there is a GPU. A gather copies a
            shard to ``device`` first, on a stream of its own; the host waits for each sharded gradient to arrive, and
            for these copies, so that shards may be written whenever a forward or a backward has returned. On a CPU
            it copies as well, and saves nothing.
        allow_different_computation: let ranks compute different things, as long as their collectives agree. By default
            ranks whose traces have other operators in between, such as another activation, raise
            :class:`ScheduleDisagreement`. Shapes may always differ.
        audit: checks during the first run of each compiled trace that no operator returns memory of a slot, or changes an
            unsharded parameter, unless the plan says so. Later steps pay nothing.
        cluster: what the simulator takes for granted, a :class:`ClusterSpec` or the name of a preset; default is the
            preset nearest to the device at hand.

    Returns:
        A transform for one module. ``.plan`` shows the buckets after ``thunder.jit``, ``.compiled`` and ``.schedules``
        the traces and their communication after a call.

    Raises:
        TypeError, ValueError: an option is wrong; the message names it. Sharding itself, inside ``thunder.jit``, raises
            RuntimeError without a process group, TypeError or ValueError for a parameter that cannot be sharded.
    """
    return FSDPTransform(
        check_options(
            sharding_strategy=sharding_strategy,
            bucketing_strategy=bucketing_strategy,
            prefetch=prefetch,
            device=device,
            mesh=mesh,
            process_group=process_group,
            broadcast_from=broadcast_from,
            ignored_params=ignored_params,
            move_state_dict_to_cpu=move_state_dict_to_cpu,
            schedule=schedule,
            max_unsharded_bytes=max_unsharded_bytes,
            cluster=cluster,
            transport=transport,
            mp_policy=mp_policy,
            process_group_for=process_group_for,
            separate_reduce_scatter_group=separate_reduce_scatter_group,
            param_init_fn=param_init_fn,
            offload_policy=offload_policy,
            allow_different_computation=allow_different_computation,
            audit=audit,
        )
    )
