"""The arguments of a traced call: what must be equal in another call, and the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from thunder.core.interpreter import WrappedValue
from thunder.core.proxies import Proxy, TensorProxy

from .grad_modes import DETACHED
from .observer import Unrepeatable
from .tokens import token_of

__all__ = ["Arguments", "flatten"]


class Arguments(NamedTuple):
    """The arguments of a call.

    Attributes:
        token: equal for calls that are traced alike, as far as their arguments go, except for ``detached``.
        tensors: the wrapped tensors, whose values are proxies, in the order of their first appearance.
        detached: which of the tensors were made without gradients.
    """

    token: Any
    tensors: tuple[WrappedValue, ...]
    detached: frozenset[int]


def flatten(args: Sequence[WrappedValue], kwargs: Mapping[str, WrappedValue]) -> Arguments:
    """Return the arguments of a call.

    Raises:
        Unrepeatable: one is a number that Thunder traces, or a tensor without a proxy.
    """
    tensors: dict[str, WrappedValue] = {}
    positional = tuple(_flatten(arg, tensors) for arg in args)
    named = tuple((name, _flatten(arg, tensors)) for name, arg in kwargs.items())
    detached = frozenset(i for i, wrapped in enumerate(tensors.values()) if DETACHED in wrapped.value.tags)
    return Arguments((positional, named), tuple(tensors.values()), detached)


def _flatten(wrapped: WrappedValue, tensors: dict[str, WrappedValue]) -> Any:
    value = wrapped.value
    if isinstance(value, TensorProxy):
        tensors.setdefault(value.name, wrapped)
        is_parameter = issubclass(wrapped.python_typ, torch.nn.Parameter)
        return list(tensors).index(value.name), _metadata(value), frozenset(value.tags) - {DETACHED}, is_parameter
    if isinstance(value, Proxy | torch.Tensor):
        raise Unrepeatable(f"an argument is a {type(value).__name__}")
    if type(value) in (tuple, list):
        wrapped.track_items()
        return type(value), tuple(_flatten(item, tensors) for item in wrapped.item_wrappers)
    if type(value) is dict:
        wrapped.track_items()
        return dict, tuple((token_of(key), _flatten(wrapped.item_wrappers[key], tensors)) for key in value)
    return token_of(value, 0)


def _metadata(proxy: TensorProxy) -> Any:
    return type(proxy), tuple(proxy.shape), proxy.true_dtype, str(proxy.device), bool(proxy.requires_grad)
