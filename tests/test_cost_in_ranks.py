"""Functions keep their contracts: the numbers of collectives and bytes for W ranks, counted on fake and on real ranks.

A contract is a function of a model's buckets and parameters, and does not contain the number of ranks. Rounds of
agreement and operations of the store go over connections of their own, which fake ranks do not have.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched.extras.planning.dry_run import fake_rank

import pytest
import thunder
import torch
import torch.distributed as dist
from internals import BucketRanks, ProcessGroupRef, RowDTensor, Rows, make_layout
from models import FeedForward
from ranks import on_ranks
from scenario import everywhere
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Cost(NamedTuple):
    """The most that a function may cost."""

    collectives: int
    nbytes: float = 0  # that a rank sends or receives, whichever is more; a reduction to all counts twice
    exchanges: int = 0  # of texts and objects over the control channel


class Count(TorchDispatchMode):
    """Counts the collectives and bytes that process groups send."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.nbytes = 0
        self.exchanged = 0  # texts and objects, which takes two for each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if name == "allgather_":
            self.exchanged += 1
        elif func.namespace == "c10d" or (func.namespace == "_c10d_functional" and name == "all_gather_into_tensor"):
            self.names.append(name)
            sides = (result if func.namespace == "_c10d_functional" else None, *args)
            sizes = [sum(t.nbytes for t in tree_leaves(side) if isinstance(t, torch.Tensor)) for side in sides]
            self.nbytes += max(sizes) * (2 if name == "allreduce_" else 1)
        return result


class Case:
    """A sharded model, and the numbers of which contracts are made.

    Attributes:
        segments: of all buckets; a gather or a reduction of a bucket is one collective for each, usually one.
        nbytes: of all buckets with padding.
    """

    def __init__(self, blocks: int, width: int = 16) -> None:
        torch.manual_seed(0)
        with Count() as jitting:
            module = nn.Sequential(*(FeedForward(width) for _ in range(blocks)))
            self.model = thunder.jit(module, transforms=[tfs.fsdp()])
        assert not jitting.names, jitting.names
        assert jitting.exchanged <= 8
        plan = self.model._lc_transforms[0].sharded.plan
        self.segments = sum(len(bucket.layout.segments) for bucket in plan)
        self.nbytes = sum(bucket.unsharded_bytes for bucket in plan)
        self.params = list(self.model.parameters())
        self.param_bytes = sum(param.nbytes for param in self.params)
        self.optimizer = torch.optim.AdamW(self.params)
        self.x = torch.randn(2, width)

    def padded(self) -> int:
        """Bytes of parameters of which each rank sends at least one row."""
        size = dist.get_world_size()
        return sum(max(2 * param.nbytes, size * param[:1].nbytes) for param in self.whole())

    def whole(self) -> list[torch.Tensor]:
        return [torch.empty(param.shape) for param in self.params]

    def step(self) -> None:
        self.model(self.x).sum().backward()
        self.optimizer.step()

    def state(self) -> None:
        """Make gradients and state without a step, which would be compiled."""
        for param in self.params:
            param.grad = torch.zeros_like(param)
        self.optimizer.step()

    def eagerly(self) -> None:
        with tfs.eager(self.model) as module:
            module(self.x)

    def change(self, **options: Any) -> None:
        with tfs.unsharded(self.model, **options) as module:
            module[0].up.bias.add_(1)


_FULL = torch_state_dict.StateDictOptions(full_state_dict=True)
_ON_CPU = torch_state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)

CONTRACTS: dict[str, tuple[Callable[[Case], Any], Callable[[Case], Cost]]] = {
    "full_state_dict": (lambda c: tfs.full_state_dict(c.model), lambda c: Cost(c.segments, c.nbytes, 1)),
    "full_tensor": (lambda c: [p.full_tensor() for p in c.params], lambda c: Cost(len(c.params), 2 * c.param_bytes)),
    "torch: get_model_state_dict": (
        lambda c: torch_state_dict.get_model_state_dict(c.model, options=_ON_CPU),
        lambda c: Cost(len(c.params), c.padded()),
    ),
    "torch: get_optimizer_state_dict": (
        lambda c: torch_state_dict.get_optimizer_state_dict(c.model, c.optimizer, options=_FULL),
        lambda c: Cost(2 * len(c.params), 2 * c.padded()),
    ),
    "state_dict": (lambda c: c.model.state_dict(), lambda c: Cost(0)),
    "get_optimizer_state_dict": (lambda c: tfs.get_optimizer_state_dict(c.model, c.optimizer), lambda c: Cost(0)),
    "clip_grad_norm_": (lambda c: tfs.clip_grad_norm_(c.model, 1.0), lambda c: Cost(1, 8)),
    "stream_full_parameters": (
        lambda c: list(tfs.stream_full_parameters(c.model)),
        lambda c: Cost(c.segments, c.nbytes, 1),
    ),
    "eager": (Case.eagerly, lambda c: Cost(c.segments, c.nbytes, 1)),
    "unsharded": (Case.change, lambda c: Cost(c.segments, c.nbytes, 4)),
    "unsharded, from a rank": (
        lambda c: c.change(from_rank=0),
        lambda c: Cost(c.segments + len(c.params), c.nbytes + c.param_bytes, 3),
    ),
}


def _check(case: Case, names: Any) -> None:
    for name in names:
        call, contract = CONTRACTS[name]
        with Count() as count:
            call(case)
        assert len(count.names) <= contract(case).collectives, (name, count.names)
        assert count.nbytes <= contract(case).nbytes, (name, count.names)
        assert count.exchanged <= 2 * contract(case).exchanges, (name, count.exchanged)


@pytest.mark.parametrize("size", [8, 64, 512])
def test_collectives_are_as_many_on_any_number_of_ranks(size: int) -> None:
    with fake_rank(0, size):
        case = Case(15)  # 90 parameters
        case.state()
        _check(case, CONTRACTS)


@pytest.mark.parametrize("size", [8, 512])
def test_a_step_gathers_twice_and_reduces_once(size: int) -> None:
    with fake_rank(0, size):
        case = Case(2)
        for _ in range(2):  # with and without compiling
            with Count() as count:
                case.step()
            assert 0 < len(count.names) <= 3 * case.segments, count.names
            assert count.nbytes <= 3 * case.nbytes, count.names


@on_ranks(4)
def test_real_ranks_issue_no_more(tmp_path: Path) -> None:
    (folder,) = set(everywhere(str(tmp_path)))
    case = Case(2, width=6)
    case.state()
    _check(case, CONTRACTS)
    with Count() as count:  # they talk over connections of their own, each rank with the first
        tfs.save_checkpoint(case.model, f"{folder}/saved", case.optimizer)
        assert count.exchanged <= 6, count.exchanged
        tfs.load_checkpoint(case.model, f"{folder}/saved", case.optimizer)
    assert not count.names
    assert count.exchanged <= 6 + 18, count.exchanged


@on_ranks(4)
def test_rows_of_any_dtype_are_gathered_bit_for_bit_with_one_collective() -> None:
    group = ProcessGroupRef.of(dist.group.WORLD)
    shapes = [(5, 3), (3,), (), (7, 3), (1, 3), (8, 3), (0, 3), (4, 0)]
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.bool, torch.int8, torch.float8_e4m3fn, torch.float64, torch.complex64):
        for per_param in (False, True):
            layout = make_layout(shapes, group.size, dtype.itemsize, per_param=per_param)
            for placement in layout.placements:
                numbers = torch.randint(2, 100, placement.shape) if dtype.itemsize > 1 else torch.ones(placement.shape)
                whole = numbers.to(dtype)
                rows = Rows(whole.shape, placement.row_starts, BucketRanks(group), "tensor")
                tensor = RowDTensor.wrap(rows.of(whole).clone(), rows)
                by_torch = [] if rows.is_even else [functools.partial(_replicated, tensor)]  # else torch gathers it
                for gathered in (tensor.full_tensor, *by_torch):
                    with Count() as count:
                        result = gathered()
                    assert (result.shape, result.dtype) == (whole.shape, dtype), placement
                    assert result.tolist() == whole.tolist(), placement
                    assert len(count.names) <= 1, (placement, count.names)


def _replicated(tensor: Any) -> torch.Tensor:
    placements = [dist.tensor.Replicate()] * tensor.device_mesh.ndim
    return tensor.redistribute(placements=placements).to_local()


def test_no_table_of_a_parameter_grows_with_the_number_of_ranks() -> None:
    sizes = {}
    for size in (8, 1024):
        with fake_rank(0, size):
            case = Case(15)
            case.state()
            tfs.full_state_dict(case.model)
            buckets = case.model._lc_transforms[0].sharded.buckets
            kept = [(b.spec.layout, [(r.starts, r._reshaped, r.is_even, r.is_cut) for r in b.rows]) for b in buckets]
            sizes[size] = len(pickle.dumps(kept))
    assert sizes[1024] < 1.1 * sizes[8], sizes  # bytes; a list of a number for each rank has 3,000


def test_a_second_backward_gathers_kept_buckets_again_in_whose_place_gradients_were_reduced() -> None:
    with fake_rank(0, 2):
        copied = tfs.Debug(skip_passes=("write_grads_in_place",))  # the reduction itself copies gradients there
        module = nn.Sequential(*(FeedForward(16) for _ in range(2)))
        model = thunder.jit(module, transforms=[tfs.fsdp(sharding_strategy="zero2", debug=copied)])
        loss = model(torch.randn(2, 16)).sum()
        for gathers in (0, 2, 2):
            with Count() as count:
                loss.backward(retain_graph=True)
            assert sum("gather" in name for name in count.names) == gathers
