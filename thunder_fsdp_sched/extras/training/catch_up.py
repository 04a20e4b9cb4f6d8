"""Catch up on the collectives that other ranks have issued before an exception stopped them.

[Note: Catching up]
Exceptions may stop the ranks at different collectives of a trace. Each process group matches collectives by their order, so
the next one of one rank would meet an earlier one of another, and agreement refuses to go on. The ranks began this trace
together and have its collectives in one order: what a rank has issued is the beginning of what the farthest one has.
So each rank issues what it lacks, into memory that nobody reads. It must not do so on its own, because a rank that still
waits for a collective would take zeros for gradients: first all of them meet, after they all have failed. A rank that had
issued all collectives of the trace when it failed cannot know whether others have, so it meets them as well.
"""

from __future__ import annotations

from ...errors import coded_error
from ...ranks.control import Control
from ...ranks.rounds import ScheduleDisagreement
from ...runtime.bucket import Bucket
from ...runtime.memory import Arena, slot_bytes
from ...runtime.ops import gather_again, reduce_scatter
from ...sharding.sharded_module import ShardedModule

_WHAT = "discard_unreduced"


def catch_up(sharded: ShardedModule) -> None:
    """Let all ranks have issued the same collectives, if exceptions have stopped some in a trace; one round if not.

    Ranks that do not agree in steps do nothing.

    Raises:
        RuntimeError: this rank cannot.
        ScheduleDisagreement: another rank cannot, or does something else.
    """
    control, counts = sharded.control, sharded.control.issue_counts
    if counts.log is None:
        return
    assert control.channel is not None
    try:
        _meet(control)
    except ScheduleDisagreement:
        if not control.channel.is_open:
            raise
        _meet(control)  # an exception may have stopped some ranks in a trace that they alone had announced
    if control.channel.is_alike and not counts.surplus_issues:
        return
    logs = control.gather_settled(_WHAT, counts.log)
    farthest, fewest = max(logs.values(), key=len), min(map(len, logs.values()))
    buckets = {b.handle: b for base in sharded.buckets for b in (base, *base.aliases.values())}
    is_possible = all(log == farthest[: len(log)] for log in logs.values()) and all(
        _can_repeat(kind, buckets.get(handle)) for kind, handle in farthest[fewest:]
    )
    failure = coded_error(RuntimeError, "ranks.cannot-catch-up-after-exceptions")
    control.report(_WHAT, None if is_possible else failure)
    for kind, handle in farthest[len(counts.log) :]:
        if kind == "all-gather":
            gather_again(buckets[handle], None)
        else:
            _reduce_zeros(buckets[handle])
    counts.issued = counts.expected = 0
    counts.log.clear()


def _meet(control: Control) -> None:
    control.settle()  # the round of a trace that an exception has stopped
    control.report(_WHAT, None, digest=control.issue_counts.surplus_issues)


def _can_repeat(kind: str, bucket: Bucket | None) -> bool:
    if bucket is None or not bucket.is_on_all_ranks or kind not in ("all-gather", "reduce-scatter"):
        return False
    # Zeros would take rounding errors along that are kept for the next reduction.
    is_stateless = kind == "all-gather" or not bucket.spec.has_error_feedback
    return is_stateless and bucket.ranks.replicas is None and bucket.secondary_ranks is None


def _reduce_zeros(bucket: Bucket) -> None:
    spec = bucket.spec
    slot = Arena(spec.device, bucket.arena).slot(0, slot_bytes(spec, spec.reduce_dtype))
    flight = reduce_scatter(bucket, slot, *[None] * len(spec.params), adds_left=False)
    slot.arena.finish(flight)
    slot.arena.release()
