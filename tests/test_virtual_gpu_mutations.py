"""Every wait, barrier and reference that a transport needs is missed by the virtual GPU if it is taken away.

A site of waits whose removal is not flagged is listed here with the reason: others stand in for it, and without all of
them together there is a fault.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from hypothesis import settings
from models import Stack
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from virtual_gpu import guard
from virtual_gpu.clocks import kinds
from virtual_gpu.mutations import missing_references, missing_waits, without_waits
from virtual_gpu.world import Rank, Result, run

LONG_ONLY = pytest.mark.skipif(settings().max_examples <= 100, reason="the whole matrix: --hypothesis-profile=long")

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

SETUPS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": POLICY},
    "offload": {"offload_policy": CPUOffloadPolicy()},
}

TRANSPORTS = ("flat", "coalesced", "all_to_all", "all_reduce", "staged", "symmetric_memory")

CASES = [
    pytest.param(t, s, marks=[LONG_ONLY] if s == "bf16" else [])
    for t in TRANSPORTS
    for s in SETUPS
    if (t, s) != ("symmetric_memory", "offload")
]

LOADING = {
    # Both order the side stream after the same point of the computation: a load waits before it copies a shard to the
    # device and again before the gather is issued. A copy that reads only host memory needs neither by itself.
    "wait_event: sending.py:sending < buffers.py:gather_into",
    "wait_event: sending.py:sending < buffers.py:shard_to_send",
}

REDUNDANT: dict[tuple[str, str], set[str]] = {
    ("flat", "offload"): {"wait_event: sending.py:sending < buffers.py:gather_into"},
    ("coalesced", "offload"): {"wait_event: sending.py:sending < buffers.py:gather_into"},
    ("all_to_all", "offload"): {"wait_event: sending.py:sending < buffers.py:gather_into"},
    ("all_reduce", "offload"): LOADING,
    # The copy after a gather begins on the side stream, on which the load is already.
    ("staged", "offload"): LOADING | {"wait_event: base.py:behind < staged.py:all_gather"},
}
"""Waits of which one alone may be missing, by transport and setup."""

UNNEEDED = {
    # The side stream, on which the copy was allocated, waits for the gather at once.
    ("staged", "offload"): {"sending.py:shard < buffers.py:shard_to_send"},
}
"""Allocations whose memory may be freed as soon as its last use is issued."""


def histories(rank: Rank, **options: Any) -> None:
    """Train, evaluate, change parameters after an evaluation: what a wait or a barrier is there for."""
    with torch.device(rank.device):
        module = Stack(3, width=8)
    model = thunder.jit(module, transforms=[fsdp(**options)])

    def write(gradients: bool) -> None:
        with rank.phase("optimizer"), torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad if gradients else 0.5)
                param.grad = None

    for _ in range(3):
        with rank.phase("forward"):
            loss = model(torch.randn(4, 8, device=rank.device)).sum()
        with rank.phase("backward"):
            loss.backward()
        write(gradients=True)
    for _ in range(2):
        with rank.phase("evaluation"), torch.no_grad():
            model(torch.randn(4, 8, device=rank.device))
        if "offload_policy" not in options:  # the host would write a shard that is still being copied
            write(gradients=False)


@cache
def ran(transport: str, setup: str) -> Result:
    # Only symmetric memory has other ranks touch this one's memory. There all gathers are issued at once: else the barriers
    # of the earlier buckets of a forward order what the last one needs a barrier for.
    symmetric = transport == "symmetric_memory"
    options: dict[str, Any] = {"prefetch": 6} if symmetric else {}
    return run(histories, ranks=None if symmetric else [0], transport=transport, **options, **SETUPS[setup])


@pytest.mark.parametrize(("transport", "setup"), CASES)
def test_every_missing_wait_is_flagged(transport: str, setup: str) -> None:
    result = ran(transport, setup)
    result.assert_clean()
    found = missing_waits(result.logs)
    unflagged = {site for site, faults in found.items() if not faults}
    assert unflagged == REDUNDANT.get((transport, setup), set())
    assert len(found) - len(unflagged) >= 3
    if unflagged:
        assert without_waits(result.logs, unflagged | LOADING), "they do not stand in for each other"


@pytest.mark.parametrize(("transport", "setup"), [(t, "offload") for t in TRANSPORTS[:-1]])
def test_every_missing_reference_to_a_loaded_shard_is_flagged(transport: str, setup: str) -> None:
    found = missing_references(ran(transport, setup).logs)
    assert {site for site, faults in found.items() if not faults} == UNNEEDED.get((transport, setup), set())
    for faults in found.values():
        assert kinds(faults) <= {"reuse"}
