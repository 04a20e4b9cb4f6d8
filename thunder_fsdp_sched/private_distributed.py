"""Private names of torch's process groups and device meshes, each used in one function only: see ``private_torch``."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh


def host_backend(group: Any) -> Any:
    """Return the backend of ``group`` for host memory.

    Its own methods skip argument checks, logging and the dispatcher, and so take less than half of the host time of those
    of ``torch.distributed``.
    """
    return group._get_backend(torch.device("cpu"))


def all_gather(output: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
    """Issue an all-gather of one tensor and return its work.

    The group's method takes less host time than the function of ``torch.distributed``, which checks its arguments first.
    """
    issue = getattr(group, "all_gather_single", None) or group._allgather_base  # torch 2.13 renamed the methods
    return issue(_real(output), _real(own), _all_gather_options())


def reduce_scatter(output: torch.Tensor, whole: torch.Tensor, op: Any, group: Any) -> Any:
    """Issue a reduce-scatter of one tensor and return its work."""
    issue = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
    return issue(_real(output), _real(whole), _reduce_scatter_options(op))


def all_to_all(output: torch.Tensor, whole: torch.Tensor, group: Any) -> Any:
    """Issue an exchange of equal pieces of one tensor and return its work."""
    issue = getattr(group, "all_to_all_single", None) or group.alltoall_base
    return issue(_real(output), _real(whole), [], [], _all_to_all_options())


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _all_real(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(map(torch.view_as_real, tensors)) if tensors[0].is_complex() else tensors


@functools.cache
def _all_gather_options() -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = True
    return options


@functools.cache
def _reduce_scatter_options(op: Any) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, True
    return options


@functools.cache
def _all_to_all_options() -> AllToAllOptions:
    options = AllToAllOptions()
    options.asyncOp = True
    return options


def all_gather_coalesced(outputs: list[Any], inputs: list[Any], group: Any) -> Any:
    """Issue one launch of an all-gather for each pair of tensors; return its work.

    It is the call at the end of ``_coalescing_manager``, without collecting and checking the arguments one by one.
    """
    issue = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    return issue(*map(_all_real, (outputs, inputs)), _all_gather_options())


def reduce_scatter_coalesced(outputs: list[Any], inputs: list[Any], op: Any, group: Any) -> Any:
    """Issue one launch of a reduce-scatter for each pair of tensors; return its work."""
    issue = getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
    return issue(*map(_all_real, (outputs, inputs)), _reduce_scatter_options(op))


def mesh_over(
    grid: Any, rank: int, group_names: list[str], device_type: str, dim_names: tuple[str, ...] | None
) -> DeviceMesh:
    """Return a device mesh over existing process groups, one per dimension, that finds them by name when asked.

    ``DeviceMesh.from_group`` would keep the groups alive.

    Args:
        grid: the global ranks, a list for each dimension.
        rank: this process's global rank.
    """
    mesh = DeviceMesh(device_type, grid, mesh_dim_names=dim_names, _init_backend=False, _rank=rank)
    mesh._dim_group_names = group_names  # type: ignore[assignment]
    return mesh


def process_groups() -> list[Any]:
    """Return the process groups that this process knows, in the order of creation."""
    return list(c10d._world.pg_names)


def gloo_connections(group: Any, key: str, timeout: timedelta) -> Any:
    """Return new connections among the ranks of ``group``, which ``destroy_process_group()`` does not close; a collective.

    Args:
        key: unique to these connections.
    """
    store = c10d.PrefixStore(f"thunder_fsdp_sched/{key}", group.get_group_store())
    return c10d.ProcessGroupGloo(store, group.rank(), group.size(), timeout)


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of the collectives of ``group``."""
    for device in ("cuda", "cpu"):
        found = getattr(_options_of(group, device), "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return c10d.default_pg_timeout


def copy_of_options(group: Any) -> Any:
    """Return a copy of the ``pg_options`` of ``group``, for another group with the same backend.

    It is ``None`` for backends without options, such as gloo. It is a copy because creating a group changes its
    options.
    """
    options = _options_of(group, "cuda")
    return copy.deepcopy(options) if hasattr(options, "is_high_priority_stream") else None


def _options_of(group: Any, device: str) -> Any:
    try:
        return group._get_backend(torch.device(device)).options
    except (AttributeError, RuntimeError):  # the group has no backend for the device, or the backend no options
        return None


def splits_default_group() -> bool:
    """Return whether ``new_group`` creates an NCCL group by splitting the default group's communicator.

    It does after ``init_process_group(device_id=...)``. All ranks of the default group must take part then, even with
    ``use_local_synchronization``.
    """
    default = c10d._get_default_group()
    return default.bound_device_id is not None and c10d._get_split_source(default) is not None


def is_group_name_taken(ranks: Collection[int], number: int, store: Store) -> bool:
    """Return whether the name that torch derives from ``ranks`` and ``number`` known groups has been used.

    Destroyed groups count, too: their members' addresses stay in ``store``, that of the default group, and a new group
    of the same name would try to connect to them.
    """
    text = "_".join(map(str, (*sorted(ranks), number)))
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    # The keys under which gloo and NCCL store the first member's address and the first communicator's id.
    return name in c10d._world.pg_names.values() or any(
        store.check([f"{name}//{key}"]) for key in ("cpu//0/0", "cuda//0")
    )


def leave(group: Any, device: torch.device) -> None:
    """Destroy a process group of one backend at once, even while other ranks have not issued its collectives."""
    if device.type == "cuda":
        group._get_backend(device).abort()
    dist.destroy_process_group(group)
