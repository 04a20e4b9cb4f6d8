"""``agree``: how often the ranks agree. The numbers are the same, and what is lost is what the documentation says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

from thunder_fsdp_sched import ScheduleDisagreement, clip_grad_norm_, fsdp

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from internals import channel
from models import Calling, Stack
from ranks import on_ranks
from scenario import Run, Scenario, do, each, loss_of
from torch import nn

WINDOW = [do.micro_batch(3), do.micro_batch(4), do.micro_batch(5, no_sync=False), do.clip(), do.step()]
STEPS = [do.train(2), *WINDOW, do.train(1, first=6)]


def _stack() -> nn.Module:
    return Stack(2).double()


def _steps_send_no_message(run: Run) -> None:
    with mock.patch.object(channel.Channel, "post", autospec=True, side_effect=channel.Channel.post) as post:
        for step in range(4):
            with run.model.no_sync() if step < 2 else contextlib.nullcontext():
                loss_of(run.model(*run.inputs(step))).backward()
        clip_grad_norm_(run.model, 1.0)
        run.optimizers[0].step()
    agrees = run.transform.options.agree == "step"
    assert (post.call_count > 0) == agrees
    traces = "\n".join(str(t) for c in run.transform.compiled for t in (c.forward, c.backward))
    assert ("fsdp_agree" in traces) == ("resident=True" in traces or "window=" in traces) == agrees


SCENARIOS = {
    f"{agree}, {strategy}": Scenario(
        _stack,
        [*STEPS, _steps_send_no_message],
        {"agree": agree, "sharding_strategy": strategy},
        long=(agree, strategy) == ("compile", "zero2"),
    )
    for agree, strategy in (("step", "zero2"), ("compile", "zero2"), ("compile", "zero3"), ("never", "zero3"))
}


@each(SCENARIOS)
def test_the_numbers_are_those_of_the_unsharded_model_and_steps_send_no_message(name: str) -> None:
    SCENARIOS[name].run()


def _branches(forward: Callable[..., Any] = lambda m, x: (m.right(m.left(x))).square().mean()) -> nn.Module:
    torch.manual_seed(0)
    return Calling(forward, left=nn.Linear(4, 4), right=nn.Linear(4, 4))


def _jit(module: nn.Module, **options: Any) -> Any:
    return thunder.jit(module, transforms=[fsdp(bucketing_strategy=1 << 20, **options)])


@on_ranks()
def test_ranks_that_compile_different_computations_raise_unless_they_never_agree(rank: int) -> None:
    x, forward = torch.ones(3, 4), lambda m, x: (torch.relu if rank else torch.neg)(m.right(m.left(x))).mean()
    different = coded("ranks.ranks-disagree", "the collectives agree but the computations differ")
    with pytest.raises(ScheduleDisagreement, check=different):
        _jit(_branches(forward), agree="compile")(x)
    model, reference = _jit(_branches(forward), agree="never"), _branches()
    model(x).backward()
    out = reference.right(reference.left(x))
    ((torch.relu(out).mean() - out.mean()) / 2).backward()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("agree", ["compile", "never"])
@on_ranks()
def test_a_kept_bucket_that_another_forward_has_overwritten_is_an_error(agree: str) -> None:
    model = _jit(_branches(), sharding_strategy="zero2", agree=agree)
    first, second = model(torch.ones(3, 4)), model(torch.ones(3, 4))
    with pytest.raises(RuntimeError, check=coded("step.bucket-lost-before-backward", agree)):
        first.backward()
    second.backward()


@pytest.mark.parametrize("agree", ["step", "compile"])
@on_ranks()
def test_parameters_that_a_loss_does_not_use_have_a_gradient_of_zeros_unless_ranks_agree_in_steps(agree: str) -> None:
    model = _jit(_branches(lambda m, x: (m.left(x).mean(), m.right(x).mean())), agree=agree)
    model(torch.ones(3, 4))[0].backward()
    grad = model.get_parameter("right.weight").grad
    assert grad is None if agree == "step" else not grad.full_tensor().any()
    assert model.get_parameter("left.weight").grad.full_tensor().any()


@on_ranks()
def test_a_rank_that_steps_alone_waits_until_the_timeout(rank: int) -> None:
    model = _jit(_branches(), agree="compile", ranks=dist.new_group(timeout=timedelta(seconds=2)))
    model(torch.ones(3, 4)).backward()
    if rank == 0:
        failed = coded("step.collective-failed", "rank 0: the all-gather of bucket", "agree='compile'")
        with pytest.raises(RuntimeError, check=failed) as failure:
            model(torch.ones(3, 4))
        assert "timed out" in str(failure.value).lower() and "had agreed" not in str(failure.value)
    dist.barrier()
