"""Settings of Python while a model compiles: fewer garbage collections, and sooner switches between threads.

[Note: Garbage collection while compiling]
Compiling creates millions of objects that live until it ends, so Python's cyclic garbage collector finds hardly any
garbage, but takes a fifth of the time: after every 700 new objects it looks at the youngest, and now and then at all.
While a model compiles, it therefore looks at the youngest only, after every 50,000. The peak of memory stays the same
(``python benchmarks/tracing.py --blocks 32 --only once``, with and without ``--default-gc``). A collector that is
disabled, or runs less often already, is left alone.

[Note: Thread switches while tracing]
Thunder's interpreter lets another thread make a frame for each exception that a traced program raises, as each loop over an
iterator does at its end. It waits for that thread in a loop that keeps the interpreter lock until Python takes it away, by
default after 5 ms. While a model is traced, Python takes it away sooner.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

from ..process_state import Reentrant

THRESHOLD = 50_000
"""How many more containers are created than freed before the youngest are collected."""

ONLY_YOUNGEST = 1_000_000
"""How many collections of the youngest precede one of older containers: more than a compilation causes."""


class CollectsLess:
    """Makes the garbage collector run less often between :meth:`begin` and :meth:`end`; both may be called repeatedly."""

    def __init__(self) -> None:
        self._before: tuple[int, int, int] | None = None

    def begin(self) -> None:
        """Let the collector run less often, until :meth:`end`."""
        first, second, third = gc.get_threshold()
        if self._before is None and gc.isenabled() and 0 < first < THRESHOLD:
            self._before = first, second, third
            gc.set_threshold(THRESHOLD, ONLY_YOUNGEST, third)

    def end(self) -> None:
        """Let the collector run as often as before, unless somebody else has changed that in between."""
        if self._before is not None and gc.get_threshold() == (THRESHOLD, ONLY_YOUNGEST, self._before[2]):
            gc.set_threshold(*self._before)
        self._before = None


INTERVAL = 5e-4
"""Seconds after which a thread loses the interpreter lock to one that waits for it."""


@contextlib.contextmanager
def _sooner_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, INTERVAL))
    yield
    sys.setswitchinterval(before)


sooner_switches = Reentrant(_sooner_switches)
"""Lets Python switch threads sooner in this context; see [Note: Thread switches while tracing]."""
