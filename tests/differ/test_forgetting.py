"""Ranks that differ forget programs and traces when there are many, and garbage may be collected at any time."""

from __future__ import annotations

import itertools
import random
import warnings
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp, transform
from thunder_fsdp_sched.extras.ranks_differ import programs

import pytest
import thunder
import torch
import torch.distributed as dist
from garbage import Collecting, drop_in_a_cycle
from ranks import on_ranks
from torch import nn

WAYS = ("", "0", "1", "2", "01", "10", "12", None)


class Blocks(nn.Module):
    """Blocks of which each rank runs some, in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        x = self.first(x)
        for number in way:
            x = torch.tanh(self.blocks[int(number)](x))
        return self.last(x).square().sum()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@on_ranks()
def test_ranks_go_on_right_after_they_have_forgotten_programs_and_traces(rank: int, strategy: str) -> None:
    model, reference = Blocks().double(), Blocks().double()
    ours = fsdp(sharding_strategy=strategy, ranks_may_differ=True)
    model = thunder.jit(model, transforms=[ours])
    collecting, draw, versions = Collecting(ours.sharded.buckets), random.Random(1), []
    registries = programs.differences_of(ours.sharded.control).registries
    with (
        mock.patch.object(programs, "MOST_PROGRAMS", 3),
        mock.patch.object(transform, "MAX_COMPILED", 3),
        warnings.catch_warnings(),
    ):
        for _ in range(14):
            drawn = [(draw.choice(WAYS), draw.choice((1, 2))) for _ in range(2)]
            way, rows = drawn[rank]
            collecting.after(draw.randrange(12))
            loss = tfs.without_batch(model) if way is None else model(torch.ones(rows, 4).double() + rank, way)
            drop_in_a_cycle(loss)
            loss.backward()
            for other, (their_way, their_rows) in enumerate(drawn):
                if their_way is not None:
                    (reference(torch.ones(their_rows, 4).double() + other, their_way) / 2).backward()
            for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), name
                if q.grad is not None:
                    torch.testing.assert_close(p.grad.to_local(), p.rows.of(q.grad), msg=name)
            model.zero_grad()
            reference.zero_grad()
            known: Any = {kind: (r.version, [*r.programs], [*r.outcomes]) for kind, r in registries.items()}
            of_ranks: list[Any] = [None, None]
            dist.all_gather_object(of_ranks, known)
            assert of_ranks[0] == of_ranks[1]
            versions.append(max(len(r.programs) for r in registries.values()))
            assert len(ours.compiled) <= 3
    collecting.after(-1)
    assert max(versions) <= 4 and sum(b < a for a, b in itertools.pairwise(versions)) >= 2, versions
