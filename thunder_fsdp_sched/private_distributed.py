"""Private names of torch's process groups and device meshes, each used in one function only: see ``private_torch``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions
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
