"""Moments of this process, which tell what the running backward's own forward has written.

[Note: The backward of the most recent forward]
Backward may reuse values that its own forward gathered or cast, but none of another forward: between two forwards a
parameter may have been written through ``.data`` (an evaluation with averaged parameters), which changes no version
counter.

So this process counts moments. What a forward writes is stored with the moment at which it was written. Right after a
forward, ``guard_backward`` stores the moment in the autograd node that Thunder has created for it, which its backward runs
in. What was written at an earlier moment was written by the running backward's own forward or by an earlier one; what was
written later is not reused. The numbers that autograd itself gives to nodes do not serve: each thread has its own, and a
backward runs on the thread of its device if that is a GPU. Outside of an autograd node nothing is reused.
"""

from __future__ import annotations

import itertools

from ..private_torch import backward_number, running_node

ENDED = "thunder_fsdp_sched.ended"
"""The key of the moment at which its forward ended, in the metadata of Thunder's autograd node."""

_moments = itertools.count(1)


def moment() -> int:
    """Return a number larger than all that were returned before, on whichever thread."""
    return next(_moments)


def end_of_forward() -> int | None:
    """Return the moment at which the forward of the running backward had ended; ``None`` if it is unknown."""
    node = running_node()
    return None if node is None else node.metadata.get(ENDED)


def running_backward_of() -> tuple[int, int] | None:
    """Return the number of the running backward, and the end of the forward of its node that runs; ``None`` if unknown."""
    ended = end_of_forward()
    return None if ended is None else (backward_number(), ended)


def is_of_running_backward(written: int) -> bool:
    """Return whether ``written`` is a moment before the end of the running backward's forward."""
    ended = end_of_forward()
    return ended is not None and written < ended
