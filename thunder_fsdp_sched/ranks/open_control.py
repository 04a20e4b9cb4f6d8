"""The control of a module that is about to be sharded, and the channel that models of the same ranks share."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from ..errors import coded_error
from ..process_state import reset_after_fork
from .control import Agreement, Control
from .process_groups import ProcessGroupRef
from .rounds import ScheduleDisagreement

if TYPE_CHECKING:
    from .channel import Channel

_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
"""Counters that number the modules of each process group. The ranks of a group shard the same modules in the same
order, but some of them may shard other modules over another group in between."""

reset_after_fork(_numbers.clear)

_channels: dict[tuple[tuple[int, ...], timedelta], Channel] = {}


def open_control(group: ProcessGroupRef, kind: str, *, agreement: Agreement) -> Control:
    """Return the control of the next module that ``group`` shards; a collective.

    Args:
        kind: the class of the module, for messages.

    Raises:
        ScheduleDisagreement: a rank does not come in time.
    """
    title = f"module {next(_numbers[group.name])}"
    name = f"{group.name} {title}"
    channel = open_channel(group, name) if group.size > 1 and not group.is_fake else None
    return Control(group, channel, name, f"{title} ({kind})", agreement=agreement)


def open_channel(group: ProcessGroupRef, name: str) -> Channel:
    """Return the channel of these ranks, of which there are several, and create one if any of them lacks it.

    It is a collective, at the start of ``thunder.jit``, for which the ranks meet at the group's store: 6 requests of a rank.
    To create a channel takes 12 more, and those with which gloo connects each rank with all others.

    Args:
        name: unique to this call, the same on all ranks.

    Raises:
        ScheduleDisagreement: a rank does not come in time. A rank that comes too late waits in vain for as long.
    """
    from ..private_distributed import timeout_of  # here, because one rank agrees with nobody
    from .channel import Channel
    from .new_groups import ARRIVAL_TIMEOUT, let_belong, new_group
    from .store_texts import exchange_texts

    timeout = timeout_of(group.process_group)
    key = tuple(group.global_ranks), timeout
    known = _channels.get(key)
    state = "open" if known is not None and known.is_open else ""
    store, patience = group.process_group.get_group_store(), min(timeout, ARRIVAL_TIMEOUT)
    states = exchange_texts(store, f"thunder_fsdp_sched/{name}", group.global_ranks, state, patience)
    if missing := [rank for rank in group.global_ranks if rank not in states]:
        from .messages import named

        raise coded_error(
            ScheduleDisagreement,
            "ranks.missing-at-jit",
            group=group.description,
            missing=named(missing),
            seconds=patience.total_seconds(),
            rank=group.global_ranks[group.rank],
        )
    if not all(states.values()):
        ranks = list(group.global_ranks)
        made = new_group(ranks, group.process_group, "fsdp_control", backend="gloo", timeout=timeout)
        _channels[key] = Channel(replace(made, description=group.description), timeout)
    channel = _channels[key]
    let_belong(channel.group, group.process_group)
    return channel
