"""Random models and ``fsdp`` options from hypothesis, as data from which every process builds the same module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from thunder_fsdp_sched import Debug, Ranks, Sharding

import profiles
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

KINDS = ("linear", "mlp", "branches", "norm", "scale", "nested", "twice", "sliced", "embedding")


Value = TypeVar("Value")

QUIET = settings(phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck), database=None)


def draw_numbered(strategy: st.SearchStrategy[Value], number: int) -> Value:
    """Return the value that a strategy draws with ``number`` as seed.

    Left to itself, hypothesis starts with the simplest value and then tries variants of earlier ones. It does not shrink
    failures either, because every attempt compiles a model.
    """
    values: list[Value] = []

    @seed(number)
    @settings(QUIET, max_examples=2)
    @given(strategy)
    def draw(value: Value) -> None:
        values.append(value)

    draw()
    return values[-1]


def examples(ordinary: int, more: int, *others: int) -> pytest.MarkDecorator:
    """Run a test with the numbers of ``ordinary`` examples for :func:`draw_numbered`, and of ``more`` in long runs.

    Args:
        others: numbers among the latter for ordinary runs, too, such as those of examples that failed once.
    """
    numbers = range(ordinary, ordinary + more)
    longer = [pytest.param(n, marks=() if n in others else pytest.mark.long) for n in numbers]
    return pytest.mark.parametrize("number", [*range(ordinary), *longer])


def quiet(examples: int = 100) -> settings:
    """Return settings for a search with ``examples`` examples in ordinary runs, twenty times as many in long ones.

    Failures are not shrunk: each attempt compiles, and a search for a smaller example would take minutes.
    """
    return settings(
        max_examples=examples * (20 if profiles.LONG else 1),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


@dataclass(frozen=True)
class BlockSpec:
    """One block.

    Attributes:
        kind: what it computes; see :class:`RandomBlock`.
        inner: inner width, such as the rows of an MLP's first layer.
        frozen: whether its first parameter does not train.
        double: whether its parameters are float64; else float32.
        leaf: whether it runs as it is.
    """

    kind: str
    inner: int
    frozen: bool
    double: bool
    leaf: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A model.

    Attributes:
        order: indices of blocks in the order in which forward runs them; some twice, some never.
        tied: pairs of blocks that share a parameter: the second uses one of the first's with the same shape and dtype.
        decay: whether forward reads the first parameter of the first block again at the end.
    """

    width: int
    blocks: tuple[BlockSpec, ...]
    order: tuple[int, ...]
    tied: tuple[tuple[int, int], ...]
    decay: bool


@dataclass(frozen=True)
class Case:
    """A model and options of ``fsdp``.

    Attributes:
        groups: indices of blocks that are sharded over a second process group, of the same ranks.
        kept: indices of blocks for which a function of the module asks for ZeRO-2.
        low: indices of blocks for which a function of the module asks for bfloat16.
        secondary: ``secondary_ranks``, where it divides the number of ranks.
    """

    model: ModelSpec
    options: dict[str, Any] = field(hash=False)
    groups: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    low: tuple[int, ...] = ()
    secondary: int | None = None


class Layer(nn.Module):
    """A residual layer inside a block."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down.forward(torch.tanh(self.up.forward(x)))


class RandomBlock(nn.Module):
    """A block from ``(batch, width)`` to ``(batch, width)``, in its input's dtype. Call ``.forward``: see ``models``."""

    def __init__(self, spec: BlockSpec, width: int) -> None:
        super().__init__()
        inner = spec.inner
        if spec.kind == "linear":
            self.only = nn.Linear(width, width)
        elif spec.kind in ("mlp", "twice"):
            self.up, self.down = nn.Linear(width, inner, bias=inner % 2 == 0), nn.Linear(inner, width)
        elif spec.kind == "branches":
            self.left, self.right = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        elif spec.kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif spec.kind == "scale":
            self.scale = nn.Parameter(torch.tensor(1.25))
            self.register_buffer("offset", torch.linspace(-1, 1, width))
        elif spec.kind == "nested":
            self.layers = nn.ModuleList(Layer(width, inner) for _ in range(2))
        elif spec.kind == "sliced":
            self.both = nn.Parameter(torch.randn(2 * width + 1, width) / 3)
        elif spec.kind == "embedding":
            self.table = nn.Embedding(inner + 2, width)  # at least as many rows as a batch has
        first = next(self.parameters())
        first.requires_grad_(not spec.frozen)
        self.to(torch.float64 if spec.double else torch.float32)

        self.compute = getattr(self, f"_{spec.kind}")  # chosen here because Thunder is slow to interpret comparisons

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x).to(x.dtype)

    # Each casts ``x`` to the dtype of the unsharded parameters, which may have lower precision than the shards.

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.only.weight.dtype)
        return x + torch.tanh(self.only.forward(x))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.up.weight.dtype)
        return x + self.down.forward(torch.relu(self.up.forward(x)))

    def _twice(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.up.weight.dtype)
        y = self.down.forward(torch.tanh(self.up.forward(x)))
        return x + self.down.forward(torch.tanh(self.up.forward(y)))

    def _branches(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.left.weight.dtype)
        return x + torch.tanh(self.left.forward(x)) * self.right.forward(x)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.norm.weight.dtype)
        return x + self.norm.forward(x)

    def _scale(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.scale.dtype)
        return x + x * self.scale + self.offset

    def _nested(self, x: torch.Tensor) -> torch.Tensor:
        y = x = x.to(self.layers[0].up.weight.dtype)
        for layer in self.layers:
            y = layer.forward(y)
        return x + y

    def _sliced(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        x = x.to(self.both.dtype)
        return x + x @ self.both[:width].t() + torch.tanh(x @ self.both[width : 2 * width])

    def _embedding(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table.forward(torch.arange(x.shape[0], device=x.device))
        return x.to(y.dtype) + y


class Calling(nn.Module):
    """A block that is called, because calls of modules can be leaves."""

    def __init__(self, block: RandomBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class RandomModel(nn.Module):
    """A model built from a specification. The same specification gives the same values."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.order, self.decay = spec.order, spec.decay
        blocks = [RandomBlock(block, spec.width) for block in spec.blocks]
        self.blocks = nn.ModuleList(Calling(b) if s.leaf else b for b, s in zip(blocks, spec.blocks, strict=True))
        self.decayed = next(name for name, _ in self.blocks[0].named_parameters()).split(".")
        self.head = nn.Linear(spec.width, 3).double()
        for source, target in spec.tied:
            _tie(self.blocks[source], self.blocks[target])

    def inputs(self, generator: torch.Generator, batch: int = 3) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, self.head.in_features, generator=generator, dtype=torch.float64),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index].forward(x)
        return self.end(x)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head.forward(x)
        if self.decay:
            # Two dimensions, because Thunder cannot expand the gradient of a 0-dim value (even unsharded). Not parameters(),
            # because their order differs between ranks when Thunder traces it (even unsharded).
            p = self.blocks[0]
            for name in self.decayed:
                p = getattr(p, name)
            y = y + 0.01 * p.double().square().sum().reshape(1, 1)
        return y


def _tie(source: nn.Module, target: nn.Module) -> None:
    for param in source.parameters():
        for path, other in target.named_parameters():
            if other.shape == param.shape and other.dtype == param.dtype and other is not param:
                owner, _, leaf = path.rpartition(".")
                setattr(target.get_submodule(owner), leaf, param)
                return


@st.composite
def models(draw: Any, *, least: int = 1, most: int = 3) -> ModelSpec:
    """Draw a model with ``least`` to ``most`` blocks."""
    width = draw(st.integers(2, 6))
    # Mostly float64: where both dtypes occur, each change starts a new bucket.
    dtypes = st.sampled_from([True, True, True, False])
    block = st.builds(
        BlockSpec,
        st.sampled_from(KINDS),
        st.integers(1, 7),
        st.sampled_from([False, False, True]),
        dtypes,
        st.sampled_from([False, False, True]),
    )
    blocks = draw(st.lists(block, min_size=least, max_size=most))
    number = st.integers(0, len(blocks) - 1)
    order = tuple(draw(st.lists(number, min_size=1, max_size=most)))
    pairs = st.tuples(number, number).filter(lambda pair: pair[0] < pair[1])
    tied = tuple(draw(st.lists(pairs, max_size=1))) if len(blocks) > 1 else ()
    decay = draw(st.booleans())
    for index, spec in enumerate(blocks):
        # Thunder computes wrong gradients for 0-dim parameters that are used twice (even unsharded).
        again = order.count(index) > 1 or (decay and index == 0) or any(index in pair for pair in tied)
        if spec.kind == "scale" and again:
            blocks[index] = replace(spec, kind="linear")
    return ModelSpec(width, tuple(blocks), order, tied, decay)


@st.composite
def cases(draw: Any, *, numeric: bool = False, least: int = 1, most: int = 3) -> Case:
    """Draw a case. ``numeric`` excludes options that change results by more than rounding (lower precision)."""
    model = draw(models(least=least, most=most))
    strategy = draw(st.sampled_from(["zero2", "zero3", "zero3"]))
    sharding = Sharding(strategy)
    options: dict[str, Any] = {
        "bucketing_strategy": draw(st.sampled_from(["block", "block", "layer", "none", 64, 300])),
        "prefetch": draw(st.sampled_from([0, 1, 1, 2, 5, "auto"])),
        "transport": draw(st.sampled_from(["auto", "flat", "all_to_all", "coalesced", "all_reduce"])),
    }
    if not numeric and draw(st.integers(0, 3)) == 0:
        policy = draw(st.sampled_from([(torch.bfloat16, torch.float32), (torch.float32, None), (None, torch.float32)]))
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=policy[0], reduce_dtype=policy[1])
    groups = (
        tuple(sorted(draw(st.sets(st.integers(0, len(model.blocks) - 1), max_size=2))))
        if draw(st.integers(0, 3)) == 0
        else ()
    )
    if draw(st.integers(0, 4)) == 0:
        options["ranks"] = Ranks(separate_reduce_scatter_group=True)
    if draw(st.integers(0, 2)) == 0:
        options["max_gathers_in_flight"] = draw(st.integers(1, 3))
    some_blocks = st.sets(st.integers(0, len(model.blocks) - 1), max_size=2)
    kept, low = (
        tuple(sorted(draw(some_blocks))) if may_draw and draw(st.integers(0, 3)) == 0 and not model.tied else ()
        for may_draw in (strategy == "zero3", not numeric and "mp_policy" not in options)
    )
    if draw(st.integers(0, 2)) == 0:
        options["accumulate"] = "sharded"
    if draw(st.integers(0, 2)) == 0:
        sharding = replace(sharding, release=True)
    secondary = draw(st.sampled_from([None, 2, 2, 4])) if strategy == "zero3" else None
    options["debug"] = Debug(differentiate_once=draw(st.booleans()))
    return Case(model, {"sharding_strategy": sharding, **options}, groups, kept, low, secondary)


def options_of(case: Case, new_group: Callable[[], Any], world_size: int) -> dict[str, Any]:
    """Return the options of a case. ``new_group`` creates the process group of the blocks in ``case.groups``."""
    options = dict(case.options)
    sharding, ranks = options["sharding_strategy"], options.pop("ranks", Ranks())
    if case.kept:
        kept = {f"blocks.{number}" for number in case.kept}
        sharding = replace(sharding, strategy=lambda name, module: "zero2" if name in kept else None)
    if case.secondary and world_size % case.secondary == 0:
        sharding = replace(sharding, secondary_ranks=case.secondary)
    if case.low:
        low, policy = {f"blocks.{number}" for number in case.low}, MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        options["mp_policy"] = lambda name, module: policy if name in low else None
    if case.groups:
        group = new_group()
        prefixes = tuple(f"blocks.{number}." for number in case.groups)
        tied = {n for pair in case.model.tied for n in pair}
        if not tied & set(case.groups):  # a tied parameter has one group
            ranks = replace(ranks, process_group_for=lambda name, param: group if name.startswith(prefixes) else None)
    leaves = tuple(f"blocks.{number}.block" for number, block in enumerate(case.model.blocks) if block.leaf)
    return {**options, "sharding_strategy": sharding, "ranks": ranks, "leaf_modules": leaves}
