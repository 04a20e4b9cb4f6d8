"""DTensors with uneven rows, against whole tensors that every rank has."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thunder_fsdp_sched.distributed.process_groups import ProcessGroupRef
from thunder_fsdp_sched.distributed.process_groups import Ranks as ShardingRanks
from thunder_fsdp_sched.plan.layout import make_layout
from thunder_fsdp_sched.runtime.row_dtensor import replicated
from thunder_fsdp_sched.runtime.row_operators import RowDTensor
from thunder_fsdp_sched.runtime.rows import Rows

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

SHAPES = [(5, 4), (3,), (), (7, 2, 3), (1, 4), (8, 4), (0, 4)]


def _pairs(*, even: bool, seed: int = 0, scale: float = 1.0) -> list[tuple[RowDTensor, torch.Tensor]]:
    """Return sharded tensors beside the whole ones, which are the same on all ranks."""
    group = ProcessGroupRef.of(dist.group.WORLD)
    layout = make_layout(SHAPES, group.size, 4, per_param=even)
    torch.manual_seed(seed)
    pairs = []
    for number, placement in enumerate(layout.placements):
        rows = Rows(placement, ShardingRanks.of(group), f"tensor {number}")
        assert rows.is_even or not even or not placement.shape
        whole = torch.randn(placement.shape) * scale
        pairs.append((RowDTensor.wrap(rows.of(whole).clone(), rows), whole))
    assert even or sum(not pair[0].rows.is_even for pair in pairs) > 3
    return pairs


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


OPERATORS: dict[str, Callable[..., Any]] = {
    "scaled": lambda x, y: x * 2 + 1,
    "sum of two": lambda x, y: x + y * x.sigmoid(),
    "comparison": lambda x, y: torch.where(x > y, x, y),
    "copy": lambda x, y: x.clone().copy_(y),
    "cast": lambda x, y: x.double(),
    "in place": lambda x, y: x.clone().mul_(y).add_(1, alpha=2).clamp_(-1, 1),
    "filled": lambda x, y: torch.zeros_like(x).fill_(3) + torch.full_like(x, 2) + torch.ones_like(x),
    "random": lambda x, y: x.clone().normal_() + torch.rand_like(x) + x.clone().uniform_(-1, 1),
    "norm": lambda x, y: x.norm(),
    "norm of order 1": lambda x, y: torch.linalg.vector_norm(x, 1),
    "infinity norm": lambda x, y: torch.linalg.vector_norm(x, torch.inf) if x.numel() else x.sum(),
    "sum": lambda x, y: x.sum(),
    "mean": lambda x, y: x.mean() if x.numel() else x.sum(),
    "variance": lambda x, y: x.var() if x.numel() > 1 else x.sum(),
    "maximum": lambda x, y: x.amax() if x.numel() else x.sum(),
    "sum of columns": lambda x, y: x.sum(0) if x.ndim else x.sum(),
    "cumulative sum": lambda x, y: x.cumsum(0) if x.ndim else x.clone(),
    "softmax": lambda x, y: x.softmax(0) if x.ndim else x.clone(),
    "sorted": lambda x, y: x.sort(0).values if x.ndim else x.clone(),
    "product": lambda x, y: torch.mm(x, x.new_ones(4, 2)) if x.ndim == 2 else x * 1,
    "norms": lambda x, y: torch._foreach_norm([x, y], 2)[0],
    "foreach": lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2)[0],
    "lerp": lambda x, y: torch._foreach_lerp([x], [y], 0.25)[0],
    "equal": lambda x, y: torch.tensor(float(torch.equal(x, x.clone()))),
    "shape": lambda x, y: torch.tensor(float(sum(x.new_zeros(x.shape).shape) + x.new_zeros(2, 3).sum())),
}


def _check_operators(rank: int, world_size: int, even: bool) -> None:
    pairs = list(zip(_pairs(even=even), _pairs(even=even, seed=1), strict=True))
    for name, function in OPERATORS.items():
        for (x, whole_x), (y, whole_y) in pairs:
            torch.manual_seed(7)
            expected = function(whole_x.clone(), whole_y.clone())
            torch.manual_seed(7)
            got = function(x.clone(), y.clone())
            assert got.shape == expected.shape and got.dtype == expected.dtype, (name, x.rows, got)
            torch.testing.assert_close(
                _whole(got), expected, msg=lambda text, x=x, name=name: f"{name} {x.rows}: {text}"
            )
        assert torch.equal(_whole(x), whole_x)  # nothing has changed its operands


@pytest.mark.parametrize("even", [True, False])
def test_operators_give_what_they_give_on_whole_tensors(ranks: Ranks, even: bool) -> None:
    ranks.run(_check_operators, even)


def test_operators_give_what_they_give_on_whole_tensors_on_four_ranks(four_ranks: Ranks) -> None:
    four_ranks.run(_check_operators, False)


def _check_placements(rank: int, world_size: int) -> None:
    for x, whole in _pairs(even=False):
        if not x.ndim:
            continue
        shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
        assert shape == x.to_local().shape and (offset[0] == x.rows.start or not shape[0])
        assert all(placement.is_shard(0) for placement in pickle.loads(pickle.dumps(x.placements)))
        # A DTensor that someone else has made of the rows, or cuts where they are cut.
        wrapped = DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
        assert torch.equal(wrapped.full_tensor(), whole)
        cut = replicated(whole, x.device_mesh).redistribute(x.device_mesh, x.placements)
        assert torch.equal(cut.to_local(), x.to_local())
        assert torch.equal(distribute_tensor(whole, x.device_mesh, x.placements).full_tensor(), whole)


def test_placements_tell_where_rows_are_cut(ranks: Ranks, four_ranks: Ranks) -> None:
    ranks.run(_check_placements)
    four_ranks.run(_check_placements)


def _check_changes_and_views(rank: int, world_size: int, even: bool) -> None:
    for x, whole in _pairs(even=even):
        version, local_version = x._version, x.to_local()._version
        for tensor in (x, whole):
            tensor.add_(1)
            if tensor.ndim and tensor.numel():
                tensor.copy_(tensor.cumsum(0))
        assert torch.equal(_whole(x), whole) or torch.allclose(_whole(x), whole)
        assert x._version > version and x.to_local()._version > local_version
        x.data.mul_(2)
        x.detach().mul_(2)
        torch.testing.assert_close(_whole(x), whole * 4)
        if x.ndim and x.numel() and not x.rows.is_equal:
            with pytest.raises(NotImplementedError, match="full_tensor"):
                x[0]
            with pytest.raises(NotImplementedError, match="full_tensor"):
                x.view(-1)
        if whole.numel() > 1:
            with pytest.raises(RuntimeError, match="mixed"):
                x.add_(whole)


@pytest.mark.parametrize("even", [True, False])
def test_changes_reach_the_rows_and_views_of_other_rows_are_refused(ranks: Ranks, even: bool) -> None:
    ranks.run(_check_changes_and_views, even)


def _check_autograd(rank: int, world_size: int, even: bool) -> None:
    for x, whole in _pairs(even=even):
        x, whole = torch.nn.Parameter(x), torch.nn.Parameter(whole)
        assert isinstance(x, RowDTensor) and isinstance(x, torch.nn.Parameter)
        (x.full_tensor() ** 2).sum().backward()
        (whole**2).sum().backward()
        assert isinstance(x.grad, RowDTensor)
        assert torch.equal(x.grad.full_tensor(), whole.grad)
        (x.to_local() * 3).sum().backward()
        assert torch.equal(x.grad.to_local(), x.rows.of(whole.grad) + 3)


@pytest.mark.parametrize("even", [True, False])
def test_gradients_flow_through_local_and_full_tensors(ranks: Ranks, even: bool) -> None:
    ranks.run(_check_autograd, even)


def _check_tools(rank: int, world_size: int, even: bool) -> None:
    for norm_type, foreach in itertools.product([1.0, 2.0, torch.inf], [None, False]):
        both = _pairs(even=even, scale=5)
        params = [[torch.nn.Parameter(torch.zeros_like(pair[side])) for pair in both] for side in (0, 1)]
        for side in (0, 1):
            for param, pair in zip(params[side], both, strict=True):
                param.grad = pair[side].clone()
        if norm_type == torch.inf:  # of a tensor without elements
            params = [side[:-1] for side in params]
        norms = [torch.nn.utils.clip_grad_norm_(side, 2.0, norm_type, foreach=foreach) for side in params]
        torch.testing.assert_close(_whole(norms[0]), norms[1])
        for sharded, whole in zip(*params, strict=True):
            torch.testing.assert_close(_whole(sharded.grad), whole.grad)
        for side in params:
            torch.nn.utils.clip_grad_value_(side, 0.1)
        for sharded, whole in zip(*params, strict=True):
            torch.testing.assert_close(_whole(sharded.grad), whole.grad)


@pytest.mark.parametrize("even", [True, False])
def test_gradients_are_clipped_by_the_norm_of_whole_gradients(ranks: Ranks, even: bool) -> None:
    ranks.run(_check_tools, even)


def _check_optimizers(rank: int, world_size: int, even: bool) -> None:
    for make in (
        lambda p: torch.optim.AdamW(p, 0.1),
        lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, 0.1, fused=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.Adagrad(p, 0.1),
    ):
        both = _pairs(even=even)
        params = [[torch.nn.Parameter(pair[side].clone()) for pair in both] for side in (0, 1)]
        optimizers = [make(side) for side in params]
        for step in range(3):
            for side in (0, 1):
                for param, pair in zip(params[side], _pairs(even=even, seed=step), strict=True):
                    param.grad = pair[side].clone()
                optimizers[side].step()
        for sharded, whole in zip(*params, strict=True):
            assert torch.equal(_whole(sharded), whole)


@pytest.mark.parametrize("even", [True, False])
def test_optimizers_of_torch_train_them_like_whole_tensors(ranks: Ranks, even: bool) -> None:
    ranks.run(_check_optimizers, even)


def _check_scaler(rank: int, world_size: int) -> None:
    for is_finite in (True, False):
        pairs = _pairs(even=False)
        params = [torch.nn.Parameter(pair[0].clone()) for pair in pairs]
        optimizer, scaler = torch.optim.SGD(params, 0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for param, pair in zip(params, pairs, strict=True):
            param.grad = pair[0].clone() * 4
        if not is_finite and rank == world_size - 1:
            next(p.grad.to_local() for p in params if p.grad.to_local().numel())[:1].fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (4.0 if is_finite else 2.0), (is_finite, scaler.get_scale())
        for param, pair in zip(params, pairs, strict=True):
            torch.testing.assert_close(_whole(param), pair[1] * (0.9 if is_finite else 1.0))


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(ranks: Ranks) -> None:
    ranks.run(_check_scaler)


def _check_dcp(rank: int, world_size: int, folder: Path, even: bool) -> None:
    saved = {str(i): pair[0] for i, pair in enumerate(_pairs(even=even))}
    dcp.save(saved, checkpoint_id=folder / str(even))
    loaded = {str(i): pair[0] for i, pair in enumerate(_pairs(even=not even, seed=1))}
    dcp.load(loaded, checkpoint_id=folder / str(even))
    whole = {str(i): torch.zeros_like(pair[1]) for i, pair in enumerate(_pairs(even=even))}
    dcp.load(whole, checkpoint_id=folder / str(even))
    for i, (_, expected) in enumerate(_pairs(even=even)):
        assert torch.equal(_whole(loaded[str(i)]), expected) and torch.equal(whole[str(i)], expected)


@pytest.mark.parametrize("even", [True, False])
def test_distributed_checkpoints_hold_whole_tensors(ranks: Ranks, tmp_path: Path, even: bool) -> None:
    ranks.run(_check_dcp, tmp_path, even)
