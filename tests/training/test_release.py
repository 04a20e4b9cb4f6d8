"""``release``: the memory of slots is freed, and nothing changes in the numbers."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from unittest import mock

from thunder_fsdp_sched import Sharding

import pytest
import torch
from coded import coded
from extending import extended
from internals import ops
from models import Stack, compile_model
from scenario import Run, Scenario, do, each


def allocated(run: Run) -> set[str]:
    """Return the slots of the compiled traces whose memory is allocated."""
    slots = {
        arg
        for compiled in run.transform.compiled
        for trace in (compiled.forward, compiled.backward)
        if trace is not None
        for bsym in trace.bound_symbols
        if bsym.sym.name in ("fsdp_all_gather", "fsdp_reduce_scatter")
        for arg in bsym.args[1:2]
    }
    return {str(slot) for slot in slots if slot.arena._memory is not None}


class _Failure(Exception):
    pass


def _gathers_again(run: Run) -> bool:
    """Return whether backward gathers again: ZeRO-3."""
    return any(bucket.options.sharding_strategy == "zero3" for bucket in run.transform.plan)


def _check_nothing_is_allocated(run: Run) -> None:
    assert not allocated(run)


def _evaluate_between_forward_and_backward(run: Run) -> None:
    is_kept = not _gathers_again(run)
    run.forward(2)
    assert allocated(run)
    run.forward(3, grad=False)
    assert bool(allocated(run)) is is_kept
    run.backward()
    run.step()


def _run_two_forwards(run: Run) -> None:
    run.forward(4)
    run.forward(5)
    run.backward()
    refused = pytest.raises(RuntimeError, check=coded("step.memory-released-before-backward"))
    with contextlib.nullcontext() if _gathers_again(run) else refused:
        run.backward()
    run.step()


def _fail_in_backward(run: Run) -> None:
    calls = itertools.count(1)
    real = ops.issue

    def fail_once(*args: Any) -> Any:
        if next(calls) == 4:
            raise _Failure
        return real(*args)

    run.forward(6)
    with mock.patch.object(ops, "issue", fail_once), pytest.raises(_Failure):
        run.backward()
    run.model.zero_grad()


def _check_no_extension_is_allocated(run: Run) -> None:
    assert not any(slot.startswith("more_") for slot in allocated(run))


def _check_extension(run: Run) -> None:
    used = {str(s) for c in run.transform.compiled for b in c.backward.bound_symbols for s in b.args[1:2]}
    assert any(slot.startswith("more_slot_") for slot in used)


def _stack() -> torch.nn.Module:
    return Stack(2).double()


FREED = [
    *(do.micro_batch(0), _check_nothing_is_allocated, do.micro_batch(1, no_sync=False), do.step()),
    *(_evaluate_between_forward_and_backward, _run_two_forwards, _fail_in_backward),
    *(do.train(2), _check_nothing_is_allocated),
]
EXTENDED = [
    *(do.micro_batch(0, no_sync=False), _check_no_extension_is_allocated, do.step()),
    *(do.micro_batch(10), do.micro_batch(1, no_sync=False), _check_no_extension_is_allocated, do.step()),
    *(do.micro_batch(2, no_sync=False), _check_no_extension_is_allocated, do.step()),
    *(do.forward(4), do.forward(5), do.backward(), do.backward(), do.step()),
    *(_fail_in_backward, do.train(2), _check_extension),
]


SCENARIOS = {
    **{
        f"step, {strategy}": Scenario(_stack, FREED, {"sharding_strategy": Sharding(strategy, release=True)})
        for strategy in ("zero2", "zero3")
    },
    "extension": Scenario(
        _stack,
        [lambda run: extended(run.transform, no_sync=False), *EXTENDED],
        {"transport": "all_to_all"},
        others=[{}],  # without an extension
    ),
}


@each(SCENARIOS)
def test_training_gives_the_same_numbers_and_frees_memory(name: str) -> None:
    SCENARIOS[name].run()


#
# In the trace
#


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_predicted_memory_shows_that_buckets_are_freed(strategy: str) -> None:
    never, step = (compile_model(_stack, sharding_strategy=Sharding(strategy, release=when)) for when in (False, True))
    assert step.memory.peak.nbytes <= never.memory.peak.nbytes
    assert never.memory.bytes_at(len(never.memory.statements) - 1)["unsharded buckets"] > 0
    assert step.memory.bytes_at(len(step.memory.statements) - 1)["unsharded buckets"] == 0
