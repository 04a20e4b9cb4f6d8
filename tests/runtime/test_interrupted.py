"""After an exception at any point of forward or backward, later steps are correct, whatever was in flight."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from thunder_fsdp_sched import discard_unreduced, fsdp
from thunder_fsdp_sched.extras import no_sync as no_sync_ops
from thunder_fsdp_sched.runtime.bucket_aliases import alias_in_dtype
from thunder_fsdp_sched.transports import find_transport
from thunder_fsdp_sched.transports.base import issue_each

import pytest
import thunder
import torch
from beside import Beside
from coded import coded
from internals import Arena, Bucket, ops, slot_bytes
from models import Stack
from ranks import on_ranks
from scenario import Run


class _Injected(Exception):
    """The exception that :class:`_FaultInjector` raises."""


class _FaultInjector:
    """Raises before or after a chosen call at run time. While ``delays_rank_1`` is set, rank 1 is late for each collective.

    Compiled traces hold the run-time functions themselves, so this wraps the transports and the first calls that the
    run-time functions make.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.calls_until_failure, self.calls, self.delays_rank_1 = rank, -1, 0, False

    def before_or_after_call(self) -> None:
        self.calls += 1
        if self.calls_until_failure == 0:
            self.calls_until_failure = -1
            raise _Injected
        self.calls_until_failure -= self.calls_until_failure > 0

    @contextlib.contextmanager
    def installed(self, transport: str) -> Iterator[None]:
        def around(owner: Any, name: str, before: bool = True, after: bool = True) -> Any:
            call = getattr(owner, name)

            def ticking(*args: Any, **kwargs: Any) -> Any:
                if before:
                    self.before_or_after_call()
                if owner is find_transport(transport) and self.delays_rank_1 and self.rank == 1:
                    time.sleep(0.002)
                result = call(*args, **kwargs)
                if after:
                    self.before_or_after_call()
                return result

            return mock.patch.object(owner, name, ticking)

        with contextlib.ExitStack() as stack:
            for name in ("all_gather", "reduce_scatter"):
                # Not after the call: between a transport's return and Arena.register only an interrupt could raise.
                stack.enter_context(around(find_transport(transport), name, after=False))
            stack.enter_context(around(Arena, "register", before=False))
            for owner, names in (
                (Arena, ("begin_use", "begin_write", "finish")),
                (no_sync_ops, ("add_grads",)),
                (Bucket, ("sharded_grads", "is_resident")),
                (torch, ("tanh",)),
            ):
                for name in names:
                    stack.enter_context(around(owner, name))
            yield

    def count(self, run: Callable[[], Any]) -> int:
        self.calls = 0
        run()
        return self.calls

    def fail(self, at: int, run: Callable[[], Any]) -> bool:
        """Raise at call number ``at`` of ``run``. Return whether ``run`` made that many calls."""
        self.calls_until_failure = at
        try:
            run()
        except _Injected:
            return True
        finally:
            self.calls_until_failure = -1
        return False


@on_ranks(2)
def test_earlier_losses_and_later_steps_are_correct_after_an_exception_at_every_second_call() -> None:
    run = Run(Stack(2).double(), transport="flat")
    injector = _FaultInjector(run.rank)
    x, other = run.inputs(0)[0], run.inputs(1)[0]
    with injector.installed("flat"):
        run.train(steps=1)
        forward_calls = injector.count(lambda: run.model(x))
        backward_calls = injector.count(run.model(x).sum().backward)
        for p in run.model.parameters():
            p.grad = None
        assert forward_calls > 15 and backward_calls > 25, (forward_calls, backward_calls)
        injector.delays_rank_1 = True
        for at in range(1, forward_calls, 2):
            run.forward(2)
            assert injector.fail(at, lambda: run.model(other))
            assert injector.fail(at // 3, lambda: run.model(x))  # while collectives of the first are in flight
            run.backward()
            run.step()
        for at in range(1, backward_calls, 2):
            run.forward(3)
            run.forward(4)
            assert injector.fail(at, run.pending.pop().losses[0].backward)
            run.backward()
            run.step()
        injector.delays_rank_1 = False
        run.train(steps=1)


@on_ranks(2)
def test_unreduced_gradients_survive_a_failed_backward_or_must_be_discarded(rank: int) -> None:
    run = Run(Stack(1).double(), transport="flat")
    injector = _FaultInjector(rank)
    with injector.installed("flat"):
        run.train(steps=1)

        # Accumulate gradients, with a second backward that fails at each of its calls.
        for synced in (True, False):
            for at in itertools.count():
                run.micro_batch(5)
                with contextlib.nullcontext() if synced else run.model.no_sync():
                    failed = injector.fail(at, run.model(*run.inputs(6)).square().sum().backward)
                if not failed:
                    discard_unreduced(run.model)
                    run.model.zero_grad()
                    run.unsharded.discard()
                    break
                if any(bucket.accumulation.is_running for bucket in run.transform.sharded.buckets):
                    with pytest.raises(RuntimeError, check=coded("gradient.sum-of-partial-backward")):
                        run.model(*run.inputs(6)).sum().backward()
                    discard_unreduced(run.model)
                    run.unsharded.discard()
                    run.micro_batch(5)
                assert all(p.grad is None for p in run.model.parameters())
                run.micro_batch(7, no_sync=False)  # no accumulated gradient may be lost or counted twice
                run.step()
            assert at > 10
        # Nothing was accumulated before the failed backward, so the gradients that it added are dropped silently.
        with run.model.no_sync():
            loss = run.model(*run.inputs(6)).square().sum()
            assert injector.fail(at - 1, loss.backward)
        run.micro_batch(8)
        run.micro_batch(9, no_sync=False)
        run.step()


@on_ranks(2)
def test_memory_of_an_interrupted_collective_is_never_reused() -> None:
    transform = fsdp(bucketing_strategy="layer", transport="flat")
    thunder.jit(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), transforms=[transform])
    first, second = transform.sharded.buckets
    nbytes = slot_bytes(first.spec, torch.float32)
    slot, overlapping, apart = (
        first.arena.slot(*offset_and_size) for offset_and_size in ((0, nbytes), (0, 2 * nbytes), (8 * nbytes, nbytes))
    )
    with (
        mock.patch.object(find_transport("flat"), "all_gather", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        ops.all_gather(first, slot, *first.params)
    for lost in (slot, overlapping):
        with pytest.raises(RuntimeError, check=coded("step.collective-failed", "'0'", "interrupted")):
            ops.all_gather(second, lost, *second.params)
    ops.wait_params(second, ops.all_gather(second, apart, *second.params))

    # A bucket alias has all attributes of the bucket.
    alias = alias_in_dtype(first, torch.bfloat16)
    assert (
        vars(alias).keys() == vars(first).keys() and alias.shard is first.shard and alias.params[0] is first.params[0]
    )


class _FailingWork:
    waited = 0

    def wait(self) -> None:
        self.waited += 1
        raise RuntimeError("failed, too")


def test_a_transport_that_fails_waits_for_what_it_has_issued() -> None:
    works = [_FailingWork(), _FailingWork()]

    def fail() -> _FailingWork:
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        issue_each([lambda: works[0], lambda: works[1], fail])
    assert [work.waited for work in works] == [1, 1]
    assert issue_each([lambda: works[0]]) == works[:1] and works[0].waited == 1


#
# Backward uses what its own forward has left in slots, and nothing else that was gathered there
#


def _layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(layer for _ in range(3) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh()))
    ).double()


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@on_ranks()
def test_a_forward_that_a_hook_calls_in_backward_leaves_nothing_for_it(strategy: str) -> None:
    both, x = Beside(_layers(), sharding_strategy=strategy, bucketing_strategy="layer"), torch.ones(4, 8).double()
    model = both.model

    def evaluate(grad: torch.Tensor) -> None:
        with torch.no_grad():
            for factor in (2, 0.5):  # an evaluation with other parameters
                for param in model.parameters():
                    param.data.mul_(factor)
                if factor == 2:
                    model(x)

    both.module(x).square().sum().backward()
    for _ in range(2):
        model.zero_grad()
        output = model(x)
        output.register_hook(evaluate)
        output.square().sum().backward()
        both.compare_gradients()
        assert both.transform.sharded.control.issue_counts.surplus_issues == 0
