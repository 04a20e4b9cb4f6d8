"""Cross entropies with label smoothing and ignored targets run as they are, because Thunder's own are wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_rank")

TARGETS = torch.tensor([0, -100, 2, 1])
WEIGHT = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "ignored": lambda y, t, w: F.cross_entropy(y, t, label_smoothing=0.1),
    "ignore_index": lambda y, t, w: F.cross_entropy(y, t.clamp(0, 2), ignore_index=2, label_smoothing=0.1),
    "weighted": lambda y, t, w: F.cross_entropy(y, t, w, label_smoothing=0.1),
    "positions": lambda y, t, w: F.cross_entropy(y.view(2, 2, 3).mT, t.view(2, 2), w, label_smoothing=0.1),
    "region": lambda y, t, w: checkpoint(lambda y: F.cross_entropy(y, t, label_smoothing=0.2), y, use_reentrant=False),
    "probabilities": lambda y, t, w: F.cross_entropy(y, torch.ones_like(y) / 3, label_smoothing=0.1),
}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.stack([loss(y, targets, weight) for loss in LOSSES.values()])


def test_smoothed_losses_of_ignored_targets_do_not_count() -> None:
    module, x = Classifier(), torch.linspace(-1, 1, 8, dtype=torch.float64).view(4, 2)
    jitted = thunder.jit(copy.deepcopy(module), transforms=[fsdp()])
    with pytest.warns(UserWarning, match="cross_entropy"):
        results = [model(x, TARGETS, WEIGHT) for model in (jitted, module)]
    for name, ours, theirs in zip(LOSSES, *results, strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")
        ours.backward(retain_graph=True)
        theirs.backward(retain_graph=True)
        for one, other in zip(jitted.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(
                one.grad.full_tensor(), other.grad, msg=lambda text, name=name: f"{name}: {text}"
            )
        jitted.zero_grad()
        module.zero_grad()


def test_the_strict_mode_refuses_them() -> None:
    inputs = torch.ones(4, 2, dtype=torch.float64), TARGETS, WEIGHT
    with pytest.raises(NotImplementedError, match="label_smoothing"):
        thunder.jit(Classifier(), transforms=[fsdp(leaf_modules=())])(*inputs)
