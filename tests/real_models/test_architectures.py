"""Architectures of transformers, timm and diffusers on two gloo ranks, with nothing but ``fsdp()`` (``make models``).

Each trains for three AdamW steps: losses, all gradients, parameters and buffers are compared with the unsharded model and
with FSDP2. ``-rP`` shows what has run. docs/models.md has the table.
"""

from __future__ import annotations

import re
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankError, Ranks
from torch import nn

from .architectures import ARCHITECTURES, Architecture, Batch, loss_of, table
from .test_real_models import BesideFSDP2


class _Run(BesideFSDP2):
    """The models of one architecture, trained alike."""

    def __init__(self, case: Architecture) -> None:
        torch.manual_seed(0)
        self.case = case
        model = case.make().train().to(case.dtype)
        super().__init__(model, "zero3", tolerance=case.tolerance, with_fsdp2=not case.fsdp2)

    def batch(self, step: int, rank: int) -> Batch:
        batch = self.case.batch(torch.Generator().manual_seed(1000 * step + rank))
        as_floats = lambda v: v.to(self.case.dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v  # noqa: E731
        return {name: as_floats(value) for name, value in batch.items()}

    def loss_of(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        torch.manual_seed(0)  # some draw in forward
        return loss_of(model(*batch.values()) if "x" in batch else model(**batch))


def _train(rank: int, world_size: int, name: str) -> dict[str, Any]:
    case = ARCHITECTURES[name]
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = _Run(case)
        before = {name: param.detach().clone() for name, param in run.reference.named_parameters()}
        run.train(3)
    moved = max((param - before[name]).abs().max().item() for name, param in run.reference.named_parameters())
    assert moved > 1e-3, f"no parameter has moved by more than {moved}: nothing was compared"
    leaves = run.transform.sharded.leaves
    found = {re.sub(r", \d+ times\)$", ")", line) for line in leaves.summary()}
    found |= {str(what) for what in leaves.announced if not isinstance(what, type)}
    return {"leaves": sorted(found), "seconds": round(time.monotonic() - start), **run.largest}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_train_like_unsharded_and_like_fsdp2(ranks: Ranks, name: str) -> None:
    case = ARCHITECTURES[name]
    if find_spec(case.library) is None:
        pytest.skip(f"{case.library} is not installed (make models)")
    if case.fails:
        with pytest.raises(RankError, match=case.fails):
            ranks.run(_train, name, timeout=500)
        return
    results = ranks.run(_train, name, timeout=500)
    print(name, *(f"{what} {value}" for what, value in results[0].items()), sep=", ")
    assert [tuple(result["leaves"]) for result in results] == [case.leaves] * len(results)


def test_the_documentation_has_the_table() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "models.md").read_text()
