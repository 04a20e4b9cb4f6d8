"""DTensors with uneven rows, against whole tensors that every rank has."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched.errors import code_of

import pytest
import torch
import torch.distributed as dist
from coded import coded
from internals import BucketRanks, ProcessGroupRef, RowDTensor, Rows, make_layout
from ranks import on_ranks
from scenario import whole_of
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

SHAPES = [(5, 4), (3,), (), (7, 2, 3), (1, 4), (8, 4), (0, 4)]


def _pairs(*, even: bool, seed: int = 0, scale: float = 1.0) -> list[tuple[RowDTensor, torch.Tensor]]:
    """Return sharded tensors beside the whole ones, which are the same on all ranks."""
    group = ProcessGroupRef.of(dist.group.WORLD)
    layout = make_layout(SHAPES, group.size, 4, per_param=even)
    torch.manual_seed(seed)
    pairs = []
    for number, placement in enumerate(layout.placements):
        rows = Rows(torch.Size(placement.shape), placement.row_starts, BucketRanks(group), f"tensor {number}")
        assert rows.is_even or not even or not placement.shape
        whole = torch.randn(placement.shape) * scale
        pairs.append((RowDTensor.wrap(rows.of(whole).clone(), rows), whole))
    assert even or sum(not pair[0].rows.is_even for pair in pairs) > 3
    return pairs


ROWS: dict[str, Callable[..., Any]] = {
    "scaled": lambda x, y: x * 2 + 1,
    "sum of two": lambda x, y: x + y * x.sigmoid(),
    "comparison": lambda x, y: torch.where(x > y, x, y),
    "copy": lambda x, y: x.clone().copy_(y),
    "cast": lambda x, y: x.double(),
    "copies": lambda x, y: copy.deepcopy(x) + x.data.div_(1) + x.detach(),
    "in place": lambda x, y: x.clone().mul_(y).add_(1, alpha=2).clamp_(-1, 1),
    "out": lambda x, y: torch.maximum(x, y, out=torch.zeros_like(x)),
    "filled": lambda x, y: torch.zeros_like(x).fill_(3) + torch.full_like(x, 2) + torch.ones_like(x),
    "foreach": lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2)[0],
    "foreach of a number": lambda x, y: torch._foreach_mul([x, y], x.sum())[0],
    "lerp": lambda x, y: torch._foreach_lerp([x], [y], 0.25)[0],
    "all of it": lambda x, y: x[:] + x[...],
}
"""Functions whose result is rows."""

REDUCED: dict[str, Callable[..., Any]] = {
    "norm": lambda x, y: x.norm(),
    "norm of order 1": lambda x, y: torch.linalg.vector_norm(x, 1),
    "norm of order 0": lambda x, y: torch.linalg.vector_norm(x, 0),
    "norm of order -1": lambda x, y: torch.linalg.vector_norm(x, -1),
    "infinity norm": lambda x, y: torch.linalg.vector_norm(x, torch.inf),
    "negative infinity norm": lambda x, y: torch.linalg.vector_norm(x, -torch.inf),
    "norms": lambda x, y: torch._foreach_norm([x, y], 2)[1],
    "norms of order -1": lambda x, y: torch._foreach_norm([x, y], -1)[1],
    "sum": lambda x, y: x.sum(),
    "mean": lambda x, y: x.mean(),
    "maximum": lambda x, y: x.max(),
    "minimum": lambda x, y: x.min(),
    "nan": lambda x, y: (x / (x > 0)).sub_(x).max(),
    "any": lambda x, y: (x > 1).any(),
    "all": lambda x, y: (x > -9).all(),
}
"""Functions whose result every rank has."""

NUMBERS: dict[str, Callable[..., Any]] = {
    "equal": lambda x, y: (torch.equal(x, x.clone()), torch.equal(x, y), torch.equal(x, x.clone().abs_())),
    "all close": lambda x, y: torch.allclose(x, x + 1e-9),
    "numbers": lambda x, y: (round(x.norm().item(), 4), round(float(x.sum()), 4), bool(x.max() > 2)),
    "foreach": lambda x, y: [round(float(n), 4) for n in torch._foreach_norm([x, y])],
    "shape": lambda x, y: x.new_zeros(x.shape).shape,
}
"""Functions whose results are values of Python, the same on every rank."""

REFUSED: dict[str, Callable[..., Any]] = {
    "cumulative sum": lambda x, y: x.cumsum(0),
    "softmax": lambda x, y: x.softmax(0),
    "sorted": lambda x, y: x.sort(0),
    "matrix product": lambda x, y: x @ x.new_ones(x.shape[-1:]),
    "transposed": lambda x, y: x.t_() if x.ndim == 2 else x.transpose_(0, -1),
    "first row": lambda x, y: x[0],
    "column": lambda x, y: x[..., 1],
    "flattened": lambda x, y: x.flatten() if x.ndim > 1 else x[:1],
    "row means": lambda x, y: x.mean(-1),
    "sum of columns": lambda x, y: x.sum(0),
    "variance": lambda x, y: x.var(),
    "random": lambda x, y: x.normal_(),
    "new shape": lambda x, y: x.new_zeros(2, 3, 4),
    "some rows": lambda x, y: x[: len(x) // 2],
    "without its first dimension": lambda x, y: x.squeeze_(),
    "with another one": lambda x, y: x.unsqueeze(0),
    "diagonal": lambda x, y: x.flatten(1).diagonal(),
    "other bits": lambda x, y: x.view(torch.int32),
    "stacked": lambda x, y: torch.stack([x, y]),
    "nonzero": lambda x, y: x.nonzero(),
    "renormalized": lambda x, y: torch.renorm(x, 2, 0, 1.0),
    "distances": lambda x, y: torch.cdist(x, x),
    "put": lambda x, y: x.put_(torch.tensor([0]), torch.tensor([1.0])),
    "orthogonal": lambda x, y: torch.nn.init.orthogonal_(x.flatten(1)),
    "random by value": lambda x, y: torch.bernoulli(x.sigmoid()),
    "dlpack": lambda x, y: torch.from_dlpack(x),
    "numpy": lambda x, y: x.numpy(),
    "shared memory": lambda x, y: x.share_memory_(),
    "calls on the host": lambda x, y: x.apply_(lambda value: value),
    "maps on the host": lambda x, y: x.map_(y, lambda one, other: one),
}
"""Functions that need rows of other ranks, or the memory of the whole tensor."""

REFUSALS = (
    "parameter.operator-needs-other-rows",
    "parameter.exported-as-whole-tensor",
    "parameter.rows-mixed-with-other-tensor",
)
"""The codes of their errors."""


ERRORS = (RuntimeError, IndexError, TypeError, ValueError)


def _check_operator(
    kind: str, name: str, function: Callable[..., Any], x: RowDTensor, y: RowDTensor, wholes: tuple[torch.Tensor, ...]
) -> bool:
    """Compare a function of rows with that of whole tensors. Return whether the whole tensors had a result."""
    what = (name, x.rows)
    torch.manual_seed(7)
    try:
        expected = function(*(whole.clone() for whole in wholes))
    except ERRORS as error:  # there are no elements, or no such dimension
        with pytest.raises(ERRORS):
            function(x.clone(), y.clone())
        assert not x.numel() or x.ndim < 2 or kind == "refused", (*what, error)
        return False
    torch.manual_seed(7)
    if kind == "refused":
        # A single row, or all rows of one rank, may be viewed with other dimensions, but not in place.
        is_single = len(x) == 1 if x.ndim and name not in ("with another one", "diagonal") else not x.rows.is_cut
        if not x.ndim or not x.numel() or is_single != (name == "without its first dimension"):
            return False
        with pytest.raises((NotImplementedError, RuntimeError), check=lambda error: code_of(error) in REFUSALS):
            function(x.clone(), y.clone())
        return True
    actual = function(x.clone(), y.clone())
    if kind == "numbers":
        assert actual == expected, (*what, actual, expected)
        return True
    assert isinstance(actual, RowDTensor if kind == "rows" else DTensor), (*what, type(actual))
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, (*what, actual)
    for found in (actual.full_tensor(), *([actual.to_local()] if kind == "reduced" else [])):
        torch.testing.assert_close(found, expected, equal_nan=True, msg=str(what))
    return True


@on_ranks()
def test_operators_give_what_they_give_on_whole_tensors_or_are_refused() -> None:
    pairs, missing = list(zip(_pairs(even=False), _pairs(even=False, seed=1), strict=True)), set()
    for kind, functions in {"rows": ROWS, "reduced": REDUCED, "numbers": NUMBERS, "refused": REFUSED}.items():
        for name, function in functions.items():
            results = []
            for (x, whole), (y, other) in pairs:
                results.append(_check_operator(kind, name, function, x, y, (whole, other)))
                assert torch.equal(x.to_local(), x.rows.of(whole)), name  # nothing has changed its operands
            missing |= set() if any(results) else {name}
    assert not missing, missing


@pytest.mark.skipif(not issubclass(RowDTensor, DTensor), reason="torch 2.10 and 2.11 refuse such losses")
@pytest.mark.parametrize("even", [True, False])
@on_ranks(2)
def test_losses_have_the_gradient_of_the_whole_tensor(even: bool) -> None:
    losses: dict[str, Callable[[Any], Any]] = {
        "penalty": lambda p: p.pow(2).sum(),
        "linear": lambda p: p.sum() + p.mean(),
        "absolute": lambda p: p.abs().mean(),
        "norm": lambda p: whole_of(p.norm()),
        "maximum": lambda p: whole_of(p.max()),
        "whole": lambda p: whole_of(p).sum(),
    }
    for name, loss_of_param in losses.items():
        for x, whole in _pairs(even=even):
            if not whole.numel():
                continue
            x, whole = torch.nn.Parameter(x), torch.nn.Parameter(whole)
            others = [torch.tensor(2.0, requires_grad=True) for _ in range(2)]
            totals = [other * 3 + 0.5 * loss_of_param(p) for other, p in zip(others, (x, whole), strict=True)]
            torch.testing.assert_close(totals[0].detach(), totals[1].detach(), check_dtype=False, msg=name)
            for total in totals:
                total.backward()
            assert isinstance(x.grad, RowDTensor) and x.grad.rows == x.rows, name
            torch.testing.assert_close(x.grad.full_tensor(), whole.grad, msg=f"{name} {x.rows}")
            assert others[0].grad == 3
            (x.to_local() * 3).sum().backward()
            torch.testing.assert_close(x.grad.to_local(), x.rows.of(whole.grad) + 3, msg=f"{name} {x.rows}")
    with pytest.raises(NotImplementedError, check=coded("parameter.operator-without-gradient", "sum")):
        torch.sum(torch.nn.Parameter(_pairs(even=even)[0][0]))


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(lambda size: size)
def test_placements_tell_where_rows_are_cut(size: int) -> None:
    for x, whole in _pairs(even=False):
        if not x.ndim:
            continue
        shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
        assert shape == x.to_local().shape and (offset[0] == x.rows.start or not shape[0])
        assert all(placement.is_shard(0) for placement in pickle.loads(pickle.dumps(x.placements)))
        # A DTensor that someone else has made of the rows, or cuts where they are cut.
        wrapped = DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
        assert torch.equal(wrapped.full_tensor(), whole)
        cut = DTensor.from_local(whole, x.device_mesh, [Replicate()], run_check=False).redistribute(
            x.device_mesh, x.placements
        )
        assert torch.equal(cut.to_local(), x.to_local())
        assert torch.equal(distribute_tensor(whole, x.device_mesh, x.placements).full_tensor(), whole)


@pytest.mark.parametrize("even", [True, False])
@on_ranks(2)
def test_changes_reach_the_rows_and_views_of_other_rows_are_refused(even: bool) -> None:
    for x, whole in _pairs(even=even):
        version, local_version = x._version, x.to_local()._version
        for tensor in (x, whole):
            tensor.add_(1)
        assert torch.equal(whole_of(x), whole) or torch.allclose(whole_of(x), whole)
        assert x._version > version and x.to_local()._version > local_version
        version, local_version = x._version, x.to_local()._version
        torch._foreach_mul_([x], 1.0)
        assert x._version > version and x.to_local()._version > local_version
        x.data.mul_(2)
        x.detach().mul_(2)
        torch.testing.assert_close(whole_of(x), whole * 4)
        whole *= 4
        for tensor in (x, whole):
            tensor[...].add_(1)
        torch.testing.assert_close(whole_of(x), whole)
        if whole.numel() > 1:
            for one, other in ((x, whole), (whole, x)):
                with pytest.raises(RuntimeError, check=coded("parameter.rows-mixed-with-other-tensor")):
                    one + other
                with pytest.raises(RuntimeError, check=coded("parameter.rows-mixed-with-other-tensor")):
                    one.add_(other)
