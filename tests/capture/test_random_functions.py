"""Random functions that Thunder does not trace draw as torch's do, and the gradient belongs to the same sample."""

from __future__ import annotations

from collections.abc import Callable

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

KINDS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "element": (F.dropout, (40, 50)),
    "1d": (F.dropout1d, (40, 50, 3)),
    "1d, one sample": (F.dropout1d, (2000, 3)),
    "2d": (F.dropout2d, (40, 50, 3, 2)),
    "2d, three dimensions": (F.dropout2d, (40, 50, 3)),
    "3d": (F.dropout3d, (40, 50, 3, 1, 2)),
    "3d, one sample": (F.dropout3d, (2000, 3, 1, 2)),
    "alpha": (F.alpha_dropout, (40, 50)),
    "alpha, 2d": (F.feature_alpha_dropout, (40, 50, 3, 2)),
}
"""The function and the shape of its input, of which 2,000 parts are kept or dropped as wholes."""


class Scaled(nn.Module):
    """Multiplies its input by a parameter, and drops parts of the product."""

    def __init__(self, kind: str, p: float, inplace: bool) -> None:
        super().__init__()
        self.drop, shape = KINDS[kind]
        self.weight, self.p, self.inplace = nn.Parameter(torch.ones(shape, dtype=torch.float64)), p, inplace

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = self.weight * x
        return self.drop(product, self.p, self.training, self.inplace), product


class Each(nn.ModuleList):
    """Calls its modules with one input each."""

    def forward(self, *inputs: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [module(x) for module, x in zip(self, inputs)]  # noqa: B905 (a keyword that Thunder does not trace)


def sample(model: nn.Module, inputs: list[torch.Tensor], inplace: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Call a model, and return outputs and their derivatives, with a row for each part."""
    model.zero_grad()
    outputs, products = zip(*model(*inputs), strict=True)
    assert all(torch.equal(*pair) == inplace for pair in zip(outputs, products, strict=True))
    sum(output.sum() for output in outputs).backward()
    slopes = [getattr(p.grad, "_local_tensor", p.grad) / x for p, x in zip(model.parameters(), inputs, strict=True)]
    return [(y.detach().reshape(2000, -1), d.reshape(2000, -1)) for y, d in zip(outputs, slopes, strict=True)]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_what_is_dropped_is_what_torch_drops(inplace: bool) -> None:
    inputs = [torch.rand(shape, dtype=torch.float64) + 1 for _, shape in KINDS.values()]
    module, reference = (Each(Scaled(kind, 0.3, inplace) for kind in KINDS) for _ in range(2))
    model = thunder.jit(module, transforms=[fsdp(leaf_modules=())])
    runs = [sample(m, inputs, inplace) for m in (reference, model, model)]
    for kind, (expected, slope), *samples in zip(KINDS, *runs, strict=True):
        assert not torch.equal(*[output for output, _ in samples]), kind
        for output, derivative in samples:
            torch.testing.assert_close(derivative, derivative[:, :1].expand_as(derivative))
            assert 1300 < (derivative[:, 0] > 0).sum() < 1500, kind
            same = (derivative > 0) == (slope > 0)  # kept in both samples, or dropped
            torch.testing.assert_close(output[same], expected[same])
            torch.testing.assert_close(derivative[same], slope[same])
    module.eval()
    assert all(torch.equal(y, x) for (y, _), x in zip(model(*inputs), inputs, strict=True))


def test_samples_of_gumbel_softmax_have_the_distribution_of_torch() -> None:
    class Sampling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Parameter(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.logits * x
            return F.gumbel_softmax(logits, tau=0.5, dim=-1), F.gumbel_softmax(logits, hard=True)

    x = torch.ones(40_000, 3, dtype=torch.float64)
    module = Sampling()
    expected = module(x)[0].detach()
    soft, hard = thunder.jit(module, transforms=[fsdp(leaf_modules=())])(x)
    torch.testing.assert_close(soft.detach().mean(0), expected.mean(0), atol=0.02, rtol=0)
    assert ((hard == 1).sum(1) == 1).all()
    torch.testing.assert_close(hard.detach().mean(0), module.logits.new_tensor([0, 1, 2]).softmax(0), atol=0.02, rtol=0)
