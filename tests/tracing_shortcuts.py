"""Shortcuts through Thunder's interpretation of ``nn.Module``, which takes two fifths of the time of compiling in tests.

Thunder interprets ``nn.Module.__call__`` and ``nn.Module.__getattr__`` line by line: a look for hooks that are not there,
and up to ten dictionary operations for each attribute. The shortcuts do the same operations without interpreting the lines
around them, so that Thunder notes the same accesses and guards. ``test_tracing_shortcuts.py`` checks that traces are the
same, to the letter, with and without them. In the environment, ``TRACING_SHORTCUTS=none`` runs all tests without them, and
``TRACING_SHORTCUTS=all`` takes that of ``__getattr__``, too, with which not every other test has run yet.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, NoReturn
from unittest import mock

import thunder_fsdp_sched  # noqa: F401  before thunder

from thunder.core import jit_ext
from thunder.core.interpreter import _interpret_call, unwrap, wrap_const
from torch.nn.modules import module as torch_module

__all__ = ["SHORTCUTS", "tracing_shortcuts"]

_CHOSEN = os.environ.get("TRACING_SHORTCUTS", "calls")

_OF_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")
_OF_ALL = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


# What the interpreter calls has wrapped values as arguments, and gives them to the functions that it shall interpret.


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``nn.Module.__call__``."""
    hooked = any(getattr(unwrap(module), name) for name in _OF_MODULE)
    hooked |= any(getattr(torch_module, name) for name in _OF_ALL)
    return _interpret_call(_call_with_hooks if hooked else _call_forward, module, *args, **kwargs)


def _call_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _call_with_hooks(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _getattr(module: Any, name: Any) -> Any:
    """Stand in for ``nn.Module.__getattr__``."""
    attributes = _interpret_call(getattr, module, wrap_const("__dict__"))
    for kind in ("_parameters", "_buffers", "_modules"):
        key = wrap_const(kind)
        if unwrap(_interpret_call(dict.__contains__, attributes, key)):
            members = _interpret_call(dict.__getitem__, attributes, key)
            type_of_members = type(unwrap(members))
            if unwrap(_interpret_call(type_of_members.__contains__, members, name)):
                return _interpret_call(type_of_members.__getitem__, members, name)
    return _interpret_call(_has_no, module, name)


def _has_no(module: Any, name: str) -> NoReturn:
    raise AttributeError(f"'{type(module).__name__}' object has no attribute '{name}'")


SHORTCUTS = {torch_module.Module._wrapped_call_impl: _call, torch_module.Module.__getattr__: _getattr}


def tracing_shortcuts(which: str = _CHOSEN) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Thunder takes ``"all"`` shortcuts, that of ``"calls"``, or ``"none"``."""
    taken = {"all": SHORTCUTS, "calls": dict([next(iter(SHORTCUTS.items()))]), "none": {}}[which]
    return mock.patch.dict(jit_ext._general_jit_lookaside_map, taken)
