"""The module of each extra, loaded when it is asked for.

[Note: Core and extras]
The core is what a default training step can run. An extra is what an option, a function or a command asks for. The core
imports no extra: where one plugs in, the core names it by a path, in a table (of transports, of rules for operators) or at
the place itself, and loads it when its turn comes. Without an extra's files everything else works.

Nor does the core have fields for an extra. What an extra keeps with an object of the core is in ``attached``
(``CompiledTraces``, ``ShardedModule``). It adds its symbols to ``schedule.GATHERS`` and the like when it registers them.
Where it changes a rule, the core has a hook, a method that a subclass in the extra overrides (``Machine.check_order``,
``Accumulation.from_others``).
"""

from __future__ import annotations

import importlib
from typing import Any


class Answer:
    """A truth value that a function of an extra computes when it is asked for.

    Args:
        path: of the function.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __bool__(self) -> bool:
        return bool(load(self._path)())


def load(path: str) -> Any:
    """Return what a path such as ``"extras.low_precision.encoded:Encoded"`` names, or a module without a name after it."""
    path, _, name = path.partition(":")
    module = importlib.import_module(f"{__package__}.{path}")
    return getattr(module, name) if name else module
