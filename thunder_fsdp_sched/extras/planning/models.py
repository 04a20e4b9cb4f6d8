"""Models to plan by name without other libraries, in the shapes of published ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Shape(NamedTuple):
    """The sizes of a decoder. With ``experts``, each block has as many perceptrons, and each token runs through two."""

    blocks: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    experts: int = 0


MODELS = {
    "Llama-3-8B": Shape(32, 4096, 32, 8, 14336, 128256),
    "Llama-3-70B": Shape(80, 8192, 64, 8, 28672, 128256),
    "Mixtral-8x7B": Shape(32, 4096, 32, 8, 14336, 32000, experts=8),
}


class Perceptron(nn.Module):
    """A gated perceptron."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Gated perceptrons, of which each token runs through two.

    Shapes must not depend on values, so each perceptron gets as many tokens as if the choices were balanced.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.up = nn.Parameter(torch.empty(shape.experts, shape.width, 2 * shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, experts = self.router(tokens).softmax(-1).topk(2, -1)
        order = experts.flatten().argsort()
        inputs = F.embedding(order // 2, tokens).unflatten(0, (self.up.shape[0], -1))
        gate, up = torch.bmm(inputs, self.up).chunk(2, -1)
        outputs = torch.bmm(F.silu(gate) * up, self.down).flatten(0, 1)
        chosen = F.embedding(order.argsort(), outputs).unflatten(0, (-1, 2))
        return (chosen * weights.unsqueeze(-1)).sum(1).view(x.shape)


class Block(nn.Module):
    """Attention with shared keys and values and rotary positions, and a perceptron or experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = shape.width // shape.heads
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.attention_norm = nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, (shape.heads + 2 * shape.kv_heads) * size, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.width)
        self.ffn = Experts(shape) if shape.experts else Perceptron(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads, shared = self.heads, self.kv_heads
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (heads + 2 * shared, -1)).transpose(1, 2)
        q, k, v = qkv.split((heads, shared, shared), dim=1)
        half = q.shape[-1] // 2
        q, k = (y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(heads // shared, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """A language model for sequences of at most ``length`` tokens."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(length, shape.width // shape.heads), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
