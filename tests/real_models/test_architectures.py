"""Architectures on two gloo ranks, with nothing but ``fsdp()``. Without the libraries of ``make models``, one is left.

Each trains for three AdamW steps: losses, all gradients, parameters and buffers are compared with the unsharded model and
with FSDP2. ``-rP`` shows what has run. docs/models.md has the table.
"""

from __future__ import annotations

import re
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import torch
import torch.distributed as dist
from memory_count import compare, count_on_fake_ranks
from ranks import RankError, Ranks
from scenario import Pending, Run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .architectures import ARCHITECTURES, Architecture, Batch, loss_of, table


class _Run(Run):
    """An architecture, its unsharded copy, and a copy that FSDP2 shards at the same blocks.

    Attributes:
        largest: the largest difference, by what the sharded model was compared with.
    """

    def __init__(self, case: Architecture) -> None:
        torch.manual_seed(0)
        self.case, self.largest = case, defaultdict[str, float](float)
        model = case.make().train().to(case.dtype)
        model.inputs = None
        # Adam divides by the size of the gradient. A gradient that consists of rounding errors, such as that of the bias of
        # attention's keys, would move a parameter as far as any other in a random direction. This eps prevents that.
        super().__init__(
            model,
            others=[] if case.fsdp2 else [_fully_shard],
            tolerance=case.tolerance,
            others_tolerance=case.tolerance,
            optimizer=partial(torch.optim.AdamW, lr=1e-2, eps=1e-4),
            sharding_strategy="zero3",
        )

    def batch(self, step: int, rank: int) -> Batch:
        batch = self.case.batch(torch.Generator().manual_seed(1000 * step + rank))
        as_floats = lambda v: v.to(self.case.dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v  # noqa: E731
        return {name: as_floats(value) for name, value in batch.items()}

    def loss_of(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        torch.manual_seed(0)  # some draw in forward
        return loss_of(model(*batch.values()) if "x" in batch else model(**batch))

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


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child
        else:
            yield from _blocks(child)


def _fully_shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in _blocks(model):
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _train(rank: int, world_size: int, name: str) -> dict[str, Any]:
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = _Run(ARCHITECTURES[name])
        before = {name: param.detach().clone() for name, param in run.reference.named_parameters()}
        run.train(3)
    moved = max((param - before[name]).abs().max().item() for name, param in run.reference.named_parameters())
    assert moved > 1e-3, f"no parameter has moved by more than {moved}: nothing was compared"
    assert len(run.transform.compiled) <= 2  # forward of some sets its configuration in the first call
    leaves = run.transform.sharded.leaves
    found = {re.sub(r", \d+ times\)$", ")", line) for line in leaves.summary()}
    found |= {str(what) for what in leaves.announced if not isinstance(what, type)}
    return {"leaves": sorted(found), "seconds": round(time.monotonic() - start), **run.largest}


def _skip_without_library(case: Architecture) -> None:
    if find_spec(case.library) is None:
        pytest.skip(f"{case.library} is not installed (make models)")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_train_like_unsharded_and_like_fsdp2(ranks: Ranks, name: str) -> None:
    case = ARCHITECTURES[name]
    _skip_without_library(case)
    if case.fails:
        with pytest.raises(RankError, match=case.fails):
            ranks.run(_train, name, timeout=500)
        return
    results = ranks.run(_train, name, timeout=500)
    print(name, *(f"{what} {value}" for what, value in results[0].items()), sep=", ")
    assert [tuple(result["leaves"]) for result in results] == [case.leaves] * len(results)


COUNTED = ("dlrm", "gpt2", "llama", "qwen2", "bert", "vit", *(name for name in ARCHITECTURES if "litgpt" in name))


@pytest.mark.parametrize("name", COUNTED)
def test_predicted_memory_is_counted_at_every_position(name: str) -> None:
    case = ARCHITECTURES[name]
    _skip_without_library(case)
    batch = {key: value for key, value in case.batch(torch.Generator().manual_seed(0)).items() if key != "labels"}
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    compiled, memory, tracker = count_on_fake_ranks(case.make().double(), fsdp, batch=batch)["step"]
    count = compare(memory, compiled, tracker)
    print(f"{name}: {len(count.wrong)} of {len(tracker.bytes_at)} positions differ, peak {count.counted:,} bytes")
    assert not count.wrong, str(count)


def test_the_documentation_has_the_table() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "models.md").read_text()
