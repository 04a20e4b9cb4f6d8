"""``broadcast_from`` with values on one rank only: the other ranks have made the module on the meta device."""

from __future__ import annotations

import copy
import gc
from typing import Any

from thunder_fsdp_sched import fsdp, full_state_dict
from thunder_fsdp_sched.agreement.consistency import ScheduleDisagreement

import pytest
import thunder
import torch
from peak_bytes import PeakBytes
from ranks import Ranks
from reference import loss_of
from torch import nn

WIDTH = 8


class Rotary(nn.Module):
    """A table that no state dict has, under two names, as in models of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(WIDTH) / WIDTH, persistent=False)
        self.original = self.table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table + self.original


class Net(nn.Module):
    """A model with tied, frozen, 0-dim and transposed parameters, and every kind of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rotary = Rotary()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.blocks[0][0].bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("offset", torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rotary(self.embedding(x)) * self.scale + self.offset
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def _make(meta: bool) -> Net:
    torch.manual_seed(3)
    if not meta:
        net = Net()
        net.blocks[1][0].weight.data = net.blocks[1][0].weight.data.t().contiguous().t()  # as loaded from Conv1D
        return net
    with torch.device("meta"):
        return Net()


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**full_state_dict(model), **dict(model.named_buffers())}


def _check_values(model: Any, expected: nn.Module) -> None:
    values = _tensors(model)
    for name, value in {**expected.state_dict(), **dict(expected.named_buffers())}.items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers(), model._model.rotary.original))
    assert model._model.rotary.original is model._model.rotary.table
    assert model._model.head.weight is model._model.embedding.weight


def _train_from_rank_0(rank: int, world_size: int, options: dict[str, Any]) -> None:
    expected = _make(meta=False)
    module = _make(meta=rank != 0)
    ignored = module.get_parameter("blocks.1.0.bias")
    model = thunder.jit(module, transforms=[fsdp(broadcast_from=0, **options)])
    _check_values(model, expected)
    assert not model.get_parameter("blocks.0.0.bias").requires_grad
    if "ignored_params" in options:
        assert model.get_parameter("blocks.1.0.bias") is ignored
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    ours, theirs = model(x), expected(x)
    torch.testing.assert_close(ours, theirs)
    for trained, loss in ((model, loss_of(ours)), (expected, loss_of(theirs))):
        loss.backward()
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
    for name, value in _tensors(model).items():
        torch.testing.assert_close(value, _tensors_of(expected)[name], msg=lambda text, n=name: f"{n}: {text}")


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**module.state_dict(), **dict(module.named_buffers())}


@pytest.mark.parametrize(
    "options",
    [{}, {"device": "cpu", "ignored_params": ["blocks.1.0.bias"], "transport": "coalesced"}],
    ids=["default", "device-and-ignored"],
)
def test_one_rank_with_values_is_enough(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.run(_train_from_rank_0, options)


def _measure_peak(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    with torch.device("cpu" if rank == 0 else "meta"):
        module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    total = sum(p.numel() for p in module.parameters()) * 4
    gc.collect()
    with PeakBytes() as peak:
        model = thunder.jit(module, transforms=[fsdp(broadcast_from=0)])
    shards = sum(b.shard.untyped_storage().nbytes() for b in model._lc_transforms[-1].sharded.buckets)
    assert total / 2 <= shards < total * 0.6
    if rank != 0:
        assert shards < peak.peak <= shards + 64 * 64 * 4 + 1024, (peak.peak, shards, total)


def test_a_rank_without_values_allocates_one_parameter_more_than_its_shards(ranks: Ranks) -> None:
    ranks.run(_measure_peak)


def _initialize_the_rest(rank: int, world_size: int) -> None:
    """The embedding is loaded on rank 0, which leaves the blocks and the norm to ``param_init_fn``."""
    module = _make(meta=rank != 0)
    for part in (module.blocks, module.norm):
        part.to("meta")
    torch.manual_seed(7 + rank)
    initialized: list[str] = []

    def init(submodule: nn.Module) -> None:
        initialized.append(type(submodule).__name__)
        submodule.reset_parameters()

    model = thunder.jit(module, transforms=[fsdp(broadcast_from=0, device="cpu", param_init_fn=init)])
    assert initialized == ["Linear", "Linear", "BatchNorm1d"]
    expected = _make(meta=False)
    torch.manual_seed(7)
    for submodule in (expected.blocks[0][0], expected.blocks[1][0], expected.norm):
        submodule.reset_parameters()
    _check_values(model, expected)


def test_param_init_fn_initializes_what_no_rank_has(ranks: Ranks) -> None:
    ranks.run(_initialize_the_rest)


def _refuse(rank: int, world_size: int, case: str) -> None:
    module, options = _make(meta=rank != 0), {"broadcast_from": 0}
    if case == "no values":
        module, expected = _make(meta=True), r"the module is on the meta device on rank 0 \('scale'\)"
    elif case == "values elsewhere":
        options = {"broadcast_from": 1}
        expected = r"the module is on the meta device on rank 1"
    elif case == "values elsewhere, initialized":
        options = {"broadcast_from": 1, "param_init_fn": nn.Module.apply, "device": "cpu"}
        expected = r"'scale' is on cpu, but on meta on rank 1, which broadcasts it"
    elif case == "buffer has values elsewhere":
        module = _make(meta=False)
        if rank == 0:
            module.offset = module.offset.to("meta")
        expected = r"'offset' is on cpu, but on meta on rank 0"
    elif case == "not tied":
        if rank == 1:
            module.head.weight = nn.Parameter(torch.empty_like(module.head.weight))
        expected = r"rank 0: embedding\.weight = head\.weight: .*\n    rank 1: embedding\.weight: "
    elif case == "other buffer":
        if rank == 1:
            module.offset = torch.empty(WIDTH, dtype=torch.float64, device="meta")
        expected = r"rank 0: offset: torch\.float32\[8\] on cpu\n    rank 1: offset: torch\.float64\[8\]"
    elif case == "attribute":
        module.rotary.plain = module.rotary.table.clone()
        expected = r"attribute 'rotary\.plain' is a tensor on meta, and on cpu on rank 0\. .*register_buffer"
    else:
        assert case == "no source"
        options, expected = {}, r"rank 0: scale.* on cpu, .*\n    rank 1: .* on meta"
    before = copy.copy(module.__dict__), [id(p) for p in module.parameters()]
    with pytest.raises((ValueError, ScheduleDisagreement), match=expected):
        thunder.jit(module, transforms=[fsdp(**options)])
    assert before == (module.__dict__, [id(p) for p in module.parameters()])


CASES = [
    "no values",
    "values elsewhere",
    "values elsewhere, initialized",
    "buffer has values elsewhere",
    "not tied",
    "other buffer",
    "attribute",
    "no source",
]


@pytest.mark.parametrize("case", CASES)
def test_every_rank_refuses_what_cannot_be_broadcast(ranks: Ranks, case: str) -> None:
    ranks.run(_refuse, case, timeout=60)
