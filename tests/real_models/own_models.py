"""Models that need no library: a convolutional network, a recommender, a mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    """Two convolutions with batch norms and a shortcut, which is a 1 x 1 convolution if the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = nn.Identity()
        if stride != 1 or channels_in != channels:
            conv = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.downsample(x))


class ResNet(nn.Module):
    """A small ResNet like torchvision's: stem, max pooling, stages of basic blocks, average pooling, classifier."""

    def __init__(self, widths: tuple[int, ...] = (6, 10), blocks: int = 1, classes: int = 7) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 5, 2, padding=2, bias=False), nn.BatchNorm2d(widths[0]))
        layers, before = [], widths[0]
        for stage, width in enumerate(widths):
            for index in range(blocks):
                layers.append(BasicBlock(before, width, stride=2 if stage and not index else 1))
                before = width
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(before, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.stem(images)), 3, stride=2, padding=1)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.layers(x), (1, 1)), 1))


class DLRM(nn.Module):
    """A recommender: embedding tables of different sizes, two MLPs, and dot products of all pairs of features.

    Each categorical feature is a bag of ``hots`` indices whose rows are summed.
    """

    def __init__(self, rows: tuple[int, ...] = (3001, 500, 17), width: int = 8, dense: int = 5, hots: int = 3) -> None:
        super().__init__()
        self.rows, self.dense, self.hots = rows, dense, hots
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, width, mode="sum") for size in rows)
        self.bottom = nn.Sequential(nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        features = len(rows) + 1
        self.top = nn.Sequential(
            nn.Linear(width + features * (features - 1) // 2, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid()
        )
        pairs = torch.tril_indices(features, features, offset=-1)
        self.register_buffer("pairs", pairs[0] * features + pairs[1], persistent=False)

    def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        features = [x] + [table(indices[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack(features, 1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, torch.index_select(dots, 1, self.pairs)], 1)).squeeze(1)


class Expert(nn.Module):
    """LLaMA's MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MoEBlock(nn.Module):
    """Mixtral's block with dense routing: every expert processes every token, and all but the best two have weight zero.

    The results are Mixtral's, but no shape depends on data.
    """

    def __init__(self, width: int, experts: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, 2 * width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm_1(x)).split(width, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm_2(x)
        scores = self.router(y)
        second = torch.topk(scores, 2, dim=-1)[0][..., 1:]
        weights = torch.softmax(torch.where(scores >= second, scores, float("-inf")), -1)
        return x + sum(expert(y) * weights[..., i : i + 1] for i, expert in enumerate(self.experts))


class DenseMoE(nn.Module):
    """A language model of ``MoEBlock``."""

    def __init__(self, vocab: int = 32, width: int = 16, blocks: int = 1, experts: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(MoEBlock(width, experts) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
