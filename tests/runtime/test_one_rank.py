"""A bucket of which one rank has everything: its unsharded parameters are views of its shard."""

from __future__ import annotations

from typing import Any

import thunder_fsdp_sched as tfs

import pytest
import torch
from internals import RowDTensor
from models import Stack
from ranks import on_ranks
from recorded import Recorded
from scenario import Run
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

VIEWS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"sharding_strategy": "zero2"},
    "released": {"sharding_strategy": tfs.Sharding("zero2", release=True)},
    "one bucket a parameter": {"bucketing_strategy": "none"},
}
COPIES: dict[str, dict[str, Any]] = {
    "cast": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "encoded": {"comm_policy": tfs.CommPolicy(gather="int8")},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "another transport": {"transport": "coalesced"},
}


def _step(run: Run, seed: int) -> Recorded:
    with Recorded() as reads:
        run.forward(seed)
        run.backward()
    run.step()
    return reads


def _gathers(reads: Recorded) -> list[str]:
    return [name for name in reads.collectives if "gather" in name]


def _clear(block: Any, args: Any) -> None:
    block.up.weight.zero_()


@on_ranks(1)
def test_unsharded_parameters_are_views_of_shards() -> None:
    for name, options in VIEWS.items():
        torch.manual_seed(0)
        run = Run(Stack().double(), others=[{"transport": "all_reduce"}], **options)
        used = {p.to_local().data_ptr() for p in run.model.parameters() if isinstance(p, RowDTensor) and p.numel()}
        for seed in range(3):
            reads = _step(run, seed)
            assert not _gathers(reads), (name, reads.collectives)
            assert used <= reads.addresses, name
        run.compare_parameters()


@on_ranks(2)
def test_replicas_of_whole_shards_train_like_the_unsharded_model() -> None:
    run = Run(Stack().double(), ranks=(2, 1))
    for seed in range(2):
        assert not _gathers(_step(run, seed))
    run.compare_parameters()


@on_ranks(1)
def test_what_is_sent_otherwise_is_copied() -> None:
    for name, options in COPIES.items():
        assert _gathers(_step(Run(Stack().double(), oracle=None, **options), 0)), name


@on_ranks(1)
def test_a_change_between_forward_and_backward_is_an_error() -> None:
    for options in VIEWS.values():
        run = Run(Stack().double(), **options)
        run.forward(0)
        with torch.no_grad():
            run.model.get_parameter("last.weight").add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run.backward()


@on_ranks(1)
def test_callers_outside_of_traces_get_copies() -> None:
    run = Run(Stack().double())
    shard = run.model.get_parameter("blocks.0.up.weight").to_local()
    _step(run, 0)
    before = shard.detach().clone()
    with pytest.raises(KeyError), tfs.unsharded(run.model) as module, torch.no_grad():
        module.blocks[0].up.weight.zero_()
        raise KeyError
    with tfs.eager(run.model) as module, torch.no_grad():
        module.blocks[0].register_forward_pre_hook(_clear)
        module.blocks[0](torch.ones(2, module.width, dtype=torch.float64))
    tfs.full_state_dict(run.model)["blocks.0.up.weight"].zero_()
    assert torch.equal(shard, before)
