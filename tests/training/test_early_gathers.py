"""Steps begin the first gathers of the next forward: the same bits and collectives on all ranks, or an error on all."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import Sharding
from thunder_fsdp_sched.extras.training import early_gathers

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from internals import ops
from models import Stack
from random_models import BlockSpec, ModelSpec
from ranks import on_ranks
from scenario import Run, everywhere
from torch.distributed.fsdp import MixedPrecisionPolicy
from virtual_gpu import guard
from virtual_gpu.together import run_together
from world import EVALUATION, WINDOW, Action, Mode, World
from world_virtual import run_histories

adamw = partial(torch.optim.AdamW, lr=0.01)
Act = Callable[["_Trained"], object]


class _Trained(Run):
    """A model whose steps gather early, beside one without that, which must have the same bits.

    Attributes:
        issued: the collectives of the first model, since the last call of ``step_of``.
    """

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        super().__init__(Stack(3, width=8).double(), others=[{}], oracle=None, optimizer=adamw, **options)
        tfs.overlap_step(self.model, self.optimizers[0], gather_early=True)
        self.issued: list[str] = []
        self.buckets = self.transform.sharded.buckets

    def step_of(self, number: int, *between: Act) -> list[str]:
        """Run a step, with something between it and the next, and return the collectives: those after "/" in forward."""
        self.issued.clear()
        for optimizer in reversed(self.optimizers):  # the first one last, because the step of another drops its gathers
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for act in between:
            act(self)
        self.issued.append("/")
        self.forward(number)
        issued = self.issued.copy()
        assert len({tuple(one) for one in everywhere(issued)}) == 1, "the ranks issue other collectives"
        self.backward()
        return issued


def watching(issued: list[str], buckets: Any) -> Any:
    """Note the names of buckets that are issued."""
    issue = ops.issue

    def watched(bucket: Any, what: str, *args: Any) -> Any:
        if bucket in buckets:
            issued.append(bucket.spec.name)
        return issue(bucket, what, *args)

    return mock.patch.object(ops, "issue", watched)


def _change(run: _Trained, *, rank: int | None = None, through_data: bool = False) -> None:
    """Change a parameter of the first bucket, on one rank or on all."""
    for model in run.models if rank in (None, run.rank) else ():
        param = model.get_parameter("first.weight")
        with torch.no_grad():
            (param.data if through_data else param).mul_(1.5)


def _change_rows(run: _Trained) -> None:
    for model in run.models if run.rank == 0 else ():
        with torch.no_grad():
            model.get_parameter("first.weight").to_local().mul_(1.5)


def _evaluate(run: _Trained) -> None:
    run.forward(100, grad=False)


def _fail(run: _Trained) -> None:
    for model in run.models:
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 2, dtype=torch.float64))


def _lose(run: _Trained) -> None:
    """Let one rank lose what the step has gathered."""
    for bucket in run.buckets if run.rank == 1 else ():
        bucket.arena.free()
        bucket.private_slot.arena.free()


def _grow(run: _Trained) -> None:
    """Let the shared memory grow, as when a further trace is compiled."""
    arena = run.buckets[0].arena
    arena.slot(arena.nbytes, 512)


def _other_optimizer(run: _Trained) -> None:
    for model in run.models:
        run.model.zero_grad()
        param = model.get_parameter("last.bias")
        param.grad = torch.ones_like(param)
        torch.optim.SGD([param], lr=0.1).step()
        param.grad = None


def _own_collective(run: _Trained) -> None:
    dist.all_reduce(torch.ones(3))


def _whole(run: _Trained) -> None:
    run.compare_parameters()


def _forget(run: _Trained) -> None:
    """Let one rank not know what the next forward will gather first."""
    if run.rank == 1:
        run.buckets[0].early._first = []


FIRST, REST = ["first", "blocks.0"], ["blocks.1", "blocks.2", "last"]

BETWEEN: dict[str, tuple[Sequence[Act], list[str], list[str]]] = {
    # What is between a step and the next forward; what is gathered before that, by the step first, and what forward gathers.
    "nothing": ((), FIRST, REST),
    "collectives of the user": ((_own_collective,), FIRST, REST),
    "state dicts": ((_whole,), [*FIRST, *FIRST, *REST], REST),
    "a failed forward": ((_fail,), FIRST, REST),
    "an evaluation": ((_evaluate,), [*FIRST, *FIRST, *REST], [*FIRST, *REST]),
    "a parameter": ((_change,), FIRST, ["first", *REST]),
    "a parameter, through data": ((partial(_change, through_data=True),), FIRST, ["first", *REST]),
    "a parameter, on one rank": ((partial(_change, rank=1),), FIRST, ["first", *REST]),
    "rows, on one rank": ((_change_rows,), FIRST, ["first", *REST]),
    "lost on one rank": ((_lose,), FIRST, [*FIRST, *REST]),
    "more memory": ((_grow,), FIRST, [*FIRST, *REST]),
    "the step of another optimizer": ((_other_optimizer,), FIRST, [*FIRST, *REST]),
}


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@on_ranks(2)
def test_what_a_step_gathers_is_taken_over_or_gathered_again(strategy: str) -> None:
    run = _Trained(sharding_strategy=strategy)
    with watching(run.issued, run.buckets):
        run.micro_batch(0, no_sync=False)
        for number, (between, (acts, before, in_forward)) in enumerate(BETWEEN.items()):
            run.at = between
            issued = run.step_of(number, *acts)
            if acts == (_grow,) and strategy == "zero2":
                in_forward = REST  # each bucket has memory of its own
            assert issued == [*before, "/", *in_forward], (between, issued)
        _forget(run)
        assert run.step_of(20) == ["/", *FIRST, *REST]
        assert run.step_of(21) == [*FIRST, "/", *REST]
        run.clip()
        assert run.step_of(22) == [*FIRST, "/", *REST]
        run.micro_batch(23)  # a window begins
        run.micro_batch(24, no_sync=False)
        assert run.step_of(25) == [*FIRST, "/", *REST]
        run.compare_parameters()


@on_ranks(2)
def test_a_rank_that_does_not_step_lets_all_ranks_raise() -> None:
    run = _Trained()
    for number in range(2):
        run.step_of(number) if number else run.micro_batch(0, no_sync=False)
    refusal = coded("ranks.actions-differ", "step of an optimizer", "forward")
    with pytest.raises(tfs.ScheduleDisagreement, check=refusal):
        if run.rank == 0:
            run.optimizers[0].step()
        run.model(*run.inputs(5))


@on_ranks(2)
def test_a_rank_that_an_exception_stops_in_its_step_lets_all_ranks_raise() -> None:
    run = _Trained()
    run.micro_batch(0, no_sync=False)
    run.step_of(1)
    if run.rank == 1:
        with mock.patch.object(early_gathers, "start_gather", side_effect=MemoryError), pytest.raises(MemoryError):
            run.optimizers[0].step()
    else:
        run.optimizers[0].step()
    refusal = coded("ranks.actions-differ", "2 collectives fewer than planned")
    with pytest.raises(tfs.ScheduleDisagreement, check=refusal):
        run.model(*run.inputs(5))
    tfs.discard_unreduced(run.model)
    for _ in range(2):
        run.model(*run.inputs(5)).sum().backward()
        run.optimizers[0].step()


def _step_with_closure(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step(lambda: 0.0)


def _step_with_hook(optimizer: torch.optim.Optimizer) -> None:
    hook = optimizer.register_step_post_hook(lambda *_: None)
    optimizer.step()
    hook.remove()


@pytest.mark.parametrize("step", [_step_with_closure, _step_with_hook])
@on_ranks(2)
def test_a_step_that_needs_all_gradients_gathers_at_its_end(step: Callable[[Any], None]) -> None:
    run = _Trained()
    with watching(run.issued, run.buckets):
        run.micro_batch(0, no_sync=False)
        for number, ranks in enumerate([(), (1,), (0, 1)]):
            run.issued.clear()
            for optimizer in reversed(run.optimizers):
                (step if run.rank in ranks else type(optimizer).step)(optimizer)
            assert run.issued == FIRST, (ranks, run.issued)
            for optimizer in run.optimizers:
                optimizer.zero_grad()
            run.forward(number)
            run.backward()
        run.compare_parameters()


@on_ranks(2)
def test_one_optimizer_gathers_for_two_models() -> None:
    torch.manual_seed(0)
    models = [thunder.jit(Stack(2, width=8), transforms=[tfs.fsdp()]) for _ in range(2)]
    optimizer = adamw([param for model in models for param in model.parameters()])
    for model in models:
        tfs.overlap_step(model, optimizer, gather_early=True)
    issued: list[str] = []
    buckets = [bucket for model in models for bucket in model._lc_transforms[-1].sharded.buckets]
    with watching(issued, buckets):
        for _ in range(2):
            sum(model(torch.ones(2, 8)).sum() for model in models).backward()
            issued.clear()
            optimizer.step()
            assert issued == [*FIRST, *FIRST]
            optimizer.zero_grad()


REFUSED: dict[str, dict[str, Any]] = {
    "agree": {"agree": "compile"},
    "ranks_may_differ": {"ranks_may_differ": True},
    "Sharding(release=True)": {"sharding_strategy": Sharding(release=True)},
    "Sharding(reshard_after_backward=True)": {"sharding_strategy": Sharding("zero2", reshard_after_backward=True)},
}


@on_ranks(2)
def test_options_that_do_not_allow_it_are_refused() -> None:
    for option, options in REFUSED.items():
        model = thunder.jit(Stack(1), transforms=[tfs.fsdp(**options)])
        with pytest.raises(ValueError, check=coded("optimizer.cannot-gather-early", option)):
            tfs.overlap_step(model, adamw(model.parameters()), gather_early=True)
    model = thunder.jit(Stack(1), transforms=[tfs.fsdp()])
    model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, check=coded("optimizer.gather-early-after-forward")):
        tfs.overlap_step(model, adamw(model.parameters()), gather_early=True)


@on_ranks(2)
def test_models_are_freed_while_gathers_are_in_flight() -> None:
    run = _Trained()
    for number in range(2):
        run.step_of(number) if number else run.micro_batch(0, no_sync=False)
    run.optimizers[0].step()
    bucket = run.buckets[0]
    assert bucket.arena.in_flight or bucket.private_slot.arena.in_flight
    freed = weakref.ref(bucket)
    optimizer = run.optimizers[0]
    del run, bucket
    gc.collect()
    assert freed() is None
    optimizer.zero_grad()


forward, in_window, evaluate = (partial(Action, "forward", mode) for mode in (Mode(), WINDOW, EVALUATION))
backward, step, zero_grad = Action("backward"), Action("step"), Action("zero_grad", value=1)

HISTORY = (
    *(forward(seed=1), backward, step, zero_grad, forward(seed=2), backward, step, zero_grad, evaluate(seed=3)),
    # In other memory, with a cast of its own, while the step's gathers are in flight.
    *(
        forward(seed=4),
        backward,
        step,
        zero_grad,
        Action("eager", EVALUATION, (0, 0), seed=8),
        forward(seed=9),
        backward,
    ),
    *(step, zero_grad, in_window(seed=6), backward, forward(seed=7), backward, Action("clip"), step, zero_grad),
)


@pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")
def test_streams_wait_for_what_steps_gather_and_reduce(lone_workers: Callable[[int], Any]) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = ModelSpec(4, (BlockSpec("linear", 1, False, True),) * 3, (), (), False)
    options = {"sharding_strategy": Sharding(), "mp_policy": policy}
    world = World(model, options, ways=((0, 1, 2),), alike=True, overlaps="early", histories=(HISTORY,))
    result = run_together(lone_workers(2), run_histories, world)
    result.assert_clean()
