"""Leaf modules: what Thunder cannot trace runs as it is, with the numbers of the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scenario import Scenario, do, each
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

SIZE = 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Each row goes through one of three experts, of which some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(SIZE, 3), nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, SIZE)
        scores = self.gate(rows).softmax(-1)
        best, out = scores.argmax(-1), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            chosen = (best == number).nonzero().flatten()
            if chosen.tolist():
                out.index_add_(0, chosen, expert(rows[chosen]) * scores[chosen, number, None])
        return out.view_as(x)


class Branch(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out * 2 if out.sum().item() > 0 else out - 1


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scaled.apply(x, self.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SIZE, SIZE, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class Counting(nn.Module):
    """Buffers and attributes change; hooks within the leaf run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.calls = nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE), 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.linear.register_forward_hook(lambda module, args, output: output * 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += x.shape[0]
        return self.linear(self.norm(x.flatten(0, 1))).view_as(x)


class Checkpointed(Mlp):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Structured(Mlp):
    """Takes a dictionary and a constant, and returns a parameter, its input and a dictionary."""

    def forward(self, x: torch.Tensor, *, more: dict[str, Any], scale: float) -> dict[str, Any]:
        return {"out": super().forward(x) * scale + more["bias"], "same": x, "bias": self.down.bias, "kind": "mlp"}


class CallsStructured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Structured()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        got = self.part(x, more={"bias": x.mean(-1, keepdim=True), "none": None}, scale=0.5)
        return got["out"] + got["same"] * got["bias"]


class Block(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(SIZE), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(self.norm(x))


class Model(nn.Module):
    def __init__(self, part: Callable[[], nn.Module] = Mlp, blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList(Block(part()) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @staticmethod
    def inputs(generator: torch.Generator, rows: int = 4) -> tuple[torch.Tensor, ...]:
        return (torch.randn(rows, 3, SIZE, generator=generator, dtype=torch.float64),)


def _model(part: Callable[[], nn.Module] = Mlp) -> Callable[[], nn.Module]:
    return lambda: Model(part).double()


def _leaf(part: Callable[[], nn.Module], *actions: Any, strategy: str = "zero3", **options: Any) -> Scenario:
    options = {"leaf_modules": ("blocks.*.part",), "sharding_strategy": strategy, **options}
    return Scenario(_model(part), actions or [do.train()], options)


SCENARIOS = {
    "mlp": _leaf(Mlp),
    "whole block": _leaf(Mlp, leaf_modules=(Block,), strategy="zero2"),
    "experts, zero2": _leaf(Experts, strategy="zero2"),
    "experts": _leaf(Experts),
    "branch": _leaf(Branch),
    "custom function": _leaf(Custom),
    "lstm": _leaf(Recurrent),
    "buffers": _leaf(Counting),
    "checkpoint": _leaf(lambda: Checkpointed(reentrant=False)),
    "reentrant checkpoint": _leaf(lambda: Checkpointed(reentrant=True)),
    "structures": _leaf(CallsStructured, leaf_modules=("Structured",)),
    "window": _leaf(Experts, do.micro_batch(0), do.micro_batch(1), do.micro_batch(2, no_sync=False), do.step()),
}


class Mixture(nn.Module):
    """A block whose experts are its own children, so that each would be a block, and a bucket, of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(x) for expert in self.experts)


class Twice(nn.Module):
    """Calls one module twice, and its weight once more outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.mlp(x)) + nn.functional.linear(torch.tanh(self.mlp.up(x)), self.mlp.down.weight)


class InCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Branch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._inner, x, use_reentrant=False)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mlp(torch.sin(x)))


LEAF = {"leaf_modules": ("blocks.*.part",)}
SCENARIOS |= {
    "one bucket": _leaf(Mixture),
    "twice": _leaf(Twice, leaf_modules=("blocks.*.part.mlp",)),
    "in a checkpoint": _leaf(InCheckpoint, leaf_modules=("Branch",)),
    "frozen": _leaf(
        Mlp,
        do.freeze(
            "blocks.0.part.up.weight",
            "blocks.1.part.up.weight",
            "blocks.1.part.up.bias",
            "blocks.1.part.down.weight",
            "blocks.1.part.down.bias",
        ),
        do.train(),
    ),
    "evaluation": _leaf(Experts, do.train(1), do.mode(training=False), do.forward(7, grad=False), do.train(1, first=8)),
    "two forwards": _leaf(Branch, do.forward(0), do.forward(1), do.backward(0), do.backward(), do.step()),
    "accumulated sharded": _leaf(
        Experts, do.micro_batch(0), do.micro_batch(1, no_sync=False), do.step(), accumulate="sharded"
    ),
    "hybrid": Scenario(_model(Experts), [do.train()], {**LEAF, "ranks": (2, 2)}, ranks=4),
    "offload": _leaf(Experts, offload_policy=CPUOffloadPolicy()),
    "prefetch": _leaf(Branch, prefetch=1, transport="all_reduce"),
}


@each(SCENARIOS)
def test_trains_like_the_unsharded_model(name: str) -> None:
    SCENARIOS[name].run()


class Nested(nn.Module):
    """Only the inner module cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) if self.training else x


class RandomScale(nn.Module):
    """The innermost module that can be a leaf is the one around that which returns a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.largest = nn.Parameter(torch.ones(SIZE)), Largest()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.largest(x)


class Largest(nn.Module):
    def forward(self, x: torch.Tensor) -> float:
        return float(x.abs().max().item() > 1) + 1.0


AUTOMATIC = {
    "experts": (Experts, "blocks.*.part"),
    "branch": (Branch, "blocks.*.part"),
    "custom function": (Custom, "blocks.*.part"),
    "lstm": (Recurrent, "blocks.*.part.lstm"),
    "nested": (Nested, "blocks.*.part.second"),
    "python number": (RandomScale, "blocks.*.part"),
}


@each({name: Scenario(_model(part)) for name, (part, _) in AUTOMATIC.items()})
def test_what_cannot_be_traced_runs_as_it_is(name: str) -> None:
    part, pattern = AUTOMATIC[name]
    with pytest.warns(UserWarning, match="is not traced, but runs as it is") as caught:
        run = Scenario(_model(part)).run()
    texts = {str(w.message).partition(" (")[0] for w in caught if "runs as it is" in str(w.message)}
    assert texts == {f"fsdp: {pattern}"}
    assert sorted(run.transform.sharded.leaves.values()) == [pattern.replace("*", str(i)) for i in range(2)]
