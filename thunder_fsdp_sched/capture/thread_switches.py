"""Sooner switches between threads while a model is traced.

[Note: Thread switches while tracing]
Thunder's interpreter lets another thread make a frame for each exception that a traced program raises, as each loop over an
iterator does at its end. It waits for that thread in a loop that keeps the interpreter lock until Python takes it away, by
default after 5 ms. While a model is traced, Python takes it away sooner.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ..process_state import Reentrant

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
