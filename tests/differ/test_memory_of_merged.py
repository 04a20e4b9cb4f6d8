"""Predicted memory of a step that runs merged traces, beside a run in which every storage is counted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from thunder_fsdp_sched import CompiledTraces, Sharding, fsdp, transform
from thunder_fsdp_sched.extras.no_sync import reduce_sums
from thunder_fsdp_sched.extras.planning.dry_run import fake_rank
from thunder_fsdp_sched.extras.ranks_differ.merging import merge
from thunder_fsdp_sched.extras.ranks_differ.start import with_merged

import pytest
import thunder
import torch
from memory_count import Count, compare, count_step
from merged_programs import steps_of
from models import ChosenBlocks
from profiles import with_long
from test_follow_order import Compiled, Start, buckets_of, recorded
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

OPTIONS: dict[str, dict[str, Any]] = {
    "zero2, released": {"sharding_strategy": Sharding("zero2", release=True), "mp_policy": LOW},
    "sharded, zero3": {"accumulate": "sharded", "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
}


class Blocks(ChosenBlocks):
    """Blocks of different sizes, of which each rank runs some."""

    def __init__(self) -> None:
        super().__init__(6, 8, 0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, n), nn.Linear(n, 8, bias=False)) for n in (16, 8, 12, 20)
        )


class Serving(Start):
    """A start that also reduces what windows have left."""

    buckets: Sequence[Any] = ()

    def serve_left(self) -> None:
        for bucket in self.buckets:
            reduce_sums(bucket, scatters=bucket.accumulation.unsharded is not None)


@dataclass
class Way:
    """The compiled traces of a way, and the inputs of their computation."""

    compiled: CompiledTraces
    halves: list[Compiled]
    flat: Sequence[Any]


class Counted:
    """A model on a rank of fake ranks, its merged traces, and counts of them."""

    def __init__(self, **options: Any) -> None:
        self.ours = fsdp(**options)
        self.model = thunder.jit(Blocks().double(), transforms=[self.ours])

    def compile(self, way: str, *, no_sync: bool = False) -> Way:
        inputs = self.ours.cast_inputs((torch.ones(3, 6, dtype=torch.float64), way), {})
        with recorded() as halves, self.model.no_sync() if no_sync else nullcontext():
            _, flat = self.ours.sharded.compile(self.model, *inputs)
        return Way(self.ours.compiled[-1], halves, flat)

    def merge(self, own: Way, known: Sequence[Way], active: Sequence[Way], left: Sequence[Any] = ()) -> CompiledTraces:
        """Return the traces of ``own`` merged with ``known`` programs, of which other ranks run ``active``."""
        for number, half in enumerate(own.halves):
            order = merge([steps_of(way.halves[number].trace) for way in known])
            keys = {step.key for way in active for step in steps_of(way.halves[number].trace)}
            start = Serving(half.half, frozenset(keys))
            start.buckets = left
            merged = half.build(order, buckets_of(self.ours), start)
            own.compiled.attached.setdefault("merged", {})[half.half] = merged
        return with_merged(own.compiled)

    def count(self, own: Way, earlier: Way | None = None) -> Count:
        """Count a step, after one that allocates what lasts.

        Args:
            earlier: the micro-batch before it, under ``no_sync``.
        """
        for _ in range(2):
            self.model.zero_grad()
            for way in [own] if earlier is None else [earlier, own]:
                for bucket in self.ours.sharded.buckets:
                    bucket.private_slot.arena.contents.clear()
                    bucket.accumulation.from_others = partial(frozenset, range(len(bucket.params)))
                tracker = count_step(self.ours, with_merged(way.compiled), way.flat)
        window = [earlier.compiled] if earlier is not None else False
        memory = own.compiled.predict_memory(merged=True, accumulated=window, others=self.ours.compiled)
        assert any("fsdp_serve_" in line for line in memory.statements)
        return compare(memory, with_merged(own.compiled), tracker)


@pytest.mark.parametrize("option", with_long(OPTIONS, "sharded, zero3"))
def test_every_position_of_merged_traces_has_the_bytes_that_a_run_allocates(option: str) -> None:
    torch.manual_seed(0)
    with fake_rank(1, 2), mock.patch.object(transform, "RECENT", 8):
        counted = Counted(**OPTIONS[option])

        def check(count: Count) -> None:
            assert count.predicted >= count.counted and not count.wrong, count

        one, others, fewer = (counted.compile(way) for way in ("1", "023", "0"))
        waiting, other_waiting = (counted.compile(way, no_sync=True) for way in ("13", "023"))
        every = [one, others]
        for own in (others, one):
            counted.merge(own, every, every)
            count = counted.count(own)  # the memory of buckets that are kept is there only after others have run, too
        check(count)
        counted.merge(waiting, [waiting, other_waiting], [waiting, other_waiting])
        check(counted.count(one, waiting))
        # No program reduces block 3, of which the micro-batch has left gradients, nor what it has reduced for others.
        names = ("blocks.2", "blocks.3") if "sharded" in option else ("blocks.3",)
        left = [bucket for bucket in counted.ours.sharded.buckets if bucket.spec.name in names]
        counted.merge(one, [one, fewer], [one, fewer], left)
        check(counted.count(one, waiting))
        # No rank needs the blocks 2 and 3, so less is allocated.
        counted.merge(one, every, [one, fewer])
        count = counted.count(one)
        assert count.predicted >= count.counted and count.wrong, count
        assert all(found <= predicted for predicted, found, _ in count.wrong), count
