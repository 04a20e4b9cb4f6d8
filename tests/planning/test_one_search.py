"""One rank searches for the settings of a trace, and all ranks compile what it has found."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

from thunder_fsdp_sched import CompiledTraces, ScheduleDisagreement, fsdp, testing
from thunder_fsdp_sched.extras.planning import choosing
from thunder_fsdp_sched.planning import Choice, ClusterSpec, MemoryLimitError, Protocol, cluster

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from models import Layer
from profiles import with_long
from ranks import on_ranks
from torch import nn

LAYERS = {"bucketing_strategy": "layer"}
CPU = cluster("cpu-2core")
MACHINES = (  # of ranks 0 and 1; their best settings differ
    dataclasses.replace(cluster("h100-sxm"), name="slow links", intra_node_bandwidth=1e6, launch_overhead=1e-4),
    dataclasses.replace(CPU, name="slow memory", memory_bandwidth=1e6, protocols=(Protocol(0.0, 0.0, 0.0),)),
)


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), Layer(16)) for _ in range(blocks))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def _batch(rank: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rank)).double()


@contextlib.contextmanager
def _searching(rank: int) -> Iterator[list[str]]:
    """Give the ranks different machines, and record the machine for which this rank searches."""
    searched: list[str] = []

    def machine() -> ClusterSpec:
        searched.append(MACHINES[rank].name)
        return MACHINES[rank]

    with mock.patch.object(choosing, "cluster_of_this_process", machine):
        yield searched


def _jit(**options: Any) -> Any:
    group = dist.new_group(timeout=timedelta(seconds=60))
    return thunder.jit(Model().double(), transforms=[fsdp(ranks=group, **LAYERS, **options)])


def _everyones(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _all_equal(value: Any) -> None:
    first, *others = _everyones(value)
    assert all(other == first for other in others), (first, *others)


LIMITS: dict[str, dict[str, Any]] = {
    "prefetch": {"prefetch": "auto"},
    "max_memory": {"max_memory": 160_000},
}


def _found_alone(spec: ClusterSpec, options: dict[str, Any]) -> Choice:
    [traces] = testing.compile_on_fake_ranks(
        lambda: (Model().double(), (_batch(0, 64),)), 2, ranks=[0], cluster=spec, **LAYERS, **options
    )
    return traces.choice


@pytest.mark.parametrize("case", with_long(LIMITS, "max_memory"))
def test_ranks_that_would_find_different_schedules_alone_compile_the_one_of_rank_0(case: str, ranks: Any) -> None:
    first, second = map(_settings, ranks.run(_train_one_step, LIMITS[case]))
    assert first == second != _settings(_found_alone(MACHINES[1], LIMITS[case]))


def _settings(choice: Choice) -> list[Any]:
    chosen = choice.chosen
    return [chosen.prefetch, chosen.kept_buckets, chosen.reductions]


def _train_one_step(rank: int, world_size: int, options: dict[str, Any]) -> Choice:
    with _searching(rank) as searched:
        model, reference = _jit(**options), Model().double()
        model(_batch(rank, 64)).backward()
    transform = model._lc_transforms[-1]
    [compiled] = transform.compiled
    assert _everyones(searched) == [[MACHINES[0].name], []]
    kept = [bucket.name for bucket in transform.plan if bucket.options.sharding_strategy == "zero2"]
    _all_equal([str(compiled.schedule), str(compiled.choice), sorted(compiled.settings.recomputed), kept])
    for other in range(world_size):
        (reference(_batch(other, 64)) / world_size).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_local(), p.rows.of(q.grad))
    return compiled.choice


@on_ranks()
def test_a_window_is_planned_by_one_rank(rank: int) -> None:
    with _searching(rank) as searched:
        model = _jit(max_memory=200_000)
        with model.no_sync():
            model(_batch(rank, 64)).backward()
        model(_batch(rank, 64)).backward()
    assert _everyones(searched) == [[MACHINES[0].name] * 2, []]
    _all_equal(
        [[str(c.schedule), str(c.choice), sorted(c.settings.recomputed)] for c in model._lc_transforms[-1].compiled]
    )


@on_ranks()
def test_the_rank_with_the_largest_batch_searches_and_others_compile_alone_what_is_known(rank: int) -> None:
    with _searching(rank) as searched:
        model = _jit(max_memory=160_000)
        model(_batch(rank, (32, 64)[rank])).backward()
        assert _everyones(searched) == [[], [MACHINES[1].name]]
        searched.clear()
        model(_batch(rank, (48, 64)[rank])).backward()  # rank 0 compiles alone
        assert not searched
        assert len(model._lc_transforms[-1].compiled) == (2, 1)[rank]
        _all_equal([model._lc_transforms[-1].compiled[-1].choice.chosen[:3]])
        # What is known does not fit, so rank 0 would have to search alone.
        with pytest.raises(
            ScheduleDisagreement,
            check=coded("ranks.actions-differ", "rank 0: the search for the schedule", "rank 1: the forward"),
        ):
            model(_batch(rank, (128, 64)[rank]))
        model(_batch(rank, 64)).backward()


@on_ranks()
def test_an_error_of_the_rank_that_searches_is_raised_on_all(rank: int) -> None:
    model = _jit(prefetch="auto")
    with mock.patch.object(choosing, "cluster_of_this_process", side_effect=ArithmeticError("on purpose")):
        expected = ArithmeticError if rank == 0 else ScheduleDisagreement
        with pytest.raises(expected, match="on purpose"):
            model(_batch(rank, 64))
    model(_batch(rank, 64)).backward()


@on_ranks()
def test_a_rank_whose_traces_exceed_the_limit_tells_the_others(rank: int) -> None:
    model = _jit(max_memory=200_000)
    real = choosing.check_memory

    def check_memory(traces: CompiledTraces, **arguments: Any) -> None:
        real(traces, **{**arguments, "limit": 1000 if rank else arguments["limit"]})

    with mock.patch.object(choosing, "check_memory", check_memory):
        code, expected = (
            ("plan.traces-exceed-max-memory", MemoryLimitError)
            if rank
            else ("ranks.actions-differ", ScheduleDisagreement)
        )
        with pytest.raises(expected, check=coded(code, "max_memory: 1,000 bytes")):
            model(_batch(rank, 64))
