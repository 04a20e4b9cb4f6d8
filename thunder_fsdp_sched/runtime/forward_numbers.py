"""Match a running backward to its forward.

[Note: The backward of the most recent forward]
Backward may reuse values that its own forward gathered or cast, but none of another forward: between two forwards a
parameter may have been written through ``.data`` (an evaluation with averaged parameters), which changes no version
counter.

Autograd numbers the nodes that a thread creates, and Thunder creates a node for each forward right after it has run. A
forward stores the number of the next node with the values that it writes. If that number is at most the number of the
running backward's node, the values were written before that backward's own forward had ended: by that forward or an
earlier one. Values of a later forward have a larger number.

Numbers depend only on the order of calls, so all ranks decide alike. Where the order is unknown (forwards in several
threads, a backward outside of autograd), nothing is reused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ..private_autograd import next_node_number, running_node_number

_LATEST = 1 << 63  # larger than the number of any node

_thread: int | None = None
_several_threads = False
_assumed: int | None = None


def forward_number() -> int:
    """Return the number to store with the values that a running forward writes, for :func:`is_backward_of`."""
    global _thread, _several_threads
    ident = threading.get_ident()
    if ident != _thread:
        _several_threads = _thread is not None  # each thread counts its own nodes
        _thread = ident
    return next_node_number()


def is_backward_of(number: int) -> bool:
    """Return whether the running backward's forward ended after :func:`forward_number` returned ``number``."""
    node = running_node_number() if _assumed is None else _assumed
    return node is not None and number <= node and not _several_threads


@contextlib.contextmanager
def as_backward_of_latest_forward() -> Iterator[None]:
    """Treat a backward that is called outside of autograd as that of the most recent forward."""
    global _assumed
    _assumed = _LATEST
    try:
        yield
    finally:
        _assumed = None
