"""Gradients written directly into the slot of their reduction: no copies, and the same bits as with copies."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import CompiledTraces, Debug, testing
from thunder_fsdp_sched.ir.slots import spans_of

import pytest
import torch
from internals import Analysis, effects, fsdp_all_gather, fsdp_reduce_scatter
from models import GPT, FeedForward, Layer, Model, SharedBlocks, Stack, compile_model
from scenario import Scenario, do, each
from thunder.core.trace import TraceCtx
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


class BatchedExperts(Model):
    """A model whose gradients are batched matmuls, transposed matmuls, sums over a batch, and those of torch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.first = nn.Parameter(torch.randn(3, 4, 4)), nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.block = Layer(4)
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.addmm(self.bias, x, self.first)
        y = torch.bmm(x.unsqueeze(0).expand(3, -1, -1), self.experts)
        y = y @ self.block.down.weight[:, :4].t() + self.block.forward(x)
        return self.conv(y.transpose(1, 2)).sum(0)


CASES: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(blocks=1, block=FeedForward),
    "gpt_with_tied_weights": lambda: GPT(blocks=1, tied=True, block=Layer),
    "shared_blocks": SharedBlocks,
    "batched_experts": BatchedExperts,
}


def in_place(trace: TraceCtx) -> dict[str, bool]:
    """Return, for each reduced gradient by parameter, whether it is written in place."""
    written = {b.output.name for b in trace.bound_symbols if effects(b).fills is not None}
    return {
        param.name: grad.name in written
        for b in trace.bound_symbols
        if b.sym is fsdp_reduce_scatter
        for param, grad in zip(b.args[0].spec.params, b.args[2:], strict=True)
        if grad is not None
    }


#
# Which gradients are written in place
#


@functools.cache
def compiled(make: Callable[[], nn.Module], **options: Any) -> CompiledTraces:
    """Return what one of two ranks compiles, cached by function and options."""
    return compile_model(lambda: make().double(), **options)


@pytest.mark.parametrize(
    ("case", "options", "copied"),
    [
        ("gpt", {"sharding_strategy": "zero2", "bucketing_strategy": "none"}, {"wte.weight", "wpe.weight"}),
        ("gpt", {}, {"wte.weight", "wpe.weight"}),
        ("gpt_with_tied_weights", {}, {"wte.weight", "wpe.weight"}),
        ("shared_blocks", {}, {"common", "blocks.0.weight", "blocks.0.bias"}),
        ("batched_experts", {}, {"bias", "block.down.weight", "conv.weight"}),
    ],
)
def test_only_gradients_that_are_sums_or_lack_an_out_variant_are_copied(
    case: str, options: dict[str, str], copied: set[str]
) -> None:
    """All others are products of matrices. The backwards of an embedding and of a layer norm have no ``out=``."""
    traces = compiled(CASES[case], **options)
    model = CASES[case]()
    copied = copied | {name for name, _ in model.named_parameters() if re.search(r"\bln(_\w+)?\.", name)}
    assert {name for name, done in in_place(traces.backward).items() if not done} == copied
    testing.assert_reductions_right_after_last_gradient(traces)


@pytest.mark.parametrize(("reduced", "expected"), [(torch.float32, False), (torch.bfloat16, True)])
def test_gradients_that_are_reduced_in_another_dtype_are_copied(reduced: torch.dtype, expected: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    done = in_place(compiled(Stack, mp_policy=policy).backward)
    assert {done[name] for name in done if name.endswith("weight")} == {expected}


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gradients_reuse_the_slot_of_their_parameters(prefetch: int) -> None:
    traces = compiled(lambda: Stack(8), prefetch=prefetch)
    trace = traces.backward
    gathers = {b.args[0]: b.args[1] for b in trace.bound_symbols if b.sym is fsdp_all_gather}
    reductions = {b.args[0]: b.args[1] for b in trace.bound_symbols if b.sym is fsdp_reduce_scatter}
    together = [bucket for bucket in gathers if reductions[bucket] is gathers[bucket]]
    used = traces.memory.fixed["unsharded buckets"]
    block = max(slot.nbytes for slot in gathers.values())
    assert len(together) > 4
    assert min(traces.memory.wasted) == 0
    lives = list(Analysis(trace).slots.values())
    begins = {live.first for live in lives}
    ends = [(last, live.last) for live, (_, last, _) in zip(lives, spans_of(lives), strict=True)]
    assert all(last == whole or last + 1 in begins for last, whole in ends), "until gradients take the place"
    assert sum(last < whole for last, whole in ends) >= len(together)
    # The prefetched buckets, the bucket that is read and then filled with gradients, and two reductions in flight.
    assert used <= (prefetch + 1 + 2) * block


#
# Training
#


ACTIONS = [do.train(2), do.micro_batch(5), do.micro_batch(6, no_sync=False), do.step()]
COPIED = [{"debug": Debug(skip_passes=("write_grads_in_place",))}]
SCENARIOS = {
    "batched experts": Scenario(
        lambda: BatchedExperts().double(), ACTIONS, {"sharding_strategy": "zero2"}, others=COPIED
    )
}


@each(SCENARIOS)
def test_trains_with_the_bits_of_copies(name: str) -> None:
    SCENARIOS[name].run()
