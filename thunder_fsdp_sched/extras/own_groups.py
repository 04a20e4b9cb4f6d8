"""The process groups that the option ``ranks`` asks for: meshes, groups of some parameters, subgroups and twins."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import coded_error
from ..ranks.assignment import GroupAssignment
from ..ranks.new_groups import companion_of, new_group
from ..ranks.process_groups import BucketRanks, ProcessGroupRef, default_group


def ranks_of_answer(assignment: GroupAssignment, name: str, answer: Any) -> BucketRanks:
    """Return the ranks that ``process_group_for`` has given for a parameter."""
    if answer is dist.GroupMember.NON_GROUP_MEMBER:
        raise coded_error(ValueError, "ranks.own-rank-outside-parameter-group", rank=dist.get_rank(), name=name)
    if isinstance(answer, DeviceMesh):
        if answer.ndim > 2:
            raise coded_error(ValueError, "ranks.parameter-mesh-too-many-dimensions", name=name, ndim=answer.ndim)
        ranks = ranks_of_mesh(assignment, answer)
    elif isinstance(answer, dist.ProcessGroup):
        ranks = assignment.ranks_over(ProcessGroupRef.of(answer))
    else:
        raise coded_error(
            TypeError, "ranks.parameter-group-of-wrong-type", name=name, answer=answer, type=type(answer).__name__
        )
    outside = {rank for group in ranks.groups for rank in group.global_ranks} - {*assignment.world_group.global_ranks}
    if outside:
        raise coded_error(ValueError, "ranks.parameter-group-exceeds-world", name=name, ranks=sorted(outside))
    return ranks


def ranks_of_mesh(assignment: GroupAssignment, mesh: DeviceMesh) -> BucketRanks:
    """Return the ranks of a mesh that shards along its last dimension, and replicates along the other one.

    Raises:
        ValueError: the ranks along the last dimension do not ascend. torch sorts the ranks of a group, so a rank would have
            the shard of another coordinate than its own, and be averaged with replicas of other shards.
    """
    rows = mesh.mesh.reshape(-1, mesh.size(mesh.ndim - 1)).tolist()
    if unsorted := next((row for row in rows if row != sorted(row)), None):
        raise coded_error(
            ValueError,
            "ranks.mesh-ranks-not-ascending",
            mesh=mesh.mesh.tolist(),
            ranks=unsorted,
            expected=sorted(unsorted),
        )
    replicas = ProcessGroupRef.of(mesh.get_group(0)) if mesh.ndim == 2 else None
    return assignment.ranks_over(ProcessGroupRef.of(mesh.get_group(mesh.ndim - 1)), replicas, mesh)


def group_of_mesh(mesh: DeviceMesh) -> ProcessGroupRef:
    """Return the process group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return ProcessGroupRef.of(mesh.get_group())
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == dist.get_world_size():
        return default_group()
    return companion(mesh.get_group(0), ranks, "mesh")


def twin(group: ProcessGroupRef) -> ProcessGroupRef:
    """Return a process group of the same ranks with a separate communicator."""
    return companion(group.process_group, list(group.global_ranks), f"{group.description}_reductions")


def subgroup(group: ProcessGroupRef, size: int) -> ProcessGroupRef:
    """Return the process group of the ``size`` successive ranks of ``group`` that include this one.

    ``size`` divides the ranks of ``group``, all of which must call this.
    """
    parts = [list(range(first, first + size)) for first in range(0, group.size, size)]
    own = [group.global_ranks[rank] for rank in parts[group.rank // size]]
    return companion(group.process_group, own, f"{group.description}_by_{size}", parts=parts)


def companion(
    parent: dist.ProcessGroup, ranks: list[int], description: str, *, parts: list[list[int]] | None = None
) -> ProcessGroupRef:
    """Return the process group of ``ranks`` with the backend of the group ``parent``, created once and destroyed with it.

    Args:
        parts: as for :func:`new_group`.
    """
    group = companion_of(parent, description, ranks)
    if group is None or not group.is_alive:
        group = new_group(ranks, parent, description, parts=parts)
    return group
