"""Predicted memory of a step beside a run of the same traces in which every storage is counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from thunder_fsdp_sched import CommPolicy, CompiledTraces, Sharding, StepMemory, fsdp
from thunder_fsdp_sched.extras.planning import choosing
from thunder_fsdp_sched.ir.analysis import NO_PENDING_GRADS
from thunder_fsdp_sched.planning import MemoryLimitError

import pytest
import torch
import torch.cuda._memory_viz
from coded import coded
from extending import extended
from memory_count import TWICE, Tracker, compare, count_on_fake_ranks
from models import CASES, GPT, ChosenBlocks, FeedForward, Stack, compile_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
LOWEST = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
REDUCED_HIGH = MixedPrecisionPolicy(torch.float32, torch.float64)


Counted = dict[str, tuple[CompiledTraces, StepMemory, Tracker]]


def counted(
    make: Callable[[], nn.Module], *, window: Any = (), dtype: torch.dtype = torch.float64, **options: Any
) -> Counted:
    torch.manual_seed(0)
    size = 4 if "secondary_ranks" in str(options.get("sharding_strategy")) else 2
    return count_on_fake_ranks(make().to(dtype), lambda: fsdp(**options), world_size=size, window=window)


def check_positions(found: Counted) -> None:
    """Check that every position has the bytes that the run has allocated, and the peak as well."""
    for step, (compiled, memory, tracker) in found.items():
        count = compare(memory, compiled, tracker)
        assert not count.wrong, f"{step}: {len(count.wrong)} positions\n{count}"
        assert count.predicted == count.counted > memory.fixed["shards"], step


WHOLE_STEPS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "zero3": (partial(GPT, block=FeedForward), {"transport": "all_to_all"}),
    "offloaded": (
        partial(GPT, block=FeedForward),
        {"offload_policy": CPUOffloadPolicy(pin_memory=False), "mp_policy": LOW},
    ),
    # Views and recomputed values.
    **{name: (CASES[name], {}) for name in ("views_of_parameters", "shared_blocks", "checkpointed")},
}

# Every transport, with the strategies and precisions in turn; ``test_random_models`` draws others.
TRANSPORT_CASES: dict[str, dict[str, Any]] = {
    "all_reduce": {"transport": "all_reduce", "mp_policy": LOWEST},
    "all_to_all": {"transport": "all_to_all", "sharding_strategy": "zero2", "mp_policy": LOWEST},
    "coalesced": {"transport": "coalesced", "mp_policy": LOW},
    "flat": {"transport": "flat", "mp_policy": REDUCED_HIGH},
}

WINDOWS: dict[str, dict[str, Any]] = {
    **TRANSPORT_CASES,
    # With a transport that has buffers of its own.
    "released, zero3": {"transport": "all_to_all", "sharding_strategy": Sharding(release=True)},
    # Gradients that are reduced in each micro-batch, and secondary shards.
    "sharded, zero3": {"accumulate": "sharded", "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "secondary": {"sharding_strategy": Sharding(secondary_ranks=2), "mp_policy": MixedPrecisionPolicy(torch.float32)},
    # Encoded buckets, with every transport that sends them.
    "encoded, flat": {"transport": "flat", "comm_policy": CommPolicy("int8", "int8", block=4)},
    "encoded, all_to_all": {
        "transport": "all_to_all",
        "comm_policy": CommPolicy("int8", "int8", error_feedback=True),
        "accumulate": "sharded",
        "sharding_strategy": "zero2",
    },
    "encoded, offloaded": {
        "comm_policy": CommPolicy("int8", "int8"),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    },
}


def test_a_limit_holds_for_the_traces_that_run(compiled: CompiledTraces) -> None:
    check = partial(choosing.check_memory, compiled, pending_grads=NO_PENDING_GRADS, compiled=())
    peak = compiled.memory.peak
    check(limit=peak.nbytes)
    assert max(wasted := compiled.memory.wasted) > 0 and f", {wasted[peak.position]:,} wasted" in str(compiled.memory)
    refusal = coded("plan.traces-exceed-max-memory", f"{peak.nbytes:,}", peak.position, peak.phase)
    with pytest.raises(MemoryLimitError, check=refusal):
        check(limit=peak.nbytes - 1)


@pytest.mark.parametrize("name", WHOLE_STEPS)
def test_every_position_has_the_bytes_that_a_run_allocates(name: str) -> None:
    make, options = WHOLE_STEPS[name]
    check_positions(counted(make, **options))


@pytest.mark.parametrize("name", WINDOWS)
def test_every_position_of_a_window_has_the_bytes_that_a_run_allocates(name: str) -> None:
    found = counted(Stack, window=TWICE, **WINDOWS[name])
    check_positions(found)
    if name in TRANSPORT_CASES:
        assert found["last of a window"][1].peak.nbytes > found["step"][1].peak.nbytes


def test_every_position_has_the_bytes_that_a_run_with_an_extension_allocates() -> None:
    options: dict[str, Any] = {"transport": "all_to_all", "accumulate": "sharded"}

    def ask() -> Any:
        return extended(fsdp(**options), no_sync=True)

    torch.manual_seed(0)
    [plain] = counted(Stack, **options).values()
    found = count_on_fake_ranks(Stack().double(), ask, window=TWICE)
    check_positions(found)
    compiled, memory, _ = found["step"]
    end_of_forward = memory.backward - 1
    less = plain[1].totals[end_of_forward] - memory.totals[end_of_forward]
    assert less >= max(buffer.nbytes for b in compiled.buckets for buffer in b.transport.reduce_buffers(b.spec)) > 0
    assert max(memory.totals) <= max(plain[1].totals)


def test_every_position_has_the_bytes_that_a_run_with_a_limit_allocates() -> None:
    options = {"transport": "all_to_all", "cluster": "h100-sxm"}
    # In float64, older torch states a wrong dtype for the log-sum-exp of attention: see "Limits" in docs/models.md.
    count = partial(counted, partial(GPT, blocks=1, length=32), dtype=torch.float32, **options)
    [(_, free, _)] = count().values()
    limit = int(0.8 * free.peak.nbytes)
    found = count(max_memory=limit)
    check_positions(found)
    [(compiled, memory, _)] = found.values()
    assert memory.peak.nbytes <= limit
    assert compiled.settings.recomputed and compiled.settings.backward_arena


def _double(name: str, grads: torch.Tensor) -> None:
    grads.mul_(2)


def test_hybrid_sharding_hooks_and_divide_factors_have_the_bytes_that_a_run_allocates() -> None:
    def ask() -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        policy = CommPolicy("int8", "int8", error_feedback=True)
        return fsdp(ranks=mesh, gradient_divide_factor=3.0, comm_policy=policy, all_reduce_hook=_double)

    model = Stack(1).double()
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.blocks[0].register_forward_hook(lambda module, args, out: out.exp() - args[0])
    found = count_on_fake_ranks(model, ask, rank=3, world_size=4, window=TWICE)
    assert any("exp(" in line for line in found["step"][1].statements)
    check_positions(found)


def test_a_window_of_different_micro_batches_has_the_gradients_that_these_have_left() -> None:
    found = count_on_fake_ranks(
        ChosenBlocks(4, 5, 4).double(),
        lambda: fsdp(transport="all_to_all", mp_policy=REDUCED_HIGH, bucketing_strategy="layer"),
        batch={"x": torch.randn(3, 4, dtype=torch.float64), "way": "0"},
        window=[{"way": "0"}, {"way": "10"}, {"way": "2"}],
    )
    check_positions(found)
    left = {t.name for t in found["last of a window"][1].tensors if t.name.startswith("unreduced")}
    names = ("first", "last", *(f"blocks.{number}" for number in range(3)))
    assert left == {f"unreduced gradients of {name}" for name in names}


@pytest.fixture(scope="module")
def compiled() -> CompiledTraces:
    return compile_model(lambda: GPT(block=FeedForward), transport="all_to_all")


def test_cuda_rounds_each_allocation_to_512_bytes(compiled: CompiledTraces) -> None:
    exact, rounded = compiled.memory, compiled.predict_memory(device="cuda")
    for one, other in zip(exact.tensors, rounded.tensors, strict=True):
        assert other.nbytes % 512 == 0 and 0 <= other.nbytes - one.nbytes < 512
        assert other._replace(nbytes=one.nbytes) == one
    assert rounded.fixed["shards"] == sum(-(-b.shard.nbytes // 512) * 512 for b in compiled.buckets)
    assert all(nbytes % 512 == 0 for nbytes in rounded.fixed.values())
