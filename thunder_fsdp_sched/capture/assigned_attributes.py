"""Assign and delete attributes as Python does: by a class's own ``__setattr__``, and by properties and other descriptors.

Thunder remembers the assigned value as that of the attribute, even if a setter stores another one, and still finds an
attribute that the program has deleted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from types import FunctionType, NoneType
from typing import Any

import torch
from thunder.core.devices import Device
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, do_raise, interpreter_needs_wrap, wrap_const
from thunder.core.proxies import Proxy

from ..private_interpreter import call_interpreted, find_attributes
from ..private_lookups import of_class
from .refusals import refusal

_NATIVE_SET = object.__setattr__
_STORED_BY_EPILOGUE = (Proxy, torch.Tensor, int, float, str, bytes, tuple, NoneType, enum.Enum, torch.dtype, Device)
"""The types of values that the epilogue of a trace can assign to an attribute."""


def look_aside(function: Any, args: tuple[WrappedValue, ...], fallback: Any, is_of_input: bool) -> Callable[..., Any]:
    """Return what to call in place of ``setattr``, ``delattr`` and ``object.__setattr__``.

    Args:
        args: the wrapped arguments.
        fallback: what is called in place of the function otherwise.
        is_of_input: whether the object is the module, an argument, or a part of them.
    """
    if function is delattr:
        return _refuse if is_of_input else _delete
    kind = type(args[0].value)
    if function is _NATIVE_SET:
        if is_of_input and not isinstance(args[2].value, _STORED_BY_EPILOGUE):
            return _refuse_value
        find_attributes(args[0])
        return partial(_assign, fallback, is_of_input)
    is_own = isinstance(kind.__setattr__, FunctionType) and not issubclass(kind, torch.nn.Module)
    return partial(call_interpreted, kind.__setattr__) if is_own else fallback


def _assign(
    fallback: Callable[..., Any], is_of_input: bool, source: WrappedValue, name: WrappedValue, value: WrappedValue
) -> Any:
    descriptor = of_class(type(source.value), name.value)
    if isinstance(descriptor, property) and descriptor.fset is not None:
        return call_interpreted(descriptor.fset, source, value)
    if isinstance(setter := getattr(type(descriptor), "__set__", None), FunctionType):
        return call_interpreted(setter, wrap_const(descriptor), source, value)
    source.attribute_wrappers.pop(name.value, None)
    result = fallback(source, name, value)
    if is_of_input and result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        source.attribute_wrappers[name.value] = value  # otherwise the next read would be one of an input
    return result


def _refuse_value(source: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    owner, kind = type(source.value).__name__, type(value.value).__name__
    what = f"forward assigns a {kind} to the attribute {name.value!r} of a {owner}, which the traces do not store"
    return do_raise(refusal(what, "Assign tensors, numbers and strings, each to an attribute of its own"))


def _refuse(source: WrappedValue, name: WrappedValue) -> Any:
    what = f"forward deletes the attribute {name.value!r} of a {type(source.value).__name__} that it has not made"
    instead = "Assign None to it, or keep the value in a local variable"
    return do_raise(refusal(f"{what}, and each call would have to delete it again", instead))


def _delete(source: WrappedValue, name: WrappedValue) -> Any:
    attributes = source.attribute_wrappers.get("__dict__")
    members = () if attributes is None else (attributes.item_wrappers, attributes.key_wrappers)
    for known in (source.attribute_wrappers, *members):
        known.pop(name.value, None)
    return interpreter_needs_wrap(delattr)(source, name)
