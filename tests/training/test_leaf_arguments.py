"""The arguments of the model show what a leaf returns, and which way a branch of the outermost module takes."""

from __future__ import annotations

import copy
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from coded import coded
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

SIZE = 4


class Merge(nn.Module):
    """Puts rows of features in the places of a token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.project = nn.Embedding(8, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        places = tokens == 7
        if places.sum() != features.shape[0]:
            raise ValueError(f"{places.sum()} tokens for {features.shape[0]} features")
        return self.table(tokens).masked_scatter(places[:, None], self.project(features))


class Multimodal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.merge, self.head = Merge(), nn.Linear(SIZE, 2)

    def forward(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.merge(tokens, features))


class Hooked(nn.Module):
    """Registers a hook in its first call, and branches on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_hooked = nn.Linear(SIZE, SIZE), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_hooked:
            self.linear.register_forward_hook(lambda module, args, output: output * 3)
            self.is_hooked = True
        y = self.linear(x)
        return y * 2 if y.sum() > 0 else y


class Checks(nn.Module):
    """Branches on what it computes from its arguments, as transformers' models do to check labels and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, options: dict[str, torch.Tensor]) -> torch.Tensor:
        if labels.max() >= SIZE or labels[0] < 0:
            raise ValueError(f"labels must be below {SIZE}")
        y = self.linear(x)
        if options["mask"].sum().item() > 1 and not (labels == 3).any():
            y = self.other(y) * options["mask"]
        return y[labels]


def _alike(model: Any, module: nn.Module, *args: Any) -> None:
    """Compare the output and all gradients."""
    for each in (model, module):
        each.zero_grad()
        each(*args).square().sum().backward()
    torch.testing.assert_close(model(*args), module(*args))
    for name, param in module.named_parameters():
        actual = model.get_parameter(name).grad
        assert (actual is None) == (param.grad is None), name
        if param.grad is not None:
            torch.testing.assert_close(actual.to_local(), param.grad, msg=name)


def test_a_leaf_is_observed_on_the_arguments_of_the_model() -> None:
    module = Multimodal().double()
    model = thunder.jit(copy.deepcopy(module), transforms=[fsdp()])
    tokens, features = torch.tensor([1, 7, 2, 7]), torch.randn(2, SIZE, dtype=torch.float64)
    _alike(model, module, tokens, features)
    with pytest.raises(ValueError, match="2 tokens for 3 features"):
        model(tokens, torch.randn(3, SIZE, dtype=torch.float64))
    _alike(model, module, tokens.flip(0), features)


def test_a_trace_that_fails_leaves_no_hooks() -> None:
    module = nn.Sequential(Hooked(), nn.Linear(SIZE, SIZE)).double()
    model = thunder.jit(copy.deepcopy(module), transforms=[fsdp()])
    for seed in range(3):
        _alike(model, module, torch.randn(2, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    assert len(model._model[0].linear._forward_hooks) == 1


def test_the_outermost_module_branches_on_its_arguments() -> None:
    torch.manual_seed(0)
    module = Checks().double()
    transform = fsdp()
    model = thunder.jit(copy.deepcopy(module), transforms=[transform])
    x, mask = torch.randn(4, SIZE, dtype=torch.float64), torch.ones(SIZE, dtype=torch.float64)
    for labels in ([0, 1], [2, 0], [0, 3], [1, 1]):
        for options in ({"mask": mask}, {"mask": mask * 0}):
            _alike(model, module, x, torch.tensor(labels), options)
    assert not transform.sharded.leaves
    assert thunder.cache_misses(model) == 3, "one for each way through forward"
    with pytest.raises(ValueError, match="labels must be below 4"):
        model(x, torch.tensor([0, 4]), {"mask": mask})
    _alike(model, module, x, torch.tensor([0, 1]), {"mask": mask})


def test_under_autocast_only_what_it_does_not_change_is_a_branch() -> None:
    model = thunder.jit(Checks(), transforms=[fsdp()])
    x, labels = torch.ones(2, SIZE), torch.tensor([0, 1])
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(NotImplementedError, check=coded("module.not-reproduced-by-trace", "reads from a tensor")),
    ):
        model(x, labels, {"mask": torch.ones(SIZE)})
    options = {"mask": torch.ones(SIZE, dtype=torch.long)}
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x, labels, options).dtype is torch.bfloat16


def test_a_branch_is_of_the_shapes_that_it_was_traced_for() -> None:
    module = Checks().double()
    model = thunder.jit(copy.deepcopy(module), transforms=[fsdp()])
    options = {"mask": torch.ones(SIZE, dtype=torch.float64)}
    for rows in (2, 3, 2):
        _alike(model, module, torch.randn(4, SIZE, dtype=torch.float64), torch.arange(rows), options)


class OnWeights(Checks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return self.other(y) if y.sum() > 0 else y


class OnDrawn(Checks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x) if torch.rand_like(x).sum() > x.sum() else x


class OnChanged(Checks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.add_(1)
        return self.other(x) if y.sum() > 0 else x


@pytest.mark.parametrize("kind", [OnWeights, OnDrawn, OnChanged])
def test_other_branches_of_the_outermost_module_are_errors(kind: type[Checks]) -> None:
    model = thunder.jit(kind(), transforms=[fsdp()])
    with pytest.raises(
        (NotImplementedError, RuntimeError), match=r"known only when the trace runs|would depend on a tensor"
    ):
        model(torch.ones(2, SIZE))
