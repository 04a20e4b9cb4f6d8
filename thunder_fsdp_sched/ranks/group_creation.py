"""Creation of process groups in addition to those of the user.

[Note: Groups created by their members]
Only the members of an additional group take part in creating it, because all other ranks may be busy with something
else. After ``init_process_group(device_id=...)``, torch creates each NCCL group by splitting a communicator, which
hangs unless all ranks of that communicator take part. ``new_group`` splits the communicator of the default group. So a
twin, which has the same ranks as an existing group, is split from that group (``split_group``), and so are subgroups, all
at once. A group over the union of several groups uses the backend gloo, which suffices because only single numbers are sent
on it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ..private_api import copy_of_options, is_group_name_taken, process_groups, splits_default_group, timeout_of
from .process_groups import ProcessGroupRef


def default_group() -> ProcessGroupRef:
    """Return the default process group.

    Raises:
        RuntimeError: it is not initialized.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fsdp: there is no process group to shard over; call torch.distributed.init_process_group() before "
            "thunder.jit(), and start the script with torchrun"
        )
    return ProcessGroupRef.of(dist.distributed_c10d._get_default_group())


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


_companions: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], ProcessGroupRef]] = (
    weakref.WeakKeyDictionary()
)
"""The process groups created here, keyed by the user's process group to which they belong. All models share them, for
the lifetime of the user's group, because each has threads and connections, or on GPUs a communicator."""


def companion(
    of: dist.ProcessGroup, ranks: list[int], description: str, *, parts: list[list[int]] | None = None
) -> ProcessGroupRef:
    """Return the process group of ``ranks`` with the backend of the group ``of``, created once and destroyed with it.

    Args:
        parts: as for :func:`new_group`.
    """
    known = _companions.setdefault(of, {})
    key = description, tuple(ranks)
    group = known.get(key)
    if group is None or not group.is_alive:
        group = known[key] = new_group(ranks, of, description, parts=parts)
    return group


def new_group(
    ranks: list[int],
    of: dist.ProcessGroup,
    description: str,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    parts: list[list[int]] | None = None,
) -> ProcessGroupRef:
    """Create a process group of ``ranks``, destroyed with the group ``of``; see [Note: Groups created by their members].

    Args:
        backend: a backend other than that of ``of``; the default uses that of ``of``, with its options.
        timeout: a timeout other than that of ``of``.
        parts: disjoint lists of ranks within ``of``, one of which is ``ranks``, if all members of ``of`` create a group
            for each of them.
    """
    timeout = timeout or timeout_of(of)
    splits = backend is None and "nccl" in dist.get_backend_config(of) and splits_default_group()
    members = dist.get_process_group_ranks(of)
    if splits and parts is None:
        parts = [list(range(len(ranks)))]
        if ranks != members:
            backend, splits = "gloo", False
    named_after = [members.index(rank) for rank in ranks] if splits else ranks
    levels = _level_group_counts(ranks, named_after)
    if splits:
        made = dist.split_group(of, parts, timeout=timeout, group_desc=description)
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
    group = ProcessGroupRef.of(made)
    weakref.finalize(of, _destroy, group).atexit = False
    return group


def _destroy(group: ProcessGroupRef) -> None:
    if group.is_alive and dist.is_initialized() and group.process_group in process_groups():
        dist.destroy_process_group(group.process_group)


def _level_group_counts(ranks: list[int], named_after: list[int]) -> list[dist.ProcessGroup]:
    """Bring all members to the same number of known process groups.

    torch derives the name of a group that only its members create from their ranks and the number of groups that the
    process already knows. Members with different numbers, such as ranks of different expert groups, would wait for each
    other forever under different names. And where groups were destroyed, the number has decreased, so the name may
    already be taken. Therefore the members exchange their numbers through the store, and choose a number whose name no
    group has. Members below that number create groups of only themselves. These are returned, and may be destroyed once
    the group is created.

    Args:
        ranks: the members.
        named_after: the members' ranks as torch puts them into the name.
    """
    world = default_group()
    if world.is_fake:
        return []
    store = world.process_group.get_group_store()
    prefix = f"thunder_fsdp_sched/groups/{'_'.join(map(str, sorted(ranks)))}"
    me, known = dist.get_rank(), len(process_groups())
    call = store.add(f"{prefix}/calls/{me}", 1)

    def largest(what: str, number: int) -> int:
        store.set(f"{prefix}/{call}/{what}/{me}", str(number))
        return max(int(store.get(f"{prefix}/{call}/{what}/{rank}")) for rank in ranks)

    try:
        number = largest("known", known)
        free = (n for n in itertools.count(number) if not is_group_name_taken(named_after, n, store))
        number = largest("free", next(free))
        written = [f"{prefix}/{call}/{what}/{rank}" for what in ("known", "free") for rank in ranks]
        delete_once_read(store, written, f"{prefix}/{call}", len(ranks))
    except Exception as error:
        raise RuntimeError(
            f"fsdp: not all of the ranks {ranks} arrived to create their process group; call thunder.jit() with the same "
            f"options on all of them ({error})"
        ) from error
    # With gloo, because an NCCL group might be split from the default group: see [Note: Groups created by their members].
    return [
        dist.new_group([me], backend="gloo", use_local_synchronization=True, group_desc="level")
        for _ in range(number - known)
    ]


def delete_once_read(store: Store, keys: Sequence[str], prefix: str, size: int) -> None:
    """Delete keys if all of ``size`` ranks have called this."""
    if store.add(f"{prefix}/read", 1) == size:
        for key in (*keys, f"{prefix}/read"):
            store.delete_key(key)
