"""Live memory beside a run of the same traces in which every storage is tracked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.pipeline import CompiledTraces
from thunder_fsdp_sched.runtime.memory import InFlight
from thunder_fsdp_sched.runtime.row_dtensor import local_rows
from thunder_fsdp_sched.testing import assert_peak_memory_at_most
from thunder_fsdp_sched.trace.inspection import AGREEMENT, statements
from thunder_fsdp_sched.trace.symbols import GRAD_WRITERS, fsdp_wait_params

import pytest
import thunder
import torch
import torch.distributed as dist
from models import CASES, GPT, Stack
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.extend import OperatorExecutor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore


class Tracker:
    """The storages that the bound symbols of a run have returned, and the bytes of those still alive after each.

    Args:
        known: tensors whose storages are not counted.
    """

    name = "tracker"

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        # Weak references keep addresses from being used again.
        self.known: dict[int, StorageWeakRef] = {}
        self.skip(*known)
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes_at: dict[int, int] = {}

    def __repr__(self) -> str:
        return self.name

    def skip(self, *values: torch.Tensor) -> None:
        for storage in (local_rows(value).untyped_storage() for value in values):
            self.known[storage._cdata] = StorageWeakRef(storage)

    def look(self, position: int, *values: Any) -> None:
        for value in values:
            tensor = value.output if isinstance(value, InFlight) else value
            tensor = None if tensor is None else local_rows(tensor)  # a gradient is a DTensor
            if tensor is not None and (storage := tensor.untyped_storage())._cdata not in self.known:
                self.seen.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.seen = {key: found for key, found in self.seen.items() if not found[0].expired()}
        self.bytes_at[position] = sum(nbytes for _, nbytes in self.seen.values())


def _print(bsym: BoundSymbol, out: Any, args: Sequence[Any], kwargs: Any) -> str:
    return f"{bsym.sym.name}({', '.join(str(getattr(arg, 'name', arg)) for arg in bsym.args)})"


def _bind(bsym: BoundSymbol) -> None:
    bsym._call_ctx = {**(bsym._call_ctx or {}), "tracker": bsym.args[0]}


executor = OperatorExecutor("live_memory_test")
look, skip = (
    executor.register_operator(
        fn.__name__,
        meta=lambda *args: None,
        fn=fn,
        tags=[OpTags.DONT_DCE],
        bind_postprocess=_bind,
        python_printer=_print,
    )
    for fn in (Tracker.look, Tracker.skip)
)


def tracked(trace: TraceCtx, tracker: Tracker, begin: int) -> Callable[..., Any]:
    """The program of a trace that shows the tracker what each bound symbol has returned, before it is deleted."""
    new = from_trace(trace)
    for position, bsym in enumerate(trace.bound_symbols, start=begin):
        if bsym.sym.name in AGREEMENT:  # there are no other ranks
            continue
        new.bound_symbols.append(bsym)
        if bsym.sym.id in (PrimIDs.RETURN, PrimIDs.DEL) or bsym.sym.name == "clear_mutable_collection":
            continue
        outs = {p.name: p for p in bsym.flat_proxy_outs if isinstance(p, (TensorProxy, FutureTensorProxy))}
        if bsym.sym is fsdp_wait_params or bsym.sym.name in GRAD_WRITERS:  # in slots
            new.bound_symbols.append(skip.bind(tracker, *outs.values(), output=None))
            outs = {}
        new.bound_symbols.append(look.bind(tracker, position, *outs.values(), output=None))
    return new.python_callable()


def run(make: Callable[[], torch.nn.Module], **options: Any) -> tuple[CompiledTraces, Tracker]:
    """One forward and backward as rank 1 of 2, over a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        torch.manual_seed(0)
        transform = fsdp(**options)
        model = make().double()
        inputs = model.inputs(torch.Generator().manual_seed(0))
        jitted = thunder.jit(model, transforms=[transform])
        inputs, _ = transform.cast_inputs(inputs, {})
        _, flat, _ = thunder.compile_data(jitted).get_computation_and_inputs(*inputs)
        compiled = transform.compiled[-1]
        tracker = Tracker(flat)
        with torch.no_grad():
            forward = tracked(compiled.forward, tracker, 0)
            backward = tracked(compiled.backward, tracker, len(compiled.forward.bound_symbols))
            outputs, (saved, others) = forward(*flat)
            grads = [torch.ones_like(out) for out in outputs["flat_output"] if isinstance(out, torch.Tensor)]
            tracker.skip(*grads)
            collections = [list(saved), list(others)]
            del saved, others
            returned = backward(collections, grads)
            del returned
    finally:
        dist.destroy_process_group()
    return compiled, tracker


CASES_TO_RUN = {
    "zero3": (Stack, {}),
    "zero2": (Stack, {"sharding_strategy": "zero2"}),
    "bfloat16": (Stack, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
    "gpt": (GPT, {}),
    **{name: (CASES[name], {}) for name in ("views_of_parameters", "shared_blocks", "scalar_loss", "checkpointed")},
}


@pytest.mark.parametrize("case", CASES_TO_RUN)
def test_bytes_are_those_of_the_storages_that_a_run_keeps_alive(case: str) -> None:
    make, options = CASES_TO_RUN[case]
    compiled, tracker = run(make, **options)
    assert compiled.forward is not None and compiled.backward is not None and tracker.bytes_at
    memory = compiled.memory
    bsyms = [*compiled.forward.bound_symbols, *compiled.backward.bound_symbols]
    counted = [*statements(compiled.forward), *statements(compiled.backward)]
    numbers = {id(bsym): number for number, bsym in enumerate(counted)}
    wrong = []
    for position, found in tracker.bytes_at.items():
        if id(bsyms[position]) not in numbers:  # a `del`
            continue
        at = memory.bytes_at(numbers[id(bsyms[position])])
        predicted = sum(at.values()) - at["inputs"] - sum(memory.fixed.values())
        if predicted != found:
            wrong.append(f"{position}: predicted {predicted}, found {found}: {bsyms[position]}")
    assert not wrong, "\n".join(wrong[:10])

    peak = memory.peak
    assert peak.nbytes == max(memory.totals) == sum(peak.by_kind.values())
    assert_peak_memory_at_most(compiled, peak.nbytes)
    with pytest.raises(AssertionError, match=rf"8 bytes more than the limit of {peak.nbytes - 1:,}: peak"):
        assert_peak_memory_at_most(compiled, peak.nbytes - 1, optimizer_state=7)
    assert f"position {peak.position}" in str(memory) and all(t.name in str(memory) for t in peak.largest)
    if case == "gpt":
        assert any("models.py:" in tensor.source for tensor in peak.largest)
