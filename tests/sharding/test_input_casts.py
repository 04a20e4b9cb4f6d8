"""Gathers in low precision, requested by a policy or inferred under autocast: values, dtypes, and number of casts."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections import Counter
from typing import Any
from unittest import mock

from thunder_fsdp_sched import eager, fsdp, full_state_dict, testing

import pytest
import thunder
import torch
from internals import args_of, fsdp_wait_params, outs_of
from models import Calling, Stack
from pipeline_patches import without
from ranks import on_ranks
from saving import assert_equal
from thunder.core import dtypes, prims
from thunder.core.proxies import Proxy, variableify
from thunder.core.trace import from_trace, tracectx
from thunder.core.transform_common import Transform
from thunder.transforms.autocast import autocast_symbol_mapper
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._pytree import tree_leaves

each_strategy = pytest.mark.parametrize("strategy", ["zero2", "zero3"])
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


#
# Inferred under autocast
#


class Blocks(nn.Module):
    """A model of norms, which autocast leaves in float32, and linear layers, one of which is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh()) for _ in range(2))
        self.back = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = x + self.back(block(x))
        return x


class Autocast(Transform):
    """A transform that applies Thunder's autocast rules to the computation trace."""

    def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
        new = from_trace(computation_trace)
        swaps: dict = {}
        with tracectx(new):
            for bsym in computation_trace.bound_symbols:
                bsym = bsym.from_bsym_swap_proxies(swaps, skip_output=True)
                if bsym.sym in (prims.unpack_trivial, prims.python_return):
                    new.bound_symbols.append(bsym)
                    continue
                out = autocast_symbol_mapper(bsym, dtypes.bfloat16)(*bsym.args, **bsym.kwargs)
                olds, news = ([p for p in tree_leaves(o) if isinstance(p, Proxy)] for o in (bsym.output, out))
                swaps.update({variableify(old): p for old, p in zip(olds, news, strict=True)})
        return prologue_trace, new, epilogue_trace


@pytest.mark.parametrize(("autocast_source", "strategy"), [("before", "zero3"), ("after", "zero2")])
@on_ranks()
def test_casts_under_autocast_are_fused_into_gathers_with_equal_bits(
    rank: int, strategy: str, autocast_source: str
) -> None:
    states, outputs = [], []
    for fuse in (True, False):
        torch.manual_seed(0)
        ours = fsdp(sharding_strategy=strategy)
        downcast = Autocast()
        transforms = [downcast, ours] if autocast_source == "before" else [ours, downcast]
        sharded = thunder.jit(Blocks(), transforms=transforms)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        for step in range(3):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            with contextlib.nullcontext() if fuse else without("fuse_downcast"):
                loss = sharded(x)
            loss.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(full_state_dict(sharded))
        outputs.append(loss.detach())
        compiled = ours.compiled[-1]
        gathered = {op.bucket: op.dtype for op in compiled.schedule.forward.of("fsdp_all_gather")}
        if fuse:
            buckets = "h.0.bfloat16", "h.0.float32", "h.1.bfloat16", "h.1.float32", "back.bfloat16"
            assert gathered == {bucket: bucket.rpartition(".")[2] for bucket in buckets}
            for trace in (compiled.forward, compiled.backward):
                assert not _casts_of_parameters(trace)
                testing.assert_waits_right_before_first_consumer(trace)
        else:
            assert set(gathered.values()) == {"float32"}
            assert _casts_of_parameters(compiled.forward)
        assert {op.dtype for op in compiled.schedule.backward.of("fsdp_reduce_scatter")} == {"float32"}
    assert torch.equal(*outputs)
    assert_equal(*states)


def _casts_of_parameters(trace) -> list[str]:
    params = {o for b in trace.bound_symbols if b.sym is fsdp_wait_params for o in outs_of(b)}
    return [str(b) for b in trace.bound_symbols if b.sym.name == "to" and params.intersection(args_of(b))]


def test_a_bucket_that_is_read_in_both_precisions_is_gathered_in_float32():
    def both(self, x):
        return self.twice.forward(self.once(x)) + self.twice.weight.sum(0) + self.twice.bias

    model = Calling(both, once=nn.Linear(8, 8), twice=nn.Linear(8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        [compiled] = testing.compile_on_fake_ranks(lambda: (model, (torch.randn(3, 8),)), 4)
    gathered = {op.bucket: op.dtype for op in compiled.schedule.forward.of("fsdp_all_gather")}
    assert gathered == {"once.bfloat16": "bfloat16", "twice": "float32"}


def test_a_kept_bucket_is_kept_in_low_precision():
    options = {"max_memory": "1MB", "cluster": "h100-sxm"}
    with torch.autocast("cpu", torch.bfloat16):
        [compiled] = testing.compile_on_fake_ranks(lambda: (Blocks(), (torch.randn(3, 8),)), 2, **options)
    assert set(compiled.choice.chosen.kept_buckets) == {"h.0", "h.1", "back"}
    assert not compiled.schedule.backward.of("fsdp_all_gather")
    slots = {op.slot for op in compiled.schedule.forward.of("fsdp_all_gather")}
    assert all(slot.startswith("own_") for slot in slots) and len(slots) == 5


#
# Requested by a policy
#


@each_strategy
@on_ranks()
def test_a_shard_is_cast_once_for_each_forward(rank: int, strategy: str) -> None:
    sharded = thunder.jit(Stack(2), transforms=[fsdp(sharding_strategy=strategy, mp_policy=LOW)])
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, foreach=False)
    casts: Counter[str] = Counter()
    kernel = torch.Tensor.copy_

    def spy(self: torch.Tensor, source: torch.Tensor, *rest: object) -> torch.Tensor:
        casts["casts"] += self.dtype is torch.bfloat16 and source.dtype is torch.float32
        return kernel(self, source, *rest)

    def run(backward: bool = True) -> int:
        casts.clear()
        with mock.patch.object(torch.Tensor, "copy_", spy):
            (x,) = Stack(2).inputs(torch.Generator().manual_seed(rank))
            loss = sharded(x.float()).sum()
            if backward:
                loss.backward()
        return casts["casts"]

    buckets = 4
    assert run() == buckets, "forward must cast each bucket once, backward none"
    with sharded.no_sync():
        assert run() == buckets
        later = 0 if strategy == "zero2" else buckets
        assert run() == later, "ZeRO-3 must cast again in each forward, even while there are unreduced gradients"
    assert run() == later
    optimizer.step()
    assert run() == buckets
    again = buckets if strategy == "zero2" else buckets - 1  # ZeRO-3: backward reads all buckets but the first
    first, second = (sharded(x) for x in (torch.ones(3, 4), torch.ones(3, 4)))
    casts.clear()
    with mock.patch.object(torch.Tensor, "copy_", spy):
        second.sum().backward()
        assert casts["casts"] == 0
        first.sum().backward()
    assert casts["casts"] == again, "backward must not use the casts of a later forward"


@pytest.mark.parametrize(
    ("reduce_dtype", "newer"),
    [(None, False), (None, True), (torch.float32, False)],
    ids=["none", "torch 2.15", "float32"],
)
@on_ranks()
def test_gradients_are_accumulated_and_reduced_in_the_dtype_of_the_policy(
    rank: int, reduce_dtype: torch.dtype | None, newer: bool
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    newer = newer or hasattr(FSDPParam, "unsharded_grad_dtype")
    with mock.patch.object(FSDPParam, "unsharded_grad_dtype", create=True) if newer else contextlib.nullcontext():
        sharded = thunder.jit(Stack(1), transforms=[ours := fsdp(mp_policy=policy)])
    (x,) = Stack(1).inputs(torch.Generator().manual_seed(rank))
    with sharded.no_sync():
        sharded(x.float()).sum().backward()
    expected = reduce_dtype or (torch.float32 if newer else torch.bfloat16)
    assert all(bucket.accumulation.unsharded.dtype is expected for bucket in ours.sharded.buckets)
    sharded(x.float()).sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in sharded.parameters())
    ops = [op for step in ours.schedules if step.backward for op in step.backward.of("fsdp_reduce_scatter")]
    assert {op.dtype for op in ops} == {str(expected).removeprefix("torch.")}


@on_ranks()
def test_inputs_are_cast_only_if_the_policy_requests_it() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)

    def run(policy: MixedPrecisionPolicy) -> tuple[torch.Tensor, torch.Tensor]:
        casts_itself = lambda self, x: (x * 2, self.layer.forward(x.to(self.layer.weight.dtype)))  # noqa: E731
        model = Calling(casts_itself, layer=nn.Linear(4, 4))
        return thunder.jit(model, transforms=[fsdp(mp_policy=policy)])(torch.ones(3, 4))

    doubled, out = run(policy)
    assert doubled.dtype is torch.float32 and out.dtype is torch.bfloat16
    doubled, _ = run(LOW)
    assert doubled.dtype is torch.bfloat16


Pair = collections.namedtuple("Pair", "x, other")


@dataclasses.dataclass(frozen=True)
class Data:
    x: Any
    number: int = 3


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """A stand-in for the outputs of Hugging Face's models, which are dataclasses and dictionaries."""

    x: Any = None
    other: Any = None

    def __post_init__(self) -> None:
        self.update({f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) is not None})


class ListOfOurs(list):
    """A subclass, of which the cast makes the same."""


def _only(value: Any) -> Any:
    return next(iter(value.values() if isinstance(value, dict) else value))


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "list_of_ours": (lambda x: ListOfOurs([x]), _only),
    "ordered_dict": (lambda x: collections.OrderedDict(x=x), _only),
    "named_tuple": (lambda x: Pair(x, "text"), lambda value: value.x),
    "output": (Output, lambda value: value.x),
    "nested": (lambda x: {"x": [Data(x)]}, lambda value: value["x"][0].x),
}


class Wraps(nn.Module):
    """Takes its input out of a container and puts its output into one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 1.3))
        self.wrap, self.unwrap = CONTAINERS[kind]

    def forward(self, value: Any) -> Any:
        return self.wrap(self.unwrap(value) * self.weight)


class WrapsAll(nn.Module):
    """Calls a :class:`Wraps` for each kind of container, and returns the tensors of their outputs and of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.of_kind = nn.ModuleDict({kind: Wraps(kind) for kind in CONTAINERS})

    def forward(self, x: torch.Tensor, *, given: dict[str, Any]) -> Any:
        unwrapped = {}
        for kind, child in self.of_kind.items():
            wrap, unwrap = CONTAINERS[kind]
            unwrapped[kind] = unwrap(child(wrap(x))), unwrap(given[kind])
        return unwrapped


def _facts(value: Any) -> Any:
    """Return types, dtypes and values of a nested structure, for comparison."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        attributes = [_facts(attribute) for attribute in getattr(value, "__dict__", {}).values()]
        return type(value), {key: _facts(item) for key, item in value.items()}, attributes
    if dataclasses.is_dataclass(value):
        return type(value), _facts(vars(value))
    return (type(value), list(map(_facts, value))) if isinstance(value, (list, tuple)) else value


@on_ranks(1)
def test_containers_into_and_out_of_modules_are_cast_as_by_fsdp2() -> None:
    inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    outer = MixedPrecisionPolicy(param_dtype=torch.float16)
    x = torch.linspace(0.1, 2.7, 6)
    given = {kind: wrap(x) for kind, (wrap, _) in CONTAINERS.items()}

    def policy(name: str, module: nn.Module) -> MixedPrecisionPolicy:
        return inner if isinstance(module, Wraps) else outer

    def check(make: Any, *args: Any, **kwargs: Any) -> None:
        theirs = make()
        for module in reversed(list(theirs.modules())):
            if isinstance(module, Wraps) or module is theirs:
                fully_shard(module, mp_policy=policy("", module))
        expected = _facts(theirs(*args, **kwargs))
        assert "torch.float64" in str(expected)
        jitted = thunder.jit(make(), transforms=[fsdp(mp_policy=policy)])
        assert _facts(jitted(*args, **kwargs)) == expected
        with eager(jitted) as module:
            assert _facts(module(*args, **kwargs)) == expected

    check(WrapsAll, x, given=given)
    check(lambda: Wraps("nested"), given["nested"])  # of the others, Thunder can return "output" from the model itself
