"""The running backward, and of which outputs of forward it has gradients.

See [Note: Outputs without gradient] in ``unused_outputs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..private_torch import backward_number, running_node

KEY = "thunder_fsdp_sched.unused"


class RunningBackward:
    """State of the running backward of one compiled forward.

    Attributes:
        given: the outputs that have a gradient on this rank, as bits.
        unused: the sharded parameters, by identity, that reach none of them.
        agreed: for each bucket, the parameters that no rank has used; ``None`` if the ranks have not agreed.
        dropped: the sharded parameters, by identity, for which backward returns no gradient.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self.given = 0
        self.unused: frozenset[int] = frozenset()
        self.begin()

    def begin(self) -> None:
        """Forget what holds for an earlier backward only."""
        if self._number != (number := backward_number()):
            self._number = number
            self.agreed: Mapping[Any, frozenset[int]] | None = None
            self.dropped: set[int] = set()


def running_backward() -> RunningBackward | None:
    """Return the state of the running backward; ``None`` for a trace that runs outside of autograd."""
    node = running_node()
    if node is None:
        return None
    running: RunningBackward | None = node.metadata.get(KEY)
    if running is None:
        running = node.metadata[KEY] = RunningBackward()
    running.begin()
    return running
