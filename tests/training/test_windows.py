"""Accumulation windows: later micro-batches reuse gathered buckets, with the bits of gathering them again."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from thunder_fsdp_sched import ScheduleDisagreement, Sharding, discard_unreduced, fsdp, unsharded
from thunder_fsdp_sched.extras import no_sync
from thunder_fsdp_sched.extras.planning import choosing
from thunder_fsdp_sched.planning import MemoryLimitError

import pytest
import thunder
import torch
from coded import coded
from internals import Bucket
from models import Model, Stack
from ranks import on_ranks
from scenario import Run, Scenario, do, each
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

WEIGHT = "blocks.0.up.weight"
AGAIN = [{"sharding_strategy": Sharding("zero2", reshard_after_backward=True)}]
"""A model that gathers in each micro-batch: the oracle of those whose later micro-batches reuse gathered buckets."""


def _stack() -> nn.Module:
    return Stack(2).double()


def _sent(run: Run, *actions: Callable[[Run], Any]) -> Counter[str]:
    """Run actions and return how often the first model sends each bucket."""
    sent: Counter[str] = Counter()
    real, own = Bucket.gather_into, run.transform.sharded.buckets

    def count(bucket: Bucket, *args: Any) -> Any:
        if any(bucket is each for each in own):
            sent[bucket.spec.name] += 1
        return real(bucket, *args)

    with mock.patch.object(Bucket, "gather_into", count):
        for action in actions:
            action(run)
    return sent


def _each(run: Run) -> Counter[str]:
    return Counter(bucket.spec.name for bucket in run.transform.sharded.buckets)


def _reuse(run: Run) -> None:
    for window in range(2):
        first, second, third = (_sent(run, do.micro_batch(10 * window + step, no_sync=step < 2)) for step in range(3))
        kept = {bucket.spec.name for bucket in run.transform.sharded.kept_buckets}
        assert kept == set(first) == set(_each(run)) and all(first[name] == 1 for name in kept)
        assert not kept & {*second, *third}
        run.step()


_zero2 = partial(Scenario, _stack, [_reuse], others=AGAIN, oracle=None)
SCENARIOS = {
    "offload": _zero2(options={"sharding_strategy": "zero2", "offload_policy": CPUOffloadPolicy()}),
    "replicas": _zero2(options={"sharding_strategy": "zero2", "ranks": (2, 2)}, ranks=4),
}


@each(SCENARIOS)
def test_only_the_first_micro_batch_of_a_window_gathers(name: str) -> None:
    SCENARIOS[name].run()


def _change(run: Run, *, first_rank: int = 0, through: str = "parameter") -> None:
    """Change the rows that each rank from ``first_rank`` on has of the weight of the first block."""
    for model in run.models if run.rank >= first_rank else ():
        weight = model.get_parameter(WEIGHT)
        ways = {"parameter": weight, "data": weight.data, "local": weight.to_local(), "detached": weight.detach()}
        with torch.no_grad():
            ways[through].mul_(2)


def _change_whole(run: Run) -> None:
    for model in run.models:
        with unsharded(model, "blocks.0"), torch.no_grad():
            model.get_parameter(WEIGHT).add_(1)


def _load(run: Run) -> None:
    for model in run.models:
        model.load_state_dict(model.state_dict())


@on_ranks(2)
def test_what_has_changed_is_gathered_again_on_all_ranks() -> None:
    options = {"sharding_strategy": "zero2", "bucketing_strategy": "layer"}
    run = Run(_stack(), others=AGAIN, oracle=None, optimizer=partial(torch.optim.AdamW, lr=1e-2), **options)
    changed, _ = run.transform.sharded.locations[WEIGHT]
    each, only, nothing = _each(run), Counter([changed.spec.name]), Counter()
    disturbances: list[tuple[Callable[[Run], Any], Counter[str]]] = [
        *((partial(_change, through=through), only) for through in ("parameter", "data", "local", "detached")),
        (partial(_change, first_rank=1), only),  # rank 0 has changed nothing, and gathers with it
        (_change_whole, only),
        (do.forward(7, grad=False), each),
        (lambda run: run.optimizers[0].step(), each),  # without gradients, but nobody looks at what it does
        (_load, each),
    ]
    for disturb, expected in disturbances:
        assert _sent(run, do.micro_batch(0)) == each
        disturb(run)
        assert _sent(run, do.micro_batch(1)) == expected, disturb
        assert _sent(run, do.micro_batch(2), do.micro_batch(3, no_sync=False)) == nothing
        run.step()

    assert _sent(run, do.forward(4, no_sync=True)) == each
    assert _sent(run, do.forward(5, no_sync=True), do.backward(), do.backward()) == nothing
    run.micro_batch(6, no_sync=False)
    run.step()

    run.micro_batch(8, no_sync=False)
    assert _sent(run, do.micro_batch(9)) == each, "nothing is left by a backward that reduces"
    assert _sent(run, do.micro_batch(10, no_sync=False)) == nothing
    run.step()


#
# Gradients reduced in each micro-batch
#


def _never_waits(module: nn.Module, **options: Any) -> nn.Module:
    """Return a sharded model that reduces in each micro-batch, because ``no_sync`` does nothing."""
    model = thunder.jit(module, transforms=[fsdp(**options)])
    model.no_sync = contextlib.nullcontext
    return model


@on_ranks(2)
def test_reducing_in_each_micro_batch_gives_the_bits_of_training_without_no_sync() -> None:
    """The other model is not called under no_sync. The sum is not rounded to the dtype of reductions."""
    options = {"transport": "flat", "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    run = Run(_stack(), others=[partial(_never_waits, **options)], oracle=None, accumulate="sharded", **options)
    for window in range(2):
        for step in range(3):
            run.micro_batch(10 * window + step, no_sync=step < 2)
        run.step()
    [waiting] = [c for c in run.transform.compiled if c.no_sync]
    assert len(waiting.backward_schedule.of("fsdp_reduce_scatter")) == len(run.transform.plan)
    assert not waiting.backward_schedule.of("fsdp_accumulate_grads")


class Repeated(Model):
    """A layer that runs some times, so that each number of times is another computation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = torch.tanh(self.layer.forward(x))
        return x


@pytest.mark.parametrize("may_differ", [False, True])
@on_ranks(2)
def test_a_window_may_accumulate_in_both_ways(rank: int, may_differ: bool) -> None:
    """With a limit on memory, each computation accumulates in the way that fits; if ranks may differ, on each rank."""
    run = Run(Repeated().double(), max_memory=1 << 30, ranks_may_differ=may_differ)
    for step, mode in enumerate(("unsharded", "sharded", "unsharded")):
        if may_differ and rank:
            mode = "sharded" if mode == "unsharded" else "unsharded"
        with mock.patch.object(choosing, "get_args", lambda _, mode=mode: [mode]):
            run.micro_batch(step, step + 1)
        assert run.transform.compiled[-1].settings.accumulate == mode
    run.micro_batch(3, 1, no_sync=False)
    run.compare_gradients()


@on_ranks(4)
def test_a_window_reduces_across_replicas_once() -> None:
    calls: list[str] = []
    run = Run(
        Stack(1).double(),
        ranks=(2, 2),
        accumulate="sharded",
        gradient_divide_factor=8.0,
        all_reduce_hook=lambda name, grads: calls.append(name),
    )
    for window in range(2):
        run.micro_batch(3 * window)
        run.micro_batch(3 * window + 1)
        assert not calls
        run.micro_batch(3 * window + 2, no_sync=False)
        assert sorted(calls) == sorted(_each(run))
        calls.clear()
        for param in run.model.parameters():
            param.grad.mul_(2)  # by 8 instead of 4 ranks
        run.step()
    [waiting] = [c for c in run.transform.compiled if c.no_sync]
    assert waiting.backward_schedule.of("fsdp_reduce_scatter")
    assert not waiting.backward_schedule.of("fsdp_all_reduce")


@on_ranks(2)
def test_a_backward_that_fails_after_reducing_some_gradients_spoils_the_sum() -> None:
    run = Run(Stack(1).double(), accumulate="sharded")
    run.micro_batch(0)
    run.forward(1, no_sync=True)
    calls = iter([None])
    real = no_sync.add_reduced
    fail = mock.patch.object(no_sync, "add_reduced", lambda *args: (next(calls), real(*args)))
    with fail, pytest.raises(StopIteration):  # in the second bucket
        run.backward()
    with pytest.raises(RuntimeError, check=coded("gradient.sum-of-partial-backward")):
        run.micro_batch(1)
    discard_unreduced(run.model)
    run.unsharded.discard()
    run.micro_batch(2)
    run.micro_batch(3, no_sync=False)
    run.step()


@on_ranks(2)
def test_ranks_notice_that_the_first_backward_of_a_window_failed_on_one(rank: int) -> None:
    run = Run(_stack(), sharding_strategy="zero2")
    real, calls = no_sync.add_grads, [None]
    fail = mock.patch.object(no_sync, "add_grads", lambda *args: (calls.pop(), real(*args)))
    for step in range(2):  # the first run is audited, in which any failure of one rank is noticed
        run.micro_batch(step, no_sync=step < 1)
    run.step()
    for everywhere in (False, True):
        calls[:] = [None]
        run.forward(1, no_sync=True)
        if rank == 0 or everywhere:
            with fail, pytest.raises(IndexError):  # in the second bucket
                run.backward()
            run.pending.clear()
            run.unsharded.discard()
        else:
            run.backward()
        run.micro_batch(2)
        if everywhere:
            run.micro_batch(3, no_sync=False)
            run.step()
            continue
        loss = run.model(*run.inputs(3)).sum()
        refusal = coded("ranks.actions-differ", "after 1 failed backwards under no_sync were left out")
        with pytest.raises(ScheduleDisagreement, check=refusal):
            loss.backward()
        discard_unreduced(run.model)
        run.unsharded.discard()


def _compile_window(**options: Any) -> Any:
    """Return the compiled steps of a micro-batch under ``no_sync`` and of the last one."""
    torch.manual_seed(0)
    transform = fsdp(cluster="cpu-2core", **options)
    model = thunder.jit(Stack(2, width=64), transforms=[transform])
    for context in (model.no_sync(), contextlib.nullcontext()):
        with context:
            model(torch.ones(2, 64)).sum().backward()
    return transform.compiled


def _peak(window: Any) -> int:
    return max(one.predict_memory(accumulated=window[:1], others=window).peak.nbytes for one in window)


def _least(**options: Any) -> int:
    with pytest.raises(MemoryLimitError, check=coded("plan.step-exceeds-max-memory")) as caught:
        _compile_window(max_memory=1, **options)
    return caught.value.least_bytes


def test_a_memory_limit_that_only_reduced_gradients_keep_makes_each_micro_batch_reduce(fake_ranks: None) -> None:
    most = _peak(_compile_window())
    window = _compile_window(max_memory=most)
    assert window[0].backward_schedule.of("fsdp_accumulate_grads") and _peak(window) <= most
    limit = _least(accumulate="unsharded") - 1
    window = _compile_window(max_memory=limit)
    schedule = window[0].backward_schedule
    assert not schedule.of("fsdp_accumulate_grads") and schedule.of("fsdp_reduce_scatter") and _peak(window) <= limit
