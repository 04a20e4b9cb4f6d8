"""Low-bit optimizers of torchao on whole parameters, beside the same optimizers on the unsharded model."""

from __future__ import annotations

from importlib.util import find_spec

import thunder_fsdp_sched as tfs

import pytest
import thunder
import torch
from coded import coded
from ranks import on_ranks


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed (make models)")
@on_ranks(2)
def test_low_bit_optimizers_train_whole_parameters_as_the_unsharded_model() -> None:
    from torchao import optim

    batches = [torch.randn(16, 64, generator=torch.Generator().manual_seed(step)) for step in range(4)]

    def losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for batch in batches:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    for cls in (optim.AdamW8bit, optim.AdamWFp8):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)))
        ours = thunder.jit(models[0], transforms=[tfs.fsdp()])
        with pytest.raises(ValueError, check=coded("optimizer.needs-whole-parameters", cls.__name__)):
            losses(ours, cls(ours.parameters()))
        ours.zero_grad()
        whole = tfs.WholeParameters(cls, ours, ours.parameters(), lr=1e-2)
        assert losses(ours, whole) == losses(models[1], cls(models[1].parameters(), lr=1e-2)), cls
