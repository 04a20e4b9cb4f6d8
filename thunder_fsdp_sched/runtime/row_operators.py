"""The operators of :class:`RowDTensor`; see [Note: Uneven DTensors] in ``row_dtensor``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..private_api import reduces_found_infs
from .row_dtensor import RowDTensor, replicated
from .rows import Rows

__all__ = ["RowDTensor", "run_operator"]

aten = torch.ops.aten


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator with at least one :class:`RowDTensor` among its operands.

    Raises:
        NotImplementedError: it returns a view that the rows cannot give.
    """
    result = _run(func, args, kwargs)
    for tensor in _changed(func, args, kwargs):  # below autograd, operators count no versions
        torch.autograd.graph.increment_version(tensor._local_tensor)
    return result


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[RowDTensor]:
    """Yield the operands that ``func`` writes."""
    if not func._schema.is_mutable:
        return
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _row_dtensors(kwargs.get(argument.name) if number >= len(args) else args[number])


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = _HANDLERS.get(func)
    if handler is not None:
        return handler(func, args, kwargs)
    if func.namespace == "c10d":
        _refuse_collective(func, args, kwargs)
    if _draws(func):
        return _on_whole_sample(func, args, kwargs)
    if _is_elementwise(func):
        operands = _Operands(args, kwargs)
        if operands.match:
            return operands.wrap(func(*operands.args, **operands.kwargs))
    if _returns_view(func):
        return _view(func, args, kwargs)
    return _on_whole(func, args, kwargs)


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on whole tensors: as DTensor does where that is right, else on gathered ones."""
    if all(tensor.rows.is_equal for tensor in _row_dtensors((args, kwargs))):
        return _as_dtensors(func, args, kwargs)
    return _on_gathered(func, args, kwargs)


def _row_dtensors(tree: Any) -> Iterator[RowDTensor]:
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, RowDTensor))


class _Operands:
    """The operands of an elementwise operator, as far as it can run on this rank's rows of all of them.

    Lists of ``_foreach`` and ``_fused`` operators are matched item by item.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.wrappers: dict[int, RowDTensor] = {}
        self.rows: list[Rows | None] = []
        """Of each item of lists, or of all operands in one item."""
        self.match = True
        self.args = [self._local(arg) for arg in args]
        self.kwargs = {name: self._local(arg) for name, arg in kwargs.items()}

    def _local(self, arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [self._of(number, item) for number, item in enumerate(arg)]
        return self._of(0, arg) if isinstance(arg, torch.Tensor) else arg

    def _of(self, number: int, arg: Any) -> Any:
        if isinstance(arg, RowDTensor):
            while len(self.rows) <= number:
                self.rows.append(None)
            known = self.rows[number]
            if known is None:
                self.rows[number] = arg.rows
            elif known != arg.rows:
                self.match = False
            self.wrappers[id(arg._local_tensor)] = arg
            return arg._local_tensor
        if isinstance(arg, torch.Tensor):
            if arg.ndim or (isinstance(arg, DTensor) and not all(p.is_replicate() for p in arg.placements)):
                self.match = False  # broadcast, or sharded otherwise
            elif isinstance(arg, DTensor):
                return arg._local_tensor
        return arg

    def wrap(self, result: Any) -> Any:
        """Return the operator's result: its operand if it was changed in place, else a tensor with the same rows."""
        if isinstance(result, (list, tuple)):
            return type(result)(self._wrapped(number, item) for number, item in enumerate(result))
        return self._wrapped(0, result)

    def _wrapped(self, number: int, result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        changed = self.wrappers.get(id(result))
        if changed is not None:
            return changed
        rows = self.rows[number] or next(rows for rows in self.rows if rows is not None)
        return RowDTensor.wrap(result, rows)


def _as_dtensors(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator as DTensor does."""
    wrappers: dict[int, RowDTensor] = {}

    def plain(tensor: RowDTensor) -> DTensor:
        converted = tensor.as_dtensor()
        wrappers[id(converted)] = tensor
        return converted

    args, kwargs = tree_map_only(RowDTensor, plain, (args, kwargs))
    return tree_map_only(DTensor, lambda result: wrappers.get(id(result), result), func(*args, **kwargs))


def _on_gathered(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on replicated DTensors, and write what it changes back to the rows."""
    pairs: list[tuple[RowDTensor, DTensor]] = []

    def gathered(tensor: RowDTensor) -> DTensor:
        for known, whole in pairs:
            if known is tensor:
                return whole
        whole = replicated(tensor.rows.gather(tensor._local_tensor).to(tensor.device), tensor.device_mesh)
        pairs.append((tensor, whole))
        return whole

    leaves, tree = tree_flatten((args, kwargs))
    operands = [gathered(leaf) if isinstance(leaf, RowDTensor) else _regathered(leaf) for leaf in leaves]
    args, kwargs = tree_unflatten(operands, tree)
    result = func(*args, **kwargs)
    if func._schema.is_mutable:
        for tensor, whole in pairs:
            tensor._local_tensor.copy_(tensor.rows.of(whole._local_tensor))
    return tree_map_only(DTensor, lambda r: next((tensor for tensor, whole in pairs if whole is r), r), result)


def _regathered(leaf: Any) -> Any:
    if isinstance(leaf, DTensor) and not all(p.is_replicate() for p in leaf.placements):
        return leaf.redistribute(leaf.device_mesh, [Replicate()] * leaf.device_mesh.ndim)
    return leaf


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    rows, local = tensor.rows, tensor._local_tensor
    if rows.is_equal:
        result = _as_dtensors(func, args, kwargs)
        memory = local.untyped_storage().data_ptr()
        views = tree_flatten(result)[0]
        if all(v._local_tensor.untyped_storage().data_ptr() == memory for v in views if isinstance(v, DTensor)):
            return result
    elif func in _SAME_ROWS or (func in _TO_SIZE and tuple(args[1]) == tuple(tensor.shape)):
        return RowDTensor.wrap(local, rows)
    raise NotImplementedError(
        f"{func} of {rows.label!r}, of which each rank has some rows: a view of gathered rows would not be a view of the "
        f"parameter. Read full_tensor(), or change the rows, to_local()"
    )


_SAME_ROWS = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}
_TO_SIZE = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default}


def _on_whole_sample(func: Any, args: Any, kwargs: Any) -> Any:
    """Draw random numbers for the whole tensor on every rank, and keep the rows."""
    tensors = list(_row_dtensors((args, kwargs)))
    if len(tensors) != 1 or tensors[0] is not args[0]:
        return _on_gathered(func, args, kwargs)
    tensor = args[0]
    fills = func._schema.name.endswith("_") or "like" in func._schema.name  # what was there does not matter
    local = tensor._local_tensor
    whole = local.new_empty(tensor.shape) if fills else tensor.rows.gather(local)
    drawn = func(whole, *args[1:], **kwargs)
    if func._schema.is_mutable:
        local.copy_(tensor.rows.of(whole))
        return tensor
    return tree_map_only(torch.Tensor, lambda t: RowDTensor.wrap(tensor.rows.of(t).clone(), tensor.rows), drawn)


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute norms of the rows, which DTensor reduces over the ranks."""
    tensors = [args[0]] if isinstance(args[0], RowDTensor) else list(args[0])
    dims = args[2] if func is _VECTOR_NORM and len(args) > 2 else kwargs.get("dim")
    if any(t.ndim == 0 for t in tensors) or (dims is not None and len(dims) < tensors[0].ndim):
        return _on_whole(func, args, kwargs)

    def nonempty(tensor: Any) -> Any:
        if not isinstance(tensor, RowDTensor):
            return tensor
        local = tensor._local_tensor
        if not local.numel() and tensor.numel():  # the infinity norm of nothing is an error
            local = local.new_zeros(1, *tensor.shape[1:])
        return tensor.as_dtensor(local)

    first = nonempty(args[0]) if isinstance(args[0], RowDTensor) else [nonempty(tensor) for tensor in args[0]]
    return func(first, *args[1:], **kwargs)


def _new(func: Any, args: Any, kwargs: Any) -> Any:
    """Create a tensor like this one; with another size it is replicated."""
    tensor, size = args[0], torch.Size(args[1])
    local = tensor._local_tensor
    if func is aten.new_empty_strided.default:
        return RowDTensor.wrap(local.new_empty(local.shape, **kwargs), tensor.rows)
    if size == tensor.shape:
        return RowDTensor.wrap(func(local, local.shape, *args[2:], **kwargs), tensor.rows)
    return replicated(func(local, size, *args[2:], **kwargs), tensor.device_mesh)


def _check_finite(func: Any, args: Any, kwargs: Any) -> None:
    """Unscale gradients, and tell every rank whether one of them is not finite on any rank (``GradScaler``)."""
    grads, found_inf, *rest = args
    locals_ = [g._local_tensor if isinstance(g, DTensor) else g for g in grads]
    func([g for g in locals_ if g.numel()] or locals_, found_inf, *rest, **kwargs)
    of_groups = {id(g.rows.ranks): g.rows for g in grads if isinstance(g, RowDTensor)}.values()
    if not any(rows.is_on_all_ranks for rows in of_groups) and not reduces_found_infs():
        raise RuntimeError(
            "GradScaler: none of these gradients is sharded over all ranks, so ranks would not agree on skipping a step. "
            "Use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
        )
    for rows in sorted(of_groups, key=lambda rows: rows.ranks.group.size):  # the group of all ranks comes last
        group = rows.ranks.group
        group.check_sends(found_inf.device, "the result of GradScaler")
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group.process_group)


def _refuse_collective(func: Any, args: Any, kwargs: Any) -> NoReturn:
    label = next(_row_dtensors((args, kwargs))).rows.label
    raise RuntimeError(
        f"{func} of {label!r}, of which each rank has other rows: DistributedDataParallel would copy the rows of one rank "
        f"to all others. Use a collective on to_local() if that is what you want"
    )


def _refuse(func: Any, args: Any, kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"{func} of a parameter of which each rank has some rows: take to_local() or full_tensor()"
    )


_VECTOR_NORM = aten.linalg_vector_norm.default

_HANDLERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    _VECTOR_NORM: _norm,
    aten._foreach_norm.Scalar: _norm,
    aten.new_empty.default: _new,
    aten.new_zeros.default: _new,
    aten.new_ones.default: _new,
    aten.new_full.default: _new,
    aten.new_empty_strided.default: _new,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _check_finite,
    aten.is_same_size.default: lambda func, args, kwargs: args[0].shape == args[1].shape,
    aten.is_pinned.default: lambda func, args, kwargs: args[0]._local_tensor.is_pinned(),
    aten.detach_.default: lambda func, args, kwargs: args[0],
    aten.set_.source_Tensor: _refuse,
    aten.resize_.default: _refuse,
}

_ELEMENTWISE = {
    aten.clone.default,
    aten.copy_.default,
    aten._to_copy.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.where.self,
    aten.nan_to_num.default,
}

_REDUCING = ("norm", "max", "min", "powsum", "sum")


def _is_elementwise(func: Any) -> bool:
    known = _elementwise.get(func)
    if known is None:
        name = func._schema.name.removeprefix("aten::")
        known = _elementwise[func] = (
            func in _ELEMENTWISE
            or torch.Tag.pointwise in func.tags
            or name.startswith("_fused_ad")
            or name.startswith("_fused_sgd")
            or (name.startswith("_foreach_") and name.split("_")[2] not in _REDUCING)
        )
    return known


_elementwise: dict[Any, bool] = {}


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _returns_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


RowDTensor.run_operator = staticmethod(run_operator)
