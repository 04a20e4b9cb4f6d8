"""Planning a traced step again: the plan is that of a dry run with the same options, for any option and number of ranks."""

from __future__ import annotations

from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.planning.dry_run import DryRun, dry_run_step, replan
from thunder_fsdp_sched.planning.replanning import NeedsTrace

import pytest
import torch
from planned_model import Model
from torch.distributed.fsdp import MixedPrecisionPolicy


class Tied(torch.nn.Module):
    """A model with tied, frozen and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(2, 32)
        self.first = torch.nn.Linear(32, 32)
        self.last = torch.nn.Linear(32, 32)
        self.last.weight = self.first.weight
        self.last.bias.requires_grad_(False)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.forward(self.last(torch.tanh(self.first(x))))


def make() -> Any:
    with torch.device("meta"):
        return Tied(), (torch.randn(4, 32),)


@pytest.fixture(scope="module")
def traced() -> DryRun:
    return dry_run_step(make, world_size=8, on="h100-sxm", prefetch=2)


def plan_of(step: DryRun) -> Any:
    """Return everything that a plan promises, without names of values."""
    compiled = step.compiled
    schedule = [
        (op.position, op.kind, op.bucket, op.nbytes, op.slot, op.first_consumer, op.travels)
        for half in (compiled.schedule.forward, compiled.schedule.backward)
        for op in half
    ]
    memory = compiled.memory
    return schedule, memory.totals, memory.fixed, step.before.step_seconds, step.after.step_seconds


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"prefetch": 0, "max_gathers_in_flight": 1},
        {"sharding_strategy": "zero2", "world_size": 3},
        {"world_size": 64, "replicas": 8, "bucketing_strategy": "layer"},
        {"prefetch": "auto", "max_unsharded_bytes": "50kB", "on": "a100-sxm"},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), "transport": "coalesced"},
    ],
    ids=lambda change: " ".join(change) or "nothing",
)
def test_a_step_that_is_planned_again_equals_a_dry_run_with_these_options(traced: DryRun, change: dict[str, Any]):
    again = replan(traced, **change)
    assert not again.traced
    assert plan_of(again) == plan_of(dry_run_step(make, **{"world_size": 8, "on": "h100-sxm", "prefetch": 2, **change}))
    assert plan_of(replan(again, **{key: traced_value(traced, key) for key in change})) == plan_of(traced)


def traced_value(traced: DryRun, key: str) -> Any:
    defaults = {"world_size": 8, "replicas": 1, "on": "h100-sxm", "sharding_strategy": "zero3", "transport": "auto"}
    defaults |= {"bucketing_strategy": "block", "max_unsharded_bytes": None, "max_gathers_in_flight": None}
    return {**defaults, "mp_policy": None, **traced.options}[key]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, "mp_policy: .*trace the model again"),
        ({"ignored_params": ["unused.weight"]}, "ignored_params: .*trace the model again"),
        ({"on": "cpu-2core"}, "'cpu-2core' and 'h100-sxm' run other kernels"),
    ],
)
def test_options_that_change_the_computation_need_a_trace(traced: DryRun, change: dict[str, Any], message: str):
    with pytest.raises(NeedsTrace, match=message):
        replan(traced, **change)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        heads = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return torch.nn.functional.scaled_dot_product_attention(*heads, mask, is_causal=mask is None).sum()


@pytest.mark.parametrize(
    ("cluster", "dtype", "masked", "kernel"),
    [
        ("h100-sxm", torch.bfloat16, False, "sdpafx_grad_forward"),
        ("h100-sxm", torch.float32, True, "sdpaex_grad_forward"),
        ("cpu-2core", torch.bfloat16, False, None),
        ("h100-sxm", torch.float64, False, None),
    ],
)
def test_attention_is_planned_with_the_kernels_of_the_cluster(cluster, dtype, masked, kernel):
    length = 64

    def make() -> Any:
        with torch.device("meta"):
            mask = torch.zeros(2, 1, length, length, dtype=dtype) if masked else None
            return Attention().to(dtype), (torch.zeros(2, length, 32, dtype=dtype), *([mask] if masked else []))

    step = dry_run_step(make, world_size=2, on=cluster)
    scores = 2 * 4 * length * length * dtype.itemsize
    called = [bsym.sym.name for bsym in step.compiled.forward.bound_symbols]
    assert any(name.startswith(kernel) for name in called) if kernel else not any("sdpa" in name for name in called)
    saved = [tensor.nbytes for tensor in step.compiled.memory.tensors if tensor.kind == "saved for backward"]
    assert (max(saved) >= scores) is (kernel is None)
    assert plan_of(replan(step)) == plan_of(step)
