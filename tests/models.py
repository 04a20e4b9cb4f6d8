"""Small models for tests. Each class's docstring says which special case it covers; its ``inputs`` makes a batch.

Layers inside a block are called through ``.forward``: Thunder would interpret ``nn.Module.__call__`` line by line, which
takes half of the time of tracing. Blocks are called as users call them, so hooks run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from thunder_fsdp_sched import CompiledTraces, testing

import torch
import torch.nn.functional as F
from byte_gpt import GPT as ByteGPT
from device import DEVICE, IS_CUDA
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Model(nn.Module):
    """A model that makes its own inputs."""

    width = WIDTH
    tolerance = 1e-11  # Thunder's decompositions round differently from eager torch; see scenario.Run

    def inputs(self, generator: torch.Generator, batch: int = 3) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, self.width, generator=generator, dtype=torch.float64),)


class ChosenBlocks(nn.Module):
    """Blocks of which each call runs some, in an order of its own (``"20"``), between two layers that all calls run."""

    def __init__(self, outside: int, inside: int, blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(outside, inside), nn.Linear(inside, outside)
        self.blocks = nn.ModuleList(nn.Linear(inside, inside) for _ in range(blocks))

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        x = self.first(x)
        for number in way:
            x = torch.tanh(self.blocks[int(number)](x))
        return self.last(x).square().mean()


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv.forward(self.ln_1.forward(x))
        heads = [t.view(batch, length, self.heads, -1).transpose(1, 2) for t in qkv.split(width, 2)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj.forward(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down.forward(F.gelu(self.up.forward(self.ln_2.forward(x))))


class FeedForward(nn.Module):
    """A transformer block without attention, which takes most of the time of compiling one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down.forward(F.gelu(self.up.forward(self.ln.forward(x))))


# On a CPU without a device, which would be an argument in each trace that ``freeze.json`` has.
_positions = partial(torch.arange, device=DEVICE) if IS_CUDA else torch.arange


class GPT(nn.Module):
    """A language model that returns its loss.

    Args:
        tied: the head uses the embedding's weight.
        block: a function that makes a block of a given width. ``FeedForward`` and ``Layer`` compile faster.
    """

    def __init__(
        self,
        *,
        width: int = 16,
        blocks: int = 2,
        vocab: int = 23,
        length: int = 8,
        tied: bool = False,
        block: Callable[[int], nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.vocab, self.length = vocab, length
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(length, width)
        self.h = nn.ModuleList(block(width) for _ in range(blocks))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte.forward(tokens) + self.wpe.forward(_positions(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.head.forward(self.ln_f.forward(x))
        return F.cross_entropy(logits.view(-1, self.vocab), targets.view(-1))

    def inputs(self, generator: torch.Generator, batch: int = 2, length: int | None = None) -> tuple[torch.Tensor, ...]:
        tokens = torch.randint(self.vocab, (batch, (length or self.length) + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Layer(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int, activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down.forward(self.activation(self.up.forward(x)))


class Stack(Model):
    """Blocks between two linear layers: the cheapest model with several buckets."""

    def __init__(
        self, blocks: int = 3, width: int = WIDTH, activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
    ) -> None:
        super().__init__()
        self.width = width
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Layer(width, activation) for _ in range(blocks))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first.forward(x)
        for block in self.blocks:
            x = block(x)
        return self.last.forward(x)


class Chain(Model):
    """Blocks, one after the other: block ``i`` is ``kind(i)``, where ``kinds`` take turns."""

    def __init__(self, *kinds: Callable[[int], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kinds[number % len(kinds)](number) for number in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class LinearBlock(nn.Module):
    """A linear layer, for blocks of a :class:`Chain` whose forward a test defines."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(4, 4)


def running(forward: Callable[..., Any]) -> type[LinearBlock]:
    """Return a class of blocks with this forward."""
    return type("Running", (LinearBlock,), {"forward": forward})


class Calling(nn.Module):
    """Members, and a forward that is a function of the module and its arguments."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def having(module: nn.Module, **members: Any) -> nn.Module:
    """Return the module, with more members: tensors that become parameters, and others."""
    for name, member in members.items():
        is_plain = type(member) is torch.Tensor and not isinstance(member, nn.Buffer)
        setattr(module, name, nn.Parameter(member) if is_plain else member)
    return module


def modeled(width: int = WIDTH, **members: Any) -> Callable[[Callable[..., Any]], type[Model]]:
    """Return a decorator that makes a class of models of their forward.

    Args:
        members: in their order shapes of parameters, and functions that make other members.
    """

    def decorate(forward: Callable[..., Any]) -> type[Model]:
        def init(self: Any) -> None:
            Model.__init__(self)
            for name, member in members.items():
                having(self, **{name: torch.randn(member) if isinstance(member, tuple) else member()})

        own = {"__init__": init, "forward": forward, "width": width, "__doc__": forward.__doc__}
        return type(forward.__name__, (Model,), {**own, "__module__": forward.__module__})

    return decorate


def linears(count: int, width: int = WIDTH) -> Callable[[], nn.ModuleList]:
    """Return a function that makes a list of linear layers."""
    return lambda: nn.ModuleList(nn.Linear(width, width) for _ in range(count))


@modeled(
    blocks=lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
    conv=partial(nn.Conv2d, 1, 3, 2),
    cube=(3, 2, 5),
)
def UnevenRows(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Parameters of 1 to 4 dimensions, with first dimensions that are not divisible by the number of ranks."""
    x = self.blocks(x)
    y = self.conv.forward(x.reshape(-1, 1, 3, 1).expand(-1, 1, 3, 3))
    return y.sum((1, 2)) @ self.cube[1] + (self.cube * x.unsqueeze(-1).unsqueeze(-1)).sum((1, 2))


@modeled(
    scale=lambda: torch.tensor(1.5),
    shift=(1, 4),
    gain=(1,),
    empty=(0, 4),
    block=lambda: having(nn.Linear(4, 4), temperature=torch.tensor(0.5)),
)
def TinyParameters(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Parameters that are 0-dim, empty, or have a single row or element, alone in a bucket and among others."""
    x = self.block.forward(torch.cat((x * self.scale + self.shift, self.empty)))
    return torch.tanh(x * self.block.temperature) * self.gain + x / self.scale


class TiedWeights(Model):
    """An embedding whose weight is also the head's, and two blocks that share a linear layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(Layer(4) for _ in range(2))
        self.blocks[1].down.weight = self.blocks[0].down.weight
        self.head = nn.Linear(4, 9)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding.forward(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head.forward(x)

    def inputs(self, generator: torch.Generator, batch: int = 3) -> tuple[torch.Tensor, ...]:
        return (torch.randint(9, (batch, 5), generator=generator),)


class LoRALinear(nn.Linear):
    """A frozen layer and a trainable correction of low rank."""

    def __init__(self, width: int, rank: int = 1) -> None:
        super().__init__(width, width)
        self.a = nn.Parameter(torch.randn(rank, width))
        self.b = nn.Parameter(torch.randn(width, rank))
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.a), self.b)


@modeled(
    first=partial(nn.Linear, 4, 4),
    blocks=lambda: nn.ModuleList([LoRALinear(4), nn.Linear(4, 4).requires_grad_(False), LoRALinear(4)]),
    last=lambda: having(nn.Linear(4, 4), bias=nn.Parameter(torch.randn(4), requires_grad=False)),
)
def FrozenParameters(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A fully frozen block, through which gradients still flow, between LoRA-style and trainable blocks."""
    x = self.first.forward(x)
    for block in self.blocks:
        x = torch.tanh(block(x))
    return self.last.forward(x)


@modeled(blocks=lambda: nn.ModuleList([having(nn.Linear(4, 4), unused=torch.randn(3, 4)), *linears(2)()]), unused=(5,))
def UnusedParameters(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A block that forward never calls, and an unused parameter among used ones."""
    return self.blocks[2].forward(torch.tanh(self.blocks[0].forward(x)))


@modeled(
    mask=lambda: nn.Buffer(torch.tensor([1.0, 0.0, 1.0, 1.0])),
    offset=lambda: nn.Buffer(torch.randn(4), persistent=False),
    blocks=lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)),
)
def Buffers(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A buffer that forward reads, one that is not saved, and a batch norm whose statistics forward updates."""
    return self.blocks(x * self.mask + self.offset)


@modeled(common=(4, 4), blocks=linears(2))
def SharedBlocks(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A parameter that is used several times, by all blocks and after them, and a block that is called twice."""
    for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
        x = torch.tanh(block(x) + x @ self.common + F.linear(x, self.common))
    return x * self.common[0] + self.common.sum(0)


@modeled(table=(6, 4), packed=lambda: torch.randn(8, 4).t(), blocks=linears(2))
def ViewsOfParameters(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Slices, transposes, reshapes and chunks of parameters, some of them used much later."""
    first, second = self.packed.chunk(2, dim=1)
    rows = self.table[1:5:2]
    x = torch.tanh(self.blocks[0].forward(x) @ first) + self.blocks[0].weight[2]
    x = (
        self.blocks[1].forward(x)
        @ self.blocks[0].weight.t()[:, 1:]
        @ self.blocks[1].weight[1:].view(3, 2, 2).flatten(1)
    )
    x = x @ second.contiguous() + x @ rows.transpose(0, 1).repeat(1, 2)
    return x + self.table.view(2, 12)[1, 4:8].unsqueeze(0)


@modeled(low=(4, 2), high=(2, 4), blocks=linears(3))
def DerivedParameters(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A weight that is computed only from parameters, of several blocks, and used in several blocks."""
    weight = (self.low @ self.high) * torch.sigmoid(self.blocks[0].weight)
    for block in self.blocks:
        x = torch.tanh(F.linear(block(x), weight))
    return x


class MixedDtypes(Model):
    """Parameters of two dtypes in one block."""

    tolerance = 1e-6  # because of the float32 parameters

    def __init__(self) -> None:
        super().__init__()
        self.block = Layer(4)
        self.last = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))

    def double(self) -> MixedDtypes:
        super().double()
        for param in (self.block.down.weight, self.scale):
            param.data = param.data.float()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.block.up.forward(x)) @ self.block.down.weight.double().t()
        return self.last.forward(x) * self.scale


@modeled(stack=lambda: Stack(2))
def ScalarLoss(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A model that returns its loss, which reads parameters of the first block again (weight decay in the model)."""
    # Not parameters(): Thunder iterates over a set of their names, so ranks would compile different orders.
    first = self.stack.blocks[0]
    decay = sum((p * p).sum() for p in (first.up.weight, first.up.bias, first.down.weight))
    return self.stack(x).square().mean() + 0.1 * decay


class Halves(Model):
    """A model that uses one of two blocks, depending on a flag."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=number == 0) for number in range(2))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        return torch.tanh(self.blocks[0].forward(x) * self.scale if first else self.blocks[1].forward(x))


class Experts(nn.Module):
    """Layers that all ranks have, and an expert that differs between groups of ranks. It is not called."""

    def __init__(self, number: int, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.more = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.expert = nn.Linear(4, width)
        nn.init.constant_(self.expert.weight, number)


@modeled(blocks=lambda: nn.ModuleList(Layer(4) for _ in range(3)))
def Checkpointed(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Activation checkpointing: backward recomputes each block's forward."""
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


@modeled(token=(1, 1, 4), positions=(1, 3, 4), experts=(2, 4, 4), gate=partial(nn.Linear, 4, 2))
def ExpandedParameters(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A class token and positions as in a vision transformer, experts in one parameter, stacking, in-place operators."""
    x = torch.cat([self.token.expand(x.shape[0], -1, -1), x.unsqueeze(1).expand(-1, 2, -1)], 1) + self.positions
    x.mul_(2.0)
    outputs = torch.einsum("bti,eij->btej", x, self.experts)
    x = (outputs * torch.softmax(self.gate.forward(x), -1).unsqueeze(-1)).sum(2)
    return torch.where(x > 0, x, x * torch.stack([self.gate.weight[0], self.experts[1, 0]]).sum(0))


def linear_gpt(shape: Any, device: torch.device | str = "cpu") -> ByteGPT:
    """Return the demo's GPT with a linear layer for each block: attention takes most of the time of compiling one."""
    torch.manual_seed(0)
    with torch.device(device):
        model = ByteGPT(blocks=0, width=shape.width, heads=1, length=shape.length)
        model.blocks.extend(nn.Linear(shape.width, shape.width) for _ in range(shape.blocks))
    return model


_CASES: tuple[type[Model], ...] = (
    *(UnevenRows, TinyParameters, TiedWeights, FrozenParameters, UnusedParameters, Buffers, SharedBlocks),
    *(ViewsOfParameters, DerivedParameters, MixedDtypes, ScalarLoss, Checkpointed, ExpandedParameters),
)
CASES = {re.sub(r"\B(?=[A-Z])", "_", case.__name__).lower(): case for case in _CASES}
"""The models, keyed by names such as ``uneven_rows``."""


def compile_model(make: Callable[[], Any], world_size: int = 2, **options: Any) -> CompiledTraces:
    """Return the traces of the first of some ranks for a model of this module, or one with its own ``inputs``."""

    def made() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        model = make()
        return model, model.inputs(torch.Generator().manual_seed(0))

    [compiled] = testing.compile_on_fake_ranks(made, world_size, **options)
    return compiled
