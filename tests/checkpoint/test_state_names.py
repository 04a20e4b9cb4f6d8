"""Names in state dicts are those of the unsharded module: partly loaded, nested, and under activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp, full_state_dict

import pytest
import thunder
import torch
from coded import coded
from models import Layer, Model
from ranks import on_ranks
from saving import Holder, assert_equal, fill, update
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)

WRAPPED = "_checkpoint_wrapped_module"


class Net(Model):
    """A model with tied parameters, two blocks, and buffers that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("unsaved", torch.ones(4), persistent=False)
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.embedding = nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList(Layer(4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.embedding.weight
        self.blocks[0].register_buffer("first_count", self.count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        x = self.embedding(x * self.scale * self.unsaved)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _wrap(module: nn.Module) -> nn.Module:
    apply_activation_checkpointing(module, check_fn=lambda m: isinstance(m, Layer))
    return module


def _make(seed: int = 0, *, wrap: bool = True) -> Net:
    torch.manual_seed(seed)
    net = Net().double()
    return _wrap(net) if wrap else net


def _without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {n: v for n, v in state.items() if not any(name in n for name in names)}


PARTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "all": lambda state: dict(state),
    "with metadata": lambda state: state,
    "every second": lambda state: dict(list(state.items())[::2]),
    "one tied name": _without("embedding.weight"),
    "the other tied name": _without("head.weight"),
    "no buffers": _without("norm.running", "norm.num", "count"),
    "no block": _without("blocks.1."),
    "nothing": lambda state: {},
    "more": lambda state: {
        **state,
        "x.y": torch.zeros(1),
        "blocks.0.z": torch.zeros(1),
        "blocks.7.up.bias": torch.ones(1),
    },
}


@on_ranks(2)
def test_missing_and_unexpected_keys_are_those_of_the_unsharded_module() -> None:
    other, plain, module = _make(1), _make(), _make()
    for net in (other, plain, module):
        net.blocks[0] = getattr(net.blocks[0], WRAPPED)  # blocks with and without a wrapper
        net.blocks[1].up.bias = net.blocks[0].up.bias
    jitted = thunder.jit(module, transforms=[fsdp(init=tfs.Init(ignored_params=["blocks.1.up.bias"]))])
    pairs = {
        "jitted": (jitted, plain, other),
        "original": (module, plain, other),
        "holder": (Holder(jitted), Holder(plain), Holder(other)),
        "list": (nn.ModuleList([module]), nn.ModuleList([plain]), nn.ModuleList([other])),
        "blocks": (module.blocks, plain.blocks, other.blocks),
        "block": (module.blocks[0], plain.blocks[0], other.blocks[0]),
        "wrapped block": (module.blocks[1], plain.blocks[1], other.blocks[1]),
    }
    for case, (ours, theirs, source) in pairs.items():
        for part, take in PARTS.items():
            state = take(source.state_dict())
            for owner in (ours, theirs):
                fill(owner, 0.0)
            actual, expected = (owner.load_state_dict(state, strict=False) for owner in (ours, theirs))
            assert actual.missing_keys == expected.missing_keys, (case, part)
            assert actual.unexpected_keys == expected.unexpected_keys, (case, part)
            assert_equal(full_state_dict(jitted), plain.state_dict(), (case, part))
            messages = []
            for owner in (ours, theirs):
                try:
                    owner.load_state_dict(state)
                except RuntimeError as error:
                    messages.append(str(error).partition("\n")[2])
            assert messages[:1] == messages[1:], (case, part)  # as nested modules name them


@on_ranks(2)
def test_names_leave_out_wrappers_for_activation_checkpointing() -> None:
    plain = _make(wrap=False)
    expected = plain.state_dict()
    trained = {name for name, _ in plain.named_parameters()}
    model = thunder.jit(_make(), transforms=[fsdp()])
    assert any(WRAPPED in name for name, _ in model.named_parameters())  # as with FSDP2
    optimizer = update(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for names in (tfs.get_optimizer_state_dict(model, optimizer), get_optimizer_state_dict(model, optimizer)):
        assert names["state"].keys() == trained
        assert {name for group in names["param_groups"] for name in group["params"]} == trained
    values = full_state_dict(model)
    assert values.keys() == expected.keys()
    for state in (
        model.state_dict(),
        get_model_state_dict(model),
        model._model.state_dict(),
        tfs.get_model_state_dict(model),
    ):
        assert_equal(state, values)
    assert {name for name, _ in tfs.stream_full_parameters(model)} == trained


@on_ranks(2)
def test_a_wrapper_around_the_whole_model_is_refused() -> None:
    with pytest.raises(ValueError, check=coded("module.parameters-renamed-by-wrapper", "CheckpointWrapper", "scale")):
        thunder.jit(checkpoint_wrapper(_make()), transforms=[fsdp()])


@on_ranks(2)
def test_parameters_that_the_module_does_not_have_are_refused() -> None:
    class Adds(thunder.Transform):
        def transform_module(self, model: Any) -> None:
            model._overrides_parameters["0.weight.added"] = nn.Parameter(torch.zeros(2))

    model = thunder.jit(nn.Sequential(nn.Linear(2, 2)), transforms=[fsdp(), Adds()])
    for use in (model.state_dict, lambda: model.load_state_dict({}, strict=False)):
        with pytest.raises(
            NotImplementedError, check=coded("state-dict.parameter-of-another-transform", "0.weight.added")
        ):
            use()
