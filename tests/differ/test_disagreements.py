"""Ranks that do different kinds of things all raise an error at once, and can go on with the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import ScheduleDisagreement
from thunder_fsdp_sched.extras.ranks_differ import start

import pytest
import torch
import torch.distributed as dist
from coded import coded, says
from differing import Blocks, DifferingRun
from internals import ops
from ranks import on_ranks
from scenario import loss_of

Do = Callable[[DifferingRun], Any]


def _call(way: str | None = "0", *, training: bool = True, no_sync: bool = False, grad: bool = True) -> Do:
    """Return a function that runs forward in a mode."""

    def call(run: DifferingRun) -> torch.Tensor:
        run.model.train(training)
        with torch.set_grad_enabled(grad), run.model.no_sync() if no_sync else nullcontext():
            return tfs.without_batch(run.model) if way is None else loss_of(run.model(*run.inputs(7), way))

    return call


def _two_forwards(run: DifferingRun) -> None:
    _call()(run)
    _call()(run)


def _step_of(*names: str) -> Do:
    """Return a function that steps some parameters before a forward, as in a loop that trains two parts in turn."""

    def step(run: DifferingRun) -> None:
        torch.optim.SGD([run.model.get_parameter(name) for name in names], lr=0.0).step()
        _call()(run)

    return step


def _some_gradients(run: DifferingRun) -> None:
    _call()(run).backward(inputs=[run.model.last.weight])


def _backward(way: str | None) -> Do:
    return lambda run: _call(way)(run).backward()


def _save(run: DifferingRun) -> None:
    tfs.full_state_dict(run.model)


def _next_batch(run: DifferingRun) -> None:
    next(tfs.batches(run.model, [0]))


def _differ(*names: str, code: str = "actions-differ") -> coded:
    return coded(f"ranks.{code}", *names)


NO_BATCH = "0: the forward without a batch (gradients enabled, training)"
NO_BATCH_EITHER = "1: the forward without a batch (gradients enabled, evaluating)"
LAST = "last.weight", "last.bias"
PARTIAL = _differ("on rank 0, backward was called for some gradients only", code="ranks-disagree")

DIFFERENT: dict[str, tuple[Do, Do, coded | says | None]] = {
    "evaluation": (_call(), _call(training=False), _differ("training)", "evaluating)")),
    "evaluation without a batch": (_call(None), _call(training=False), _differ(NO_BATCH)),
    "evaluation without any batch": (_call(None), _call(None, training=False), _differ(NO_BATCH, NO_BATCH_EITHER)),
    "no gradients": (_call(), _call(grad=False), _differ("(gradients enabled", "(no gradients")),
    "no_sync": (_call(), _call(no_sync=True), _differ("no_sync)")),
    "no_sync without a batch": (_call(None), _call(no_sync=True), _differ("no_sync)")),
    "backward": (_backward("0"), _two_forwards, _differ("0: the backward", "1: the forward")),
    "a save": (_call(), _save, _differ("0: the forward", "1: the whole state dict")),
    "a save without a batch": (_call(None), _save, _differ("0: the forward without a batch")),
    "another model": (
        _call(),
        lambda run: _call()(run.other),
        says(r"0: .* of module (\d+) .*\n.*1: .* of module (?!\1)"),
    ),
    "a loop": (_call(), _next_batch, _differ("0: the forward", "1: the next step of batches")),
    "another optimizer": (_step_of("first.weight"), _step_of(*LAST), _differ("of first.weight", "of last.weight")),
    "the same in turn": (_step_of(*LAST), _step_of("first.weight"), None),
    "some gradients": (_some_gradients, _backward("1"), PARTIAL),
    "some gradients alone": (_some_gradients, _backward(None), PARTIAL),
    "some gradients again": (_some_gradients, _backward("1"), PARTIAL),
}


@on_ranks()
def test_ranks_that_do_different_kinds_of_things_raise_at_once(rank: int) -> None:
    run = DifferingRun()
    run.other = DifferingRun(Blocks(1).double())
    for case, (first, second, expected) in DIFFERENT.items():
        if expected:
            with pytest.raises(ScheduleDisagreement, check=expected) as caught:
                (first, second)[rank](run)
            assert "did not come" not in str(caught.value), case
        else:
            (first, second)[rank](run)
        run.forget()
        run.at = f"after {case}"
        if case != "another optimizer":
            run.train(1, ("0", "1"))


@on_ranks()
def test_programs_that_cannot_be_merged(rank: int) -> None:
    run = DifferingRun()
    run.train(1, ("0", "0"))
    # A merged trace whose construction fails on one rank.
    failing = mock.patch.object(start, "build", side_effect=ValueError("no memory"))
    with failing if rank else nullcontext(), pytest.raises((ValueError, ScheduleDisagreement), match="no memory"):
        run.forward(1, ("1", "01"))
    run.forget()
    run.train(1, ("1", "01"), first=2)
    # Operators that are not of fsdp(...) communicate: nobody knows what the other ranks do there.
    read = start.program_of

    def communicating(*args: Any) -> Any:
        program, groups = read(*args)
        return program._replace(communicates=True), groups

    with mock.patch.object(start, "program_of", communicating) if rank else nullcontext():
        foreign = _differ("rank 1, operators that are not of fsdp(...) communicate", code="ranks-disagree")
        with pytest.raises(ScheduleDisagreement, check=foreign):
            run.forward(3, ("01", "10"))
    run.forget()
    run.train(1, ("0", "1"), first=4)


@on_ranks()
def test_an_error_in_a_forward_is_one_on_all_ranks(rank: int) -> None:
    run = DifferingRun()
    run.train(1, ("0", "1"))
    with pytest.raises(ScheduleDisagreement if rank else IndexError, match="out of range"):
        run.model(*run.inputs(1), "012"[: 3 - rank])
    run.train(1, ("0", "1"), first=2)


def _failing(rank: int) -> Iterator[int]:
    yield 0
    if rank == 1:
        raise OSError("disk")
    yield 1


class _Unreadable(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise OSError("no such file")


_UNUSABLE: dict[Any, str] = {
    _Unreadable(): "no such file",
    torch.utils.data.DataLoader(_Unreadable()): "no such file",
    None: "'NoneType' object is not iterable",
    itertools.cycle([0]): "itertools.cycle",
    itertools.count(): r"count\(0\)",
}


@on_ranks()
def test_loops_over_batches(rank: int) -> None:
    run = DifferingRun()
    numbers = list(tfs.batches(run.model, [0, 1] if rank else []))
    assert numbers == ([0, 1] if rank else [None, None]) and list(tfs.batches(run.model, [])) == []
    for step, number in enumerate(tfs.batches(run.model, range(1 + 3 * rank))):
        assert number == (step if rank or step < 1 else None)
        run.train(1, ("0" if step < 1 else None, "1"), first=step)
        if step == 1:  # all leave the loop in the same step
            break
    with pytest.raises(OSError if rank else ScheduleDisagreement, match="disk"):
        for number in tfs.batches(run.model, _failing(rank)):
            assert number == 0
    code = "batches.batch-is-none" if rank else "ranks.actions-differ"
    with pytest.raises(ValueError if rank else ScheduleDisagreement, check=coded(code)):
        list(tfs.batches(run.model, [0, None] if rank else [0, 1]))
    for loader, text in _UNUSABLE.items():
        with pytest.raises(Exception, match=text):
            next(tfs.batches(run.model, loader if rank else [0]))
    with pytest.raises(ScheduleDisagreement, check=_differ("the next step of batches")):  # one leaves it earlier
        for number in tfs.batches(run.model, range(3)):
            run.forward(5, ("0", "0"), grad=False)
            if rank and number == 1:
                break
        run.forward(5, ("0", "0"), grad=False)
    run.train(1, ("0", "1"), first=6)


def _failing_at(number: int) -> Any:
    """Return a context in which the collective of this number is not issued, because of an exception."""
    numbers, issue = itertools.count(), ops.issue

    def issue_or_fail(*args: Any) -> Any:
        if next(numbers) == number:
            raise ArithmeticError("on demand")
        return issue(*args)

    return mock.patch.object(ops, "issue", issue_or_fail)


@pytest.mark.parametrize(("ways", "strategy"), [(("0", "1"), "zero2"), (("01", "01"), "zero3")])
@on_ranks()
def test_ranks_that_an_exception_stopped_at_different_collectives_continue_after_discarding(
    rank: int, strategy: str, ways: tuple[str, str]
) -> None:
    run = DifferingRun(sharding_strategy=strategy, ranks=dist.new_group(timeout=timedelta(seconds=60)))
    run.train(1, ways)
    for number in (0, 1):
        run.forward(1, ways)
        with _failing_at(number + rank), pytest.raises(ArithmeticError, match="on demand"):
            run.pending[-1].losses[0].backward()
        if number:  # before they discard, they would mix up their collectives
            with pytest.raises(ScheduleDisagreement, check=_differ("after an exception")):
                run.model(*run.inputs(1), ways[rank])
        run.model.zero_grad()
        tfs.discard_unreduced(run.model)
        run.forget()
        run.train(1, ways, first=2)
