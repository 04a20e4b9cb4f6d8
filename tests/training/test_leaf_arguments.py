"""The arguments of the model show what a leaf returns, and which way a branch of the outermost module takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from beside import Applied, Beside
from coded import coded
from models import Calling
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

SIZE = 4


def merge(self: Any, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Put rows of features in the places of a token."""
    places = tokens == 7
    if places.sum() != features.shape[0]:
        raise ValueError(f"{places.sum()} tokens for {features.shape[0]} features")
    return self.table(tokens).masked_scatter(places[:, None], self.project(features))


def hook_once(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Register a hook in the first call, and branch on data."""
    if not self.is_hooked:
        self.linear.register_forward_hook(lambda module, args, output: output * 3)
        self.is_hooked = True
    y = self.linear(x)
    return y * 2 if y.sum() > 0 else y


def check_arguments(self: Any, x: torch.Tensor, labels: torch.Tensor, options: dict[str, torch.Tensor]) -> torch.Tensor:
    """Branch on what is computed from arguments, as transformers' models do to check labels and masks."""
    if labels.max() >= SIZE or labels[0] < 0:
        raise ValueError(f"labels must be below {SIZE}")
    y = self.linear(x)
    if options["mask"].sum().item() > 1 and not (labels == 3).any():
        y = self.other(y) * options["mask"]
    return y[labels]


def layers(*names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(SIZE, SIZE) for name in names}


def checking() -> nn.Module:
    return Calling(check_arguments, **layers("linear", "other"))


def test_a_leaf_is_observed_on_the_arguments_of_the_model() -> None:
    inner = Calling(merge, table=nn.Embedding(8, SIZE), **layers("project"))
    both = Beside(Calling(lambda self, *args: self.head(self.merge(*args)), merge=inner, **layers("head")).double())
    tokens, features = torch.tensor([1, 7, 2, 7]), torch.randn(2, SIZE, dtype=torch.float64)
    both.check(tokens, features)
    with pytest.raises(ValueError, match="2 tokens for 3 features"):
        both.model(tokens, torch.randn(3, SIZE, dtype=torch.float64))
    both.check(tokens.flip(0), features)


@torch.library.custom_op("leaf_tests::values", mutates_args=())
def values(x: torch.Tensor) -> torch.Tensor:
    return x.coalesce().values() if x.is_sparse else x.flatten()


values.register_fake(lambda x: x.new_empty(2, layout=torch.strided))


def test_an_operator_may_read_a_sparse_tensor() -> None:
    both = Beside(Calling(lambda self, x, mask: self.head(x) * values(mask), head=nn.Linear(SIZE, 2)).double())
    both.check(torch.randn(3, SIZE, dtype=torch.float64), torch.diag(torch.tensor([2.0, 3.0]).double()).to_sparse())


class _Exchanged(torch.autograd.Function):
    """Returns what it has read as gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.shift = shift
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return ctx.shift, ctx.saved_tensors[0], None


def test_gradients_of_inputs_have_memory_of_their_own() -> None:
    """Autograd adds the gradients of later backwards to them in place."""
    part = Calling(lambda self, x, y: _Exchanged.apply(x, y, self.shift.expand_as(x)))
    part.register_buffer("shift", torch.ones(SIZE))
    whole = Calling(lambda self, x, y: self.head(self.part(x, y)), part=part, **layers("head"))
    both = Beside(whole.double(), leaf_modules=("part",))
    inputs = [[torch.full((2, SIZE), value).double().requires_grad_() for value in (2.0, 3.0)] for _ in both.both]
    for _ in range(3):
        for net, (x, y) in zip(both.both, inputs, strict=True):
            net(x, y).sum().backward()
    torch.testing.assert_close(*inputs)
    torch.testing.assert_close(*([x.grad, y.grad] for x, y in inputs))
    torch.testing.assert_close(both.model.get_buffer("part.shift"), both.module.part.shift)


def test_a_trace_that_fails_leaves_no_hooks() -> None:
    both = Beside(nn.Sequential(Calling(hook_once, is_hooked=False, **layers("linear"))).double())
    for seed in range(3):
        both.check(torch.randn(2, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    assert len(both.own[0].linear._forward_hooks) == 1


def test_the_outermost_module_branches_on_its_arguments() -> None:
    torch.manual_seed(0)
    both = Beside(checking().double())
    x, mask = torch.randn(4, SIZE, dtype=torch.float64), torch.ones(SIZE, dtype=torch.float64)
    for labels in ([0, 1], [2, 0], [0, 3], [1, 1]):
        for options in ({"mask": mask}, {"mask": mask * 0}):
            both.check(x, torch.tensor(labels), options)
    assert not both.transform.sharded.leaves
    assert thunder.cache_misses(both.model) == 3, "one for each way through forward"
    with pytest.raises(ValueError, match="labels must be below 4"):
        both.model(x, torch.tensor([0, 4]), {"mask": mask})
    both.check(x, torch.tensor([0, 1]), {"mask": mask})


def test_under_autocast_only_what_it_does_not_change_is_a_branch() -> None:
    model = thunder.jit(checking(), transforms=[fsdp()])
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
    both = Beside(checking().double())
    options = {"mask": torch.ones(SIZE, dtype=torch.float64)}
    for rows in (2, 3, 2):
        both.check(torch.randn(4, SIZE, dtype=torch.float64), torch.arange(rows), options)


BRANCHES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "on weights": lambda y, x: y if y.sum() > 0 else -y,
    "on what is drawn": lambda y, x: y if torch.rand_like(x).sum() > x.sum() else -y,
    "on what was changed": lambda y, x: y if (x * 1).add_(1).sum() > 0 else -y,
}


@pytest.mark.parametrize("name", BRANCHES)
def test_other_branches_of_the_outermost_module_are_errors(name: str) -> None:
    model, x = thunder.jit(Applied(BRANCHES[name]), transforms=[fsdp()]), torch.ones(2, 2)
    with pytest.raises(
        (NotImplementedError, RuntimeError), match=r"known only when the trace runs|would depend on a tensor"
    ):
        model(x, x)
