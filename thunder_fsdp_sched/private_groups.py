"""Private names of torch for creating and leaving process groups, each used in one function only: see ``private_torch``."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d


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
