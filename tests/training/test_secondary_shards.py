"""``secondary_ranks``: backward gathers among fewer ranks, and nothing changes in the numbers."""

from __future__ import annotations

from typing import Any

from thunder_fsdp_sched import Sharding, fsdp, testing
from thunder_fsdp_sched.extras.secondary_shards import over_fewer_ranks
from thunder_fsdp_sched.planning import AnalyticCost, compile_as_rank, simulate

import pytest
import torch
from coded import coded
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import Bucket, effects, fsdp_all_gather, make_layout
from models import Stack
from scenario import Run, Scenario, do, each
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def _small() -> nn.Module:
    return Stack(2)


def _gathers(trace: TraceCtx | None) -> list[BoundSymbol]:
    assert trace is not None
    return [bsym for bsym in trace.bound_symbols if bsym.sym is fsdp_all_gather]


def _check_groups(run: Run) -> None:
    """Check that forward gathers among all ranks, and backward among pairs, in its own memory layout."""
    for compiled in run.transform.compiled:
        assert {b.args[0].ranks.group.size for b in _gathers(compiled.forward)} == {4}
        for gather in _gathers(compiled.backward):
            bucket = gather.args[0]
            first = 2 * (run.rank // 2)
            assert bucket.ranks.group.global_ranks == (first, first + 1)
            layout = bucket.spec.layout
            assert gather.kwargs["secondary"].shape == (layout.shard_numel,)
            assert sum(2 * s.shard_numel for s in layout.segments) <= layout.unsharded_numel


def _check_one_module(run: Run) -> None:
    [compiled] = run.transform.compiled
    among = {b.args[0].base.spec.name: b.args[0].ranks.group.size for b in _gathers(compiled.backward)}
    assert among.pop("blocks.1") == 2 and set(among.values()) == {4}
    assert "backward gathers among 2 ranks, from secondary shards: blocks.1" in str(run.transform.plan)


def _change_under_a_live_graph(run: Run) -> None:
    """Change a parameter between forward and backward, which is an error, and change it back."""
    run.forward(5)
    weight = run.model.get_parameter("blocks.1.down.weight")
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run.pending.pop().losses[0].backward()
    run.model.zero_grad()
    with torch.no_grad():
        weight.div_(2)


STEPS = [
    *(do.micro_batch(1, no_sync=False), do.step()),
    *(do.micro_batch(2), do.micro_batch(3, no_sync=False), do.step()),
    *(do.forward(1), do.forward(2)),  # each backward has the secondary shards of its own forward
    *(do.backward(0), do.backward(0), do.step(), _check_groups),
]
KEPT = [
    *(do.forward(3), do.forward(4, grad=False), do.backward(retain=True), do.backward(), do.step()),
    *(_change_under_a_live_graph, do.micro_batch(6, no_sync=False), do.step()),
]


def _of_one_block(name: str, module: nn.Module) -> int | None:
    return 2 if name == "blocks.1" else None


def _scenario(actions: list[Any], options: dict[str, Any]) -> Scenario:
    options = {"sharding_strategy": Sharding(secondary_ranks=2), **options}
    return Scenario(lambda: _small().double(), actions, options, ranks=4)


SCENARIOS = {
    "flat": _scenario(
        [*STEPS, *KEPT], {"bucketing_strategy": "layer", "prefetch": 2, "transport": "flat", "accumulate": "sharded"}
    ),
    "released": _scenario(
        STEPS, {"transport": "all_reduce", "sharding_strategy": Sharding(secondary_ranks=2, release=True)}
    ),
    "one module": _scenario(
        [do.train(2), _check_one_module], {"sharding_strategy": Sharding(secondary_ranks=_of_one_block)}
    ),
}


@each(SCENARIOS)
def test_numbers_are_those_of_gathering_among_all_ranks(name: str) -> None:
    SCENARIOS[name].run()


#
# On one rank of fake ones
#


def _make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = _small().double()
    return model, model.inputs(torch.Generator().manual_seed(0))


def test_hybrid_sharding_divides_each_replica() -> None:
    def transform() -> Any:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards"))
        return fsdp(ranks=mesh, sharding_strategy=Sharding(secondary_ranks=2))

    compiled = compile_as_rank(_make, transform, rank=6, world_size=8).compiled[-1]
    assert {b.args[0].ranks.group.global_ranks for b in _gathers(compiled.backward)} == {(6, 7)}
    assert {b.args[0].ranks.group.global_ranks for b in _gathers(compiled.forward)} == {(4, 5, 6, 7)}


def test_simulated_backward_leaves_the_node_only_to_reduce() -> None:
    cost = AnalyticCost("h100-sxm")  # 8 ranks in a node
    found = {}
    for size in (None, 8):
        [compiled] = testing.compile_on_fake_ranks(_make, 16, sharding_strategy=Sharding(secondary_ranks=size))
        gathers = [b for b in _gathers(compiled.backward) if not effects(b).issues.resident]
        found[size] = [cost.collective_seconds(effects(b).issues) for b in gathers]
        step = simulate(compiled.traces, None, cost)
        assert step.communication_seconds
    assert len(found[8]) == len(found[None]) and all(a < b for a, b in zip(found[8], found[None], strict=True))


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=5),
    st.sampled_from([(4, 2), (6, 2), (6, 3), (8, 4), (8, 2)]),
    st.booleans(),
)
@settings(deadline=None)
def test_fewer_ranks_own_the_same_rows_together(
    shapes: list[tuple[int, ...]], sizes: tuple[int, int], per_param: bool
) -> None:
    many, few = sizes
    layout = make_layout(shapes, many, 4, per_param=per_param)
    coarse = over_fewer_ranks(layout, few)
    each = many // few
    assert coarse.unsharded_numel == layout.unsharded_numel
    assert [p.unsharded_offset for p in coarse.placements] == [p.unsharded_offset for p in layout.placements]
    assert [p.row_starts for p in coarse.placements] == [p.row_starts[::each] for p in layout.placements]
    whole = torch.arange(layout.unsharded_numel)
    ranges = [segment.view(few, -1) for segment in coarse.unsharded_segments(whole)]
    finer = [segment.view(many, -1) for segment in layout.unsharded_segments(whole)]
    assert all(torch.equal(a, b.reshape(few, -1)) for a, b in zip(ranges, finer, strict=True))
    for rank in range(few):
        shard = torch.full((coarse.shard_numel,), -1)
        for own, whole_of in zip(coarse.shard_segments(shard), ranges, strict=True):
            own.copy_(whole_of[rank])
        for placement in coarse.placements:
            rows = placement.row_starts[rank], placement.row_starts[rank + 1]
            if rows[0] < rows[1] and placement.row_numel:
                at = placement.shard_offset(rank)
                assert int(shard[at]) == placement.unsharded_offset + rows[0] * placement.row_numel


#
# Options
#


def test_a_number_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, check=coded("option.secondary-ranks-do-not-divide", "3")):
        testing.compile_on_fake_ranks(_make, 4, sharding_strategy=Sharding(secondary_ranks=3))


def test_as_many_ranks_as_there_are_need_no_secondary_shards() -> None:
    [compiled] = testing.compile_on_fake_ranks(_make, 4, sharding_strategy=Sharding(secondary_ranks=4))
    assert not any(bsym.sym.name == "fsdp_copy_secondary_shard" for bsym in compiled.forward.bound_symbols)
    assert all(isinstance(b.primary, Bucket) and b.secondary_ranks is None for b in compiled.buckets)
