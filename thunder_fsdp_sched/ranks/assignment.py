"""The ranks that share each parameter, from the fields of the option ``ranks``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..extensions import load
from ..plan.specs import BucketSpec, GroupKey
from .process_groups import BucketRanks, ProcessGroupRef, default_group


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
        self.default_ranks = (
            self.ranks_over(world_group) if mesh is None else load("extras.own_groups:ranks_of_mesh")(self, mesh)
        )

    def of(self, name: str, param: torch.nn.Parameter) -> BucketRanks:
        """Return the ranks that share a parameter, according to ``process_group_for``.

        Raises:
            TypeError, ValueError: ``process_group_for`` returned something that this rank or ``world_group`` cannot use.
        """
        answer = None if self._process_group_for is None else self._process_group_for(name, param)
        if answer is None:
            return self.default_ranks
        ranks: BucketRanks = load("extras.own_groups:ranks_of_answer")(self, name, answer)
        return ranks

    def ranks(self, group_key: GroupKey) -> BucketRanks:
        """Return the ranks for which :meth:`key` has returned ``group_key``."""
        return self._of[group_key]

    def ranks_of(self, spec: BucketSpec) -> BucketRanks:
        """Return the ranks that share a bucket."""
        return self.ranks(GroupKey(spec.group, spec.layout.world_size, spec.replicas))

    def secondary_ranks_of(self, spec: BucketSpec) -> BucketRanks | None:
        """Return the ranks that gather a bucket from secondary shards; all ranks that share it must call this."""
        if (size := spec.options.secondary_ranks) is None:
            return None
        key = f"{self.ranks_of(spec).group.name} by {size}"
        if key not in self._made:
            self._made[key] = BucketRanks(load("extras.own_groups:subgroup")(self.ranks_of(spec).group, size))
        return self._made[key]

    def key(self, ranks: BucketRanks) -> GroupKey:
        """Return the key by which a plan describes these ranks."""
        replicas = ranks.replicas.size if ranks.replicas is not None else 1
        key = GroupKey(ranks.group.description, ranks.group.size, replicas)
        if self._of.setdefault(key, ranks) is not ranks:  # two groups with one description
            key = key._replace(group=f"{ranks.group.description} {ranks.group.name}")
            self._of[key] = ranks
        return key

    def ranks_over(
        self, group: ProcessGroupRef, replicas: ProcessGroupRef | None = None, mesh: DeviceMesh | None = None
    ) -> BucketRanks:
        """Return the ranks of these groups; the same object for the same groups."""
        key = f"{group.name} {replicas.name if replicas is not None else ''}"
        if key not in self._made:
            twins = self._separate_reductions and group.size > 1
            reductions = load("extras.own_groups:twin")(group) if twins else None
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
    group: ProcessGroupRef = load("extras.own_groups:group_of_mesh")(mesh)
    return group
