"""Small models whose ranks run different parts, what each rank runs, and what all ranks must have after training.

A trace is specialized on its Python arguments, so a module that depends on data takes its choice as an argument: a string,
which Thunder guards by value. Everything is seeded, and float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, WIDTH, EXPERTS, LAYERS = 32, 16, 4, 4

WAYS = ("ab", "ba", "nb", "aa", "an", "nn", "bn", "ab")
"""The branches that two ranks run in each step of :class:`TwoBranches`: every pair."""

KEPT = ("013", "2", "12")
"""Which blocks of :class:`LayerDrop` run."""

ORDERS = ("012", "210")
"""Orders of the blocks of :class:`Reordered`. They have one size, so a gather does not show whose it is."""


class Block(nn.Module):
    """A residual block, of few operators, because each program of a rank is compiled. FSDP2 shards each, as buckets do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


class TwoBranches(nn.Module):
    """A network with a branch ``a``, a longer branch ``b``, and a short cut ``n``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.a = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.b = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.joint, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        x = torch.relu(self.first(x))
        if way == "a":
            x = self.a(x)
        elif way == "b":
            x = self.b(x)
        return self.last(x if way == "n" else self.joint(x)).square().mean()


class LanguageModel(nn.Module):
    """The part that all models of tokens share: they predict each token from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def loss(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class LayerDrop(LanguageModel):
    """Residual blocks, of which each rank skips those that ``keep`` does not name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(LAYERS)

    def forward(self, tokens: torch.Tensor, keep: str = "0123") -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if str(number) in keep:
                x = block(x)
        return self.loss(x, tokens)


class Reordered(LanguageModel):
    """Blocks that each rank runs in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(3)

    def forward(self, tokens: torch.Tensor, order: str) -> torch.Tensor:
        x = self.embedding(tokens)
        for number in order:
            x = self.blocks[int(number)](x)
        return self.loss(x, tokens)


class Experts(LanguageModel):
    """A mixture of experts with top-1 routing. A rank runs only those experts that have tokens.

    Without ``choice``, it returns the expert of each token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before, self.router, self.experts = Block(), nn.Linear(WIDTH, EXPERTS), blocks(EXPERTS)

    def forward(self, tokens: torch.Tensor, choice: torch.Tensor | None = None, used: str = "") -> torch.Tensor:
        x = self.before(self.embedding(tokens))
        gates = torch.softmax(self.router(x), -1)
        if choice is None:
            return gates.argmax(-1)
        mixed = torch.zeros_like(x)
        for number in map(int, used):
            mixed = mixed + self.experts[number](x) * (gates[..., number] * (choice == number)).unsqueeze(-1)
        return self.loss(mixed, tokens)


class TwoTowers(LanguageModel):
    """Text blocks, and an encoder of images that only batches with an image run."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.projection, self.blocks = blocks(2), nn.Linear(WIDTH, WIDTH), blocks(2)

    def forward(self, tokens: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        if image is not None:
            for block in self.vision:
                image = block(image)
            x = x + self.projection(image)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, tokens)


def direct(model: nn.Module, batch: Sequence[Any]) -> torch.Tensor:
    return model(*batch)


def routed(model: nn.Module, batch: Sequence[Any]) -> torch.Tensor:
    """Route the tokens, then run the experts that have some."""
    (tokens,) = batch
    with torch.no_grad():
        choice = model(tokens)
    return model(tokens, choice, "".join(map(str, choice.unique().tolist())))


def _random(rank: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * number + rank)


def _tokens(rank: int, number: int, length: int = 5) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, length), generator=_random(rank, number))


def _branches(rank: int, number: int) -> tuple[Any, ...]:
    way = WAYS[number % len(WAYS)][rank % 2]
    return torch.randn(4, 8, generator=_random(rank, number), dtype=torch.float64), way


def _kept(rank: int, number: int) -> tuple[Any, ...]:
    return _tokens(rank, number), KEPT[(2 * rank + number) % len(KEPT)]


def _images(rank: int, number: int) -> tuple[Any, ...]:
    tokens = _tokens(rank, number)
    if (rank + number) % 3:  # with two ranks: one has an image, the other one, both, and so on
        return (tokens,)
    return tokens, torch.randn(2, 5, WIDTH, generator=_random(rank, number), dtype=torch.float64)


def _few_tokens(rank: int, number: int) -> tuple[Any, ...]:
    return (_tokens(rank, number, length=3),)


def _sequence(rank: int, number: int) -> tuple[Any, ...]:
    """Return a sequence of one of two lengths, so that ranks also differ in shapes."""
    return (_tokens(rank, number, length=4 + (rank + number // 2) % 2),)


def _alike(rank: int, number: int) -> tuple[Any, ...]:
    return (_tokens(rank, number),)


@dataclass(frozen=True)
class Case:
    """A model, and what each rank runs.

    Attributes:
        make: makes the model.
        batch: returns the batch of a rank by its number.
        call: returns the loss of a batch.
        counts: the number of batches of each rank; further ranks repeat it.
        window: micro-batches of a step, of which all but the last run under ``no_sync``.
        trains: whether there is a backward; otherwise only losses are computed, without gradients.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, ...]]
    call: Callable[[nn.Module, Sequence[Any]], torch.Tensor] = direct
    counts: tuple[int, ...] = (4,)
    window: int = 1
    trains: bool = True

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().double()

    def batches(self, rank: int) -> list[tuple[Any, ...]]:
        return [self.batch(rank, number) for number in range(self.counts[rank % len(self.counts)])]

    def ends_step(self, number: int) -> bool:
        return number % self.window == self.window - 1

    def unsharded(self, world_size: int) -> Unsharded:
        """Train without sharding on the batches of all ranks: sums over ranks, divided by their number.

        A parameter that no rank has used keeps the gradient ``None``, so the optimizer skips it.
        """
        model, of_ranks = self.model(), [self.batches(rank) for rank in range(world_size)]
        optimizer = optimizer_of(model)
        losses: list[list[float]] = [[] for _ in of_ranks]
        gradients: list[dict[str, torch.Tensor | None]] = []
        for number in range(max(map(len, of_ranks))):
            for own, seen in zip(of_ranks, losses, strict=True):
                if number < len(own):
                    loss = self.call(model, own[number])
                    seen.append(loss.item())
                    if self.trains:
                        (loss / world_size).backward()
            if self.trains and self.ends_step(number):
                gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
                optimizer.step()
                optimizer.zero_grad()
        return Unsharded(dict(model.named_parameters()), gradients, losses)


@dataclass(frozen=True)
class Unsharded:
    """The results of training without sharding: whole parameters, gradients before each step, the losses of each rank."""

    parameters: dict[str, torch.Tensor]
    gradients: list[dict[str, torch.Tensor | None]]
    losses: list[list[float]]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


CASES = {
    "alike": Case(LayerDrop, _alike),
    "branches": Case(TwoBranches, _branches, counts=(len(WAYS),)),
    "layerdrop": Case(LayerDrop, _kept),
    "experts": Case(Experts, _few_tokens, routed, counts=(3,)),
    "towers": Case(TwoTowers, _images),
    "order": Case(Reordered, lambda rank, number: (_tokens(rank, number), ORDERS[(rank + number) % 2])),
    "counts": Case(LayerDrop, _sequence, counts=(5, 8)),
    "windows": Case(LayerDrop, _alike, counts=(5, 8), window=2),
    "evaluation": Case(LayerDrop, _alike, counts=(2, 4), trains=False),
}
"""By name. Ranks do not differ in ``alike``; in the last three, numbers of batches do, and in ``counts`` also shapes."""
