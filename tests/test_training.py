"""Training on gloo ranks, compared with the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from thunder_fsdp_sched import Init, fsdp, full_state_dict

import pytest
import thunder
import torch
from device import DEVICE
from models import (
    CASES,
    GPT,
    Buffers,
    FeedForward,
    FrozenParameters,
    Layer,
    Stack,
    TiedWeights,
    TinyParameters,
    UnusedParameters,
    modeled,
)
from ranks import on_ranks
from scenario import Run, Scenario, do, each, loss_of, train_and_check_what_is_saved
from step_counter import StepCounter
from thunder.transforms.materialization import MaterializationTransform
from torch import nn

each_strategy = pytest.mark.parametrize("strategy", ["zero2", "zero3"])

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def _double(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: make(*args, **kwargs).double()


def _in_one_buffer() -> nn.Module:
    """Return a model whose parameters lie side by side in one storage, as cuDNN wants those of an LSTM."""
    module = _double(Stack)()
    params = list(module.parameters())
    buffer = torch.cat([p.detach().flatten() for p in params])
    for param, part in zip(params, buffer.split([p.numel() for p in params]), strict=True):
        param.data = part.view(param.shape)
    return module


#
# Actions that check more than numbers
#


def _train_under_autocast(run: Run) -> None:
    with torch.autocast(DEVICE.type, torch.bfloat16):
        train_and_check_what_is_saved(run)


def _check_frozen_buckets(run: Run) -> None:
    frozen = {b.name for b in run.transform.plan if not b.requires_grad}
    assert "blocks.1" in frozen and len(frozen) == 4, frozen
    reduced = run.buckets("fsdp_reduce_scatter", backward=True)
    assert sorted(reduced) == sorted(b.name for b in run.transform.plan if b.requires_grad)
    assert sorted(run.buckets("fsdp_all_gather")) == sorted(b.name for b in run.transform.plan)
    for name, param in run.model.named_parameters():
        assert param.requires_grad == run.reference.get_parameter(name).requires_grad, name


def _check_unused_blocks(run: Run) -> None:
    compiled = run.transform.compiled[-1]
    for schedule in (compiled.forward_schedule, compiled.backward_schedule):
        assert {op.bucket for op in schedule} == {"blocks.0", "blocks.2"}


def _evaluate_in_inference_mode(run: Run) -> None:
    with torch.inference_mode():
        run.forward(grad=False)


def _check_evaluation(run: Run) -> None:
    (evaluation,) = [c for c in run.transform.compiled if c.backward_schedule is None]
    assert len(evaluation.forward_schedule.of("fsdp_all_gather")) == len(run.transform.plan)


def _backward_of_two_forwards(run: Run) -> None:
    """Run one backward of the sum of two losses twice. Their forwards have gathered into the same slots."""
    run.forward(0)
    run.forward(1)
    first, second = run.pending
    first.losses = [loss + 2 * other for loss, other in zip(first.losses, second.losses, strict=True)]
    first.expected = {rank: loss + 2 * second.expected[rank] for rank, loss in first.expected.items()}
    run.backward(0, retain=True)
    run.backward(0)
    run.pending.clear()


def _keep_what_is_returned(run: Run) -> None:
    """Train, and check that returned parameters keep their values."""
    returned = []
    for step in range(3):
        ours = run.forward(step)
        returned.append((ours, {name: value.detach().clone() for name, value in ours.items()}))
        run.backward()
        run.step()
    for ours, before in returned:
        run.close(ours, before, "returned earlier", tolerance=0)


def _differentiate_inputs(run: Run) -> None:
    (x,) = run.inputs()
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for model, leaf in zip((run.model, run.reference), leaves, strict=True):
        loss_of(model(leaf)).backward()
    run.close(leaves[0].grad, leaves[1].grad, "gradient of the input")
    run.reset()


def _check_gathers_of_a_frozen_model(run: Run) -> None:
    """Gradients flow through it to the inputs."""
    assert not run.buckets("fsdp_reduce_scatter", backward=True)
    assert len(run.buckets("fsdp_all_gather", backward=True)) == len(run.transform.plan)


#
# Models
#


@modeled(blocks=lambda: nn.ModuleList(nn.LayerNorm(4) for _ in range(2)))
def _Norms(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Layer norms, whose gradients are copied: no operator writes them in place."""
    for block in self.blocks:
        x = torch.tanh(block(x))
    return x


@modeled(blocks=lambda: nn.ModuleList(Layer(4) for _ in range(2)), only_returned=(5, 2))
def _ReturnsParameters(self: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output, a parameter, views of parameters, and a parameter that is not used otherwise."""
    for block in self.blocks:
        x = block(x)
    first, second = self.blocks
    views = {"view": first.down.weight.t()[1:], "slice": second.up.weight[3]}
    return {"output": x, "parameter": first.up.weight, **views, "unused": self.only_returned}


#
# Scenarios
#

_stack = _double(Stack, 2)

TRAINED_OTHERWISE = (
    *("frozen_parameters", "buffers", "unused_parameters", "tied_weights"),
    *("uneven_rows", "shared_blocks", "views_of_parameters"),
)
"""Models that other scenarios train, the last three in ``test_transports`` and ``test_fusions``."""

SCENARIOS = {
    **{
        f"{case} on 2 ranks": Scenario(_double(make), [train_and_check_what_is_saved])
        for case, make in CASES.items()
        if case not in TRAINED_OTHERWISE
    },
    "parameters in one buffer": Scenario(_in_one_buffer, [train_and_check_what_is_saved]),
    "frozen buckets are gathered but not reduced": Scenario(
        _double(FrozenParameters), [do.train(2), _check_frozen_buckets]
    ),
    "unused blocks do not communicate": Scenario(_double(UnusedParameters), [do.train(1), _check_unused_blocks]),
    "evaluation between steps": Scenario(
        _double(Buffers),
        [
            *(do.mode(training=False), _evaluate_in_inference_mode),  # before unsharded memory has been allocated
            *(do.mode(training=True), do.train(1)),
            *(do.mode(training=False), do.forward(1, grad=False), _check_evaluation),
            do.train(1),  # with gradients, in evaluation mode
            *(do.mode(training=True), do.train(2), do.forward(2, grad=False), do.train(1)),
        ],
    ),
    "copied gradients in the place of kept parameters": Scenario(
        _double(_Norms),
        [do.forward(), do.backward(retain=True), do.backward(), do.step(), do.train(1)],
        {"sharding_strategy": "zero2"},
    ),
    "one backward of two forwards": Scenario(
        _stack, [_backward_of_two_forwards, do.step(), do.train(1)], others=[{"sharding_strategy": "zero2"}]
    ),
    # Bits
    "bits of the unsharded compiled GPT": Scenario(
        partial(GPT, blocks=1, block=FeedForward),
        [train_and_check_what_is_saved],
        {"sharding_strategy": "zero2"},
        oracle="compiled",
        tolerance=0,
        optimizer=ADAMW,
    ),
    "bits of the unsharded compiled model under autocast": Scenario(
        partial(Stack, 2), [_train_under_autocast], {"dtype": torch.float32}, oracle="compiled", tolerance=0
    ),
    "a fully frozen model": Scenario(
        lambda: Stack(2).double().requires_grad_(False),
        [_differentiate_inputs, _check_gathers_of_a_frozen_model],
        optimizer=lambda params: None,
    ),
    "returned parameters": Scenario(_double(_ReturnsParameters), [_keep_what_is_returned]),
    "tied weights, zero2": Scenario(  # which keeps more than each parameter once
        _double(TiedWeights), [train_and_check_what_is_saved], {"sharding_strategy": "zero2"}
    ),
}
"""Scenarios for ZeRO-3, unless they say otherwise. ZeRO-2 differs in what is kept for backward."""


@each(SCENARIOS)
def test_trains_like_the_unsharded_model(name: str) -> None:
    SCENARIOS[name].run()


#
# Memory
#


def _addresses(flat: torch.Tensor) -> tuple[int, int]:
    return flat.data_ptr(), flat.data_ptr() + flat.nbytes


@each_strategy
@on_ranks(2)
def test_a_step_copies_no_parameters_and_allocates_no_unsharded_ones(strategy: str) -> None:
    run = Run(Stack(3, width=16).double(), sharding_strategy=strategy)
    buckets = run.transform.sharded.buckets

    def memory() -> dict[Any, tuple[int, int]]:
        arenas = {a for b in buckets for a in (b.arena, b.private_slot.arena)}
        return {a: _addresses(a._memory) for a in arenas if a._memory is not None}

    run.train(steps=2)
    before = memory()
    with StepCounter(run.model.parameters()) as counter:
        with counter.phase("forward"):
            loss = loss_of(run.model(*run.inputs()))
        with counter.phase("backward"):
            loss.backward()
    counts = counter.counts()
    assert counts.parameter_bytes_copied == counts.unsharded_bytes_allocated == 0
    assert memory() == before
    for bucket in buckets:
        params = [run.model.get_parameter(param.name) for param in bucket.spec.params]
        for tensors in ([param.grad.to_local() for param in params], [*(p.to_local() for p in params), bucket.shard]):
            storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
            assert len(storages) == 1, "sharded parameters and gradients must each be views of one buffer"


#
# Other options
#


@pytest.mark.parametrize("order", ["before", "after"])
@on_ranks(2)
def test_module_on_the_meta_device_is_materialized(order: str) -> None:
    torch.manual_seed(5)
    model = TinyParameters().double()
    reference = copy.deepcopy(model)
    materialize = MaterializationTransform(
        "cpu", init=MaterializationTransform.init_from_original_state_dict(model.state_dict())
    )
    transforms = [fsdp(init=Init(device="cpu")), materialize]
    sharded = thunder.jit(model.to("meta"), transforms=transforms if order == "after" else transforms[::-1])
    (x,) = model.inputs(torch.Generator().manual_seed(1))
    torch.testing.assert_close(sharded(x), reference(x), rtol=1e-11, atol=1e-11)
    for name, value in full_state_dict(sharded).items():
        assert torch.equal(value, reference.state_dict()[name]), name


@on_ranks(2)
def test_ignored_parameters_are_neither_sharded_nor_reduced(rank: int) -> None:
    model = Stack(2).double()
    reference = copy.deepcopy(model)
    ignored = [model.blocks[0].up.weight, "last.bias"]
    sharded = thunder.jit(model, transforms=[transform := fsdp(init=Init(ignored_params=ignored))])
    names = {"blocks.0.up.weight", "last.bias"}
    assert not names & {n for bucket in transform.plan for p in bucket.params for n in p.names}
    (x,) = model.inputs(torch.Generator().manual_seed(rank))
    loss_of(sharded(x)).backward()
    loss_of(reference(x)).backward()
    for name in names:  # unsharded, with the gradient of this rank's batch only
        ours, theirs = sharded.get_parameter(name), reference.get_parameter(name)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    whole = full_state_dict(sharded)
    assert set(whole) == set(reference.state_dict())
    for name in names:
        with torch.no_grad():
            sharded.get_parameter(name).add_(1)
        assert torch.equal(whole[name], reference.get_parameter(name)), "shares memory with the model"
