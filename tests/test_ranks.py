"""The worker processes of ``ranks.py``: results, errors and hangs. Its functions need neither Thunder nor the package."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, Ranks


def _sum(rank: int, world_size: int, offset: int, *, factor: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, total * factor


def _fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


def _die_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _hang_on_rank_0(rank: int, world_size: int) -> None:
    while rank == 0:
        pass


def test_failing_dying_and_hanging_ranks_are_reported_and_replaced(ranks: Ranks) -> None:
    assert ranks.run(_sum, 3, factor=2) == [(0, torch.tensor([14])), (1, torch.tensor([14]))]
    with pytest.raises(RankError, match=r"(?s)--- rank 1 failed.*ValueError: only here"):
        ranks.run(_fail_on_rank_1)
    with pytest.raises(RankError, match="--- rank 1 failed\nthe process died, exit code 7"):
        ranks.run(_die_on_rank_1)
    with pytest.raises(RankError, match=r"(?s)hung: no answer within 8 s.*--- rank 0 did not return.*_hang_on_rank_0"):
        ranks.run(_hang_on_rank_0, timeout=8)
    assert [rank for rank, _ in ranks.run(_sum, 0, factor=1)] == [0, 1]
