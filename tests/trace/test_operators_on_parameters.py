"""Operators that need special care under ZeRO-3: multi-input views, random, unknown and in-place operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.nn.functional as F
from ranks import on_ranks
from scenario import Run, saved_for_backward
from thunder.core.proxies import TensorProxy
from thunder.torch.custom_op import _register_custom_op
from torch import nn


class Blocks(nn.Module):
    """Blocks that read their weights through operators. There are several, so that slots are reused."""

    def __init__(self, *reads: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(max(len(reads), 4)))
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = torch.tanh(x @ self.reads[i % len(self.reads)](x, block.weight)) + x
        return x

    def inputs(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (torch.randn(4, 4, generator=generator, dtype=torch.float64),)


VIEWS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "broadcast_tensors": lambda x, w: torch.broadcast_tensors(x, w)[1],
    "meshgrid": lambda x, w: torch.meshgrid(w[0], w[1], indexing="ij")[1],
    "atleast_3d": lambda x, w: torch.atleast_3d(x, w)[1].squeeze(2),
    "tensor_split": lambda x, w: torch.cat(list(reversed(torch.tensor_split(w, 2)))),
    "unbind": lambda x, w: torch.stack(w.unbind(1)),
    "expand_as": lambda x, w: w[0].expand_as(x),
    "swapaxes": lambda x, w: torch.swapaxes(w, 0, 1),
    "cartesian_prod": lambda x, w: torch.outer(torch.cartesian_prod(w[0]), w[1]),
}


@on_ranks()
def test_multi_input_views_of_parameters_train_correctly_and_are_not_saved() -> None:
    run = Run(Blocks(*VIEWS.values()).double())
    with saved_for_backward() as saved:
        run.train(2)
    arena = run.transform.sharded.buckets[0].arena
    assert saved and not any(arena.span_of(t) for t in saved)


class ReturnsViews(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        w = self.blocks[0].weight
        return super().forward(x), torch.broadcast_tensors(x, w)[1], torch.meshgrid(w[0], w[1], indexing="ij")


@on_ranks()
def test_returned_multi_input_views_of_parameters_are_cloned() -> None:
    run = Run(ReturnsViews(lambda x, w: w).double())
    run.train(2)


#
# Random operators
#

RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gumbel_softmax": lambda w: F.gumbel_softmax(w),
    "hard gumbel_softmax": lambda w: F.gumbel_softmax(w, hard=True),
    "randint_like": lambda w: torch.randint_like(w, 0, 10),
    "dropout1d": lambda w: F.dropout1d(w, 0.5, True),
    "alpha_dropout": lambda w: F.alpha_dropout(w, 0.5, True),
    "feature_alpha_dropout": lambda w: F.feature_alpha_dropout(w, 0.5, True),
    "poisson": lambda w: torch.poisson(w.abs() * 3),
    "rand_like": lambda w: torch.rand_like(w) * w,
    "custom": lambda w: torch.ops.fsdp_sched_test.noisy(w),
}


@torch.library.custom_op("fsdp_sched_test::noisy", mutates_args=())
def noisy(w: torch.Tensor) -> torch.Tensor:
    return w + torch.rand_like(w)


@noisy.register_fake
def _(w: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(w)


class Sampled(nn.Module):
    """A model in which the gradient of ``scale`` equals the random samples, which must be those that forward drew."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4, 4 * len(RANDOM)))

    def forward(self, x: torch.Tensor) -> Any:
        samples = torch.cat([sample(self.blocks[1].weight.detach()) + 0.0 for sample in RANDOM.values()], 1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (samples * self.scale).sum() + x.sum(), samples


class DropsActivations(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout1d(super().forward(x), 0.5, True)


@on_ranks()
def test_gradients_belong_to_the_sample_that_forward_drew(rank: int, world_size: int) -> None:
    _register_custom_op(noisy)
    torch.manual_seed(0)
    jitted = thunder.jit(Sampled(), transforms=[fsdp(sharding_strategy="zero3")])
    torch.manual_seed(1)  # the same sample on both ranks
    loss, drawn = jitted(torch.ones(4, 4))
    torch.manual_seed(2)
    loss.backward()
    grad = jitted.get_parameter("scale").grad.to_local()
    rows = drawn.detach().chunk(world_size)[rank]
    for i, name in enumerate(RANDOM):
        columns = slice(4 * i, 4 * i + 4)
        assert torch.equal(grad[:, columns], rows[:, columns]), name

    jitted = thunder.jit(DropsActivations(), transforms=[fsdp()])
    with pytest.raises(NotImplementedError, match="runs the random operator 'dropout1d' again"):
        jitted(torch.ones(4, 4))


#
# Unknown operators
#


def opaque(w: torch.Tensor) -> torch.Tensor:
    return w.t()


@on_ranks()
def test_outputs_of_unknown_operators_are_copied_out_of_the_slot() -> None:
    executor = thunder.extend.OperatorExecutor("opaque")
    thunder.extend.register_executor(executor)
    symbol = executor.register_operator(
        "opaque_t",
        meta=lambda w: TensorProxy(like=w, shape=tuple(reversed(w.shape))),
        fn=opaque,
        replaces=opaque,
    )

    def grad(w: TensorProxy) -> TensorProxy:
        out = symbol(w)
        thunder.core.transforms.put_grad(w, thunder.torch.t(thunder.core.transforms.get_grad(out)))
        return out

    executor.register_implementation(symbol, symbol, grad_transform=grad)
    run = Run(
        Blocks(lambda x, w: opaque(w)).double(),
        jit_options={"executors": [executor, *thunder.get_default_executors()]},
    )
    with saved_for_backward() as saved:
        run.train(2)
    arena = run.transform.sharded.buckets[0].arena
    assert not any(arena.span_of(t) for t in saved)


#
# In-place operators
#


class Writes(nn.Module):
    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("buf", torch.zeros(4, 4))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        self.write(self)
        return y

    def inputs(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (torch.randn(3, 4, generator=generator, dtype=torch.float64),)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda m: m.a.weight.detach().copy_(m.buf),
    "mul_ of a view": lambda m: m.a.weight.detach().view(-1).mul_(2),
    "add_ of a row": lambda m: m.a.weight.detach()[0].add_(1),
    "add_ of a diagonal": lambda m: m.a.weight.detach().diagonal().add_(1),
    "add_ of a broadcast": lambda m: torch.broadcast_tensors(m.a.weight.detach(), m.buf)[0].add_(1),
    "setitem": lambda m: m.a.weight.detach().__setitem__(0, 1.0),
}


@on_ranks()
def test_parameters_may_be_copied_to_buffers_but_not_written_in_place() -> None:
    run = Run(Writes(lambda m: m.buf.copy_(m.a.weight.detach())).double())
    run.train(2)
    for name, write in REFUSED.items():
        jitted = thunder.jit(Writes(write), transforms=[fsdp(broadcast_from=0)])
        with pytest.raises(NotImplementedError) as raised:
            jitted(torch.ones(3, 4))
        assert "changes parameter 'a.weight' in place" in str(raised.value), (name, str(raised.value))
