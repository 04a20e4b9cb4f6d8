"""The ranks that share each parameter, from the fields of the option ``ranks``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..plan.specs import BucketSpec, GroupKey
from .process_groups import BucketRanks, ProcessGroupRef, companion, default_group, subgroup, twin


class GroupAssignment:
    """The ranks of each parameter.

    Args:
        world_group: all ranks that share any of the module's parameters (:func:`find_world_group`).
        mesh: the ranks of parameters for which ``process_group_for`` returns nothing else; by default ``world_group``.
        process_group_for: a function of a parameter's name and the parameter, as in ``Ranks(...)``.
        separate_reductions: whether reductions have a communicator of their own.

    Attributes:
        default_ranks: the ranks of parameters for which ``process_group_for`` returns nothing else.
    """

    def __init__(
        self,
        world_group: ProcessGroupRef,
        *,
        mesh: DeviceMesh | None = None,
        process_group_for: Callable[[str, torch.nn.Parameter], Any] | None = None,
        separate_reductions: bool = False,
    ) -> None:
        self.world_group = world_group
        self._process_group_for = process_group_for
        self._separate_reductions = separate_reductions
        self._made: dict[str, BucketRanks] = {}
        self._of: dict[GroupKey, BucketRanks] = {}
        self.default_ranks = self._ranks(world_group) if mesh is None else self._of_mesh(mesh)

    def of(self, name: str, param: torch.nn.Parameter) -> BucketRanks:
        """Return the ranks that share a parameter, according to ``process_group_for``.

        Raises:
            TypeError, ValueError: ``process_group_for`` returned something that this rank or ``world_group`` cannot use.
        """
        answer = None if self._process_group_for is None else self._process_group_for(name, param)
        return self.default_ranks if answer is None else self._checked(name, answer)

    def ranks(self, group_key: GroupKey) -> BucketRanks:
        """Return the ranks that a plan describes by ``key``."""
        return self._of[group_key]

    def ranks_of(self, spec: BucketSpec) -> BucketRanks:
        """The ranks that share a bucket."""
        return self.ranks(GroupKey(spec.group, spec.layout.world_size, spec.replicas))

    def secondary_ranks_of(self, spec: BucketSpec) -> BucketRanks | None:
        """Return the ranks that gather a bucket from secondary shards; all ranks that share it must call this."""
        if (size := spec.options.secondary_ranks) is None:
            return None
        key = f"{self.ranks_of(spec).group.name} by {size}"
        if key not in self._made:
            self._made[key] = BucketRanks(subgroup(self.ranks_of(spec).group, size))
        return self._made[key]

    def key(self, ranks: BucketRanks) -> GroupKey:
        """Return the key by which a plan describes these ranks."""
        replicas = ranks.replicas.size if ranks.replicas is not None else 1
        key = GroupKey(ranks.group.description, ranks.group.size, replicas)
        if self._of.setdefault(key, ranks) is not ranks:  # two groups with one description
            key = key._replace(group=f"{ranks.group.description} {ranks.group.name}")
            self._of[key] = ranks
        return key

    def _checked(self, name: str, answer: Any) -> BucketRanks:
        if answer is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"process_group_for: rank {dist.get_rank()} is not in the process group for parameter {name!r}; return the "
                f"group that this rank is a member of"
            )
        if isinstance(answer, DeviceMesh):
            if answer.ndim > 2:
                raise ValueError(
                    f"process_group_for: the mesh for {name!r} has {answer.ndim} dimensions, expected at most 2"
                )
            ranks = self._of_mesh(answer)
        elif isinstance(answer, dist.ProcessGroup):
            ranks = self._ranks(ProcessGroupRef.of(answer))
        else:
            raise TypeError(
                f"process_group_for: expected a process group, a mesh or None for parameter {name!r}, got {answer!r} of "
                f"type {type(answer).__name__}"
            )
        outside = {rank for group in ranks.groups for rank in group.global_ranks} - {*self.world_group.global_ranks}
        if outside:
            raise ValueError(
                f"process_group_for: the group for parameter {name!r} holds ranks {sorted(outside)}, which are not "
                f"among those that the module is sharded over; give Ranks(...) a mesh or process_group with all of them"
            )
        return ranks

    def _of_mesh(self, mesh: DeviceMesh) -> BucketRanks:
        replicas = ProcessGroupRef.of(mesh.get_group(0)) if mesh.ndim == 2 else None
        return self._ranks(ProcessGroupRef.of(mesh.get_group(mesh.ndim - 1)), replicas, mesh)

    def _ranks(
        self, group: ProcessGroupRef, replicas: ProcessGroupRef | None = None, mesh: DeviceMesh | None = None
    ) -> BucketRanks:
        """Return the ranks of these groups; the same object for the same groups."""
        key = f"{group.name} {replicas.name if replicas is not None else ''}"
        if key not in self._made:
            reductions = twin(group) if self._separate_reductions and group.size > 1 else None
            grid = mesh.mesh.tolist() if mesh is not None and mesh.ndim == 2 else None
            dim_names = None if mesh is None else mesh.mesh_dim_names
            self._made[key] = BucketRanks(
                group, reductions=reductions, replicas=replicas, grid=grid, dim_names=dim_names
            )
        return self._made[key]


def find_world_group(mesh: DeviceMesh | None, process_group: ProcessGroupRef | None) -> ProcessGroupRef:
    """Return all ranks that share any of a module's parameters, for agreement and for aligning measurements.

    Raises:
        RuntimeError: there is no process group.
    """
    if mesh is None:
        return process_group or default_group()
    if mesh.ndim == 1:
        return ProcessGroupRef.of(mesh.get_group())
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == dist.get_world_size():
        return default_group()
    return companion(mesh.get_group(0), ranks, "mesh")
