"""Real models on gloo ranks: three AdamW steps, compared with the unsharded model and with FSDP2.

``make models`` installs the libraries. Without them only ``own_models`` run. ``-rP`` shows seconds and differences.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import torch
import torch.distributed as dist
from memory_count import compare, count_on_fake_ranks
from profiles import LONG_ONLY
from ranks import Ranks
from scenario import Pending, Run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .models import MODELS, Batch, RealModel


class BesideFSDP2(Run):
    """A sharded model, its unsharded copy, and a copy that FSDP2 shards at the same blocks.

    Derived classes say what is trained, by ``batch`` and ``loss_of``.

    Attributes:
        largest: the largest difference, by what the sharded model was compared with.
    """

    def __init__(self, model: Any, strategy: str, *, tolerance: float = 1e-11, with_fsdp2: bool = True) -> None:
        self.largest = defaultdict[str, float](float)
        model.inputs = None
        # Adam divides by the size of the gradient. A gradient that consists of rounding errors, such as that of the bias of
        # attention's keys, would move a parameter as far as any other in a random direction. This eps prevents that.
        super().__init__(
            model,
            others=[partial(_fully_shard, reshard_after_forward=strategy == "zero3")] if with_fsdp2 else [],
            tolerance=tolerance,
            others_tolerance=tolerance,
            optimizer=partial(torch.optim.AdamW, lr=1e-2, eps=1e-4),
            sharding_strategy=strategy,
        )

    def batch(self, step: int, rank: int) -> Batch:
        raise NotImplementedError

    def loss_of(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, step: int = 0, *args: Any, **options: Any) -> None:
        """Run forward, and compare losses."""
        assert self.unsharded is not None
        losses = [self.loss_of(model, self.batch(step, self.rank)) for model in self.models]
        expected = {rank: self.loss_of(model, self.batch(step, rank)) for rank, model in self.unsharded.models.items()}
        for other in losses[1:]:
            self.close(other, losses[0], "loss", tolerance=self.others_tolerance)
        self.close(losses[0], expected[self.rank], "loss")
        self.pending.append(Pending(losses, expected, no_sync=False))

    def close(self, actual: Any, expected: Any, what: str, *, tolerance: float | None = None) -> None:
        beside = "unsharded" if tolerance is None else "FSDP2"
        if isinstance(actual, torch.Tensor) and actual.numel():
            difference = (actual.detach() - expected.detach()).abs().max().item()
            self.largest[beside] = max(self.largest[beside], difference)
        super().close(actual, expected, f"{what} beside {beside}", tolerance=tolerance)


class _RealRun(BesideFSDP2):
    def __init__(self, case: RealModel, strategy: str) -> None:
        self.case = case
        super().__init__(case.make().double(), strategy)

    def batch(self, step: int, rank: int) -> Batch:
        return self.case.batch(torch.Generator().manual_seed(1000 * step + rank))

    def loss_of(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self.case.loss(model(**batch), batch)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child
        else:
            yield from _blocks(child)


def _fully_shard(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in _blocks(model):
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _train(rank: int, world_size: int, name: str, strategy: str) -> dict[str, float]:
    compared = _RealRun(MODELS[name], strategy)
    before = {name: param.detach().clone() for name, param in compared.reference.named_parameters()}
    start = time.process_time()
    compared.train(1)
    seconds = time.process_time() - start
    compared.train(2, first=1)
    assert len(compared.transform.compiled) == 1
    moved = max((param - before[name]).abs().max().item() for name, param in compared.reference.named_parameters())
    assert moved > 1e-3, f"no parameter has moved by more than {moved}: nothing was compared"
    return {"CPU seconds of the first step": seconds, "moved": moved, **compared.largest}


def _skip_without_library(case: RealModel) -> None:
    if case.library is not None and find_spec(case.library) is None:
        pytest.skip(f"{case.library} is not installed (make models)")


_LONG_ONLY = {("dlrm", "zero2"), ("resnet", "memory"), ("dense_moe", "memory")}


def _case(*case: str) -> Any:
    return pytest.param(*case, marks=[LONG_ONLY] if case in _LONG_ONLY else [])


@pytest.mark.parametrize(
    ("name", "strategy"), [_case(name, strategy) for name, case in MODELS.items() for strategy in case.strategies]
)
def test_real_models_train_like_unsharded_and_like_fsdp2(ranks: Ranks, name: str, strategy: str) -> None:
    _skip_without_library(MODELS[name])
    results = ranks.run(_train, name, strategy, timeout=500)
    print(name, strategy, *(f"{what} {max(r[what] for r in results):.2g}" for what in results[0]), sep=", ")


@pytest.mark.parametrize(("name", "_"), [_case(name, "memory") for name in MODELS])
def test_predicted_memory_of_real_models_is_counted_at_every_position(name: str, _: str) -> None:
    case = MODELS[name]
    _skip_without_library(case)
    batch = case.batch(torch.Generator().manual_seed(0))
    compiled, memory, tracker = count_on_fake_ranks(case.make().double(), fsdp, batch=batch)["step"]
    count = compare(memory, compiled, tracker)
    print(f"{name}: {len(count.wrong)} of {len(tracker.bytes_at)} positions differ, peak {count.counted:,} bytes")
    assert not count.wrong, str(count)
