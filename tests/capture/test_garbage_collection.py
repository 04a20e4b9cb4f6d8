"""The garbage collector runs less often, and threads switch sooner, while a model is traced, and as before afterwards."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator

from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.extras.planning.dry_run import fake_rank
from thunder_fsdp_sched.planning import compile_as_rank

import pytest
import thunder
import torch
from thunder.core.interpreter import make_opaque
from torch import nn

X = torch.ones(2, 4)
SEEN: list[tuple[int, int, int]] = []
INTERVALS: list[float] = []
RARELY = 1_000_000


@make_opaque  # a traced program may change no global
def _note_thresholds() -> None:
    SEEN.append(gc.get_threshold())
    INTERVALS.append(sys.getswitchinterval())


class Noting(nn.Linear):
    """Notes the thresholds when it is traced, and then fails or sets others."""

    def __init__(self, fails: bool = False, *thresholds: int) -> None:
        super().__init__(4, 4)
        self.fails, self.thresholds = fails, thresholds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _note_thresholds()
        if self.thresholds:
            gc.set_threshold(*self.thresholds)
        if self.fails:
            raise ValueError("this model always fails")
        return super().forward(x)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = gc.get_threshold()
    SEEN.clear()
    yield
    gc.enable()
    gc.set_threshold(*before)


def compile_without_a_call(module: nn.Module) -> None:
    compile_as_rank(lambda: (module, (X,)), fsdp(), rank=0, world_size=2)


def call(module: nn.Module) -> None:
    with fake_rank(0, 1):
        thunder.jit(module, transforms=[fsdp()])(X)


@pytest.mark.parametrize("run", [compile_without_a_call, call])
def test_thresholds_are_raised_and_threads_switch_sooner_while_a_model_compiles(run: Callable[..., None]) -> None:
    gc.set_threshold(500, 7, 8)
    interval = sys.getswitchinterval()
    for fails in (False, True):
        with pytest.raises(ValueError, match="always fails") if fails else contextlib.nullcontext():
            run(Noting(fails))
        assert gc.get_threshold() == (500, 7, 8) and min(SEEN[-1][:2]) > 10_000 and SEEN[-1][2] == 8
        assert sys.getswitchinterval() == interval and INTERVALS.pop() < interval / 5


def test_a_collector_that_runs_less_often_or_not_at_all_is_left_alone() -> None:
    for thresholds in ((RARELY, 7, 8), (0, 7, 8)):
        gc.set_threshold(*thresholds)
        compile_without_a_call(Noting())
        assert gc.get_threshold() == thresholds
    gc.set_threshold(500, 7, 8)
    gc.disable()
    compile_without_a_call(Noting())
    assert SEEN == [(RARELY, 7, 8), (0, 7, 8), (500, 7, 8)]


def test_thresholds_that_the_model_sets_stay() -> None:
    compile_without_a_call(Noting(False, 900, 9, 9))
    assert gc.get_threshold() == (900, 9, 9)


@pytest.mark.usefixtures("one_rank")
def test_what_a_collection_calls_is_not_what_forward_calls() -> None:
    class Permuting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (
                len(sorted(itertools.permutations(range(9)))) / 362_880
            )  # more than the threshold

    read: list[float] = []
    gc.callbacks.append(note := lambda phase, _: read.append(time.perf_counter()))
    try:
        gc.collect()
        assert read
        expected = (module := Permuting(4, 4))(X).detach()
        torch.testing.assert_close(thunder.jit(module, transforms=[fsdp()])(X), expected)
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
