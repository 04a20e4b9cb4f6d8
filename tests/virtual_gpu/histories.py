"""Typical uses of a small model with five buckets, which tests of waits and counters run."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from thunder_fsdp_sched import CommPolicy, Debug, fsdp

import pytest
import thunder
import torch
from extending import extended
from internals import InFlight
from models import Stack
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from .clocks import Fault
from .world import Rank, Result, run

TRANSPORTS = ("flat", "coalesced", "all_to_all", "all_reduce", "symmetric_memory")

SETUPS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "encoded": {"comm_policy": CommPolicy("int8", "int8", block=4, error_feedback=True)},
    "interrupted": {},
}
"""Options of the histories from whose logs single waits are removed."""

_INTERRUPTED: dict[str, dict[str, Any]] = {
    "all_to_all": {"at": 7, "sharding_strategy": "zero2"},
    "symmetric_memory": {"at": 10},
}
"""The wait at which an exception ends a step: one at which work is in flight on a side stream, but not in NCCL."""


def setups_of(transport: str) -> list[str]:
    """Return the setups that a transport supports."""
    refused = [("symmetric_memory", "offload"), ("all_reduce", "encoded")]
    setups = [s for s in SETUPS if (transport, s) not in refused]
    return [s for s in setups if s != "interrupted" or transport in _INTERRUPTED]


def make_model(rank: Rank, blocks: int = 3, width: int = 8, extends: bool = False, **options: Any) -> Any:
    """Return a jitted model of ``blocks + 2`` buckets on the rank's device.

    Args:
        extends: whether each backward has an extension.
    """
    with torch.device(rank.device):
        module = Stack(blocks, width=width)
    transform = fsdp(**options)
    return thunder.jit(module, transforms=[extended(transform) if extends else transform])


def run_history(transport: str, setup: str) -> Result:
    """Run the history of a setup."""
    # Only with symmetric memory do ranks access each other's memory. All its gathers are issued at once, because otherwise
    # barriers of earlier buckets would already order what the last bucket's barrier is for.
    symmetric = transport == "symmetric_memory"
    options: dict[str, Any] = {"prefetch": 6} if symmetric else {}
    history: Callable[..., None] = _train
    if setup == "interrupted":
        history, options = interrupt, _INTERRUPTED[transport]
    return run(history, ranks=None if symmetric else [0], transport=transport, **options, **SETUPS[setup])


def _train(rank: Rank, **options: Any) -> None:
    """Train, evaluate, and change parameters after evaluations, which together need every wait and barrier."""
    model = make_model(rank, **options)

    def write(gradients: bool) -> None:
        with rank.phase("optimizer"), torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad if gradients else 0.5)
                param.grad = None

    def evaluate() -> None:
        with rank.phase("evaluation"), torch.no_grad():
            model(torch.randn(4, 8, device=rank.device))

    for _ in range(3):
        with rank.phase("forward"):
            loss = model(torch.randn(4, 8, device=rank.device)).sum()
        with rank.phase("backward"):
            loss.backward()
        write(gradients=True)
    for _ in range(2):
        evaluate()
        write(gradients=False)
    if "offload_policy" not in options:
        return
    with rank.phase("written by the device"):
        for param in model.parameters():
            rows = param.to_local().detach()
            rows.copy_(torch.ones(rows.shape, device=rank.device), non_blocking=True)
    evaluate()
    with model.no_sync(), rank.phase("accumulation"):
        model(torch.randn(4, 8, device=rank.device)).sum().backward()
    with rank.phase("optimizer"):
        for param in model.parameters():
            param.data.sub_(0.5)


class _Interrupted(Exception):
    pass


def interrupt(rank: Rank, at: int, wait: tuple[Any, str] = (InFlight, "wait"), **options: Any) -> None:
    """Interrupt a step at one of its waits, drop everything, and allocate memory again.

    Args:
        wait: the class and the name of the method that waits.
    """
    model = make_model(rank, width=32, debug=Debug(audit=False), **options)
    x = torch.ones(4, 32, device=rank.device)
    with rank.phase("step"):
        model(x).sum().backward()
    real, waits = getattr(*wait), itertools.count(1)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(waits) == at:
            raise _Interrupted
        return real(*args, **kwargs)

    with rank.phase("interrupted"):
        with mock.patch.object(*wait, interrupted), pytest.raises(_Interrupted):
            model(x).sum().backward()
        del model
        gc.collect()
        for _ in range(3):
            torch.zeros(1 << 16, device=rank.device)


def faults_after_interruption(result: Result) -> list[Fault]:
    """Return the faults, but for collectives that are never waited for: NCCL's watchdog keeps their tensors alive."""
    return [fault for fault in result.faults if "unordered with collective" not in fault.text]


def take_three_steps(rank: Rank, precision: str, **options: Any) -> None:
    """Take three steps of gradient descent, with phases ``forward 0``, ``backward 0``, ``forward 1`` and so on."""
    model = make_model(rank, **options)
    for step in range(3):
        autocast: AbstractContextManager[Any] = nullcontext()
        if precision == "autocast":
            autocast = torch.autocast("cuda", torch.bfloat16)
        with rank.phase(f"forward {step}"), autocast:
            loss = model(torch.randn(4, 8, device=rank.device)).float().sum()
        with rank.phase(f"backward {step}"):
            loss.backward()
        with rank.phase("optimizer"), torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad)
                param.grad = None
