"""Operators on whole rows, and reductions over rows, whose results are those of the whole tensor on every rank.

See [Note: Operators on rows] in ``row_operators``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from .operator_kinds import REDUCING
from .row_dtensor import RowDTensor, replicated
from .row_operands import align, dims_of, run_on_single_rank, with_rows
from .rows import Rows

aten = torch.ops.aten

_VECTOR_NORM = aten.linalg_vector_norm.default
_MEANS = (aten.mean.default, aten.mean.dim)
_LINEAR = (*_MEANS, aten.sum.default, aten.sum.dim_IntList)
_SPREADS = (aten.var.correction, aten.std.correction)
_REDUCTIONS = frozenset((_VECTOR_NORM, *_MEANS, *_SPREADS, *REDUCING))


def reduce_or_run_on_rows(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, rows = args[0], args[0].rows
    # On the whole shape, so that it raises the same errors on all ranks.
    expected = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args[1:], **kwargs)
    dims = dims_of(func, args, kwargs)
    if dims and 0 not in dims:
        result = func(tensor._local_tensor, *args[1:], **kwargs)
        return tree_map_only(
            torch.Tensor, lambda local: with_rows(local, rows.reshaped((tensor.shape[0], *local.shape[1:]))), result
        )
    is_whole = len(set(dims)) in (0, tensor.ndim)
    if func not in _REDUCTIONS or (is_whole and expected.numel() != 1):
        return run_on_single_rank(func, args, kwargs)
    if torch.is_grad_enabled() and tensor.requires_grad and func in _LINEAR:
        # The gradient that torch computes of it is a plain tensor, of which nobody knows whether it is whole.
        raise NotImplementedError(
            f"{func} of {rows.label!r} has no gradient: in a loss, use the methods p.sum() or p.mean() without arguments, "
            f"or p.full_tensor(); elsewhere, torch.no_grad() or p.detach()"
        )
    if is_whole:
        _check_shared(func, rows)
    return replicated(_reduced(func, args, kwargs, expected), tensor.device_mesh)


def _reduced(func: Any, args: Sequence[Any], kwargs: dict[str, Any], expected: torch.Tensor) -> torch.Tensor:
    """Reduce each rank's rows, and the results of all ranks; a collective."""
    tensor, rows, local = args[0], args[0].rows, args[0]._local_tensor
    reduce = _mean_and_variance if func in _SPREADS else func
    if not tensor.numel():
        return func(local.new_empty(tensor.shape), *args[1:], **kwargs)
    if not tensor.ndim and len(local):
        local = local.reshape(())
    if rows.start < rows.end:
        part = reduce(local, *args[1:], **kwargs)
    else:
        part = local.new_zeros((2,) * (func in _SPREADS) + tuple(expected.shape), dtype=expected.dtype)
    parts = rows.exchange(part, str(func))[rows.holders]
    if parts.dtype in (torch.bfloat16, torch.float16):
        parts = parts.float()
    weights = torch.tensor([length / rows.starts[-1] for length in rows.lengths if length], dtype=torch.float64)
    weights = weights.to(parts.device).view(-1, *(1 for _ in expected.shape))
    if func is _VECTOR_NORM:
        combined = _norm_of(parts, args[1] if len(args) > 1 else kwargs.get("ord", 2))
    elif func in _MEANS:
        combined = (parts * weights).sum(0)
    elif func in _SPREADS:
        means, variances = parts.double().unbind(1)
        combined = ((variances + (means - (means * weights).sum(0)).square()) * weights).sum(0)
        number, correction = tensor.numel() // expected.numel(), kwargs.get("correction", 1)
        combined = combined * number / combined.new_tensor(max(0, number - (1 if correction is None else correction)))
        combined = combined.sqrt() if func is aten.std.correction else combined
    else:
        combine: Any = REDUCING[func]
        combined = combine(parts, 0)
    return combined.to(expected.dtype)


def _mean_and_variance(local: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    dims = tuple(range(local.ndim)) if dim is None else dim
    return torch.stack([local.mean(dims, keepdim), local.var(dims, correction=0, keepdim=keepdim)])


def _norm_of(norms: torch.Tensor, order: Any) -> torch.Tensor:
    """Return the norm of a tensor from the norms of its parts, along the first dimension."""
    return norms.sum(0) if order == 0 else torch.linalg.vector_norm(norms, order, 0)


def _check_shared(func: Any, rows: Rows) -> None:
    """Raise an error for a number that not all ranks would have, because other ranks have other parameters."""
    if not rows.is_on_all_ranks:
        raise RuntimeError(
            f"{func}: {rows.label!r} is sharded over ranks {list(rows.ranks.group.global_ranks)} alone "
            f"(process_group_for), so other ranks would not get its value. thunder_fsdp_sched.clip_grad_norm_(model, ...) "
            f"counts such parameters right; p.full_tensor() gives the whole tensor on these ranks"
        )


def norms(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Compute the norms of a list of tensors; one collective for each process group."""
    tensors, order = args[0], args[1] if len(args) > 1 else 2
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    norms: list[Any] = [None] * len(tensors)
    by_group: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, RowDTensor) and tensor.numel():
            _check_shared(func, tensor.rows)
            by_group.setdefault(tensor.rows.ranks.group, []).append(number)
        else:
            norms[number] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
    for numbers in by_group.values():
        sharded = [tensors[number] for number in numbers]
        wide = torch.float64 if any(t.dtype in (torch.float64, torch.complex128) for t in sharded) else torch.float32
        parts = sharded[0]._local_tensor.new_full((len(sharded),), torch.inf if order < 0 else 0, dtype=wide)
        here = [place for place, tensor in enumerate(sharded) if tensor._local_tensor.numel()]
        if here:
            local = func([sharded[place]._local_tensor for place in here], order, dtype=dtype)
            parts[here] = torch.stack([norm.to(wide) for norm in local])
        labels = [tensor.rows.label for tensor in sharded]
        combined = _norm_of(sharded[0].rows.exchange(parts, str(func), *labels), order)
        for number, tensor, norm in zip(numbers, sharded, combined.unbind(), strict=True):
            norms[number] = replicated(norm.to(dtype or _real(tensor.dtype)), tensor.device_mesh)
    return norms


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def compare(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if func is aten.equal.default and args[0].shape != args[1].shape:
        return False
    (one, other), rows = align(func, args[:2])
    _check_shared(func, rows)
    is_equal = torch.tensor(func(one, other, *args[2:], **kwargs), device=one.device)
    return bool(rows.exchange(is_equal, str(func)).all())


def item(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, rows = args[0], args[0].rows
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    _check_shared(func, rows)
    local = tensor._local_tensor.reshape(-1)
    part = local[0] if len(local) else local.new_zeros(())
    return rows.exchange(part, str(func))[rows.holders[0]].item()
