"""Offloaded activations: copies have the bits and strides of their values, and training has the bits of training without.

The device is a CPU, so both copies are within one memory; ``tests/test_virtual_gpu.py`` checks streams.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from typing import Any
from unittest import mock

from thunder_fsdp_sched import ScheduleDisagreement, fsdp
from thunder_fsdp_sched.ir.host_copies import HOST_COPIES, fsdp_copy_to_device, fsdp_wait_host_copy
from thunder_fsdp_sched.ir.inspection import args_of, nbytes_of, outs_of, return_of, split_joint
from thunder_fsdp_sched.planning.cost import AnalyticCost
from thunder_fsdp_sched.planning.fake_ranks import compile_as_rank
from thunder_fsdp_sched.runtime.activation_offload import copy_to_device, copy_to_host, wait_device_copy, wait_host_copy
from thunder_fsdp_sched.transforms.offload_activations import offload_activations, offloadable

import pytest
import thunder
import torch
import torch.nn.functional as F
from models import GPT, Block, Model, Stack
from offloading import offloading
from random_models import RandomModel, cases, draw_numbered, examples, options_of
from ranks import on_ranks
from scenario import Run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

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


class Attention(Model):
    """A transformer block, whose attention saves views of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)

    def inputs(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (torch.randn(2, 4, 8, generator=generator),)


def _model(name: str) -> Any:
    torch.manual_seed(3)
    return {"varied": Varied, "attention": Attention, "stack": Stack}[name]()


def _run(rank: int, name: str, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Train three steps with accumulation, two forwards before their backwards, a dropped one and a repeated backward."""
    model = _model(name).to(torch.float64 if "mp_policy" not in options else torch.float32)
    make_inputs, seen = model.inputs, []
    jitted = thunder.jit(model, transforms=[transform := fsdp(device="cpu", **options)])
    optimizer = torch.optim.AdamW(jitted.parameters(), lr=1e-2)

    def loss(step: int) -> torch.Tensor:
        torch.manual_seed(100 * step + rank)
        inputs = make_inputs(torch.Generator().manual_seed(10 * step + rank))
        inputs = [i.to(next(model.parameters()).dtype) for i in inputs]
        out = jitted(*inputs)
        return sum(o.double().square().mean() for o in (out if isinstance(out, tuple) else (out,)))

    for step in range(3):
        with jitted.no_sync() if name == "varied" else contextlib.nullcontext():
            first = loss(10 * step)
            first.backward()
        dropped, earlier, later = loss(10 * step + 1), loss(10 * step + 2), loss(10 * step + 3)
        del dropped
        earlier.backward(retain_graph=True)
        later.backward()
        earlier.backward()
        seen += [first.detach(), earlier.detach(), later.detach()]
        seen += [p.grad.clone() for p in jitted.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in jitted.parameters())], transform


def _assert_split(traces: Any) -> int:
    """Check that forward saves host copies instead of the offloaded values, and return how many there are."""
    forward, backward = traces.forward, traces.backward
    saved = set(args_of(return_of(forward)))
    hosts = {outs_of(b)[0]: b.args[1].name for b in forward.bound_symbols if b.sym is fsdp_wait_host_copy}
    back = {b.args[0].name for b in backward.bound_symbols if b.sym is fsdp_copy_to_device}
    read = {a for b in backward.bound_symbols for a in args_of(b)}
    assert set(hosts.values()) == traces.offloaded
    assert hosts.keys() <= saved and hosts.keys() == back
    assert not saved & traces.offloaded and not read & traces.offloaded
    return len(hosts)


OPTIONS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"sharding_strategy": "zero2"},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


@on_ranks(2)
def test_training_with_offloaded_activations_gives_the_same_bits(rank: int) -> None:
    for name, option in (("varied", "zero3"), ("attention", "zero2"), ("stack", "bf16")):
        expected, plain = _run(rank, name, **OPTIONS[option])
        assert not any(b.sym.name in HOST_COPIES for b in plain.compiled[0].forward.bound_symbols)
        with offloading():
            actual, transform = _run(rank, name, **OPTIONS[option])
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), (name, option)
        for traces in transform.compiled:
            assert _assert_split(traces) >= 4, (name, option)


@on_ranks(2)
def test_ranks_must_offload_the_same_values_but_may_copy_them_at_other_positions(rank: int) -> None:
    def run(rows: int) -> None:
        model = _model("stack").to(torch.float64)
        jitted = thunder.jit(model, transforms=[fsdp(device="cpu")])
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


def test_views_of_one_value_are_offloaded_as_that_value_and_computed_again() -> None:
    joint, _ = _joint(GPT(width=8, blocks=1, vocab=7, length=4))
    found = offloadable(joint, min_bytes=0)
    [qkv] = [
        out.name
        for b in joint.bound_symbols
        for out in b.flat_proxy_outs
        if b.sym.name == "linear" and out.shape == (2, 4, 24)
    ]
    views = [out for b in joint.bound_symbols if b.sym.name == "split" for out in outs_of(b)]
    assert qkv in found and len(views) == 3 and not found.keys() & set(views)
    forward, backward = split_joint(offload_activations(joint, offloaded=[qkv]))
    assert [b.sym.name for b in backward.bound_symbols].count("split") == 1
    assert args_of(return_of(forward)).count(f"host_{qkv}") == 1


def test_a_name_that_cannot_be_offloaded_is_refused() -> None:
    joint, _ = _joint(Stack(1))
    assert offload_activations(joint, offloaded=()) is joint
    [unpacked] = [b.output.name for b in joint.bound_symbols if b.sym.name == "unpack_trivial"][:1]
    with pytest.raises(ValueError, match=f"{unpacked} cannot be offloaded"):
        offload_activations(joint, offloaded=[unpacked])
