"""Values from one rank (``broadcast_from``), from ``param_init_fn``, or loaded into modules on the meta device."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import ScheduleDisagreement, fsdp, full_state_dict
from thunder_fsdp_sched.sharding.initial_digests import Digest

import pytest
import thunder
import torch
from coded import coded
from memory_count import Tracker
from ranks import on_ranks
from scenario import loss_of
from torch import nn

WIDTH = 8


class Rotary(nn.Module):
    """A table that no state dict has, under two names, as in models of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(WIDTH), persistent=False)
        self.original = self.table
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table + self.original


class Net(nn.Module):
    """A model with tied, frozen, 0-dim and transposed parameters, and every kind of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rotary = Rotary()
        self.scale = nn.Parameter(torch.empty(()))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.blocks[0][0].bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("offset", torch.empty(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.normal_(self.offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rotary(self.embedding(x)) * self.scale + self.offset
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def _make(meta: bool, make: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(3)
    with torch.device("meta" if meta else "cpu"):
        net = make()
    if make is Net and not meta:
        net.blocks[1][0].weight.data = net.blocks[1][0].weight.data.t().contiguous().t()  # as loaded from Conv1D
    return net


def _reset(module: nn.Module) -> None:
    module.reset_parameters()


def _reset_all(module: Any, seed: int) -> Any:
    """Initialize the module as if it were not sharded."""
    torch.manual_seed(seed)
    for submodule in module.modules():
        if hasattr(submodule, "reset_parameters"):
            submodule.reset_parameters()
    return module


def _check_values(model: Any, expected: nn.Module, **tolerance: float) -> None:
    values = {**full_state_dict(model), **dict(model.named_buffers())}
    torch.testing.assert_close(values, {**expected.state_dict(), **dict(expected.named_buffers())}, **tolerance)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers(), model._model.rotary.original))
    assert model._model.rotary.original is model._model.rotary.table
    assert model._model.head.weight is model._model.embedding.weight
    assert not model.get_parameter("blocks.0.0.bias").requires_grad


IGNORING = tfs.Init(device="cpu", ignored_params=["blocks.1.0.bias", "scale"])
INITIALIZING = tfs.Init(device="cpu", param_init_fn=_reset)


@pytest.mark.parametrize(
    "options",
    [{"init": tfs.Init(broadcast_from=0)}, {"init": replace(IGNORING, param_init_fn=_reset), "transport": "coalesced"}],
    ids=["one rank has them", "initialized on all ranks"],
)
@on_ranks()
def test_values_equal_those_of_the_unsharded_module_and_train(rank: int, options: dict[str, Any]) -> None:
    init = options["init"]
    initializes = init.param_init_fn is not None
    module, expected = _make(meta=rank != 0 or initializes), _make(meta=False)
    if initializes:
        weight = expected.blocks[1][0].weight
        weight.data = weight.data.contiguous()  # random values fill memory in its order
        _reset_all(expected, 5)
        torch.manual_seed(5)
    ignored = module.scale
    model = thunder.jit(module, transforms=[fsdp(**options)])
    assert (model.get_parameter("scale") is ignored) == bool(init.ignored_params)
    _check_values(model, expected, rtol=0, atol=0)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    outputs = model(x), expected(x)
    torch.testing.assert_close(*outputs)
    for trained, output in zip((model, expected), outputs, strict=True):
        loss_of(output).backward()
        torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.1).step()
    _check_values(model, expected, rtol=1e-5, atol=1e-5)


@on_ranks()
def test_param_init_fn_initializes_what_no_rank_has(rank: int) -> None:
    """The embedding is loaded on rank 0, which leaves the blocks and the norm to ``param_init_fn``."""
    module = _make(meta=rank != 0)
    for part in (module.blocks, module.norm):
        part.to("meta")
    torch.manual_seed(7 + rank)
    initialized: list[str] = []

    def init(submodule: nn.Module) -> None:
        initialized.append(type(submodule).__name__)
        submodule.reset_parameters()

    model = thunder.jit(module, transforms=[fsdp(init=tfs.Init(device="cpu", param_init_fn=init, broadcast_from=0))])
    assert initialized == ["Linear", "Linear", "BatchNorm1d"]
    expected = _make(meta=False)
    torch.manual_seed(7)
    for submodule in (expected.blocks[0][0], expected.blocks[1][0], expected.norm):
        submodule.reset_parameters()
    _check_values(model, expected, rtol=0, atol=0)


@pytest.mark.parametrize("init", [tfs.Init(broadcast_from=0), INITIALIZING], ids=["broadcast", "initialized"])
@on_ranks()
def test_a_rank_without_values_allocates_a_layer_or_two_more_than_its_shards(rank: int, init: tfs.Init) -> None:
    is_on_meta = rank != 0 or init.param_init_fn is not None
    with torch.device("meta" if is_on_meta else "cpu"):
        module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    total = sum(p.numel() for p in module.parameters()) * 4
    gc.collect()
    with Tracker() as tracker:
        model = thunder.jit(module, transforms=[fsdp(init=init)])
    shards = sum(b.shard.untyped_storage().nbytes() for b in model._lc_transforms[-1].sharded.buckets)
    assert total / 2 <= shards < total * 0.6
    if is_on_meta:  # a thread of gloo may still hold the layer before
        assert shards < tracker.peak <= shards + 2 * total / 8 + 4 * 1024, (tracker.peak, shards, total)


def _alone(failing: int, expected: coded) -> list[coded]:
    """Return what each of two ranks raises if one of them fails."""
    theirs = coded("ranks.ranks-disagree", f"rank {failing}: ValueError", *expected.names)
    return [expected if rank == failing else theirs for rank in range(2)]


FROM_FIRST = {"init": tfs.Init(broadcast_from=0)}
# Options, and what each rank raises.
REFUSED: dict[str, tuple[dict[str, Any], list[coded]]] = {
    "no values": (FROM_FIRST, [coded("option.broadcast-from-meta-device", "rank 0", "'scale'")] * 2),
    "values elsewhere": (
        {"init": tfs.Init(broadcast_from=1)},
        [coded("option.broadcast-from-meta-device", "rank 1")] * 2,
    ),
    "values elsewhere, initialized": (
        {"init": tfs.Init(device="cpu", param_init_fn=nn.Module.apply, broadcast_from=1)},
        _alone(0, coded("option.broadcast-between-devices", "'scale'", "meta on rank 1")),
    ),
    "buffer has values elsewhere": (
        FROM_FIRST,
        _alone(1, coded("option.broadcast-between-devices", "'offset'", "meta on rank 0")),
    ),
    "not tied": (
        FROM_FIRST,
        [coded("ranks.ranks-disagree", "rank 0: embedding.weight = head.weight:", "rank 1: embedding.weight:")] * 2,
    ),
    "other buffer": (
        FROM_FIRST,
        [coded("ranks.ranks-disagree", "rank 0: offset: torch.float32[8]", "rank 1: offset: torch.float64[8]")] * 2,
    ),
    "attribute": (FROM_FIRST, _alone(1, coded("option.broadcast-of-plain-tensor", "'rotary.plain'", "cpu on rank 0"))),
    "no source": (
        {},
        [coded("ranks.ranks-disagree", "rank 0: scale: float32[] on cpu", "rank 1: scale: float32[] on meta")] * 2,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks()
def test_every_rank_refuses_what_cannot_be_broadcast(rank: int, case: str) -> None:
    options, expected = REFUSED[case]
    module = _make(meta=case == "no values" or (rank != 0 and case != "buffer has values elsewhere"))
    if case == "buffer has values elsewhere" and rank == 0:
        module.offset = module.offset.to("meta")
    elif case == "not tied" and rank == 1:
        module.head.weight = nn.Parameter(torch.empty_like(module.head.weight))
    elif case == "other buffer" and rank == 1:
        module.offset = torch.empty(WIDTH, dtype=torch.float64, device="meta")
    elif case == "attribute":
        module.rotary.plain = module.rotary.table.clone()
    before = copy.copy(module.__dict__), [id(p) for p in module.parameters()]
    with pytest.raises((ValueError, ScheduleDisagreement), check=expected[rank]):
        thunder.jit(module, transforms=[fsdp(**options)])
    assert before == (module.__dict__, [id(p) for p in module.parameters()])


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


@on_ranks()
def test_parameters_and_buffers_without_values_are_refused() -> None:
    x = torch.ones(2, 4)

    def shard(**options: Any) -> Any:
        return thunder.jit(_make(True, _two_layers), transforms=[fsdp(**options)])

    model = shard(init=tfs.Init(device="cpu"))
    nn.init.ones_(model.get_submodule("0").weight)
    model.get_submodule("2").bias.data.zero_()
    for use in (
        lambda: model(x),
        lambda: tfs.eager(model).__enter__(),
        lambda: tfs.full_state_dict(model),
        lambda: tfs.save_checkpoint(model, "none"),
        lambda: tfs.save_safetensors(model, "none"),
    ):
        with pytest.raises(RuntimeError, check=coded("parameter.no-values-yet", "0.bias, 2.weight")):
            use()
    for name in ("0.bias", "2.weight"):
        model.get_parameter(name).data.fill_(0.5)
    model(x)

    # An initialization that omits a parameter, buffers that were never created, and nothing at all.
    model = shard(init=tfs.Init(device="cpu", param_init_fn=lambda module: nn.init.ones_(module.weight)))
    with pytest.raises(RuntimeError, check=coded("parameter.no-values-yet", "0.bias, 2.bias")):
        model(x)
    module = _make(True, _two_layers)
    module.register_buffer("mask", torch.empty(4, device="meta"))
    model = thunder.jit(module, transforms=[fsdp(init=tfs.Init(device="cpu"))])
    model.load_original_state_dict(_make(False, _two_layers).state_dict())
    with pytest.raises(RuntimeError, check=coded("parameter.no-values-yet", "mask")):
        model(x)
    with pytest.raises(RuntimeError, check=coded("parameter.no-values-yet", "0.weight, 0.bias, 2.weight and 1 more")):
        shard()(x)


def test_the_digest_of_values_depends_on_their_order_and_signs() -> None:
    values = torch.randn(300, 257)  # more than a chunk of words
    half = values.half()
    swapped, signs = values.clone(), values.clone()
    swapped[:, :2] = values[:, :2].flip(1)
    signs[0, 1], signs[0, 3] = -values[0, 1], -values[0, 3]  # the top bits of two 64-bit words
    moved = signs.clone()
    moved[0, 1], moved[0, 5] = values[0, 1], -values[0, 5]
    zeros = values.clone().index_fill_(0, torch.tensor([7]), 0.0)
    variants = {
        "values": values,
        "rows in another order": values.roll(1, 0),
        "two rows": values[[1, 0, *range(2, 300)]],
        "halves": torch.cat([values[150:], values[:150]]),
        "chunks": values.view(-1).roll(1 << 16).view_as(values),
        "columns": swapped,
        "signs": signs,
        "other signs": moved,
        "zeros": zeros,
        "negative zeros": zeros.clone().index_fill_(0, torch.tensor([7]), -0.0),
        "half": half,
        "halves of words": half.view(-1, 2).flip(1).reshape_as(half),
        "bools": values > 0,
        "flipped bools": (values > 0).flip(0),
    }
    digests = {what: Digest().of(value) for what, value in variants.items()}
    assert len(set(digests.values())) == len(variants), digests
    assert Digest().of(values.t().contiguous().t()) == digests["values"]  # strides do not matter
    assert Digest().of(torch.stack([values, values], -1)[..., 0]) == digests["values"]
