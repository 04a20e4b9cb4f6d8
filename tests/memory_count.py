"""Count the bytes that a step allocates, operator by operator, and compare them with the predicted memory.

[Note: Counted bytes]
The program of the traces runs with real tensors. A dispatch mode sees every base operator, those of this package's
runtime included, and records the storages that it returns. An input that no operator has returned existed before. A
storage inside the memory of another one, as each parameter in a slot has it, does not count. After each operator the
bytes of all storages that still exist are added up; the count of a bound symbol is the most between it and the one before
it. Buffers inside a kernel, and those of gloo's threads, are invisible to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thunder_fsdp_sched import CompiledTraces, FSDPTransform, StepMemory
from thunder_fsdp_sched.extras.planning.dry_run import fake_rank
from thunder_fsdp_sched.runtime.autograd import ENDED
from thunder_fsdp_sched.testing import statements

import thunder
import torch
from internals import AGREEMENT, Arena, Bucket
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.extend import OperatorExecutor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FREES = ("fsdp_release", "fsdp_backward_done", "fsdp_finish_served", "fsdp_serve_left")
"""Symbols that free memory of arenas."""


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


class Tracker(TorchDispatchMode):
    """The bytes of storages that exist, with the peak between two bound symbols.

    Args:
        counted: tensors that exist before the step and count.
        others: tensors that do not count, such as the inputs.

    Attributes:
        peak: the largest number of bytes since the last bound symbol.
    """

    def __init__(self, counted: Iterable[torch.Tensor] = (), others: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        # Weak references keep addresses from being used again.
        self.known: dict[int, StorageWeakRef] = {}
        self.alive: dict[int, tuple[StorageWeakRef, int, int]] = {}  # with the address and the bytes
        for tensor in others:
            self.skip(tensor)
        for tensor in counted:
            self.add(tensor)
        self.peak = self.bytes_now()
        self.bytes_at: dict[int, int] = {}

    def __repr__(self) -> str:
        return "tracker"

    def skip(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage._cdata not in self.known:
            self.known[storage._cdata] = StorageWeakRef(storage)

    def add(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage._cdata not in self.known:
            self.skip(tensor)
            self.forget_freed()
            begin = storage.data_ptr()
            if not any(first <= begin < first + nbytes for _, first, nbytes in self.alive.values()):
                self.alive[storage._cdata] = StorageWeakRef(storage), begin, storage.nbytes()

    def forget_freed(self) -> None:
        self.alive = {key: found for key, found in self.alive.items() if not found[0].expired()}

    def bytes_now(self) -> int:
        self.forget_freed()
        return sum(nbytes for _, _, nbytes in self.alive.values())

    def look(self, position: int) -> None:
        now = self.bytes_now()
        self.bytes_at[position] = max(self.peak, now)
        self.peak = 0  # tensors that are deleted before the next operator do not count there

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:  # its argument is a number, for which torch made a tensor
            for tensor in _tensors((args, kwargs)):
                self.skip(tensor)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self.add(tensor)
        self.peak = max(self.peak, self.bytes_now())
        return result


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)


def _print(bsym: BoundSymbol, out: Any, args: Sequence[Any], kwargs: Any) -> str:
    return f"look({bsym.args[0]!r}, {bsym.args[1]})"


def _bind(bsym: BoundSymbol) -> None:
    bsym._call_ctx = {**(bsym._call_ctx or {}), "tracker": bsym.args[0], "look": Tracker.look}


_executor = OperatorExecutor("memory_count_test")
_look = _executor.register_operator(
    "look",
    meta=lambda *args: None,
    fn=Tracker.look,
    tags=[OpTags.DONT_DCE],
    bind_postprocess=_bind,
    python_printer=_print,
)


def _tracked(trace: TraceCtx, tracker: Tracker, begin: int, agrees: bool) -> Callable[..., Any]:
    """The program of a trace that tells the tracker after each bound symbol, before anything is deleted."""
    new = from_trace(trace)
    for position, bsym in enumerate(trace.bound_symbols, start=begin):
        if bsym.sym.name in AGREEMENT and not agrees:  # there are no other ranks
            continue
        new.bound_symbols.append(bsym)
        if bsym.sym.id in (PrimIDs.RETURN, PrimIDs.DEL) or bsym.sym.name == "clear_mutable_collection":
            continue
        new.bound_symbols.append(_look.bind(tracker, position, output=None))
    return new.python_callable()


def _lasting(buckets: Iterable[Bucket]) -> Iterator[torch.Tensor | None]:
    """Yield the tensors that buckets keep between steps."""
    for bucket in buckets:
        arenas: list[Arena] = [bucket.arena, bucket.private_slot.arena]
        yield bucket.shard
        yield bucket.accumulation.unsharded
        yield bucket.accumulation.sharded
        for arena in arenas:
            yield arena._memory
            for buffers in arena.scratch.values():
                yield from buffers
        for one in (bucket, *bucket.aliases.values()):
            yield getattr(one.source, "_cast", None)
        yield getattr(vars(bucket).get("feedback"), "lost", None)  # made by the first reduction


class _Backward(torch.autograd.Function):
    """Run a function as the backward of an autograd node. Outside of one, leaf modules would keep their graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
        ctx.run = run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        ctx.run()
        return None, None


def count_step(
    transform: FSDPTransform, compiled: CompiledTraces, flat: Sequence[Any], *, agrees: bool = False
) -> Tracker:
    """Run forward and backward of ``compiled`` once, and return the bytes at each of their bound symbols.

    Args:
        flat: the inputs of the computation.
        agrees: whether there are other ranks, with which the ranks agree on what they run.
    """
    inputs = [value for value in flat if isinstance(value, torch.Tensor)]
    lasting = [t for t in _lasting(transform.sharded.buckets) if t is not None]
    own = {t.untyped_storage()._cdata for t in lasting}
    tracker = Tracker(lasting, [t for t in inputs if _storage(t)._cdata not in own])
    del lasting  # the step may free a part of it
    assert compiled.forward is not None
    with torch.no_grad():
        forward = _tracked(compiled.forward, tracker, 0, agrees)
        backward = None
        if compiled.backward is not None:
            backward = _tracked(compiled.backward, tracker, len(compiled.forward.bound_symbols), agrees)
        with tracker:
            result = forward(*flat)
        if backward is None:
            return tracker
        outputs, (saved, others) = result
        del result
        grads = [torch.ones_like(out) for out in outputs["flat_output"] if isinstance(out, torch.Tensor)]
        for grad in grads:
            tracker.skip(grad)
        collections = [list(saved), list(others)]
        del saved, others

    def run() -> None:
        with tracker:
            backward(collections, grads)

    loss = _Backward.apply(torch.zeros((), requires_grad=True), run)
    loss.grad_fn.metadata[ENDED] = sys.maxsize  # as the backward of the forward above
    loss.backward()
    return tracker


TWICE: tuple[Mapping[str, Any], ...] = ({}, {})
"""A window of two micro-batches like the step."""


def count_on_fake_ranks(
    model: torch.nn.Module,
    ask: Callable[[], FSDPTransform],
    *,
    rank: int = 1,
    world_size: int = 2,
    batch: Mapping[str, Any] | None = None,
    window: Sequence[Mapping[str, Any]] = (),
) -> dict[str, tuple[CompiledTraces, StepMemory, Tracker]]:
    """Run a step twice on a fake rank, first to allocate lasting memory; return traces, prediction and count.

    Args:
        ask: returns ``fsdp(...)``.
        batch: keyword arguments for ``model``; by default it is called with ``model.inputs(...)``.
        window: keyword arguments that differ, each of a micro-batch under ``no_sync``; also count these and the step
            that follows them.
    """
    with fake_rank(rank, world_size):
        transform = ask()
        inputs = () if batch is not None else model.inputs(torch.Generator().manual_seed(0))
        jitted = thunder.jit(model, transforms=[transform])

        def flat(other: Mapping[str, Any] | None = None) -> Sequence[Any]:
            args, kwargs = transform.cast_inputs(inputs, dict(batch or {}) | dict(other or {}))
            return transform.sharded.compile(jitted, args, kwargs)[1]

        def count(
            compiled: CompiledTraces, args: Sequence[Any], accumulated: Sequence[CompiledTraces] = ()
        ) -> tuple[CompiledTraces, StepMemory, Tracker]:
            for bucket in transform.sharded.buckets:
                bucket.private_slot.arena.contents.clear()  # the trace gathers, as predicted, in any window
            tracker = count_step(transform, compiled, args)
            return compiled, compiled.predict_memory(accumulated=accumulated, others=transform.compiled), tracker

        args = flat()
        reducing = transform.compiled[-1]
        count(reducing, args)
        found = {"step": count(reducing, args)}
        micro_batches = []
        for other in window:
            with jitted.no_sync():
                args = flat(other)
            micro_batches.append((transform.compiled[-1], args))
        for _ in range(2 if window else 0):  # the first window allocates lasting memory
            for number, (compiled, args) in enumerate(micro_batches):
                earlier = [micro_batch for micro_batch, _ in micro_batches[:number]]
                found[f"number {number} of a window"] = count(compiled, args, earlier)
            found["last of a window"] = count(reducing, flat(), [micro_batch for micro_batch, _ in micro_batches])
            jitted.zero_grad()
    return found


@dataclass(frozen=True)
class Count:
    """A counted step beside its prediction.

    Attributes:
        wrong: for each position at which they differ, predicted bytes, counted bytes, and the bound symbol.
        predicted, counted: the peaks in bytes, without inputs.
    """

    wrong: list[tuple[int, int, str]]
    predicted: int
    counted: int

    def __str__(self) -> str:
        return "\n".join(f"predicted {a}, counted {b}, {a - b:+}: {text}" for a, b, text in self.wrong[:10])


def compare(memory: StepMemory, compiled: CompiledTraces, tracker: Tracker) -> Count:
    """Return where the predicted and the counted bytes of a step differ, inputs aside."""
    traces = compiled.traces
    bsyms = [bsym for trace in traces for bsym in trace.bound_symbols]
    numbers = {id(b): n for n, b in enumerate(b for trace in traces for b in statements(trace))}
    wrong, predicted = [], []
    for position, found in tracker.bytes_at.items():
        if id(bsyms[position]) in numbers:
            number = numbers[id(bsyms[position])]
            at = memory.bytes_at(number)
            predicted.append(sum(at.values()) - at["inputs"])
            # Memory that these symbols free counts there in the prediction, but not for the tracker, which looks after
            # them.
            frees = bsyms[position].sym.name in FREES
            # An embedding bag makes one offset more than torch's rule for fake tensors.
            unknown = 8 * ("embedding_bag" in bsyms[position].sym.name)
            if not (0 <= found - predicted[-1] <= unknown or (frees and found < predicted[-1])):
                wrong.append((predicted[-1], found, str(bsyms[position]).partition("\n")[0]))
    return Count(wrong, max(predicted), max(tracker.bytes_at.values()))
