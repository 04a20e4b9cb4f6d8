"""The messages of errors when ranks do different things or some do not come; loaded for the first such error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from .messages import first_difference, first_different, first_line, named, sides

if TYPE_CHECKING:
    from .channel import Channel
    from .rounds import RoundAction


def failures(channel: Channel, reports: Mapping[int, str], unagreed: str, patience: timedelta) -> str:
    """Return what the other ranks have reported, after the failure of this one.

    Args:
        reports: by global rank.
        unagreed: what to say instead of the last round.
        patience: how long this rank has waited for reports.
    """
    others = [rank for rank in channel.group.global_ranks if rank != channel.global_rank]
    lines = [f"    rank {rank}: {_brief(rank, reports[rank])}" for rank in others if rank in reports]
    if silent := [rank for rank in others if rank not in reports]:
        lines.append(f"    {named(silent)} reported nothing within {patience.total_seconds():g} s")
    agreed = unagreed or (f"All ranks had agreed on {channel.last.describe()}. " if channel.last is not None else "")
    return "\n".join([f"{agreed}The other ranks:", *lines])


def _brief(rank: int, report: str) -> str:
    """Return the first line of a rank's report, which may begin with the rank."""
    return first_line(report).removeprefix(f"rank {rank}: ")


def absence(channel: Channel, came: Mapping[int, str], waited: float, error: RuntimeError) -> str:
    """Return why a round could not be settled.

    Args:
        came: what the ranks that came were about to do, or the collective that failed, by global rank.
        waited: seconds since the round began.
        error: that of the messages.
    """
    missing = [rank for rank in channel.group.global_ranks if rank not in came]
    timed_out = "timed out" in str(error).lower()
    who = f"{named(missing)} did not come" if missing else "the ranks did not come together"
    when = f"within {waited:.1f} s" if timed_out else "and a connection was closed"
    causes = "hung, or busy with something else" if timed_out else "or gave no answer in time"
    absent = f"\n    {named(missing)}: stopped, failed, {causes}" if missing else ""
    return (
        f"fsdp: the ranks of process group {channel.group.description!r} disagree: {who} {when}:\n"
        f"{sides({rank: _brief(rank, text) for rank, text in came.items()})}{absent}\n({first_line(str(error))})"
    )


def difference(
    channel: Channel, action: RoundAction, tokens: Mapping[int, tuple[int, ...]], patience: timedelta
) -> str:
    """Exchange what the ranks are about to do, and return where it differs.

    Args:
        action: that of this rank, which is cancelled.
        tokens: by global rank.
    """
    different = first_different({rank: ((), same) for rank, (same, *_) in tokens.items()})
    different = different or first_different({rank: (of[1], of[2]) for rank, of in tokens.items()})
    assert different is not None
    first, other = different
    details = action.details() if channel.global_rank in (first, other) else ()
    own = json.dumps([action.describe(), list(details), action.advice])
    action.cancel()
    texts = channel.exchange_texts(f"differ/{channel.rounds}", own, patience)
    said = {rank: json.loads(text) for rank, text in texts.items()}
    lines = {rank: said[rank][0] if rank in said else "(no report)" for rank in channel.group.global_ranks}
    message = f"fsdp: the ranks of process group {channel.group.description!r} disagree:\n{sides(lines)}"
    if lines[first] == lines[other] and first in said and other in said:
        differs = first_difference(first, said[first][1], other, said[other][1])
        message += f"\nTheir traces differ in {differs}" if differs else "\n(no line of their traces differs)"
    advice = {said[rank][2] if rank in said else "" for rank in (first, other)}
    return f"{message}\n{advice.pop()}".rstrip() if len(advice) == 1 else message


def difference_of_lines(channel: Channel, first: int, other: int, lines: Sequence[str]) -> str:
    """Exchange the lines of the ranks ``first`` and ``other``, and return the first that differs.

    A collective: four of gloo's broadcasts, of ceil(log2 W) hops each, and two all-gathers.
    """
    texts = {first: [list(lines)], other: [list(lines)]}
    for rank, text in texts.items():
        dist.broadcast_object_list(text, rank, group=channel.group.process_group)
    differs = first_difference(first, texts[first][0], other, texts[other][0]) or "(no line differs)"
    if len(set(channel.gather(hash("a string")))) > 1:
        differs += (
            "\nIf all ranks run the same code: Python orders sets of strings differently on each of them, and Thunder "
            "takes the order of einsum's labels from such a set. Start all ranks with PYTHONHASHSEED=0"
        )
    return differs
