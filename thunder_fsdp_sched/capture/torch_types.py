"""Dtypes and devices of tensors, as torch's in place of Thunder's.

[Note: Dtypes of traced tensors]
While Thunder traces, a tensor is a proxy, whose ``dtype`` and ``device`` are Thunder's, which equal none of torch's, so
``x.dtype == torch.float32`` would be false for all inputs, and one branch would run for all of them. A program that Thunder
traces gets torch's. Thunder's own functions, which the interpreter interprets as well, go on with Thunder's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from thunder.core.devices import to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.interpreter import WrappedValue, unwrap, wrap_const
from thunder.core.proxies import NumberProxy, StringProxy, TensorProxy

from .refusals import is_in_thunder

_AS_TORCH = {"dtype": to_torch_dtype, "device": to_torch_device}


def look_aside(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return what to call in place of a function that returns a dtype or a device.

    Args:
        function: ``getattr`` or ``torch.device``; others are left alone.
        args: the wrapped arguments.
    """
    if function not in (getattr, torch.device):
        return None
    if function is getattr and not (isinstance(args[0].value, TensorProxy) and unwrap(args[1]) in _AS_TORCH):
        return None
    if is_in_thunder():
        return None
    return _device if function is torch.device else _attribute


def _attribute(tensor: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    return wrap_const(_AS_TORCH[unwrap(name)](getattr(tensor.value, unwrap(name))))


def _device(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
    return wrap_const(torch.device(*map(_plain, args), **{name: _plain(arg) for name, arg in kwargs.items()}))


def _plain(argument: WrappedValue) -> Any:
    value = argument.value
    return value.value if isinstance(value, StringProxy | NumberProxy) else value
