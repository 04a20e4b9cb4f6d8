"""Process groups that this package creates in addition to the user's.

[Note: Groups created by their members]
Only the members of an additional group take part in creating it, because all other ranks may be busy with something
else. After ``init_process_group(device_id=...)``, torch creates each NCCL group by splitting a communicator, which
hangs unless all ranks of that communicator take part. torch's ``new_group`` splits the default group's. So a twin,
which has the same ranks as an existing group, is split from that group (``split_group``), and so are subgroups, all at
once. A group over the union of several groups uses gloo, which suffices because only single numbers are sent on it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ..errors import coded_error
from ..private_distributed import copy_of_options, is_group_name_taken, process_groups, splits_default_group, timeout_of
from .process_groups import ProcessGroupRef, default_group
from .store_texts import exchange_texts

ARRIVAL_TIMEOUT = timedelta(seconds=300)
"""How long a rank waits at most for the others to shard the same module, or to create a process group."""

_companions: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], ProcessGroupRef]] = (
    weakref.WeakKeyDictionary()
)
"""The process groups created here, keyed by the user's process groups to which they belong. All models share them,
because each has threads and connections, or on GPUs a communicator. A group lives as long as any to which it belongs."""


def companion_of(parent: dist.ProcessGroup, description: str, ranks: Sequence[int]) -> ProcessGroupRef | None:
    """Return the process group that was created here for ``parent`` under this description, if there is one."""
    return _companions.get(parent, {}).get((description, tuple(ranks)))


def new_group(
    ranks: list[int],
    parent: dist.ProcessGroup,
    description: str,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    parts: list[list[int]] | None = None,
) -> ProcessGroupRef:
    """Create a group of ``ranks`` that is destroyed with ``parent``; see [Note: Groups created by their members].

    Args:
        backend: a backend other than that of ``parent``; the default uses that of ``parent``, with its options.
        timeout: a timeout other than that of ``parent``.
        parts: disjoint lists of ranks within ``parent``, one of which is ``ranks``, if all members of ``parent`` create a
            group for each of them.
    """
    timeout = timeout or timeout_of(parent)
    splits = backend is None and "nccl" in dist.get_backend_config(parent) and splits_default_group()
    members = dist.get_process_group_ranks(parent)
    owners = list(_companions)  # keeps all alive: a collected group would change the number that the members exchange
    if splits and parts is None:
        parts = [list(range(len(ranks)))]
        if ranks != members:
            backend, splits = "gloo", False
    named_after = [members.index(rank) for rank in ranks] if splits else ranks
    levels = _level_group_counts(ranks, named_after)
    if splits:
        made = dist.split_group(parent, parts, timeout=timeout, group_desc=description)
        assert made is not None
    else:
        made = dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend or dist.get_backend(parent),
            pg_options=copy_of_options(parent) if backend is None else None,
            use_local_synchronization=True,
            group_desc=description,
        )
    for level in levels:
        dist.destroy_process_group(level)
    del owners
    group = ProcessGroupRef.of(made)
    let_belong(group, parent)
    return group


def let_belong(group: ProcessGroupRef, parent: dist.ProcessGroup) -> None:
    """Make a group that was created here live at least as long as the group ``parent``."""
    known = _companions.setdefault(parent, {})
    key = group.description, tuple(group.global_ranks)
    if known.get(key) is not group:
        known[key] = group
        weakref.finalize(parent, _destroy, group).atexit = False


def _destroy(group: ProcessGroupRef) -> None:
    if any(group.name == other.name for known in _companions.values() for other in known.values()):
        return  # it belongs to another group as well
    if group.is_alive and dist.is_initialized() and group.process_group in process_groups():
        dist.destroy_process_group(group.process_group)


def _level_group_counts(ranks: list[int], named_after: list[int]) -> list[dist.ProcessGroup]:
    """Bring all members to the same number of known process groups.

    If only its members create a group, torch derives its name from their ranks and from the number of groups that the
    process knows. Members with different numbers, such as ranks of different expert groups, would wait for each other
    forever under different names. And destroying a group decreases the number, so the name may already be taken.
    Therefore the members exchange their numbers through the store, and choose a number whose name no group has. Members
    below that number create groups of only themselves. These are returned, and may be destroyed once the group is
    created.

    Args:
        ranks: the members.
        named_after: the members' ranks as they appear in the name.
    """
    world = default_group()
    if world.is_fake:
        return []
    store = world.process_group.get_group_store()
    prefix = f"thunder_fsdp_sched/groups/{'_'.join(map(str, sorted(ranks)))}"
    me, known = dist.get_rank(), len(process_groups())
    call = store.add(f"{prefix}/calls/{me}", 1)

    def largest(what: str, number: int) -> int:
        numbers = exchange_texts(store, f"{prefix}/{call}/{what}", ranks, str(number), ARRIVAL_TIMEOUT)
        if missing := [rank for rank in ranks if rank not in numbers]:
            raise coded_error(RuntimeError, "ranks.missing-at-group-creation", missing=missing, ranks=ranks)
        return max(map(int, numbers.values()))

    number = largest("known", known)
    number = largest("free", next(n for n in itertools.count(number) if not is_group_name_taken(named_after, n, store)))
    # With gloo, because an NCCL group might be split from the default group: see [Note: Groups created by their members].
    return [
        dist.new_group([me], backend="gloo", use_local_synchronization=True, group_desc="level")
        for _ in range(number - known)
    ]
