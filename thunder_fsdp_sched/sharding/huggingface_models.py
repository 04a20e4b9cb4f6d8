"""Lookasides with which Thunder traces models of Hugging Face's transformers as they are.

transformers 5 decorates ``forward`` of its models to collect intermediate outputs on request. The decorator stores what
it collects in a variable of its own class (``CompileableContextVar``), which is a ``ContextVar``, or a plain attribute if
something is compiled. Thunder says that it compiles, and then refuses to trace the assignment. The lookasides, which
exist only in the compile data of the sharded module, make the assignment do nothing if nothing is to be collected.

What cannot be traced is refused with an error that says what to change: collecting intermediate outputs, and caches of
keys and values, which are objects that forward changes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["transformers_lookasides"]


def transformers_lookasides() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return what replaces functions of transformers while Thunder traces; nothing if transformers is not imported."""
    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "CompileableContextVar", None)
    if collector is not None:
        found |= {collector.set: _refuse_collecting, collector.get: _nothing, collector.reset: _nothing}
    caches = sys.modules.get("transformers.cache_utils")
    base: Any = getattr(caches, "Cache", None)
    if base is not None:
        classes: list[Any] = [c for c in vars(caches).values() if inspect.isclass(c) and issubclass(c, base)]
        found |= dict.fromkeys((*classes, *(cls.update for cls in classes)), _refuse_cache)
    return found


def _nothing(*_: Any) -> None:
    return None


def _refuse_collecting(_: Any, collected: Any) -> None:
    if collected:
        raise ValueError(
            f"fsdp: the model was asked for {', '.join(sorted(collected))}, which transformers collects by hooks that "
            f"cannot be compiled. Leave out output_hidden_states and output_attentions (arguments, or attributes of "
            f"model.config), or call the module that thunder_fsdp_sched.eager(model) returns"
        )


def _refuse_cache(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        "fsdp: the model was asked to use a cache of keys and values, which cannot be compiled. Pass use_cache=False, or "
        "set model.config.use_cache = False. To generate, call generate(...) of the module that "
        "thunder_fsdp_sched.eager(model) returns"
    )
