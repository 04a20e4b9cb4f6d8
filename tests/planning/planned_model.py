"""A model of equal blocks for tests of plans."""

import torch
from torch import nn

__all__ = ["Model", "make"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down.forward(torch.tanh(self.up.forward(self.norm.forward(x))))


class Model(nn.Module):
    def __init__(self, blocks: int = 4, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return self.head.forward(x).sum()


def make(blocks: int = 4) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Model(blocks), (torch.randn(2, 16),)
