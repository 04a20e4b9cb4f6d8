"""Calls of torch's functions that Thunder does not know in this form, by others that it knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from thunder.core.interpreter import unwrap, wrap_const
from thunder.core.symbol import Symbol
from thunder.torch import reshape

from ..private_interpreter import call_interpreted


def look_aside(function: Any, kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what to call in place of a function, with the same wrapped arguments; ``None`` for those that Thunder knows."""
    if function is torch.eye:
        return partial(call_interpreted, _eye, wrap_const(torch.get_default_dtype()))
    if (function is reshape or function in (torch.reshape, torch.Tensor.reshape)) and "shape" in kwargs:
        return partial(call_interpreted, _reshape, wrap_const(function))
    if isinstance(function, Symbol) and function.name == "norm" and "p" in kwargs and unwrap(kwargs["p"]) != "nuc":
        return partial(call_interpreted, _norm)  # Thunder calls torch.linalg.norm, which has no `p`
    return None


def _norm(tensor: torch.Tensor, *, p: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> torch.Tensor:
    order = 2 if p is None or p == "fro" else p
    return torch.linalg.vector_norm(tensor, order, dim, keepdim, dtype=dtype)


def _eye(
    default_dtype: Any,
    n: int,
    m: int | None = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    if requires_grad:
        raise NotImplementedError("fsdp: torch.eye(requires_grad=True) in forward: make it a parameter of the module")
    rows = torch.arange(n, device=device)
    columns = torch.arange(n if m is None else m, device=device)
    return (rows[:, None] == columns[None, :]).to(default_dtype if dtype is None else dtype)


def _reshape(function: Callable[..., torch.Tensor], tensor: torch.Tensor, *, shape: Any) -> torch.Tensor:
    return function(tensor, shape)
