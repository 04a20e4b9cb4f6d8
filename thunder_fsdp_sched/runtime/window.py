"""Reuse of gathered buckets in an accumulation window.

[Note: Gathered once in a window]
An accumulation window is a sequence of micro-batches under ``no_sync``, and the one after it that reduces gradients. A
bucket that stays unsharded between forward and backward (ZeRO-2, or chosen by ``max_memory``) stays so between
micro-batches, too: its private slot belongs to no other bucket. So the forward of a later micro-batch sends nothing if

* the previous gather into the slot was one of a forward under ``no_sync`` with a backward, and has been waited for. An
  evaluation, and the forward after ``no_sync``, leave nothing to reuse;
* nothing else has been written there since: gradients, or a gather of backward;
* the memory has not been freed since (``release``, ``lend``);
* no parameter of the bucket has changed since. Every write through a parameter or its ``.data`` counts, as does each step
  of an optimizer in this process. Writes that torch cannot see, by kernels of others or through ``to_local().data``, do
  not: no window may contain them, unless ``fsdp(reshard_after_backward=True)`` gathers in each micro-batch;
* all of that holds on every rank. Each rank offers what it could reuse in the round of agreement at the start of forward,
  and only what all of them offer is reused. So a rank that has changed its own rows never skips a gather alone, and
  others do not skip it either.
"""

from __future__ import annotations

WINDOW_OPEN = "open"
"""The mark of a gather in a forward under ``no_sync``: it may reuse what is gathered, and leaves it for the next one."""

WINDOW_LAST = "last"
"""The mark of a gather in a forward whose backward reduces gradients: it may reuse what is gathered, and leaves nothing."""


class Window:
    """The latest gather of a bucket into its private slot, as far as a later micro-batch may reuse it.

    Attributes:
        is_agreed: whether all ranks have offered the bucket in the latest round of agreement.
    """

    __slots__ = ("_state", "is_agreed")

    def __init__(self) -> None:
        self._state: tuple[int, ...] | None = None
        self.is_agreed = False

    def begin(self, state: tuple[int, ...]) -> None:
        """Let later micro-batches reuse what a gather has put into the slot, once it has been waited for.

        Args:
            state: numbers that change when the slot's memory or the shards do.
        """
        self._state = state

    def end(self) -> None:
        """Let nobody reuse what is in the slot."""
        self._state, self.is_agreed = None, False

    @property
    def is_open(self) -> bool:
        """Whether a later micro-batch may reuse what is in the slot, if the state has not changed."""
        return self._state is not None

    def holds(self, state: tuple[int, ...]) -> bool:
        """Return whether the state has not changed."""
        return self._state == state
