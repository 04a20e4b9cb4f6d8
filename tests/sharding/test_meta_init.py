"""Modules that are created on the meta device and initialized or loaded directly into shards."""

from __future__ import annotations

import gc
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp, full_state_dict

import pytest
import thunder
import torch
from peak_bytes import PeakBytes
from ranks import Ranks
from reference import loss_of
from torch import nn


class Scaled(nn.Module):
    """A module with a 0-dim parameter and two buffers, one of which is not saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("offset", torch.empty(width))
        self.register_buffer("positions", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.normal_(self.offset)
        self.positions.copy_(torch.arange(len(self.positions)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.offset + self.positions / 10


class Net(nn.Module):
    """A model with tied and frozen parameters, and a batch norm with its buffers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Linear(width, width, bias=False)
        self.scaled = Scaled(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(4)
        )
        self.blocks[0][0].bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, width)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled.forward(self.embedding(x))
        for block in self.blocks:
            x = x + block.forward(x)
        return self.head.forward(self.norm(x))


def _reset(module: nn.Module) -> None:
    module.reset_parameters()


def _initialized_module(seed: int, width: int = 8) -> Net:
    """Return the module as it is initialized without sharding."""
    module = Net(width)
    torch.manual_seed(seed)
    for submodule in module.modules():
        if hasattr(submodule, "reset_parameters"):
            submodule.reset_parameters()
    return module


def _on_meta(width: int = 8) -> Net:
    with torch.device("meta"):
        return Net(width)


def _initialize(rank: int, world_size: int, options: dict[str, Any]) -> None:
    expected = _initialized_module(5)
    torch.manual_seed(5 + (rank if "broadcast_from" in options else 0))
    model = thunder.jit(_on_meta(), transforms=[fsdp(device="cpu", param_init_fn=_reset, **options)])
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(
            value, expected.state_dict()[name], rtol=0, atol=0, msg=lambda t, n=name: f"{n}: {t}"
        )
    assert torch.equal(model.get_buffer("scaled.positions"), torch.arange(8.0))
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert not model.get_parameter("blocks.0.0.bias").requires_grad
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    ours, theirs = model(x), expected(x)
    torch.testing.assert_close(ours, theirs)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, expected)]
    loss_of(ours).backward()
    loss_of(theirs).backward()
    for optimizer in optimizers:
        optimizer.step()
    for name, value in full_state_dict(model).items():
        if "ignored_params" not in options or name not in options["ignored_params"]:
            torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"broadcast_from": 0}, {"ignored_params": ["head.bias", "scaled.scale"], "transport": "coalesced"}],
    ids=["broadcast", "ignored-and-even"],
)
def test_initialized_parameters_equal_those_of_the_unsharded_module(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.run(_initialize, options)


def _measure_peak(rank: int, world_size: int) -> None:
    width = 64
    module = _on_meta(width)
    total = sum(p.numel() for p in module.parameters()) * 4
    block = sum(p.numel() for p in module.blocks[0].parameters()) * 4
    gc.collect()
    with PeakBytes() as peak:
        model = thunder.jit(module, transforms=[fsdp(device="cpu", param_init_fn=_reset)])
    shards = sum(b.shard.untyped_storage().nbytes() for b in model._lc_transforms[-1].sharded.buckets)
    assert total / 2 <= shards < total
    assert shards < peak.peak <= shards + block + 4 * 1024, (shards, block, total, peak.peak)


def test_initialization_allocates_at_most_one_block_besides_the_shards(ranks: Ranks) -> None:
    ranks.run(_measure_peak)


def _use_without_values(rank: int, world_size: int, folder: str) -> None:
    model = thunder.jit(_on_meta(), transforms=[fsdp(device="cpu", ignored_params=["scaled.scale"])])
    with pytest.raises(
        RuntimeError, match=r"on the meta device have no values yet: .* and \d+ more\. Give fsdp\(param_init_fn"
    ):
        model(torch.randn(3, 8))
    for save in (
        lambda: tfs.full_state_dict(model),
        lambda: tfs.save_checkpoint(f"{folder}/checkpoint", model),
        lambda: tfs.save_safetensors(model, f"{folder}/whole"),
    ):
        with pytest.raises(RuntimeError, match="on the meta device have no values yet"):
            save()
    with pytest.raises(ValueError, match="broadcast_from: the module is on the meta device"):
        thunder.jit(_on_meta(), transforms=[fsdp(device="cpu", broadcast_from=0)])
    with pytest.raises(ValueError, match="param_init_fn: also pass device="):
        fsdp(param_init_fn=_reset)
    with pytest.raises(TypeError, match="param_init_fn: expected a callable"):
        fsdp(param_init_fn="reset", device="cpu")


def test_parameters_without_values_are_refused(ranks: Ranks) -> None:
    ranks.run(_use_without_values, "")


class Plain(nn.Module):
    """A module without buffers, so that a checkpoint contains all of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second.forward(torch.tanh(self.first.forward(x)))


def _load_into_meta_module(rank: int, world_size: int, folder: Any, use_safetensors: bool) -> None:
    torch.manual_seed(1)
    trained = thunder.jit(Plain(), transforms=[fsdp()])
    with torch.device("meta"):
        module = Plain()
    model = thunder.jit(module, transforms=[fsdp(device="cpu")])
    if use_safetensors:
        tfs.save_safetensors(trained, folder)
        tfs.load_safetensors(model, folder)
    else:
        tfs.save_checkpoint(folder, trained)
        tfs.load_checkpoint(folder, model)
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), trained(x), rtol=0, atol=0)


@pytest.mark.parametrize("use_safetensors", [False, True], ids=["checkpoint", "safetensors"])
def test_a_module_on_the_meta_device_can_be_loaded(ranks: Ranks, tmp_path: Any, use_safetensors: bool) -> None:
    ranks.run(_load_into_meta_module, tmp_path / "saved", use_safetensors)
