"""The control of a module that is about to be sharded."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

from ..process_state import reset_after_fork
from .control import Agreement, Control
from .process_groups import ProcessGroupRef

_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
"""Counters that number the modules of each process group. The ranks of a group shard the same modules in the same
order, but some of them may shard other modules over another group in between."""

reset_after_fork(_numbers.clear)


def open_control(group: ProcessGroupRef, kind: str, *, agreement: Agreement) -> Control:
    """Return the control of the next module that ``group`` shards; a collective.

    Args:
        kind: the class of the module, for messages.

    Raises:
        ScheduleDisagreement: a rank does not come in time.
    """
    title = f"module {next(_numbers[group.name])}"
    name = f"{group.name} {title}"
    title = f"{title} ({kind})"
    if group.size == 1 or group.is_fake:
        return Control(group, name, title, agreement=agreement)
    from . import joint_control  # here, because one rank agrees with nobody

    return joint_control.open_joint_control(group, name, title, agreement)
