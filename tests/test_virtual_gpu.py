"""Compiled models on a virtual GPU: nothing races, nothing waits for the device, whatever carries the buckets."""

from __future__ import annotations

from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from models import Stack
from virtual_gpu import guard
from virtual_gpu.world import Rank, Result, run

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")

TRANSPORTS = ("flat", "coalesced", "all_to_all", "all_reduce", "staged", "symmetric_memory")


def train(rank: Rank, steps: int = 3, **options: Any) -> None:
    """Take some steps of plain gradient descent."""
    with torch.device(rank.device):
        module = Stack(3, width=8)
    model = thunder.jit(module, transforms=[fsdp(**options)])
    for step in range(steps):
        with rank.phase(f"forward {step}"):
            loss = model(torch.randn(4, 8, device=rank.device)).sum()
        with rank.phase(f"backward {step}"):
            loss.backward()
        with rank.phase("optimizer"), torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad)
                param.grad = None


def assert_never_synchronizes(result: Result) -> None:
    """Fail if a rank's host waited for its device in a step after the first."""
    __tracebackhide__ = True
    for log in result.logs:
        for entry in log.entries:
            later = entry.phase in ("forward 1", "backward 1", "forward 2", "backward 2")
            assert not (later and (entry.blocks or entry.kind == "sync_event")), str(entry)


# Kernels, copies, collectives, barriers, events recorded and waits for events of one forward and one backward of 5 buckets.
COUNTS = {
    "flat": ((16, 0, 5, 0, 10, 10), (33, 0, 7, 0, 14, 14)),
    "coalesced": ((16, 0, 5, 0, 10, 10), (33, 0, 7, 0, 14, 14)),
    "all_to_all": ((16, 0, 5, 0, 10, 10), (43, 0, 7, 0, 24, 24)),
    "all_reduce": ((21, 5, 5, 0, 10, 10), (35, 2, 7, 0, 14, 14)),
    "staged": ((21, 0, 5, 0, 20, 20), (40, 0, 7, 0, 18, 18)),
    "symmetric_memory": ((16, 10, 0, 10, 10, 10), (38, 19, 0, 14, 24, 24)),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_training_has_no_race_and_no_synchronization(transport: str) -> None:
    result = run(train, transport=transport)
    result.assert_clean()
    assert_never_synchronizes(result)
    kinds = ("kernel", "copy", "collective", "barrier", "record", "wait_event")
    counts = tuple(tuple(result.count(phase)[kind] for kind in kinds) for phase in ("forward 2", "backward 2"))
    assert counts == COUNTS[transport]


@pytest.mark.parametrize("transport", ["flat", "staged", "all_to_all", "symmetric_memory"])
def test_training_has_no_race_if_the_current_device_is_another(transport: str) -> None:
    run(train, transport=transport, set_device=False).assert_clean()
