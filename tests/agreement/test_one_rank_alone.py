"""What one rank alone runs on another thread, loses or discards costs all ranks a gather or raises on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched.extras import no_sync
from thunder_fsdp_sched.runtime.memory import Arena

import pytest
import torch
from coded import coded
from internals import ops
from models import Stack
from ranks import on_ranks
from scenario import Run
from thunder.core.transform_common import Transform
from torch import nn


@contextlib.contextmanager
def collectives() -> Iterator[list[str]]:
    """Collect the names of the buckets of the collectives that this rank issues."""
    issued: list[str] = []
    issue = ops.issue_named

    def spy(what: str, bucket: str, *args: Any) -> Any:
        issued.append(f"{what} {bucket}")
        return issue(what, bucket, *args)

    with mock.patch.object(ops, "issue_named", spy):
        yield issued


def on_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


@contextlib.contextmanager
def _failing(fails: bool, patch: Any) -> Iterator[None]:
    """Expect an ``IndexError`` with this patch, on the ranks that fail."""
    with contextlib.ExitStack() as stack:
        if fails:
            stack.enter_context(patch)
            stack.enter_context(pytest.raises(IndexError))
        yield


def _step(run: Run) -> list[str]:
    with collectives() as issued:
        run.train(1)
    return issued


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])  # buckets are kept, or left by forward
@on_ranks()
def test_a_forward_on_another_thread_of_one_rank_changes_no_collective(rank: int, strategy: str) -> None:
    run = Run(Stack(3, 8).double(), sharding_strategy=strategy)
    _step(run)
    usual = _step(run)
    for one in (0, 1):
        evaluate = lambda: run.forward(grad=False)  # noqa: E731
        on_another_thread(evaluate) if rank == one else evaluate()
        assert _step(run) == usual
        run.forward()
        on_another_thread(run.backward) if rank == one else run.backward()
        assert _step(run) == usual


@on_ranks()
def test_discarding_unreduced_gradients_on_one_rank_raises_on_all_and_discards_nothing(rank: int) -> None:
    run = Run(Stack(2, 8).double(), sharding_strategy="zero2")
    run.micro_batch(0)
    for _ in range(2 - rank):  # rank 1 tries twice
        expected = coded("ranks.actions-differ", "rank 0: the forward", "rank 1: discard_unreduced")
        with pytest.raises(tfs.ScheduleDisagreement, check=expected):
            tfs.discard_unreduced(run.model) if rank else run.forward(1, no_sync=True)
    run.micro_batch(1, no_sync=False)
    run.step()
    run.micro_batch(2)
    tfs.discard_unreduced(run.model)
    run.unsharded.discard()
    run.train(1)


@on_ranks()
def test_ranks_catch_up_with_one_that_has_issued_all_collectives_of_its_trace(rank: int) -> None:
    run = Run(Stack(2, 8).double(), prefetch=1)
    run.train(1)
    last, issue, finish = run.transform.sharded.buckets[-1], ops.issue, Arena.finish

    def fail_at_last(function: Callable[..., Any], bucket: Any, *args: Any) -> Any:
        if bucket is last:
            raise ArithmeticError("on demand")
        return function(*args)

    issuing = mock.patch.object(ops, "issue", lambda *args: fail_at_last(issue, args[0], *args))
    waiting = mock.patch.object(Arena, "finish", lambda *args: fail_at_last(finish, args[1].bucket, *args))
    with issuing if rank else waiting, pytest.raises(ArithmeticError, match="on demand"):
        run.model(*run.inputs(1))
    assert (run.transform.sharded.control.issue_counts.surplus_issues == 0) == (rank == 0)
    tfs.discard_unreduced(run.model)
    run.train(1, first=1)


@on_ranks()
def test_ranks_discard_after_one_has_failed_before_backward_and_one_in_it(rank: int) -> None:
    run = Run(Stack(2, 8).double())
    run.train(1)
    loss = run.model(*run.inputs(1)).sum()
    if rank == 1:  # it has announced its backward, and not waited for the other yet
        with mock.patch.object(Arena, "begin_write", side_effect=ArithmeticError), pytest.raises(ArithmeticError):
            loss.backward()
        assert run.transform.sharded.control.channel.pending is not None
    tfs.discard_unreduced(run.model)
    run.train(1, first=1)


@on_ranks()
def test_a_backward_that_only_one_rank_refuses_raises_on_all(rank: int) -> None:
    run = Run(Stack(2, 8).double(), sharding_strategy=tfs.Sharding("zero2", release=True))
    run.train(1)
    run.micro_batch(0)
    run.forward(1, no_sync=True)
    real, calls = no_sync.add_grads, [None]
    fail = mock.patch.object(no_sync, "add_grads", lambda *args: (calls.pop(), real(*args)))
    with _failing(rank == 1, fail):
        run.backward()
    failed = coded("ranks.actions-differ", "rank 1: starting the backward", "which failed: RuntimeError")
    with pytest.raises(RuntimeError, check=coded("gradient.sum-of-partial-backward") if rank else failed):
        run.model(*run.inputs(1)).sum().backward()
    tfs.discard_unreduced(run.model)
    run.unsharded.discard()

    first, second = (run.model(*run.inputs(1)).sum() for _ in range(2))
    fail = mock.patch.object(Arena, "free", side_effect=IndexError)
    with _failing(rank == 1, fail):
        second.backward()
    freed = coded(
        "ranks.actions-differ", "rank 0: the backward", "after the memory of blocks.0, blocks.1, first, last was freed"
    )
    with pytest.raises(tfs.ScheduleDisagreement, check=freed):
        first.backward()
    run.model.zero_grad()
    run.train(1)


@on_ranks()
def test_the_error_of_a_save_that_one_rank_takes_while_a_trace_starts_is_raised_on_all(rank: int) -> None:
    run = Run(Stack(2, 8).double())
    run.train(1)
    control = run.transform.sharded.control
    post = control.channel.post

    def fail() -> None:
        control.failure = None
        raise OSError("disk full")

    def post_and_take(*args: Any) -> None:
        post(*args)
        if rank == 1:  # as `result()` of the save does, on another thread
            control.failure = None

    control.failure = fail
    with mock.patch.object(control.channel, "post", post_and_take), pytest.raises(OSError, match="disk full"):
        run.model(*run.inputs(1))
    run.train(1)


class _Later(Transform):
    """A transform that follows ``fsdp(...)``."""

    def transform_trace_post_optimization(self, computation_trace: Any, **kwargs: Any) -> Any:
        return computation_trace


def _batch(rows: int, width: int = 8) -> torch.Tensor:
    return torch.ones(rows, width, dtype=torch.float64)


def _fails(error: Any, at: str = "begin_compilation") -> Callable[[Run, int], Any]:
    """Return a call that fails in the passes, or in the transform after them."""

    def call(run: Run, rows: int) -> None:
        owner = type(run.transform) if at == "begin_compilation" else run.model._lc_transforms[-1]
        with mock.patch.object(owner, at, side_effect=error):
            run.model(_batch(rows))

    return call


_ERROR = OSError("the same object")


def _raise_because_of_it(*args: Any, **kwargs: Any) -> None:
    raise ValueError("another one") from _ERROR


def _fail_in_check(run: Run, rows: int) -> None:
    hook = run.transform.sharded.module.register_full_backward_pre_hook(lambda *_: None)
    try:
        run.model(_batch(rows))
    finally:
        hook.remove()


def _fail_in_cached_call(run: Run, rows: int) -> None:
    weight = run.transform.sharded.module.last.weight
    run.transform.sharded.module.last.weight = nn.Parameter(weight.detach().clone())
    try:
        run.model(_batch(3))
    finally:
        run.transform.sharded.module.last.weight = weight


ALONE: dict[str, tuple[Callable[[Run, int], Any], str]] = {
    "tracing": (lambda run, rows: run.model(_batch(rows, 9)), "RuntimeError: "),
    "a pass": (_fails(OSError("a pass")), "OSError: a pass"),
    "an error raised again": (_fails(_ERROR), "OSError: the same object"),
    "an error raised again, as a cause": (_fails(_raise_because_of_it), "ValueError: another one"),
    "a later transform": (_fails(OSError("later"), "transform_trace_post_optimization"), "OSError: later"),
    "a check before tracing": (_fail_in_check, "NotImplementedError: "),
    "a check before a cached trace": (_fail_in_cached_call, "RuntimeError: "),
}


@on_ranks()
def test_a_call_that_fails_on_one_rank_before_its_trace_runs_raises_on_all(rank: int) -> None:
    run = Run(Stack(1, 8).double(), after=[_Later()])
    run.train(1)
    for number, (case, (fail, text)) in enumerate(ALONE.items()):
        # The other rank compiles, or has the trace.
        for rows in (10 + number, 3) if number % 2 == 0 else (3,):
            run.at = f"{case}, {rows} rows"
            if rank == 1:
                with pytest.raises(Exception) as caught:
                    fail(run, 10 + number)
                assert not isinstance(caught.value, tfs.ScheduleDisagreement), run.at
                assert f"{type(caught.value).__name__}: {caught.value}".startswith(text), run.at
            else:
                failed = coded("ranks.actions-differ", "rank 1: starting a call of module", f", which failed: {text}")
                with pytest.raises(tfs.ScheduleDisagreement, check=failed):
                    run.model(_batch(rows))
            run.train(1)
    if rank == 0:  # each rank raises its own error
        with pytest.raises(OSError, match="a pass"):
            _fails(OSError("a pass"))(run, 20)
    else:
        with pytest.raises(RuntimeError):
            run.model(_batch(20, 9))
    run.train(1)
