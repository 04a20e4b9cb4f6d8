"""Activations that are recomputed (``max_memory``) or offloaded: no bit of training changes, and a step keeps its limit.

The device of offloading is a CPU, so both copies are within one memory; ``tests/test_virtual_gpu.py`` checks streams.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

from thunder_fsdp_sched import Init, ScheduleDisagreement, Sharding, fsdp
from thunder_fsdp_sched.extras.activation_offload.copies import (
    copy_to_device,
    copy_to_host,
    wait_device_copy,
    wait_host_copy,
)
from thunder_fsdp_sched.extras.activation_offload.host_copies import fsdp_copy_to_device, fsdp_wait_host_copy
from thunder_fsdp_sched.extras.activation_offload.offload_activations import offloadable
from thunder_fsdp_sched.extras.planning.clusters import ClusterSpec, cluster
from thunder_fsdp_sched.extras.planning.cost import AnalyticCost
from thunder_fsdp_sched.extras.planning.fake_ranks import compile_as_rank
from thunder_fsdp_sched.extras.planning.search import MemoryLimitError
from thunder_fsdp_sched.ir.operator_facts import is_pure

import pytest
import thunder
import torch
import torch.nn.functional as F
from internals import args_of, declared, nbytes_of, outs_of, return_of, split_joint
from models import GPT, Block, Chain, FeedForward, Model, Stack
from offloading import offloading
from random_models import RandomModel, cases, draw_numbered, examples, options_of
from ranks import on_ranks
from scenario import Run, loss_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint


class Dropping(nn.Module):
    """Blocks with dropout, one of them a region of ``torch.utils.checkpoint``, between a mask and a running mean."""

    def __init__(self, width: int = 24, blocks: int = 2) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))
        self.width = width
        self.register_buffer("mean", torch.zeros(width))

    def inputs(self, generator: torch.Generator, batch: int = 64) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, self.width, generator=generator, dtype=torch.float64),)

    def block(self, x: torch.Tensor, index: int) -> torch.Tensor:
        y = torch.sin(self.up[index](x))
        return x + self.down[index](torch.tanh(y) * y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - self.mean
        for index in range(len(self.up)):
            if index == 1:
                x = checkpoint(self.block, x, index, use_reentrant=False)
            else:
                x = F.dropout(self.block(x, index), 0.25)
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x


class Varied(Model):
    """Dropout, a module under ``torch.utils.checkpoint``, a saved transposed view, and an output that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.dropout(torch.tanh(self.blocks[0](x)), 0.5)
        x = checkpoint(lambda y: torch.sin(torch.tanh(self.blocks[1](y)) * 2), x, use_reentrant=False) + x
        y = torch.exp(self.blocks[2](x))
        return y, (y @ x.t()).sigmoid()


class Attention(Chain):
    """Transformer blocks, whose attention saves views of one value."""

    def inputs(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (torch.randn(2, 4, 8, generator=generator),)


MODELS: dict[str, Callable[[], Any]] = {
    "varied": lambda: Varied().double(),
    "attention": lambda: Attention(lambda index: Block(8), count=1).double(),
    "stack": Stack,
    "gpt": lambda: GPT(width=16, blocks=1, length=64, block=FeedForward).double(),
    "dropping": lambda: Dropping().double(),
    "large": lambda: GPT(width=512, blocks=2, length=512, vocab=100, block=FeedForward).to("meta"),  # a copy pays off
}


def _made(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    param = next(model.parameters())
    inputs = [x.to(param.device) for x in model.inputs(torch.Generator().manual_seed(0))]
    return model, tuple(x.to(param.dtype) if x.is_floating_point() else x for x in inputs)


def _train(
    name: str, rank: int, *, steps: int = 2, no_sync: bool = False, repeats: bool = True, **options: Any
) -> tuple[Any, list[torch.Tensor]]:
    """Train and return the transform, and losses, gradients, buffers and parameters of all steps.

    Args:
        no_sync: begin each step with a micro-batch under ``no_sync``.
        repeats: run two forwards before their backwards, a dropped one, and a repeated backward.
    """
    model, inputs = _made(name)
    jitted = thunder.jit(model, transforms=[transform := fsdp(**options)])
    optimizer = torch.optim.AdamW(jitted.parameters(), lr=1e-2)
    seen: list[torch.Tensor] = []

    def loss() -> torch.Tensor:
        torch.manual_seed(100 * len(seen) + rank)
        batch = [torch.randn_like(x) if x.is_floating_point() else x.roll(rank + len(seen)) for x in inputs]
        computed = loss_of(jitted(*batch))
        seen.append(computed.detach())
        return computed

    for _ in range(steps):
        with jitted.no_sync() if no_sync else contextlib.nullcontext():
            loss().backward()
        if repeats:
            dropped, earlier, later = loss(), loss(), loss()
            del dropped
            earlier.backward(retain_graph=True)
            later.backward()
            earlier.backward()
        elif no_sync:
            loss().backward()
        seen += [p.grad.to_local().clone() for p in jitted.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    seen += [*(p.to_local() for p in jitted.parameters()), *model.buffers()]
    return transform, [value.detach().clone() for value in seen]


def _assert_same_bits(actual: list[torch.Tensor], expected: list[torch.Tensor], what: Any) -> None:
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), f"value {number} of {what}"


#
# Recomputed
#

RELEASING = {"sharding_strategy": Sharding(release=True), "prefetch": 1}
KEEPING = {**RELEASING, "cluster": "h100-sxm"}  # where compute is fast, gathering again costs time


@pytest.mark.parametrize(
    ("name", "no_sync", "options", "within", "share", "most"),
    [
        ("gpt", False, {}, {}, 0.0, 0),
        ("dropping", True, {"sharding_strategy": "zero2"}, {}, 0.85, 2),
        pytest.param("gpt", True, {"sharding_strategy": "zero2"}, {}, 0.75, 2, marks=pytest.mark.long),
        pytest.param("dropping", False, {"prefetch": "auto"}, {}, 0.75, 2, marks=pytest.mark.long),
        ("gpt", False, {"steps": 4, "repeats": False}, RELEASING, 0.8, 9),
        pytest.param("gpt", False, {"steps": 4, "repeats": False}, KEEPING, 2.0, 9, marks=pytest.mark.long),
    ],
)
@on_ranks()
def test_recomputation_changes_no_bit_of_a_step(
    rank: int, name: str, no_sync: bool, options: dict[str, Any], within: dict[str, Any], share: float, most: int
) -> None:
    """Compare steps within a limit with a step without one.

    Args:
        within: options of the step within the limit alone.
        share: the limit as a share of the peak without a limit; 0 for the least that any step needs.
        most: the fewest reductions in flight of any compiled step are at most as many.
    """
    free, expected = _train(name, rank, no_sync=no_sync, **options)
    limit = int(share * max(compiled.memory.peak.nbytes for compiled in free.compiled))
    if not limit:
        with pytest.raises(MemoryLimitError) as error:
            _train(name, rank, no_sync=no_sync, **options, max_memory=1)
        limit = error.value.least_bytes
    limited, found = _train(name, rank, no_sync=no_sync, **options, **within, max_memory=limit)
    _assert_same_bits(found, expected, name)
    assert all(compiled.memory.peak.nbytes <= limit for compiled in limited.compiled)
    # Memory is saved by computing values again, or time by buckets that stay unsharded.
    assert (
        any(compiled.settings.recomputed for compiled in limited.compiled)
        if share < 1
        else limited.sharded.kept_buckets
    )
    assert not within or all(bucket.arena._memory is None for bucket in limited.sharded.buckets)
    assert min(compiled.settings.reductions_in_flight for compiled in limited.compiled) <= most


# A GPU that computes so slowly that copies to host memory are hidden.
SLOW = dataclasses.replace(
    cluster("h100-sxm"), name="slow", flops=dict.fromkeys(cluster("h100-sxm").flops, 1e12), memory_bandwidth=1e11
)


def _compile(model: str = "gpt", machine: ClusterSpec | str = "h100-sxm", **options: Any) -> Any:
    return compile_as_rank(partial(_made, model), fsdp(cluster=machine, **options), rank=0, world_size=2)


def test_random_operators_and_what_they_read_in_place_never_run_again() -> None:
    free = _compile("dropping").compiled[-1]
    limited = _compile("dropping", max_memory=int(0.7 * free.memory.peak.nbytes)).compiled[-1]
    assert limited.settings.recomputed
    for compiled in (free, limited):
        random = [b for b in compiled.backward.bound_symbols if "uniform" in b.sym.name or "rand" in b.sym.name]
        assert not random
    made = {p.name: b for b in limited.joint.bound_symbols for p in b.flat_proxy_outs}
    assert all(is_pure(made[name]) for name in limited.settings.recomputed)
    # The buffer is written in forward, so nothing may read it again.
    assert not any("mean" in str(b) for b in limited.backward.bound_symbols)


def test_activations_move_to_host_memory_if_that_costs_less() -> None:
    free = _compile("large", SLOW)
    peak = free.compiled[-1].memory.peak.nbytes
    [compiled] = _compile("large", SLOW, max_memory=int(0.6 * peak)).compiled
    assert compiled.settings.offloaded and compiled.settings.offloaded == compiled.choice.chosen.offloaded
    copies = [b for b in compiled.forward.bound_symbols if b.sym.name == "fsdp_copy_to_host"]
    assert {b.args[0].name for b in copies} == compiled.settings.offloaded
    assert compiled.memory.peak.nbytes <= 0.6 * peak


def _stack_within(limit: int, **options: Any) -> tuple[Any, Any]:
    """Return a function that compiles a step, with or without ``no_sync``, and the transform."""
    model, transform = Stack().double(), fsdp(max_memory=limit, transport="all_to_all", cluster="h100-sxm", **options)
    jitted = thunder.jit(model, transforms=[transform])

    def compile_step(no_sync: bool) -> None:
        with jitted.no_sync() if no_sync else contextlib.nullcontext():
            transform.sharded.compile(jitted, model.inputs(torch.Generator().manual_seed(0)), {})

    return compile_step, transform


@pytest.mark.parametrize("limit", [7_000, 9_060])
def test_a_window_that_was_planned_within_its_limit_is_not_refused(fake_ranks: None, limit: int) -> None:
    """A second model of memory once counted the sum of the reduced gradients twice, and refused 9,060 bytes."""
    compile_step, transform = _stack_within(limit, accumulate="sharded")
    for no_sync in (True, False):
        compile_step(no_sync)
    first, last = transform.compiled
    for step in (first, last):
        assert step.predict_memory(accumulated=[first], others=transform.compiled).peak.nbytes <= limit


def test_a_limit_that_a_later_mode_would_exceed_is_an_error_before_it_runs(fake_ranks: None) -> None:
    compile_step, _ = _stack_within(9_060, accumulate="unsharded")
    compile_step(no_sync=False)
    with pytest.raises(MemoryLimitError, match="9,060 bytes are too few"):
        compile_step(no_sync=True)


#
# Offloaded
#

TENSORS = {
    "contiguous": torch.arange(24.0).view(2, 3, 4),
    "transposed": torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
    "expanded": torch.arange(3.0).view(3, 1).expand(3, 5),
    "with gaps": torch.arange(24.0).view(4, 6)[1:, ::2],
    "0-dim": torch.tensor(2.5),
    "0-dim of a view": torch.arange(3.0)[2],
    "without elements": torch.empty(3, 0, 2),
    "bfloat16": torch.arange(5.0, dtype=torch.bfloat16),
    "mask": torch.tensor([[True], [False]]),
    "int64": torch.arange(7).flip(0),
    "nan": torch.tensor([float("nan"), -0.0]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_copy_has_the_bits_and_strides_of_its_value_and_memory_of_its_own(name: str) -> None:
    value = TENSORS[name]
    host = wait_host_copy(copy_to_host(value), value)
    back = wait_device_copy(copy_to_device(host, "cpu"))
    memory = {t.untyped_storage().data_ptr() for t in (value, host, back)}
    assert len(memory) == 3 or not value.numel()
    for copy in (host, back):
        assert (copy.shape, copy.stride(), copy.dtype) == (value.shape, value.stride(), value.dtype)
        bits = [t.view(torch.uint8) if name == "nan" else t for t in (copy, value)]
        assert torch.equal(*bits)


def _assert_split(traces: Any) -> int:
    """Check that forward saves host copies instead of the offloaded values, and return how many there are."""
    forward, backward = traces.forward, traces.backward
    saved = set(args_of(return_of(forward)))
    hosts = {outs_of(b)[0]: b.args[1].name for b in forward.bound_symbols if b.sym is fsdp_wait_host_copy}
    back = {b.args[0].name for b in backward.bound_symbols if b.sym is fsdp_copy_to_device}
    read = {a for b in backward.bound_symbols for a in args_of(b)}
    assert set(hosts.values()) == traces.settings.offloaded
    assert hosts.keys() <= saved and hosts.keys() == back
    assert not saved & traces.settings.offloaded and not read & traces.settings.offloaded
    return len(hosts)


OPTIONS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"sharding_strategy": "zero2"},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


@on_ranks(2)
def test_training_with_offloaded_activations_gives_the_same_bits(rank: int) -> None:
    for name, option in (("varied", "zero3"), ("attention", "zero2"), ("stack", "bf16")):
        options = {"init": Init(device="cpu"), "no_sync": name == "varied", **OPTIONS[option]}
        plain, expected = _train(name, rank, **options)
        assert not any(declared(b).copies_activation for b in plain.compiled[0].forward.bound_symbols)
        with offloading():
            transform, actual = _train(name, rank, **options)
        _assert_same_bits(actual, expected, name)
        for traces in transform.compiled:
            assert _assert_split(traces) >= 4, (name, option)


@on_ranks(2)
def test_ranks_must_offload_the_same_values_but_may_copy_them_at_other_positions(rank: int) -> None:
    def run(rows: int) -> None:
        model = Stack().double()
        jitted = thunder.jit(model, transforms=[fsdp(init=Init(device="cpu"))])
        jitted(torch.ones(rows, 4, dtype=torch.float64)).sum().backward()

    # Times of copies, and so their positions, depend on the inputs' sizes.
    with offloading(), mock.patch.object(AnalyticCost, "host_copy_seconds", lambda cost, nbytes: float(rank)):
        run(rows=3 + rank)
    with offloading(lambda found: list(found)[rank:]), pytest.raises(ScheduleDisagreement, match="host copy of"):
        run(rows=3)


@examples(0, 60)
@on_ranks(2)
def test_random_models_with_half_of_their_activations_offloaded_give_the_same_bits(
    world_size: int, number: int
) -> None:
    case = draw_numbered(cases(numeric=True), number)

    def some(found: dict[str, int]) -> Iterable[str]:
        return random.Random(number).sample(sorted(found), (len(found) + 1) // 2)

    model = RandomModel(case.model)
    if any(p.requires_grad for p in model.parameters()):
        options = options_of(case, torch.distributed.new_group, world_size)
        run = Run(model, others=[{}], oracle=None, **options)
        run.models[1](*run.inputs())  # compiles it without offloading
        with offloading(some):
            run.train(2)


def _joint(model: nn.Module) -> tuple[Any, Any]:
    """Return the joint trace of a model, and its compiled traces, for one fake rank of two."""
    transform = compile_as_rank(lambda: (model.double(), model.inputs(torch.Generator())), fsdp, rank=0, world_size=2)
    return transform.compiled[0].joint, transform.compiled[0]


def test_offloadable_values_own_memory_that_only_backward_needs() -> None:
    joint, _ = _joint(Varied())
    found = offloadable(joint, min_bytes=0)
    producers = {out: b for b in joint.bound_symbols for out in outs_of(b)}
    kinds = [producers[name].sym.name for name in found]
    assert kinds.count("tanh") == 1, "the other tanh is computed again, as torch.utils.checkpoint asks"
    assert "linear" not in kinds, "backward needs what tanh returns, not what it reads"
    outputs = {p.name for p in return_of(joint).args[0]["fw_flat_out"]}
    inputs = {p.name for p in return_of(joint).args[0]["flat_args"]}
    saved = {a for a in args_of(return_of(split_joint(joint)[0]))}
    assert (outputs & saved) and (inputs & saved) and not (outputs | inputs) & found.keys()
    assert all(nbytes_of(producers[name].output) == found[name] for name in found)
    assert offloadable(joint) == {}, "all values of this model are smaller than is worthwhile"
