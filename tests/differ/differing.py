"""A model whose ranks take different ways, compared with the unsharded model that takes all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched.extras.ranks_differ.programs import differences_of

import torch
from device import DEVICE
from models import Layer, Model
from scenario import Pending, Run, loss_of
from torch import nn

adamw = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
"""With a large ``eps``, so that gradients which are only rounding errors cause small updates."""

Ways = tuple[str | None, ...]
"""The blocks that each rank runs, a digit for each; ``None`` for a rank without a batch."""


class Blocks(Model):
    """Blocks between two linear layers; ``way`` says which of them run, in which order."""

    def __init__(self, blocks: int = 2, block: Callable[[int], nn.Module] = Layer) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(block(4) for _ in range(blocks))
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        x = self.first(x)
        for number in way:
            x = self.blocks[int(number)](x)
        return self.last(x)


class DifferingRun(Run):
    """A run of ranks that differ. It clips gradients before each step.

    Args:
        casts: the ranks whose forward runs under ``torch.autocast``.
    """

    def __init__(self, model: nn.Module | None = None, *, casts: Collection[int] = (), **options: Any) -> None:
        model = Blocks().double() if model is None else model
        super().__init__(model, **{"optimizer": adamw, "ranks_may_differ": True, **options})
        self.casts = casts

    @property
    def merges(self) -> list[bool]:
        """For each combination of forwards that the ranks have met, whether their merged traces run."""
        registries = differences_of(self.transform.sharded.control).registries.items()
        return [o.merges for kind, registry in registries if kind[0] == "forward" for o in registry.outcomes.values()]

    def forward(self, step: int = 0, ways: Ways = (), *, no_sync: bool = False, grad: bool = True, **size: Any) -> Any:
        """Run forward on this rank's way, and on the unsharded model those of all ranks, and compare the losses."""
        assert self.unsharded is not None
        expected = {}
        with torch.set_grad_enabled(grad):
            for rank, model in self.unsharded.models.items():
                if (way := ways[rank]) is not None:
                    with self._cast(rank):
                        output = model(*self.inputs(step, rank=rank, **size), way)
                    expected[rank] = loss_of(output)
            with self.model.no_sync() if no_sync else nullcontext():
                if (way := ways[self.rank]) is None:
                    loss = tfs.without_batch(self.model)
                else:
                    with self._cast(self.rank):
                        output = self.model(*self.inputs(step, **size), way)
                    loss = loss_of(output)
        self.close(loss, expected.get(self.rank, torch.zeros_like(loss)), "loss")
        if grad:
            self.pending.append(Pending([loss], expected, no_sync))
        return loss

    def _cast(self, rank: int) -> AbstractContextManager[Any]:
        return torch.autocast(DEVICE.type, torch.bfloat16) if rank in self.casts else nullcontext()

    def step(self, *, set_to_none: bool = True) -> None:
        assert self.transform.sharded.control.issue_counts.surplus_issues == 0, self.at
        self.clip()
        super().step(set_to_none=set_to_none)

    def forget(self) -> None:
        """Forget what a step has left that failed."""
        assert self.unsharded is not None
        self.pending.clear()
        self.unsharded.discard()
        for model in (self.model, self.reference):
            model.train()
            model.zero_grad()

    @contextlib.contextmanager
    def exchanges(self, count: int) -> Any:
        """Check how many messages the ranks exchange on their control channel."""
        channel = self.transform.sharded.control.channel
        before = channel._started
        yield
        assert channel._started - before == count, self.at
