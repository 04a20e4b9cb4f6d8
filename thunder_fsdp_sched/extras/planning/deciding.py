"""Decisions that one rank makes for others, because each rank by itself might decide otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ...ranks.control import Control
from ...ranks.messages import sides

T = TypeVar("T")


def decide_once(control: Control, what: str, kind: int, size: int, decide: Callable[[], T]) -> dict[int, T]:
    """Meet the other ranks, and let one rank of each kind decide for all ranks of its kind; a collective.

    No rank waits for a decision before all ranks have come to this call. Of each kind, the rank with the largest size
    decides, the first among equals, and sends its decision to all ranks: O(log W) messages for each kind.

    Args:
        what: what is decided.
        kind: equal on the ranks for which one decision holds.
        size: the size of the work for which this rank needs the decision.
        decide: returns a decision that can be pickled.

    Returns:
        The decisions, keyed by kind.

    Raises:
        ScheduleDisagreement: a rank does something else or does not come, or ``decide`` failed on another rank.
    """
    if control.channel is None:
        return {kind: decide()}
    ranks = control.group.global_ranks
    deciding: dict[int, tuple[int, int]] = {}  # for each kind, the largest size, and the negative rank that has it
    for rank, (of, its_size) in zip(ranks, control.exchange(what, (kind, size)), strict=True):
        deciding[of] = max(deciding.get(of, (its_size, -rank)), (its_size, -rank))
    failure: Exception | None = None
    own: tuple[T | None, str] = None, ""
    if deciding[kind][1] == -control.global_rank:
        try:
            own = decide(), ""
        except Exception as error:
            failure, own = error, (None, f"{type(error).__name__}: {error}")
    decisions: dict[int, Any] = {}
    failed: dict[int, str] = {}
    with control.doing(f"the exchange of {what}"):
        for of, (_, negative) in deciding.items():
            sent = [own if -negative == control.global_rank else None]
            dist.broadcast_object_list(sent, -negative, group=control.channel.group.process_group)
            assert sent[0] is not None
            decisions[of], error_text = sent[0]
            if error_text:
                failed[-negative] = error_text
    if failure is not None:
        raise failure
    if failed:
        raise control.disagreement(f"{what} failed:\n{sides(failed)}")
    return decisions
