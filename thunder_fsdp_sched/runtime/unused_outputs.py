"""Return ``None`` as the gradient of parameters that reach no output with a gradient, as the unsharded model does.

[Note: Outputs without gradient]
A loss may use one of several outputs. In torch, a parameter that only the others need gets no gradient, so an optimizer
neither decays it nor counts a step. A compiled backward computes the gradients of all parameters; for outputs without
gradient it gets zeros. So:

1. The trace says which outputs each input of the computation reaches (``guard_outputs``), operator by operator, as autograd
   would connect them. If a parameter reaches no output that has a gradient, backward computes zeros for it.
2. A hook of the node that autograd runs first sees which outputs have a gradient, before Thunder replaces the others by
   zeros.
3. The collectives are the same in any case, because ranks may use different outputs, and other micro-batches of a window
   may have used a parameter (:attr:`Accumulation.used`). In the round of agreement at the start of backward, each rank
   announces a hash of the parameters that it has not used. Only if the hashes differ do the ranks exchange names. So a
   parameter has a gradient on all ranks if any rank has used it, and on no rank otherwise.
4. A hook that runs after the compiled node replaces the gradients of parameters that no rank has used by ``None``.

Traces in which every parameter reaches every output, such as most of those with a loss alone, need neither hook.
"""

from __future__ import annotations

from collections.abc import Mapping

from .autograd import RunningBackward, running_backward
from .bucket import Bucket


def not_used_here(bucket: Bucket) -> frozenset[int]:
    """Return the parameters for which the running backward computes zeros on this rank, because no gradient reaches them."""
    return _not_used_here(bucket, running_backward())


def _not_used_here(bucket: Bucket, running: RunningBackward | None) -> frozenset[int]:
    if running is None or not running.unused:
        return frozenset()
    return frozenset(index for index, param in enumerate(bucket.params) if id(param) in running.unused)


def unused_gradients(bucket: Bucket, missing: frozenset[int]) -> frozenset[int]:
    """Return the parameters that neither the running backward nor its window has used, on any rank if they agreed.

    Args:
        missing: the parameters for which the trace computes no gradient.
    """
    running, accumulation = running_backward(), bucket.accumulation
    if running is not None and running.agreed is not None and bucket in running.agreed:
        return running.agreed[bucket]
    if bucket.base.control is not None and not bucket.base.control.agrees_in_steps:
        return frozenset()  # another rank may have used them
    unused = _not_used_here(bucket, running)
    if accumulation.params and bucket.ends_window():
        unused = (unused | (accumulation.params & missing)) - accumulation.used
    return unused


def agree_on_unused(agreed: Mapping[Bucket, frozenset[int]]) -> None:
    """Let the running backward know which parameters no rank has used, for each bucket that it reduces."""
    if (running := running_backward()) is not None:
        running.agreed = agreed


def drop_gradients(bucket: Bucket, indices: frozenset[int]) -> None:
    """Let the running backward return ``None`` for these parameters."""
    if indices and (running := running_backward()) is not None:
        running.dropped.update(id(bucket.params[index]) for index in indices)
