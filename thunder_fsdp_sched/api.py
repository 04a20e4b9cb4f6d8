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
    max_unsharded_bytes: int | str | None = None,
    cluster: ClusterSpec | str | None = None,
    schedule: str | Path | StepSchedule | None = None,
    transport: str | Callable[[str, tuple[ParamSpec, ...]], str] = "auto",
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    process_group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    process_group_for: Callable[[str, torch.nn.Parameter], ProcessGroup | DeviceMesh | None] | None = None,
    separate_reduce_scatter_group: bool = False,
    device: torch.device | str | None = None,
    param_init_fn: Callable[[torch.nn.Module], object] | None = None,
    broadcast_from: int | None = None,
    ignored_params: Iterable[torch.nn.Parameter | str] | None = None,
    allow_different_computation: bool = False,
    audit: bool = True,
    move_state_dict_to_cpu: bool = False,
) -> FSDPTransform:
    """Return a transform that shards a module: ``thunder.jit(model, transforms=[fsdp(...)])``.

    ``thunder.jit`` shards the module at once. From then on the module's own ``nn.Parameter`` objects hold this rank's rows,
    as views of one flat buffer for each bucket, so optimizers, parameter groups and hooks made before stay valid. Code that
    would take these rows for whole parameters raises an error. Initializing a shard in place (``nn.init``) does not: it sees
    the rows.

    Args:
        sharding_strategy: ``"zero3"`` frees unsharded parameters after their last use in forward and gathers them again
            in backward. This takes the least memory and half as much communication again. Buckets that are still
            resident when backward starts are not gathered again. ``"zero2"`` keeps all parameters unsharded until
            backward has used them.
        bucketing_strategy: which parameters travel in one collective. ``"block"``: those of one block of the module
            tree (a child of a ModuleList or Sequential), and those of each module outside any block. The first and the
            last block are cut into several buckets if they have 3 MiB or more, because no compute hides their
            collectives. ``"layer"``: the parameters that one module owns. ``"none"``: each parameter by itself. An int:
            consecutive parameters, until the bucket has that many bytes. A callable ``(parameter name, parameter) ->
            bucket name``. No bucket mixes dtypes, devices, process groups, or trainable and frozen parameters.
        prefetch: how many buckets ahead of its own wait an all-gather is issued. A bucket that is smaller than the
            gathered one (a norm, a part of a block) counts for its share of the bytes. ZeRO-3 needs memory for about
            ``prefetch + 1`` unsharded buckets. 0 overlaps nothing. ``"auto"`` takes the distance with the shortest
            simulated step.
        max_unsharded_bytes: the most bytes that all unsharded memory may take, as an int or a text such as ``"40GiB"``:
            gathered buckets and unsharded gradients. As many buckets as fit stay unsharded until backward. With
            ``prefetch="auto"`` both are chosen together for the shortest simulated step. ``.compiled[-1].choice`` shows
            the candidates. It needs ``sharding_strategy="zero3"``. The default is no limit.
        cluster: the machine that the simulator assumes for ``prefetch="auto"`` and ``max_unsharded_bytes``: a
            :class:`ClusterSpec` or the name of a preset. The default is the preset nearest to the device at hand.
        schedule: a schedule to replay instead of sorting: a file written by ``transform.save_schedules(path)``, or a
            :class:`StepSchedule`. One that does not fit is refused, and the error names the line.
        transport: how buckets travel, or a callable ``(bucket name, parameters) -> transport``. ``"flat"``: the bucket
            as one vector, one collective and no copy, cut between rows. ``"all_to_all"``: gathers as flat does; for a
            reduction ranks exchange pieces and add them up themselves, at half the bytes of gloo's reduce-scatter.
            ``"coalesced"``: each parameter cut evenly, one launch for all collectives, no copy. ``"all_reduce"``: one
            all-reduce completes a buffer that holds each rank's shards in place, at twice the bytes.
            ``"symmetric_memory"``: copy engines pull from the memory of peers, with CUDA within a node. ``"staged"``:
            one collective and one copy. ``"auto"``: all_to_all with gloo; otherwise flat, or with NCCL coalesced where
            flat would need several collectives. The plan gives the reason.
        mp_policy: torch's own :class:`~torch.distributed.fsdp.MixedPrecisionPolicy`. Shards are cast to ``param_dtype``
            and then gathered. Gradients are averaged in ``reduce_dtype`` (default ``param_dtype``), and accumulated in
            it under ``no_sync``. Shards, their gradients and the optimizer's state keep the parameters' dtype.
            ``cast_forward_inputs`` and ``output_dtype`` apply to the inputs and outputs of the jitted module.
        offload_policy: torch's own :class:`~torch.distributed.fsdp.CPUOffloadPolicy`. Shards and their gradients, and
            so the optimizer's state, live on the CPU, in pinned memory if the policy asks for it and the device is a
            GPU. A gather first copies the shard to ``device`` on a stream of its own. The host waits for each sharded
            gradient to arrive, and for these copies, so shards may be written whenever a forward or a backward has
            returned. If ``device`` is the CPU, the copies are made as well and nothing is saved.
        process_group: the ranks to shard over. The default is the default process group.
        mesh: a device mesh to shard over, instead of ``process_group``. With two dimensions, parameters are replicated
            across the first and sharded over the second, as in FSDP2 (hybrid sharding).
        process_group_for: a callable ``(parameter name, parameter) -> process group``, 1-D or 2-D mesh, or ``None`` for
            the usual ranks. It is for parameters, such as experts, that are sharded over other ranks, all of which have
            to be among those of ``mesh`` or ``process_group``. Their gradients are averaged over those ranks.
        separate_reduce_scatter_group: give reductions communicators of their own, so that no gather queues after one.
        device: where shards and unsharded parameters live. The default is where each parameter is. ``"cuda"`` without an
            index is the GPU that is current when ``thunder.jit`` is called.
        param_init_fn: initializes a module on the meta device: ``lambda module: module.reset_parameters()``. It is
            called with one submodule after the other and sets the parameters and buffers that this submodule owns
            itself. Each is materialized on ``device`` alone, so the module never exists as a whole. Without it,
            parameters on the meta device have to be loaded (:func:`load_checkpoint`, :func:`load_safetensors`) before
            the first call.
        broadcast_from: global rank whose parameters and buffers all ranks copy. By default every rank has to initialize
            the same values.
        ignored_params: parameters, or their names, that stay whole on every rank. Their gradients are not reduced.
        allow_different_computation: let ranks compute different things, as long as their collectives agree. By default
            :class:`ScheduleDisagreement` is raised if the traces of ranks differ in an operator, an argument or the flow
            of data. Ranks whose inputs have other shapes, or other numbers as arguments, may also have other numbers in
            their traces, as far as these may come from a size.
        audit: during the first run of each compiled trace, check that no operator returns memory of a slot, or changes
            an unsharded parameter, unless the plan says so. Later runs pay nothing.
        move_state_dict_to_cpu: ``original_state_dict`` moves each parameter to the CPU as soon as it is gathered.

    Returns:
        A transform for one module. After ``thunder.jit``, ``.plan`` shows the buckets; after a call, ``.compiled`` holds the
        traces and ``.schedules`` their communication.

    Raises:
        TypeError, ValueError: an option is wrong; the message names it. ``thunder.jit`` itself raises RuntimeError without a
            process group, and TypeError or ValueError for a parameter that cannot be sharded.
    """
    return FSDPTransform(
        check_options(
            sharding_strategy=sharding_strategy,
            bucketing_strategy=bucketing_strategy,
            prefetch=prefetch,
            max_unsharded_bytes=max_unsharded_bytes,
            cluster=cluster,
            schedule=schedule,
            transport=transport,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            process_group=process_group,
            mesh=mesh,
            process_group_for=process_group_for,
            separate_reduce_scatter_group=separate_reduce_scatter_group,
            device=device,
            param_init_fn=param_init_fn,
            broadcast_from=broadcast_from,
            ignored_params=ignored_params,
            allow_different_computation=allow_different_computation,
            audit=audit,
            move_state_dict_to_cpu=move_state_dict_to_cpu,
        )
    )
