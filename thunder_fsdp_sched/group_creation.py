"""Creation of process groups beside those of the user.

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

import torch.distributed as dist

from .compat import copy_of_options, is_group_name_taken, process_groups, splits_default_group, timeout_of
from .groups import Group

__all__ = ["companion", "default_group", "new_group", "twin"]


def default_group() -> Group:
    """Return the default process group.

    Raises:
        RuntimeError: there is none.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fsdp: there is no process group to shard over; call torch.distributed.init_process_group() before "
            "thunder.jit(), and start the script with torchrun"
        )
    return Group.of(dist.distributed_c10d._get_default_group())


def twin(group: Group) -> Group:
    """Return a process group of the same ranks with a communicator of its own."""
    return companion(group.process_group, list(group.global_ranks), f"{group.description}_reductions")


_companions: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], Group]] = (
    weakref.WeakKeyDictionary()
)
"""Process groups made here, by the process group of the user's that they go with: one for all models, for as long as that
lives. Each has threads and connections, or on GPUs a communicator."""


def companion(of: dist.ProcessGroup, ranks: list[int], description: str) -> Group:
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
    everybody = default_group()
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
