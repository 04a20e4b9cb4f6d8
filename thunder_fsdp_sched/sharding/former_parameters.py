"""Parameters that sharded ones have replaced: using one raises an error that names it and the fix.

[Note: Former parameters]
``thunder.jit`` gives the module new parameter objects, and so does ``unsharded`` for the time of its block. The former
ones stay plain parameters, and other objects may still refer to them. So guards are attached to them:

- ``.grad`` is a :class:`_NoGradient`, whose every use raises the error. So ``clip_grad_norm_``, gradient scalers and loops
  over gradients fail.
- The dictionaries of hooks refuse new hooks, and refuse a gradient that a loss sends to a former parameter.
- :func:`refuse_former` recognizes former parameters by these dictionaries. It runs before each step of each optimizer.
- A call of the sharded module notices if ``zero_grad()`` or ``p.grad = None`` has been applied to a former parameter
  (:func:`check_gradients`). Otherwise the gradients of the new parameter would accumulate forever.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from ..errors import coded_error
from ..private_torch import hooks_of, set_hooks

FormerParameters: TypeAlias = "list[weakref.ref[torch.nn.Parameter]]"


def retire(param: torch.nn.Parameter, label: str) -> weakref.ref[torch.nn.Parameter]:
    """Make each use of ``param`` as a trained parameter an error; see [Note: Former parameters].

    Args:
        label: the name of the sharded parameter that replaces it.
    """
    grad = param.detach().as_subclass(_NoGradient)
    grad.label = label
    param.grad = grad
    set_hooks(param, _NoHooks(label), _NoHooks(label))
    return weakref.ref(param)


def refuse_former(params: Iterable[torch.Tensor]) -> None:
    """Raise an error if a former parameter is among ``params``.

    Raises:
        RuntimeError: names it, and what to do.
    """
    for param in params:
        if type(param) is torch.nn.Parameter:
            hooks, _ = hooks_of(param)
            if isinstance(hooks, _NoHooks):
                _refuse(hooks.label)


def check_gradients(former: FormerParameters) -> FormerParameters:
    """Return the former parameters that are still alive, and raise an error if ``.grad`` of one was assigned to.

    Raises:
        RuntimeError: names it, and what to do.
    """
    alive = [reference for reference in former if reference() is not None]
    params = [param for reference in alive if (param := reference()) is not None]
    refuse_former(param for param in params if not isinstance(param.grad, _NoGradient))
    return alive


class _NoGradient(torch.Tensor):
    """The gradient of a former parameter."""

    label: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse(next(leaf.label for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)))


class _NoHooks(dict[int, Any]):
    """The hooks of a former parameter: one, which refuses gradients."""

    def __init__(self, label: str) -> None:
        super().__init__({-1: partial(_refuse, label)})
        self.label = label

    def __setitem__(self, number: int, hook: Any) -> NoReturn:
        _refuse(self.label)


def _refuse(label: str, *_: Any) -> NoReturn:
    raise coded_error(RuntimeError, "parameter.taken-before-jit", parameter=label)
