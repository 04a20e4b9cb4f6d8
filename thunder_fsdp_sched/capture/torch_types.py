"""Queries of a program for the type or an attribute of a tensor: see [Note: Attributes of traced tensors].

``tensor_attributes`` answers them. It is loaded for the first query, because many programs have none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from thunder.core.interpreter import ProvenanceRecord, WrappedValue, interpreter_needs_wrap, unwrap, wrap_const
from thunder.core.proxies import TensorProxy

from ..private_interpreter import call_interpreted
from .refusals import is_in_thunder


def look_aside(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return what to call in place of a function that returns a property of a tensor.

    Args:
        function: ``getattr``, ``hasattr``, ``type``, also to make a class, or ``torch.device``; others are left alone.
        args: the wrapped arguments.
    """
    if function is getattr and type(args[0].value) is tuple and args[1].value == "numel":  # of a shape, or a part of it
        return lambda shape, _: wrap_const(functools.partial(math.prod, shape.value))
    if function is type and len(args) > 1:
        return interpreter_needs_wrap(type)
    if function is not torch.device and (
        function not in (getattr, hasattr, type) or not isinstance(args[0].value, TensorProxy)
    ):
        return None
    if is_in_thunder():
        return None
    from .tensor_attributes import answer_of

    return answer_of(function, args)


class Shapes:
    """The shapes that a program has read from tensors, which are tuples for Thunder."""

    def __init__(self) -> None:
        self._known: dict[int, ProvenanceRecord] = {}  # by identity

    def look_aside(self, function: Any, args: tuple[Any, ...], fallback: Any) -> Any:
        """Return what to call in place of ``getattr`` for the shape of a tensor, and of queries for the type of a shape.

        Args:
            fallback: what is called in place of them otherwise.
        """
        if function is getattr and isinstance(args[0].value, TensorProxy) and unwrap(args[1]) == "shape":
            return functools.partial(self._note, fallback)
        if function in (type, isinstance) and args and id(args[0].provenance) in self._known and not is_in_thunder():
            if function is isinstance:
                return lambda _, classes: call_interpreted(issubclass, wrap_const(torch.Size), classes)
            return lambda _: wrap_const(torch.Size)
        return fallback

    def _note(self, fallback: Callable[..., Any], *args: WrappedValue) -> Any:
        shape = fallback(*args)
        if isinstance(shape, WrappedValue):
            self._known[id(shape.provenance)] = shape.provenance
        return shape


def error_of_identity(one: WrappedValue, other: WrappedValue) -> NotImplementedError | None:
    """Return the error for ``one is other`` if these are tensors that may be one object for torch."""
    a, b = one.value, other.value
    if not (isinstance(a, TensorProxy) and isinstance(b, TensorProxy)) or a is b or is_in_thunder():
        return None
    from .tensor_attributes import error_of_same

    return error_of_same(a, b)
