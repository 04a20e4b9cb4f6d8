"""Fusion executors: torch.compile, and nvFuser's fusion pass with a stand-in for its kernels.

The tests check the fusion regions of traces that train on gloo ranks like the unsharded model. This module has its own
workers, because the stand-in stays installed in them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from thunder_fsdp_sched import fsdp, testing

import nvfuser_standin
import pytest
import thunder
import torch
from coded import coded
from internals import args_of, facts_of, fsdp_wait_params, outs_of
from models import CASES, GPT, Calling, Chain, FeedForward, Stack
from ranks import Ranks, on_ranks, worker_pool
from scenario import Run, train_and_check_what_is_saved
from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors.torch_compile import torch_compile_ex
from torch import nn


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[[int], Ranks]]:
    """Workers for this module only: the stand-in for nvFuser stays installed in them."""
    with worker_pool() as of_size:
        yield of_size


def jit_options(fuser: str, fusion_type: str = "consecutive") -> dict[str, Any]:
    """Return options of ``thunder.jit`` and install what they need in this process.

    "nvfuser_matmul" fuses matmuls as well. "aot_eager" is torch.compile without a C++ compiler.
    """
    options: dict[str, Any] = {"fusion_type": fusion_type, "executors": [torch_compile_ex]}
    if fuser.startswith("nvfuser"):
        options["executors"] = [nvfuser_standin.install()]
        options["nv_enable_linear"] = options["nv_enable_matmul"] = fuser == "nvfuser_matmul"
    else:
        torch.compile = functools.partial(_torch_compile, backend=fuser)
    return options


_torch_compile = torch.compile


#
# Checks of traces
#


class BucketReads:
    """The buckets that each statement of a trace reads, directly or through values computed only from their parameters."""

    def __init__(self, trace: TraceCtx) -> None:
        self.statements = testing.statements(trace)
        self.bucket_of: dict[str, str] = {}
        for bsym in self.statements:
            if bsym.sym is fsdp_wait_params:
                self.bucket_of.update(dict.fromkeys(outs_of(bsym), bsym.args[0].spec.name))
            elif not bsym.sym.name.startswith("fsdp_"):
                for member in bsym.subsymbols if bsym.sym.is_fusion else [bsym]:
                    buckets = [self.bucket_of.get(arg) for arg in args_of(member)]
                    if buckets and buckets[0] is not None and set(buckets) == {buckets[0]}:
                        self.bucket_of.update(dict.fromkeys(outs_of(member), buckets[0]))

    def of(self, bsym: BoundSymbol) -> set[str]:
        return {self.bucket_of[arg] for arg in args_of(bsym) if arg in self.bucket_of}


def kernels(bsym: BoundSymbol) -> set[str]:
    """Return the names of the operations that ``bsym`` runs."""
    return {bsym.sym.name}.union(*(kernels(sub) for sub in bsym.subsymbols))


def check_regions(trace: TraceCtx, *, fused_blocks: bool) -> list[str]:
    """Check that no region reads two buckets, and that each bucket's consumers are contiguous.

    Returns the buckets in the order in which they are read.
    """
    reads = BucketReads(trace)
    order: list[str] = []
    regions: dict[str, int] = {}
    for bsym in reads.statements:
        buckets = reads.of(bsym)
        if bsym.sym.name.startswith("fsdp_") or bsym.sym.id is PrimIDs.RETURN or not buckets:
            continue
        assert len(buckets) == 1, f"{bsym.sym.name} reads {buckets}"
        (bucket,) = buckets
        if order[-1:] != [bucket]:
            order.append(bucket)
        regions[bucket] = regions.get(bucket, 0) + bsym.sym.is_fusion
        if bsym.sym.is_fusion and "var_mean" in kernels(bsym):
            assert {"mul", "add", "sub"} <= kernels(bsym), f"{bsym.sym.name} holds only a part of a layer norm"
    assert len(order) == len(set(order)), "a bucket's consumers must be contiguous"
    if fused_blocks:
        assert set(regions.values()) == {1}, regions
    return order


def check_overlap(trace: TraceCtx, prefetch: int) -> None:
    """Check the prefetch distance, and that each wait follows all reads of the previous buckets."""
    testing.assert_prefetch_distance(trace, prefetch)
    testing.assert_waits_right_before_first_consumer(trace)
    testing.assert_reductions_right_after_last_gradient(trace)
    for gather, following in itertools.pairwise(testing.gathers(trace)):
        # Under ZeRO-2 the return statement reads parameters that are saved for backward.
        assert gather.last_consumer < following.wait or gather.last_consumer == len(testing.statements(trace)) - 1


def train(model: nn.Module, strategy: str, **options: Any) -> Run:
    """Train like the unsharded model. Under ZeRO-3 no saved tensor may derive only from parameters."""
    run = Run(model.double(), sharding_strategy=strategy, **options)
    train_and_check_what_is_saved(run, steps=2)
    if strategy == "zero3":
        forward = run.transform.compiled[-1].forward
        derived = BucketReads(forward).bucket_of
        kept = [p.name for p in forward.bound_symbols[-1].args[1][0] if p.name in derived]
        assert not kept, f"{kept} derive only from parameters, but are saved for backward"
    return run


#
# A transformer
#


@pytest.mark.parametrize(
    ("strategy", "fuser", "fusion_type"), [("zero3", "nvfuser", "dataflow"), ("zero2", "nvfuser_matmul", "consecutive")]
)
@on_ranks(timeout=300)
def test_each_block_has_its_own_fusion_regions(strategy: str, fuser: str, fusion_type: str) -> None:
    model = GPT(blocks=2, width=8, length=4, block=FeedForward)  # attention is slow to trace
    run = train(model, strategy, jit_options=jit_options(fuser, fusion_type))
    compiled = run.transform.compiled[-1]
    one_region_per_block = fuser != "nvfuser"
    forward = ["wte", "wpe", "h.0", "h.1", "ln_f", "head"]
    assert check_regions(compiled.forward, fused_blocks=one_region_per_block) == forward
    check_overlap(compiled.forward, prefetch=1)
    backward = forward[:1:-1]
    assert run.buckets("fsdp_reduce_scatter", backward=True)[:4] == backward
    check_overlap(compiled.backward, prefetch=1)
    if strategy == "zero3":
        assert check_regions(compiled.backward, fused_blocks=one_region_per_block) == backward
        assert [g.bucket for g in testing.gathers(compiled.backward)] == backward
    elif one_region_per_block:
        regions = [b.sym.is_fusion for b in testing.statements(compiled.backward) if not b.sym.name.startswith("fsdp_")]
        assert sum(regions) <= len(forward)


#
# Values that derive from parameters
#


class TwoWeights(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(4, 4))
        self.w = nn.Parameter(torch.randn(4, 4))


class Sines(TwoWeights):
    """Backward reads a product twice. Executors rematerialize it, so backward reads forward's gathered parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.w[0]
        return torch.sin(y) * torch.cos(y + self.w[1]) + torch.sin(self.v[1] * self.w[2])


class Transposes(TwoWeights):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w.t() + x @ self.v.t().contiguous())


DERIVED: dict[str, Callable[[], nn.Module]] = {b.__name__: functools.partial(Chain, b) for b in (Sines, Transposes)}
TRAINED = [
    *(("nvfuser", "zero3", "consecutive", name) for name in (*DERIVED, "views_of_parameters")),
    ("aot_eager", "zero3", "consecutive", "Transposes"),
    ("nvfuser", "zero3", "dataflow", "shared_blocks"),
]


@pytest.mark.parametrize(("fuser", "strategy", "fusion_type", "name"), TRAINED)
@on_ranks()
def test_fused_models_train_and_save_no_values_that_derive_only_from_parameters(
    fuser: str, strategy: str, fusion_type: str, name: str
) -> None:
    run = train({**CASES, **DERIVED}[name](), strategy, jit_options=jit_options(fuser, fusion_type))
    if name in DERIVED:
        check_regions(run.transform.compiled[-1].forward, fused_blocks=False)


@on_ranks()
def test_fused_models_accumulate_and_evaluate_correctly() -> None:
    run = Run(Stack(2).double(), jit_options=jit_options("nvfuser_matmul"))
    run.micro_batch(0)
    run.micro_batch(1, no_sync=False)
    run.step()
    with torch.no_grad():
        inputs = run.inputs(step=2, batch=5)
        run.close(run.model(*inputs), run.reference(*inputs), "evaluation")
    evaluation = run.transform.compiled[-1]
    assert evaluation.backward is None
    assert check_regions(evaluation.forward, fused_blocks=True) == ["first", "blocks.0", "blocks.1", "last"]


#
# Random operators
#


def draws(*shapes: tuple[int, ...]) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for shape in shapes:
            x = torch.sin(torch.tanh(self.linear(x)) * torch.randn(shape))
        return x

    return Calling(forward, linear=nn.Linear(4, 4))


def parts_of(trace: TraceCtx) -> list[BoundSymbol]:
    return [part for bsym in trace.bound_symbols for part in (bsym.subsymbols if bsym.sym.is_fusion else [bsym])]


@pytest.mark.parametrize("fuser", ["nvfuser", "aot_eager"])
@on_ranks(timeout=300)
def test_fusion_executors_neither_repeat_nor_merge_draws(fuser: str) -> None:
    options = jit_options(fuser)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    transform = fsdp()
    jitted = thunder.jit(draws((2, 4), (1, 4)), transforms=[transform], **options)
    torch.manual_seed(3)
    jitted(x).sum().backward()
    compiled = transform.compiled[-1]
    drawn = [sum(facts_of(part).draws for part in parts_of(trace)) for trace in (compiled.forward, compiled.backward)]
    assert drawn == [2, 0], drawn
    if fuser.startswith("nvfuser"):
        jitted = thunder.jit(draws((2, 4), (2, 4)), transforms=[fsdp()], **options)
        with pytest.raises(NotImplementedError, check=coded("trace.random-operators-fused", "randn")):
            jitted(x)
