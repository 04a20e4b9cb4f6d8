"""Blocks are found from the module tree, and a bucket holds only parameters that one collective can communicate."""

import copy

from thunder_fsdp_sched import Plan, fsdp

import pytest
import thunder
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("fake_ranks")


class Block(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d))


class Decoder(nn.Module):
    """A GPT whose blocks are nested in a ``ModuleDict``."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.body = nn.ModuleDict(
            {
                "tokens": nn.Embedding(9, 8),
                "positions": nn.Embedding(9, 8),
                "layers": nn.ModuleList([Block() for _ in range(blocks)]),
                "norm": nn.LayerNorm(8),
            }
        )
        self.head = nn.Linear(8, 9, bias=False)
        self.scale = nn.Parameter(torch.ones(()))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.down = nn.Linear(8, 8)


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 1)
        self.stages = nn.ModuleList([Stage(), Stage()])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList([Block(), Block()])


class MoEBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.moe = Experts()


class Owner(nn.Module):
    """A model with a module that has a parameter of its own next to lists of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Staged()
        self.inner.token = nn.Parameter(torch.ones(8))


def _model(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


def plan(module: nn.Module, strategy="block") -> Plan:
    transform = fsdp(bucketing_strategy=strategy)
    thunder.jit(copy.deepcopy(module), transforms=[transform])
    return transform.plan


def members(module: nn.Module, strategy="block") -> dict[str, list[str]]:
    return {b.name: [p.name for p in b.params] for b in plan(module, strategy)}


def _sequentials() -> nn.Module:
    sequentials = {f"group_{name}": nn.Sequential(Block(), Block()) for name in "ab"}
    return _model(stem=nn.Linear(2, 2), **sequentials)


BLOCKS = [
    (Decoder, "root body.tokens body.positions body.layers.0 body.layers.1 body.layers.2 body.norm head"),
    # the stages of a vision model
    (
        Staged,
        "patch stages.0.blocks.0 stages.0.blocks.1 stages.0.down stages.1.blocks.0 stages.1.blocks.1 stages.1.down",
    ),
    (_sequentials, "stem group_a.0 group_a.1 group_b.0 group_b.1"),
    # experts stay in the bucket of their block
    (lambda: _model(layers=nn.ModuleList([MoEBlock(), MoEBlock()])), "layers.0 layers.1"),
]


@pytest.mark.parametrize(("module", "expected"), BLOCKS)
def test_blocks_are_found_from_the_module_tree(module, expected):
    assert " ".join(members(module())) == expected


MEMBERS = [
    (lambda: nn.Linear(3, 3), "block", ["root: weight bias"]),
    (lambda: nn.Linear(3, 3), "none", ["weight: weight", "bias: bias"]),
    (
        Block,
        "layer",
        ["norm: norm.weight norm.bias", "mlp.0: mlp.0.weight mlp.0.bias", "mlp.2: mlp.2.weight mlp.2.bias"],
    ),
    # a size in bytes, filled in order
    (
        Block,
        8 * 8 * 4,
        [
            "norm.weight: norm.weight norm.bias mlp.0.weight",
            "mlp.0.bias: mlp.0.bias mlp.2.weight",
            "mlp.2.bias: mlp.2.bias",
        ],
    ),
]


@pytest.mark.parametrize(("module", "strategy", "expected"), MEMBERS)
def test_a_strategy_groups_parameters(module, strategy, expected):
    assert [f"{bucket}: {' '.join(names)}" for bucket, names in members(module(), strategy).items()] == expected


def test_parameters_outside_of_blocks_are_in_the_bucket_of_their_module():
    assert members(Decoder())["root"] == ["scale"]
    assert members(Owner())["inner"] == ["inner.token"]


def test_large_edge_blocks_are_divided_into_edge_pieces():
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(256))  # of the block itself
            self.norm = nn.LayerNorm(256)
            self.query = nn.Linear(256, 3 * 256, bias=False)
            self.out = nn.Linear(256, 256)
            self.up = nn.Linear(256, 4 * 256)
            self.down = nn.Linear(4 * 256, 256)
            self.end = nn.LayerNorm(256)

    blocks = nn.ModuleList([Big(), Big(), Big()]).bfloat16()  # 1.6 MB each: too small to divide
    assert list(members(nn.ModuleDict({"blocks": blocks}))) == ["blocks.0", "blocks.1", "blocks.2"]
    grouped = members(nn.ModuleDict({"blocks": blocks.float()}))  # 3.2 MB
    edge = ["query", "up", "down"]
    assert list(grouped) == [*(f"blocks.0.{n}" for n in edge), "blocks.1", *(f"blocks.2.{n}" for n in edge)]
    first = ["scale", "norm.weight", "norm.bias", "query.weight"]
    assert grouped["blocks.0.query"] == [f"blocks.0.{n}" for n in first]
    assert [n for n in grouped["blocks.2.down"] if "end" in n] == ["blocks.2.end.weight", "blocks.2.end.bias"]
    two = nn.Sequential(nn.Linear(1200, 1200, bias=False), nn.Linear(1200, 1200, bias=False))
    assert list(members(nn.ModuleDict({"blocks": nn.ModuleList([two])}))) == ["blocks.0.0", "blocks.0.1"]
    one = members(nn.Sequential(nn.Linear(1200, 1200, bias=False)))
    assert list(one) == ["0"], "a block with one layer cannot be divided"


def test_every_parameter_is_in_exactly_one_bucket_under_every_strategy():
    for module in (Decoder(), Staged(), Owner()):
        names = [n for n, _ in module.named_parameters()]
        for strategy in ("none", "layer", "block", 1, 300, 10**9, lambda name, param: name[0]):
            assert sorted(n for b in plan(module, strategy) for n in (p.name for p in b.params)) == sorted(names)


def test_tied_parameters_are_one_parameter_with_two_names():
    model = Decoder()
    model.head.weight = model.body["tokens"].weight
    [bucket] = [b for b in plan(model) if b.name == "body.tokens"]
    assert bucket.params[0].names == ("body.tokens.weight", "head.weight")
    assert "head" not in members(model)


def test_buckets_are_divided_by_dtype_and_by_requires_grad():
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()])})
    model.blocks[0].norm.bfloat16()
    model.blocks[0].mlp[2].requires_grad_(False)
    for bucket in plan(model):
        assert len({(p.dtype, p.requires_grad) for p in bucket.params}) == 1
    assert len({b.name for b in plan(model)}) == len(plan(model)) == 4
