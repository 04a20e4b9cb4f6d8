"""Mutation tests of ``verify_memory``: a trace or a fact that exceeds the limit is refused.

``trace/test_live_memory`` tests that the peak that it proves is the counted one, for every transport and release.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched import testing
from thunder_fsdp_sched.ir.inspection import args_of
from thunder_fsdp_sched.ir.symbols import fsdp_all_gather, fsdp_reduce_scatter, fsdp_release, fsdp_wait_params
from thunder_fsdp_sched.transforms import VerificationError, verify_memory

import pytest
import torch
from models import Stack
from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

CASES: dict[str, dict[str, Any]] = {
    "bucket": {"release": "bucket"},
    "step": {"release": "step"},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "cast": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


@cache
def compiled(case: str) -> testing.CompiledTraces:
    def make() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        model = Stack(3).double()
        return model, model.inputs(torch.Generator().manual_seed(0))

    [traces] = testing.compile_on_fake_ranks(make, 2, transport="all_to_all", **CASES[case])
    return traces


def check(traces: testing.CompiledTraces, change: Callable[[list[BoundSymbol]], list[BoundSymbol]] = list) -> None:
    """Verify both traces, changed, with the peak of the unchanged ones as limit."""

    def changed(trace: TraceCtx) -> TraceCtx:
        new = from_trace(trace)
        new.bound_symbols = change(trace.bound_symbols)
        return new

    verify_memory(
        changed(traces.backward),
        forward=changed(traces.forward),
        max_memory=traces.memory.peak.nbytes,
        buckets=traces.buckets,
    )


refused = partial(pytest.raises, VerificationError, match=r"bound symbol \d+ of (forward|backward): the step needs")


def without(found: Callable[[BoundSymbol], bool], bsyms: list[BoundSymbol]) -> list[BoundSymbol]:
    return [bsym for bsym in bsyms if not found(bsym)]


def late(bsyms: list[BoundSymbol]) -> list[BoundSymbol]:
    """Move all releases to the end."""
    releases = [b for b in bsyms if b.sym is fsdp_release]
    return [*(b for b in bsyms[:-1] if b.sym is not fsdp_release), *releases, bsyms[-1]]


def keeping(kind: Any, bsyms: list[BoundSymbol]) -> list[BoundSymbol]:
    """Remove the ``del`` statements of the results of a symbol."""
    kept = {p.name for b in bsyms if b.sym is kind for p in b.flat_proxy_outs}
    return without(lambda b: b.sym.id is PrimIDs.DEL and not kept.isdisjoint(args_of(b)), bsyms)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        pytest.param("bucket", partial(without, lambda b: b.sym is fsdp_release), id="no release of a bucket"),
        pytest.param("bucket", late, id="buckets released at the end"),
        pytest.param("bucket", partial(keeping, fsdp_wait_params), id="views outlive the release"),
        pytest.param("offloaded", partial(keeping, fsdp_all_gather), id="copies of shards outlive their gathers"),
        pytest.param("cast", partial(keeping, fsdp_reduce_scatter), id="gradients outlive their cast"),
    ],
)
def test_a_trace_that_frees_later_is_refused(
    case: str, change: Callable[[list[BoundSymbol]], list[BoundSymbol]]
) -> None:
    check(compiled(case))
    with refused():
        check(compiled(case), change)


def test_buffers_that_stay_without_a_release_are_counted_from_the_start() -> None:
    traces = compiled("step")
    check(traces)
    with refused():
        check(traces, partial(without, lambda b: b.sym is fsdp_release))


@pytest.mark.parametrize("case", ["bucket", "offloaded"])
@pytest.mark.parametrize("fact", ["reduce_buffers", "reduce_workspace", "reduce_temporary"])
def test_memory_of_transports_is_counted(monkeypatch: pytest.MonkeyPatch, case: str, fact: str) -> None:
    traces = compiled(case)
    peak = traces.memory.peak.nbytes
    for bucket in traces.buckets:
        monkeypatch.setattr(bucket.transport, fact, lambda spec: (peak,) if fact == "reduce_buffers" else peak)
    with refused():
        check(traces)


def test_memory_inside_operators_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = compiled("bucket")
    module = sys.modules[verify_memory.__module__]
    observed = module.observed_call

    def larger(bsym: BoundSymbol, strides: Any) -> Any:
        call = observed(bsym, strides)
        return call and call._replace(temporary_bytes=traces.memory.peak.nbytes * (bsym.sym.name == "linear"))

    monkeypatch.setattr(module, "observed_call", larger)
    with refused():
        check(traces)


def test_casts_of_shards_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = compiled("step")
    for bucket in {b.args[0] for b in traces.forward.bound_symbols if b.sym is fsdp_all_gather}:
        comm = replace(bucket.spec.comm, param_dtype=torch.bfloat16, reduce_dtype=bucket.spec.reduce_dtype)
        monkeypatch.setattr(bucket, "spec", replace(bucket.spec, comm=comm))
    with refused():
        check(traces)
