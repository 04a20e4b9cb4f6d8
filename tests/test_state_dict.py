"""State dicts, sharded and whole: saved, loaded, refused."""

from __future__ import annotations

import copy
from typing import Any

from thunder_fsdp_sched import fsdp, full_state_dict

import pytest
import thunder
import torch
from models import Layer, Model
from ranks import Ranks
from reference import Twins, loss_of
from torch import nn


class Everything(Model):
    """Parameters of the root module, 0-dim, uneven, frozen and tied ones, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.mix = nn.Parameter(torch.randn(5, 4))
        self.register_buffer("offset", torch.randn(4))
        self.register_buffer("unsaved", torch.randn(4), persistent=False)
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(Layer(4) for _ in range(2))
        self.blocks[1].up.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + self.offset + self.unsaved
        for block in self.blocks:
            x = block.forward(x)
        return self.head.forward(self.norm(x)) + torch.tanh(x @ self.embedding.weight.t() @ self.mix)[:, :1]


def _twins(rank: int, world_size: int, seed: int = 0, **options: Any) -> Twins:
    torch.manual_seed(seed)
    return Twins(rank, world_size, Everything().double(), **options)


def _addresses(module: nn.Module) -> dict[str, int]:
    return {name: param.data_ptr() for name, param in module.named_parameters()}


def _save_and_load_shards(rank: int, world_size: int) -> None:
    twins = _twins(rank, world_size)
    addresses = _addresses(twins.sharded)
    twins.train(steps=1)
    models = (twins.sharded, twins.reference)
    saved = [copy.deepcopy(model.state_dict()) for model in models]
    saved_optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in twins.optimizers]
    assert "unsaved" not in saved[0] and "norm.running_mean" in saved[0]
    for param in twins.transform.plan["blocks.0"].params:
        assert saved[0][param.name].shape[1:] == param.shape[1:]

    twins.train(steps=2)
    for model, state in zip(models, saved, strict=True):
        model.load_state_dict(state)
    for optimizer, state in zip(twins.optimizers, saved_optimizers, strict=True):
        optimizer.load_state_dict(state)
    assert _addresses(twins.sharded) == addresses
    twins.check_parameters()
    twins.train(steps=2)


def test_training_goes_on_from_a_loaded_sharded_state_dict(ranks: Ranks) -> None:
    ranks.run(_save_and_load_shards)


def _whole_state(rank: int, world_size: int) -> None:
    twins = _twins(rank, world_size, move_state_dict_to_cpu=True)
    before = twins.reference.state_dict()
    whole = full_state_dict(twins.sharded)
    assert list(whole) and set(whole) == set(before)
    for name, value in whole.items():  # before any training: every bit
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
        assert value.device.type == "cpu" and not value.requires_grad

    original = twins.sharded.original_state_dict()
    assert {name.removeprefix(".") for name in original} <= set(before)
    for name, value in original.items():
        torch.testing.assert_close(value, before[name.removeprefix(".")], rtol=0, atol=0)

    twins.train(steps=2)
    for name, value in whole.items():
        shares = value.untyped_storage().data_ptr() in {
            b.shard.untyped_storage().data_ptr() for b in twins.transform.sharded.buckets
        }
        assert not shares, f"{name} is a copy, not a view of the shards"
    fresh = Everything().double()
    fresh.load_state_dict(full_state_dict(twins.sharded), strict=True)
    for name, value in fresh.state_dict().items():
        twins.close(value, twins.reference.state_dict()[name], name)
    assert fresh.head.weight is fresh.embedding.weight


def test_whole_state_dict_loads_into_the_unsharded_module(ranks: Ranks) -> None:
    ranks.run(_whole_state)


def _load_whole_state(rank: int, world_size: int) -> None:
    twins = _twins(rank, world_size)
    twins.train(steps=1)
    addresses = _addresses(twins.sharded)
    torch.manual_seed(7)
    other = Everything().double()
    twins.sharded.load_original_state_dict(other.state_dict())
    twins.reference.load_state_dict(other.state_dict())
    assert _addresses(twins.sharded) == addresses
    assert twins.sharded.get_parameter("head.weight") is twins.sharded.get_parameter("embedding.weight")
    twins.check_parameters()
    twins.train(steps=2)

    # What one sharded module gave, another one takes, in any dtype.
    again = _twins(rank, world_size, seed=9)
    again.sharded.load_original_state_dict(twins.sharded.original_state_dict())
    for name, value in full_state_dict(again.sharded).items():
        torch.testing.assert_close(value, full_state_dict(twins.sharded)[name], rtol=0, atol=0)
    again.sharded.load_original_state_dict({name: value.float() for name, value in other.state_dict().items()})
    for name, value in full_state_dict(again.sharded).items():
        torch.testing.assert_close(value, other.state_dict()[name].float().to(value.dtype), rtol=0, atol=0)
    assert all(p.dtype is torch.float64 for p in again.sharded.parameters())


def test_training_goes_on_from_a_loaded_whole_state_dict(ranks: Ranks) -> None:
    ranks.run(_load_whole_state)


def _load_a_part(rank: int, world_size: int) -> None:
    twins = _twins(rank, world_size)
    before = full_state_dict(twins.sharded)
    part = {"head.weight": torch.full((5, 4), 2.0), "scale": torch.tensor(3.0), "blocks.0.up.bias": torch.ones(8)}
    twins.sharded.load_original_state_dict(part)
    after = full_state_dict(twins.sharded)
    for name, value in after.items():
        tied = "head.weight" if name == "embedding.weight" else name
        twins.close(value, part[tied].double() if tied in part else before[name], name)


def test_a_part_of_a_whole_state_dict_leaves_the_rest(ranks: Ranks) -> None:
    ranks.run(_load_a_part)


def _load_wrong_shape(rank: int, world_size: int) -> None:
    twins = _twins(rank, world_size)
    state = {**twins.reference.state_dict(), "mix": torch.zeros(4, 5)}
    with pytest.raises(ValueError, match=r"state dict entry 'mix': expected shape \(5, 4\), got \(4, 5\)"):
        twins.sharded.load_original_state_dict(state)
    shard = {name: torch.zeros(9, 9) if name == "mix" else value for name, value in twins.sharded.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch for mix"):
        twins.sharded.load_state_dict(shard)


def test_entries_of_the_wrong_shape_are_refused_by_name(ranks: Ranks) -> None:
    ranks.run(_load_wrong_shape)


def _replace_parameters(rank: int, world_size: int) -> None:
    model = Everything().double()
    sharded = thunder.jit(model, transforms=[fsdp(bucketing_strategy="none")])
    (x,) = model.inputs(torch.Generator().manual_seed(0))
    loss_of(sharded(x)).backward()

    def check_that_it_is_named(name: str) -> None:
        # Every rank says so, also one that owns no row of the parameter; nobody waits for the others.
        with pytest.raises(RuntimeError, match=rf"parameter '{name}' no longer lies in the shard buffer.*p\.copy_"):
            sharded(x)

    for name in ("mix", "scale"):
        param = sharded.get_parameter(name)
        ours = param.data
        param.data = ours.clone()
        check_that_it_is_named(name)
        param.data = ours
        loss_of(sharded(x)).backward()
    sharded.load_state_dict({name: value.clone() for name, value in sharded.state_dict().items()}, assign=True)
    check_that_it_is_named("scale")


def test_a_parameter_replaced_by_another_tensor_is_named_on_every_rank(ranks: Ranks) -> None:
    ranks.run(_replace_parameters)
