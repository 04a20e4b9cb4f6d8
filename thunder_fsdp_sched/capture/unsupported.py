"""Errors for calls that Thunder cannot trace."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, do_raise, unwrap
from thunder.core.proxies import Proxy, TensorProxy, TorchAutogradFunctionCtxProxy
from torch import nn
from torch.utils._pytree import tree_leaves

from .refusals import refusal

_RULE = Callable[[Sequence[Any], Mapping[str, Any]], NotImplementedError | None]

_OUTSIDE = "call it outside of the module that is compiled, on its inputs or results"
OWN_BACKWARD = (
    "Save what backward needs with ctx.save_for_backward, or as an attribute of ctx if it is no tensor, return one gradient "
    "for each input of forward, also for those that need none, and return one output, which is differentiable"
)


def unsupported_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NotImplementedError | None:
    """Return the error for a call that Thunder refuses only later, or without saying why.

    Args:
        args, kwargs: the wrapped arguments.
    """
    rule = _RULES.get(id(function))
    if rule is not None:
        return rule(args, kwargs)
    if isinstance(function, FunctionType) and function.__module__ in _FUNCTORCH:
        return refusal(
            "Thunder cannot trace torch.func (vmap, grad, jvp, functional_call and so on)",
            f"Write the batch dimension or the derivative out, or {_OUTSIDE}",
        )
    return None


def _embedding(args: Sequence[Any], kwargs: Mapping[str, Any], sparse: int) -> NotImplementedError | None:
    if _argument(args, kwargs, "sparse", sparse) and _has_gradient(
        kwargs.get("weight", args[-1 if len(args) < 2 else 1])
    ):
        return refusal(
            "gradients of an embedding with sparse=True are sparse tensors, which cannot be reduced or sharded",
            "Pass sparse=False",
        )
    if _argument(args, kwargs, "max_norm", 3) is not None:
        return refusal(
            "an embedding with max_norm changes its parameter in forward, which Thunder cannot trace",
            "Leave max_norm out, and normalize what the embedding returns, or the rows of the parameter between steps",
        )
    return None


def _has_gradient(weight: Any) -> bool:
    """Return whether the parameter of an embedding, or what it is computed from, may get a gradient."""
    is_enabled = torch.is_grad_enabled() and get_compile_data().is_grad_enabled
    return is_enabled and (weight.value.requires_grad or not issubclass(weight.python_typ, nn.Parameter))


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], name: str, index: int) -> Any:
    return unwrap(kwargs.get(name, args[index] if len(args) > index else None))


def _recurrent(args: Sequence[Any], kwargs: Mapping[str, Any]) -> NotImplementedError:
    name = type(unwrap(args[0])).__name__
    cell = "GRU" if name == "LSTM" else name  # Thunder loses gradients of nn.LSTMCell
    return refusal(
        f"Thunder cannot trace nn.{name}",
        f"Loop over the sequence with nn.{cell}Cell in forward, or {_OUTSIDE}",
    )


def _autograd_function(args: Sequence[Any], kwargs: Mapping[str, Any]) -> NotImplementedError | None:
    kind = unwrap(args[0])
    if len(args) > 1 and isinstance(unwrap(args[1]), list | tuple | slice):
        return refusal(
            f"Thunder loses gradients of autograd functions whose first argument is no tensor or number ({kind.__name__})",
            "Pass a tensor first",
        )
    if getattr(kind, "setup_context", None) is torch.autograd.Function.setup_context:
        return None
    return refusal(
        f"Thunder cannot trace autograd functions with a setup_context ({kind.__name__})",
        f"Let forward take ctx as its first argument, without setup_context. {OWN_BACKWARD}",
    )


def call_for_one_result(traced: Callable[..., Any], *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Call what traces an autograd function; return the signal of an error if the function has several results."""
    result = traced(*args, **kwargs)
    if isinstance(result, INTERPRETER_SIGNALS) or not isinstance(unwrap(result), tuple | list):
        return result
    name = unwrap(args[0]).__name__
    return do_raise(refusal(f"Thunder cannot trace autograd functions with several results ({name})", OWN_BACKWARD))


def _attribute_of_context(args: Sequence[Any], kwargs: Mapping[str, Any]) -> NotImplementedError | None:
    if not any(isinstance(value, TensorProxy) for value in tree_leaves(unwrap(args[2]))):
        return None
    return refusal(
        f"an autograd function keeps a tensor as an attribute of ctx ({unwrap(args[1])!r}), which backward would not find",
        OWN_BACKWARD,
    )


def _tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> NotImplementedError | None:
    from .unknown_numbers import UnknownNumber

    data = _argument(args, kwargs, "data", 0)
    return data.error() if isinstance(data, UnknownNumber) else None


def _parameter(args: Sequence[Any], kwargs: Mapping[str, Any]) -> NotImplementedError:
    return refusal("forward creates a parameter", "Create parameters, and modules that have some, outside of forward")


def _assigned_part(args: Sequence[Any], kwargs: Mapping[str, Any]) -> NotImplementedError | None:
    if not isinstance(unwrap(args[0]), TensorProxy) or unwrap(args[1]) not in ("imag", "real"):
        return None
    return refusal(
        f"forward assigns {unwrap(args[1])} of a tensor, which the trace would not change",
        "Make a new tensor, torch.complex(real, imag)",
    )


def _own_lookup(args: Sequence[Any], kwargs: Mapping[str, Any]) -> NotImplementedError | None:
    """Return the error for an attribute for which the class's own ``__getattribute__`` gives another value."""
    owner, name = unwrap(args[0]), unwrap(args[1])
    kind = type(owner)
    if not isinstance(kind.__getattribute__, FunctionType) or isinstance(owner, Proxy):
        return None
    if isinstance(inspect.getattr_static(kind, name, None), property | functools.cached_property):
        return None  # asking would run it once more
    stored, own = (_value_or_none(look_up, owner, name) for look_up in (object.__getattribute__, getattr))
    if stored is None or own is stored or (not hasattr(own, "__array__") and own == stored):
        return None
    return refusal(
        f"forward reads {name!r} of a {kind.__name__}, whose __getattribute__ Thunder does not call",
        "Define a property, or __getattr__ for attributes that are not stored",
    )


def own_iterator(value: Any) -> NotImplementedError | None:
    """Return the error for a list or tuple whose class has its own ``__iter__``: Thunder iterates over what it stores."""
    if not isinstance(value, list | tuple) or type(value).__iter__ in (list.__iter__, tuple.__iter__):
        return None
    return refusal(
        f"forward uses a {type(value).__name__}, a list or tuple whose own __iter__ Thunder does not call",
        "Give it a method with another name that returns a plain list",
    )


def _value_or_none(look_up: Callable[[Any, str], Any], owner: Any, name: str) -> Any:
    try:
        return look_up(owner, name)
    except AttributeError:
        return None


def _saved_tensors_hooks(args: Sequence[Any], kwargs: Mapping[str, Any]) -> NotImplementedError:
    return refusal(
        f"forward registers hooks of saved tensors ({type(unwrap(args[0])).__name__}), which do not run in a trace",
        "Leave them out (fsdp(max_memory=...) and torch.utils.checkpoint save memory, too)",
    )


_RULES: dict[int, _RULE] = {
    id(getattr): _own_lookup,
    id(torch.autograd.graph.saved_tensors_hooks.__enter__): _saved_tensors_hooks,
    id(object.__setattr__): _assigned_part,
    id(TorchAutogradFunctionCtxProxy.__setattr__): _attribute_of_context,
    id(torch.tensor): _tensor,
    id(nn.Parameter.__new__): _parameter,
    id(F.embedding): lambda args, kwargs: _embedding(args, kwargs, sparse=6),
    id(F.embedding_bag): lambda args, kwargs: _embedding(args, kwargs, sparse=7),
    id(torch.autograd.Function.apply.__func__): _autograd_function,  # type: ignore[attr-defined]
    **{id(kind.forward): _recurrent for kind in (nn.RNN, nn.LSTM, nn.GRU)},
}
"""Functions that return the error for a call, by the identity of the called function."""

_FUNCTORCH = frozenset(
    {"torch.func", "torch._functorch.apis", "torch._functorch.vmap", "torch._functorch.eager_transforms"}
)
