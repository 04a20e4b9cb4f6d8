"""Which ranks share which parameters: the process groups behind ``mesh``, ``process_group`` and ``process_group_for``.

[Note: Groups that only members make]
Groups beside the user's are made by their members alone, as the rest of the world may be busy with something else. After
``init_process_group(device_id=...)`` torch makes each group of NCCL by splitting a communicator, which hangs unless all of
its ranks take part. By ``new_group`` that is the default group's communicator. So a twin, which has the same ranks as the
group that it goes with, is split from that one (``split_group``), and a group over the union of several has gloo for its
backend: it carries single numbers only.
"""

from __future__ import annotations

import itertools
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .buckets import ParamSpec, ShardedOver
from .compat import copy_of_options, is_group_name_taken, process_groups, splits_default_group, timeout_of
from .groups import Group, Ranks
from .options import Options

__all__ = ["Placing", "everyone_of", "new_group"]


class Placing:
    """The ranks of each parameter.

    Attributes:
        usual: the ranks of parameters for which nothing else is asked.
        everyone: all ranks that the module's parameters are shared with (:func:`everyone_of`).
    """

    def __init__(self, options: Options, everyone: Group) -> None:
        self._options = options
        self.everyone = everyone
        self._made: dict[str, Ranks] = {}
        self._of: dict[ShardedOver, Ranks] = {}
        self._mesh_of: dict[Ranks, DeviceMesh] = {}  # with two dimensions
        if options.mesh is not None:
            self.usual = self._of_mesh(options.mesh)
        else:
            self.usual = self._ranks(everyone)

    def of(self, name: str, param: torch.nn.Parameter) -> ShardedOver:
        """Asks ``process_group_for`` about a parameter.

        Raises:
            TypeError, ValueError: what it returns is no group that this rank and ``everyone`` can use.
        """
        asked = None if self._options.process_group_for is None else self._options.process_group_for(name, param)
        return self.key(self.usual if asked is None else self._checked(name, asked))

    def ranks(self, over: ShardedOver) -> Ranks:
        """The ranks that a plan names."""
        return self._of[over]

    def check_sends(self, spec: ParamSpec, over: ShardedOver) -> None:
        """Refuse a parameter that the ranks which share it cannot send to each other.

        Raises:
            ValueError: they have no backend for its device.
        """
        for group in self._of[over].groups:
            group.check_sends(spec.device, f"parameter {spec.name!r}")

    def broadcast(
        self, tensor: torch.Tensor, source: int, over: ShardedOver, *, via: torch.device | None = None
    ) -> None:
        """Gives every rank that shares a parameter the values of the global rank ``source``.

        Args:
            via: where to copy ``tensor`` to be sent if its own device has no backend (a CPU, with NCCL alone).

        Raises:
            ValueError: ``source`` is not among them, or there is no backend for either device.
        """
        ranks = self._of[over]
        if not all(group.backend_for(tensor.device) for group in ranks.groups):
            for group in ranks.groups:
                group.check_sends(via or tensor.device, f"a tensor of shape {tuple(tensor.shape)} for broadcast_from")
            copy = tensor.to(via)
            self.broadcast(copy, source, over)
            tensor.copy_(copy)
            return
        mesh = self._mesh_of.get(ranks)
        within = ranks.group.global_ranks if mesh is None else mesh.mesh.flatten().tolist()
        if source not in within:
            raise ValueError(f"broadcast_from: rank {source} is not in the process group to shard over")
        if mesh is not None and ranks.replicas is not None:
            if source in ranks.replicas.global_ranks:
                dist.broadcast(tensor, src=source, group=ranks.replicas.process_group)
            # From here on, in each row of the mesh, the rank in the column of `source` has it.
            column = int((mesh.mesh == source).nonzero()[0, 1])
            row = int((mesh.mesh == dist.get_rank()).nonzero()[0, 0])
            source = int(mesh.mesh[row, column])
        dist.broadcast(tensor, src=source, group=ranks.group.process_group)

    def key(self, ranks: Ranks) -> ShardedOver:
        """What a plan calls these ranks."""
        replicas = ranks.replicas.size if ranks.replicas is not None else 1
        key = ShardedOver(ranks.group.description, ranks.group.size, replicas)
        if self._of.setdefault(key, ranks) is not ranks:  # two groups with one description
            key = key._replace(group=f"{ranks.group.description} {ranks.group.name}")
            self._of[key] = ranks
        return key

    def _checked(self, name: str, asked: Any) -> Ranks:
        if asked is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"process_group_for: rank {dist.get_rank()} is not in the process group for parameter {name!r}; return the "
                f"group that this rank is a member of"
            )
        if isinstance(asked, DeviceMesh):
            if asked.ndim > 2:
                raise ValueError(
                    f"process_group_for: the mesh for {name!r} has {asked.ndim} dimensions, at most 2 work"
                )
            ranks = self._of_mesh(asked)
        elif isinstance(asked, dist.ProcessGroup):
            ranks = self._ranks(Group.of(asked))
        else:
            raise TypeError(
                f"process_group_for: expected a process group, a mesh or None for parameter {name!r}, got {asked!r} of "
                f"type {type(asked).__name__}"
            )
        for group in (ranks.group, ranks.replicas):
            outside = set(group.global_ranks) - set(self.everyone.global_ranks) if group is not None else set()
            if outside:
                raise ValueError(
                    f"process_group_for: the group for parameter {name!r} holds ranks {sorted(outside)}, which are not "
                    f"among those that the module is sharded over; give fsdp(...) a mesh or process_group with all of them"
                )
        return ranks

    def _of_mesh(self, mesh: DeviceMesh) -> Ranks:
        if mesh.ndim == 1:
            return self._ranks(Group.of(mesh.get_group()))
        ranks = self._ranks(Group.of(mesh.get_group(1)), Group.of(mesh.get_group(0)))
        self._mesh_of[ranks] = mesh
        return ranks

    def _ranks(self, group: Group, replicas: Group | None = None) -> Ranks:
        """The same object for the same groups."""
        key = f"{group.name} {replicas.name if replicas is not None else ''}"
        if key not in self._made:
            reductions = _twin(group) if self._options.separate_reduce_scatter_group and group.size > 1 else None
            self._made[key] = Ranks.of(group, reductions=reductions, replicas=replicas)
        return self._made[key]


def everyone_of(options: Options) -> Group:
    """All ranks that a module's parameters are shared with, for what concerns them all: agreeing, aligning measurements.

    Raises:
        RuntimeError: there is no process group.
    """
    if options.mesh is not None:
        return _group_of_mesh(options.mesh)
    return options.process_group or _default_group()


def _default_group() -> Group:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fsdp: there is no process group to shard over; call torch.distributed.init_process_group() before "
            "thunder.jit(), and start the script with torchrun"
        )
    return Group.of(dist.distributed_c10d._get_default_group())


def _group_of_mesh(mesh: DeviceMesh) -> Group:
    if mesh.ndim == 1:
        return Group.of(mesh.get_group())
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == dist.get_world_size():
        return _default_group()
    return _companion(mesh.get_group(0), ranks, "mesh")


def _twin(group: Group) -> Group:
    """The same ranks with a communicator of its own."""
    return _companion(group.process_group, list(group.global_ranks), f"{group.description}_reductions")


_companions: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], Group]] = (
    weakref.WeakKeyDictionary()
)
"""Process groups made here, by the process group of the user's that they go with: one for all models, for as long as that
lives. Each has threads and connections, or on GPUs a communicator."""


def _companion(of: dist.ProcessGroup, ranks: list[int], description: str) -> Group:
    """Return a process group of ``ranks`` with the backend of the group ``of``, destroyed with it; the same each time."""
    known = _companions.setdefault(of, {})
    key = description, tuple(ranks)
    group = known.get(key)
    if group is None or not group.is_alive:
        group = known[key] = new_group(ranks, of, description)
    return group


def new_group(
    ranks: list[int],
    of: dist.ProcessGroup,
    description: str,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> Group:
    """Make a process group of ``ranks``, destroyed with the group ``of``; see [Note: Groups that only members make].

    Args:
        backend: instead of that of ``of``, whose options it has then.
        timeout: instead of that of ``of``.
    """
    timeout = timeout or timeout_of(of)
    splits = backend is None and "nccl" in dist.get_backend_config(of) and splits_default_group()
    if splits and ranks != dist.get_process_group_ranks(of):
        backend, splits = "gloo", False
    named_after = list(range(len(ranks))) if splits else ranks
    levels = _level_group_counts(ranks, named_after)
    if splits:
        made = dist.split_group(of, [named_after], timeout=timeout, group_desc=description)
        assert made is not None
    else:
        made = dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend or dist.get_backend(of),
            pg_options=copy_of_options(of) if backend is None else None,
            use_local_synchronization=True,
            group_desc=description,
        )
    for level in levels:
        dist.destroy_process_group(level)
    group = Group.of(made)
    weakref.finalize(of, _destroy, group).atexit = False
    return group


def _destroy(group: Group) -> None:
    if group.is_alive and dist.is_initialized() and group.process_group in process_groups():
        dist.destroy_process_group(group.process_group)


def _level_group_counts(ranks: list[int], named_after: list[int]) -> list[dist.ProcessGroup]:
    """Makes all members know the same number of process groups.

    torch names a group that only its members make after their ranks and the number of groups that the process knows
    already. Members with different numbers, such as ranks of different expert groups, would wait for each other for ever
    under different names, and a number that has come down since, because groups were destroyed, may give a name that is
    taken. So members exchange their numbers through the store, agree on one whose name is free, and those with less make
    groups of themselves, which are returned and may be destroyed as soon as the group is made.

    Args:
        ranks: the members.
        named_after: their ranks as torch puts them into the name.
    """
    everybody = _default_group()
    if everybody.is_fake:
        return []
    store = everybody.process_group.get_group_store()
    prefix = f"thunder_fsdp_sched/groups/{'_'.join(map(str, sorted(ranks)))}"
    me, known = dist.get_rank(), len(process_groups())
    call = store.add(f"{prefix}/calls/{me}", 1)

    def keys(what: str) -> list[str]:
        return [f"{prefix}/{call}/{what}/{rank}" for rank in ranks]

    def largest(what: str, number: int) -> int:
        store.set(f"{prefix}/{call}/{what}/{me}", str(number))
        return max(int(store.get(key)) for key in keys(what))

    try:
        number = largest("known", known)
        free = (n for n in itertools.count(number) if not is_group_name_taken(named_after, n, store))
        number = largest("free", next(free))
        if store.add(f"{prefix}/{call}/read", 1) == len(ranks):  # everybody has read everything
            for key in (*keys("known"), *keys("free"), f"{prefix}/{call}/read"):
                store.delete_key(key)
    except Exception as error:
        raise RuntimeError(
            f"fsdp: not all of the ranks {ranks} came to make a process group of theirs; call thunder.jit() with the same "
            f"options on all of them ({error})"
        ) from error
    # Of gloo: a group of NCCL might be split from the default group, see [Note: Groups that only members make].
    return [
        dist.new_group([me], backend="gloo", use_local_synchronization=True, group_desc="level")
        for _ in range(number - known)
    ]
