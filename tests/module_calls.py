"""A shortcut through Thunder's interpretation of ``nn.Module.__call__``, which takes a quarter of the time of compiling.

Before it calls ``forward``, ``nn.Module.__call__`` looks for hooks, and Thunder interprets these lines one by one. For a
module without hooks they do nothing. ``test_module_calls.py`` checks that traces are the same, to the letter, with and
without the shortcut. ``STOCK_MODULE_CALLS=1`` in the environment runs all tests without it.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any
from unittest import mock

import torch
from thunder.core import jit_ext
from thunder.core.interpreter import _interpret_call, unwrap
from torch.nn.modules import module as torch_module

__all__ = ["shortened_module_calls"]

_OF_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")
_OF_ALL = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def _call_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _call_with_hooks(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``nn.Module.__call__`` while Thunder interprets; arguments are the interpreter's wrapped values."""
    hooked = any(getattr(unwrap(module), name) for name in _OF_MODULE)
    hooked |= any(getattr(torch_module, name) for name in _OF_ALL)
    return _interpret_call(_call_with_hooks if hooked else _call_forward, module, *args, **kwargs)


def shortened_module_calls() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Thunder interprets ``forward`` right away where a module has no hooks."""
    if os.environ.get("STOCK_MODULE_CALLS"):
        return contextlib.nullcontext()
    return mock.patch.dict(jit_ext._general_jit_lookaside_map, {torch.nn.Module._wrapped_call_impl: _call})
