"""Blocks are found from the module tree, and a bucket holds only parameters that one collective can communicate."""

import copy
from typing import Any

from thunder_fsdp_sched import Plan, fsdp

import pytest
import thunder
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("fake_ranks")


def _module(**children: nn.Module) -> Any:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def block() -> Any:
    return _module(norm=nn.LayerNorm(8), mlp=nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))


def blocks(count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(block() for _ in range(count))


def decoder() -> Any:
    """Return a GPT whose blocks are nested in a ``ModuleDict``."""
    edges = {"tokens": nn.Embedding(9, 8), "positions": nn.Embedding(9, 8)}
    body = nn.ModuleDict({**edges, "layers": blocks(3), "norm": nn.LayerNorm(8)})
    model = _module(body=body, head=nn.Linear(8, 9, bias=False))
    model.scale = nn.Parameter(torch.ones(()))
    return model


def staged() -> Any:
    """Return the stages of a vision model."""
    stages = nn.ModuleList(_module(blocks=blocks(), down=nn.Linear(8, 8)) for _ in range(2))
    return _module(patch=nn.Conv2d(3, 8, 1), stages=stages)


def owner() -> Any:
    """Return a model with a module that has a parameter of its own next to lists of blocks."""
    model = _module(inner=staged())
    model.inner.token = nn.Parameter(torch.ones(8))
    return model


def experts() -> Any:
    """Return a model whose experts stay in the bucket of their block."""
    moe = [_module(gate=nn.Linear(8, 2), experts=blocks()) for _ in range(2)]
    return _module(layers=nn.ModuleList(_module(norm=nn.LayerNorm(8), moe=each) for each in moe))


def sequentials() -> Any:
    groups = {f"group_{name}": nn.Sequential(block(), block()) for name in "ab"}
    return _module(stem=nn.Linear(2, 2), **groups)


def plan(module: nn.Module, strategy="block") -> Plan:
    transform = fsdp(bucketing_strategy=strategy)
    thunder.jit(copy.deepcopy(module), transforms=[transform])
    return transform.plan


def members(module: nn.Module, strategy="block") -> dict[str, list[str]]:
    return {b.name: [p.name for p in b.params] for b in plan(module, strategy)}


BLOCKS = [
    (decoder, "root body.tokens body.positions body.layers.0 body.layers.1 body.layers.2 body.norm head"),
    (
        staged,
        "patch stages.0.blocks.0 stages.0.blocks.1 stages.0.down stages.1.blocks.0 stages.1.blocks.1 stages.1.down",
    ),
    (sequentials, "stem group_a.0 group_a.1 group_b.0 group_b.1"),
    (experts, "layers.0 layers.1"),
]


@pytest.mark.parametrize(("module", "expected"), BLOCKS)
def test_blocks_are_found_from_the_module_tree(module, expected):
    assert " ".join(members(module())) == expected


MEMBERS = [
    (lambda: nn.Linear(3, 3), "block", ["root: weight bias"]),
    (lambda: nn.Linear(3, 3), "none", ["weight: weight", "bias: bias"]),
    (
        block,
        "layer",
        ["norm: norm.weight norm.bias", "mlp.0: mlp.0.weight mlp.0.bias", "mlp.2: mlp.2.weight mlp.2.bias"],
    ),
    # a size in bytes, filled in order
    (
        block,
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
    assert members(decoder())["root"] == ["scale"]
    assert members(owner())["inner"] == ["inner.token"]


def test_large_edge_blocks_are_divided_into_edge_pieces():
    def big() -> Any:
        linears = {"query": (256, 3 * 256), "out": (256, 256), "up": (256, 4 * 256), "down": (4 * 256, 256)}
        parts = {name: nn.Linear(*sizes, bias=name != "query") for name, sizes in linears.items()}
        made = _module(norm=nn.LayerNorm(256), **parts, end=nn.LayerNorm(256))
        made.scale = nn.Parameter(torch.ones(256))  # of the block itself
        return made

    large = nn.ModuleList([big(), big(), big()]).bfloat16()  # 1.6 MB each: too small to divide
    assert list(members(nn.ModuleDict({"blocks": large}))) == ["blocks.0", "blocks.1", "blocks.2"]
    grouped = members(nn.ModuleDict({"blocks": large.float()}))  # 3.2 MB
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
    for module in (decoder(), staged(), owner()):
        names = [n for n, _ in module.named_parameters()]
        for strategy in ("none", "layer", "block", 1, 300, 10**9, lambda name, param: name[0]):
            assert sorted(n for b in plan(module, strategy) for n in (p.name for p in b.params)) == sorted(names)


def test_tied_parameters_are_one_parameter_with_two_names():
    model = decoder()
    model.head.weight = model.body["tokens"].weight
    [bucket] = [b for b in plan(model) if b.name == "body.tokens"]
    assert bucket.params[0].names == ("body.tokens.weight", "head.weight")
    assert "head" not in members(model)


def test_buckets_are_divided_by_dtype_and_by_requires_grad():
    model = nn.ModuleDict({"blocks": blocks()})
    model.blocks[0].norm.bfloat16()
    model.blocks[0].mlp[2].requires_grad_(False)
    for bucket in plan(model):
        assert len({(p.dtype, p.requires_grad) for p in bucket.params}) == 1
    assert len({b.name for b in plan(model)}) == len(plan(model)) == 4
