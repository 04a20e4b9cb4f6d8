"""Functions of torch that work on DTensors, on sharded models, against FSDP2 on the same ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from models import Stack
from ranks import on_ranks
from scenario import Run, fsdp2, sgd, whole_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

TRANSPORTS = ["coalesced", "flat"]
"""With ``coalesced``, rows are cut like those of FSDP2, so bits are equal. Norms of other rows round differently."""


def _beside_fsdp2(transport: str, optimizer: Any = sgd, seed: int = 0) -> Run:
    """Return a model that this package shards beside one that FSDP2 shards."""
    torch.manual_seed(seed)
    tolerance = 0 if transport == "coalesced" else 1e-5
    model = Stack(2, width=8)
    return Run(model, others=[fsdp2], others_tolerance=tolerance, oracle=None, optimizer=optimizer, transport=transport)


def _compare(run: Run) -> None:
    run.compare_gradients()
    run.compare_parameters()


def _check(run: Run, ours: Any, theirs: Any, what: str) -> None:
    ours, theirs = map(whole_of, (ours, theirs))
    if isinstance(ours, torch.Tensor):
        run.close(ours, theirs, what, tolerance=run.others_tolerance)
    else:
        assert ours == theirs, what


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_clipping_gives_what_fsdp2_gives(world_size: int, transport: str) -> None:
    run = _beside_fsdp2(transport)
    for norm_type in (1.0, 2.0, math.inf):
        run.gradients(1)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.3, norm_type) for m in run.models]
        _check(run, *norms, f"norm of order {norm_type}")
        _compare(run)
    run.gradients(2)
    for model in run.models:
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    _compare(run)


@on_ranks(2)
def test_parameters_and_buffers_are_averaged() -> None:
    """EMA and SWA of a module with batch norms, beside the unsharded module."""
    for model in _beside_fsdp2("flat").models:
        with pytest.raises((TypeError, AssertionError), match=r"copied|deepcopy"):
            AveragedModel(model)
    # A copy from before sharding is sharded like the model.
    for average_fn in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, {"avg_fn": lambda a, b, n: a * 0.5 + b * 0.5}):
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
        averages = [AveragedModel(copy.deepcopy(whole), use_buffers=True, **average_fn) for _ in range(2)]
        model = thunder.jit(copy.deepcopy(whole), transforms=[fsdp()])
        averages[0].module = thunder.jit(averages[0].module, transforms=[fsdp()])
        for step in range(3):
            for average, net in zip(averages, (model, whole), strict=True):
                with torch.no_grad():
                    for tensor in (*net.parameters(), *net.buffers()):
                        tensor.copy_(tensor.mul(0.7).add(step + 1.0) if tensor.is_floating_point() else tensor + 1)
                average.update_parameters(net)
        ours, theirs = (average.state_dict() for average in averages)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(whole_of(ours[name]), value, msg=name)
