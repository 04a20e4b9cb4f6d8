"""Predicted memory of a step beside a run of the same traces in which every storage is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.pipeline import CompiledTraces
from thunder_fsdp_sched.testing import assert_peak_memory_at_most, compile_on_fake_ranks, gathers
from thunder_fsdp_sched.trace.operands import Issue
from thunder_fsdp_sched.trace.symbols import fsdp_all_gather
from thunder_fsdp_sched.trace.unknown_memory import unknown_memory
from thunder_fsdp_sched.transports import TRANSPORTS

import pytest
import torch
from memory_count import compare, count_on_fake_ranks
from models import CASES, GPT, Stack
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, tracectx
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
LOWEST = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
REDUCED_HIGH = MixedPrecisionPolicy(torch.float32, torch.float64)

GPT_CASES: dict[str, dict[str, Any]] = {
    "zero3": {"transport": "all_to_all"},
    "zero2, lower precision": {"sharding_strategy": "zero2", "mp_policy": LOW},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False), "mp_policy": LOW},
}

TRANSPORT_CASES: dict[str, dict[str, Any]] = {
    f"{transport}, {strategy}": {"transport": transport, "sharding_strategy": strategy, "mp_policy": policy}
    for number, transport in enumerate(sorted(TRANSPORTS.keys() - {"symmetric_memory"}))
    for strategy, policy in zip(
        ("zero2", "zero3"), ((LOW, LOWEST), (LOWEST, REDUCED_HIGH), (None, LOW))[number % 3], strict=True
    )
}
"""Every transport with both strategies, the precisions in turn."""


def counted(make: Callable[[], nn.Module], *, window: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    return count_on_fake_ranks(make().double(), lambda: fsdp(**options), window=window)


@pytest.mark.parametrize("name", [*GPT_CASES, *TRANSPORT_CASES])
def test_every_position_has_the_bytes_that_a_run_allocates(name: str) -> None:
    if name in GPT_CASES:
        found = counted(GPT, **GPT_CASES[name])
    else:
        found = counted(Stack, window=True, **TRANSPORT_CASES[name])
        assert found["last of a window"][1].peak.nbytes > found["step"][1].peak.nbytes
    for step, (compiled, memory, tracker) in found.items():
        count = compare(memory, compiled, tracker)
        assert not count.wrong, f"{step}: {len(count.wrong)} positions\n{count}"
        assert count.predicted == count.counted > memory.fixed["shards"]


@pytest.mark.parametrize("name", ["views_of_parameters", "shared_blocks", "scalar_loss", "checkpointed"])
def test_views_and_recomputed_values_have_the_bytes_that_a_run_allocates(name: str) -> None:
    compiled, memory, tracker = counted(CASES[name])["step"]
    count = compare(memory, compiled, tracker)
    assert not count.wrong, str(count)


@pytest.fixture(scope="module")
def compiled() -> CompiledTraces:
    def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        model = GPT()
        return model, model.inputs(torch.Generator().manual_seed(0))

    [compiled] = compile_on_fake_ranks(make, 2, transport="all_to_all")
    return compiled


def test_a_peak_is_printed_with_lines_of_the_model_and_asserted(compiled: CompiledTraces) -> None:
    memory = compiled.memory
    peak = memory.peak
    assert peak.nbytes == max(memory.totals) == sum(peak.by_kind.values())
    assert all(total == sum(memory.bytes_at(n).values()) for n, total in enumerate(memory.totals))
    assert_peak_memory_at_most(compiled, peak.nbytes)
    with pytest.raises(AssertionError, match=rf"8 bytes more than the limit of {peak.nbytes - 1:,}: peak"):
        assert_peak_memory_at_most(compiled, peak.nbytes - 1, optimizer_state=7)
    assert f"position {peak.position}" in str(memory) and all(t.name in str(memory) for t in peak.largest)
    assert {t for t in memory.alive_at(peak.position) if t.kind != "communication"} >= set(peak.largest)
    assert any("models.py:" in tensor.source for tensor in peak.largest)


def test_cuda_rounds_each_allocation_to_512_bytes(compiled: CompiledTraces) -> None:
    exact, rounded = compiled.memory, compiled.predict_memory(device="cuda")
    for one, other in zip(exact.tensors, rounded.tensors, strict=True):
        assert other.nbytes % 512 == 0 and 0 <= other.nbytes - one.nbytes < 512
        assert other._replace(nbytes=one.nbytes) == one
    assert rounded.fixed["shards"] == sum(-(-b.shard.nbytes // 512) * 512 for b in compiled.buckets)
    assert all(nbytes % 512 == 0 for nbytes in rounded.fixed.values())


def test_memory_that_traces_do_not_tell_is_named_and_bounded(compiled: CompiledTraces) -> None:
    on_cpu = {unknown.name for unknown in compiled.memory.unknowns}
    assert on_cpu == {"torch.ops.aten.embedding_backward"}
    on_gpu = {unknown.name: unknown for unknown in compiled.predict_memory(device="cuda").unknowns}
    assert on_gpu.keys() == on_cpu | {"cuBLAS", "NCCL", "CUDA context and kernels", "fragmentation"}
    assert on_gpu["cuBLAS"].nbytes == 32 << 20 and on_gpu["NCCL"].nbytes is None
    matmuls = {n for n, line in enumerate(compiled.memory.statements) if "linear(" in line or "matmul" in line}
    assert set(on_gpu["cuBLAS"].positions) == matmuls
    assert "cuBLAS: at most 33,554,432 bytes" in str(compiled.predict_memory(device="cuda"))


def test_a_fusion_allocates_at_most_what_it_computes_inside() -> None:
    trace = TraceCtx()
    with tracectx(trace):
        a = TensorProxy("a", shape=(8,), device=devices.cpu, dtype=dtypes.float32)
        b, c = prims.exp(a), prims.sin(a)
        d = prims.add(b, c)
    fusion = Symbol("fusion0", lambda a: None, is_fusion=True).bind(a, output=d, subsymbols=tuple(trace.bound_symbols))
    [unknown] = unknown_memory([fusion], {}, lambda bsym: 5, "cpu")
    assert (unknown.name, unknown.nbytes, unknown.positions) == ("fusion0", 2 * 32, (5,))


def test_waste_is_what_slots_hold_without_a_later_use(compiled: CompiledTraces) -> None:
    forward, memory = compiled.forward, compiled.memory
    assert forward is not None
    slots = {b.output.name: Issue(b).slot for b in forward.bound_symbols if b.sym is fsdp_all_gather}
    allocated = {b.arena: b.arena.nbytes for b in compiled.buckets}
    [nbytes] = allocated.values()
    for position in range(memory.backward):
        used = bytearray(nbytes)
        for gather, slot in zip(gathers(forward), slots.values(), strict=True):
            # Backward reads the last buckets again, which forward leaves in their slots.
            left = any(op.slot == slot.name and not op.travels for op in compiled.backward_schedule or ())
            last = memory.backward if left else max(gather.last_consumer or 0, gather.wait)
            if gather.issue <= position <= last:
                used[slot.offset : slot.end] = b"1" * slot.nbytes
        assert memory.wasted[position] == used.count(0)
    assert min(memory.wasted) < max(memory.wasted) == nbytes
