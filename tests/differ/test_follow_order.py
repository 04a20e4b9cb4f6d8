"""Merged traces: a rank's own trace in the merged order, with the collectives that only other ranks need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from unittest import mock

import thunder_fsdp_sched as fs
from thunder_fsdp_sched.extras.ranks_differ.build import build
from thunder_fsdp_sched.extras.ranks_differ.follow_order import empty_trace, steps_of
from thunder_fsdp_sched.extras.ranks_differ.merging import Key, merge
from thunder_fsdp_sched.extras.ranks_differ.symbols import key_of
from thunder_fsdp_sched.ir.schedule import GATHERS, ISSUES, WAITS
from thunder_fsdp_sched.passes import Context
from thunder_fsdp_sched.transform import Compilation

import pytest
import thunder
import torch
from internals import (
    Bucket,
    effects,
    find_transform,
    is_declared,
    outs_of,
    read_schedule,
    statements,
)
from thunder.core.trace import TraceCtx
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WAYS = ("013", "2", "310")
"""Which blocks each of three ranks runs, in which order."""


class Blocks(nn.Module):
    """Blocks of which each rank runs some, in an order of its own, between two layers that all ranks run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        x = self.first(x)
        for number in way:
            x = torch.tanh(self.blocks[int(number)](x))
        return self.last(x).square().mean()


@dataclass
class Start:
    """A stand-in for the start of a merged trace."""

    name: str
    keys: frozenset[Key] = frozenset()
    left: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return self.name

    def serves(self, kind: str, bucket: Bucket, occurrence: int) -> bool:
        return (kind, key_of(bucket), occurrence) in self.keys

    def serve_left(self) -> None:
        self.left.append(self.name)

    def end_audit(self) -> None: ...


@dataclass
class Compiled:
    """A scheduled trace, before ranks compare it, and the context of its compilation."""

    trace: TraceCtx
    context: Context
    half: str

    def build(self, order: Sequence[Key], buckets: Any, start: Start, sources: Any = MappingProxyType({})) -> TraceCtx:
        arguments = {"order": order, "start": start, "buckets": buckets, "sources": sources}
        return build(self.trace, **arguments, context=self.context, half=self.half)

    @classmethod
    def nothing(cls, like: Compiled) -> Compiled:
        """Return that of a rank without a batch."""
        trace = empty_trace("nothing", backward=like.half == "backward")
        return cls(trace, dataclasses.replace(like.context, forward=None), like.half)


@contextmanager
def recorded() -> Iterator[list[Compiled]]:
    """Record the scheduled traces that are compiled in the context."""
    found: list[Compiled] = []
    agree = Compilation._agree

    def record(self: Compilation, trace: TraceCtx, schedule: Any, half: str) -> None:
        found.append(Compiled(trace, dataclasses.replace(self.context), half))
        agree(self, trace, schedule, half)

    with mock.patch.object(Compilation, "_agree", record):
        yield found


def buckets_of(transform: Any) -> dict[Any, Bucket]:
    return {key_of(b): b for base in transform.sharded.buckets for b in (base, *base.aliases.values())}


def compile_ways(ways: Sequence[str], context: Callable[[], Any] = nullcontext, **options: Any) -> tuple[Any, Any]:
    """Return the transform, and for each way its scheduled forward and backward."""
    model = thunder.jit(Blocks(), transforms=[fs.fsdp(**options)])
    found = []
    for way in ways:
        with recorded() as traces, context():
            model(torch.ones(2, 6), way)
        found.append(traces)
    return find_transform(model), found


def compute(trace: TraceCtx) -> list[tuple[str, tuple[str, ...]]]:
    """Return what a trace computes, without communication: operators and the names of their results."""
    return [(b.sym.name, outs_of(b)) for b in statements(trace) if not is_declared(b.sym) or effects(b).fills]


def issued(trace: TraceCtx) -> list[tuple[str, Any]]:
    """Return the kinds and buckets of what a trace issues, in order."""
    kinds = {name: "gather" for name in GATHERS} | {
        "fsdp_all_reduce": "all_reduce",
        "fsdp_serve_all_reduce": "all_reduce",
    }
    issues = [e.issues for e in map(effects, trace.bound_symbols) if e.issues is not None]
    return [(kinds.get(issue.kind, "reduce"), key_of(issue.bucket)) for issue in issues]


@pytest.mark.parametrize(
    ("options", "context"),
    [
        *(
            ({"sharding_strategy": s, "prefetch": p}, nullcontext)
            for s, p in (("zero2", 1), ("zero3", 0), ("zero3", 2))
        ),
        ({"sharding_strategy": fs.Sharding("zero3", release=True)}, nullcontext),
        ({"max_memory": "1 GB"}, nullcontext),
        ({"sharding_strategy": "zero3"}, lambda: torch.autocast("cpu", torch.bfloat16)),
        ({"sharding_strategy": "zero3", "mesh": True}, nullcontext),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("fake_ranks")
def test_a_merged_trace_is_the_own_one_in_the_merged_order(options: dict[str, Any], context: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    if options.pop("mesh", False):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        options = {**options, "ranks": fs.Ranks(mesh=mesh)}
    transform, ways = compile_ways(WAYS, context, **options)
    buckets = buckets_of(transform)
    for half in range(2):
        order = merge([steps_of(way[half].trace) for way in ways])
        assert len(order) == len(set(order)) and {key[1] for key in order} <= buckets.keys()
        sources = dict.fromkeys(order, "rank 0 reads it at model.py:17")
        for way in ways:
            own = way[half]
            merged = own.build(order, buckets, Start(f"{own.half}_0"), sources)
            assert issued(merged) == [key[:2] for key in order]
            assert compute(merged)[:-1] == compute(own.trace)[:-1]  # `forward` returns the same in another form
            mine = {step.key for step in steps_of(own.trace)}
            schedule = read_schedule(merged)
            served = [op for op in schedule if "_serve" in op.kind and op.issues]
            assert len(served) == len(order) - len(mine)
            assert all(op.reason.startswith("for others: rank 0 reads it at model.py:17; ") for op in served)
            of_own = {b.header for b in own.trace.bound_symbols}
            assert {op.reason for op in schedule if "_serve" not in op.kind} <= of_own
            assert sum(op.kind in WAITS for op in schedule) == sum(op.kind in ISSUES for op in schedule) - sum(
                "all_reduce" in op.kind for op in schedule
            )
            assert merged.python_callable() is not None
        nothing = Compiled.nothing(ways[0][half]).build(order, buckets, Start("start"))
        assert issued(nothing) == [key[:2] for key in order]
        assert nothing.python_callable() is not None
