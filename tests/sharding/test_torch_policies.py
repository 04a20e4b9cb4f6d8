"""Policies of other releases of torch than the installed one, and how ranks compare functions among the options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import ScheduleDisagreement, fsdp, testing

import pytest
import thunder
import torch
from coded import coded
from models import Stack
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclasses.dataclass(frozen=True)
class Policy(MixedPrecisionPolicy):
    """A stand-in for the policy of torch 2.15."""

    param_dtype_override_fn: Any = dataclasses.field(default=None, kw_only=True)


class ScaledLinear(nn.Module):
    """A linear layer behind a scale in its own precision, inside one module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.3, 1.7, 8))
        self.weight = nn.Parameter(torch.linspace(-1.1, 1.3, 64).view(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(nn.functional.linear((x * self.scale).to(self.weight.dtype), self.weight))


@on_ranks()
def test_a_function_overrides_the_precision_of_single_parameters(rank: int) -> None:
    asked: list[nn.Parameter] = []

    def override(param: nn.Parameter) -> torch.dtype | None:
        asked.append(param)
        return torch.float32 if param.ndim < 2 else None

    model = ScaledLinear()
    params, x = list(model.parameters()), torch.linspace(0.1, 2.3, 24).view(3, 8)
    low = x.bfloat16()
    expected = torch.relu(nn.functional.linear((low * model.scale).bfloat16(), model.weight.bfloat16())).detach()
    policy = Policy(torch.bfloat16, torch.float32, param_dtype_override_fn=override)
    jitted = thunder.jit(model, transforms=[transform := fsdp(mp_policy=policy)])
    assert all(map(lambda own, given: own is given, asked, params)) and len(asked) == 2
    out = jitted(x)
    assert out.dtype is torch.bfloat16 and torch.equal(out, expected)
    out.float().sum().backward()
    gathers = transform.compiled[-1].schedule.forward.of("fsdp_all_gather")
    assert {op.dtype for op in gathers} == {"float32", "bfloat16"}

    def on_one_rank(param: nn.Parameter) -> torch.dtype | None:
        return torch.float32 if rank else None

    policy = Policy(torch.bfloat16, param_dtype_override_fn=on_one_rank)
    with pytest.raises(
        ScheduleDisagreement,
        check=coded("ranks.ranks-disagree", "rank 0: scale: ", "mp_policy", "param_dtype=torch.float32"),
    ):
        thunder.jit(ScaledLinear(), transforms=[fsdp(mp_policy=policy)])


def test_a_wrong_answer_about_a_parameter_names_it() -> None:
    def plan(policy: MixedPrecisionPolicy) -> None:
        testing.compile_on_fake_ranks(lambda: (Stack(1), (torch.ones(2, 4),)), 2, mp_policy=policy)

    policy = Policy(torch.bfloat16, param_dtype_override_fn=lambda param: torch.float16)
    with pytest.raises(ValueError, check=coded("option.override-returned-other-dtype", "torch.float16", "first")):
        plan(policy)


def test_gradients_of_another_dtype_than_their_parameter_are_refused() -> None:
    def make() -> tuple[nn.Module, tuple[torch.Tensor]]:
        model = Stack(1)
        model.last.weight.grad_dtype = torch.bfloat16
        return model, (torch.ones(2, 4),)

    with pytest.raises(ValueError, check=coded("parameter.grad-dtype-set", "last.weight", "torch.bfloat16")):
        testing.compile_on_fake_ranks(make, 2)


#
# Functions
#


def _made(factor: Any) -> Callable[..., Any]:
    return lambda name, grads: grads.mul_(factor)


class Hook:
    def __call__(self, name: str, grads: torch.Tensor) -> None: ...

    def method(self, name: str, grads: torch.Tensor) -> None: ...


@on_ranks()
def test_ranks_compare_functions_by_what_they_are(rank: int) -> None:
    def jit(**options: Any) -> None:
        thunder.jit(Stack(1), transforms=[fsdp(**options)])

    def first(name: str, module: nn.Module) -> str:
        return "zero3"

    def second(name: str, module: nn.Module) -> str | None:
        return "zero3" if name else None

    alike = [
        lambda name, module: "zero2",  # on two lines, which messages name, but ranks do not compare
        lambda name, module: "zero2",
    ]
    jit(sharding_strategy=alike[rank], all_reduce_hook=_made(2))
    second.__qualname__ = first.__qualname__
    lines = [f"at {__file__}:{f.__code__.co_firstlineno})" for f in (first, second)]
    with pytest.raises(ScheduleDisagreement, check=coded("ranks.ranks-disagree", "first with code", *lines)):
        jit(sharding_strategy=(first, second)[rank])
    with pytest.raises(
        ScheduleDisagreement,
        check=coded("ranks.ranks-disagree", "fsdp(all_reduce_hook=", "(factor=0) at", "(factor=1) at"),
    ):
        jit(all_reduce_hook=_made(rank))
