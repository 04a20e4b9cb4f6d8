"""The traces and schedules compiled for one set of input shapes and flags, and the memory of a step that runs them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, TypeVar

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from .errors import coded_error
from .extensions import load
from .ir.analysis import NO_PENDING_GRADS, PendingGrads
from .ir.calls import NO_CALL, CallSignature
from .ir.effects import NOTHING, declared
from .ir.schedule import MAX_REDUCTIONS_IN_FLIGHT, Schedule, StepSchedule
from .runtime.accumulation import AccumulationMode
from .runtime.bucket import Bucket
from .runtime.traced_inputs import TracedInputs


@dataclass(frozen=True)
class StepSettings:
    """The settings of one compilation, from the options or chosen by the search.

    Attributes:
        prefetch: how many prefetch steps ahead gathers are issued.
        accumulate: how gradients accumulate under ``no_sync``.
        kept_buckets: the buckets that stay unsharded from forward to backward.
        reductions_in_flight: how many equally large reductions of one process group may be in flight; ``max_memory``
            chooses fewer than usual if that fits and costs less than recomputation.
        backward_arena: whether ``max_memory`` makes backward allocate the memory of slots that only backward needs.
        recomputed: names of the values of forward that ``max_memory`` makes backward compute again.
    """

    prefetch: int = 0
    accumulate: AccumulationMode = "unsharded"
    kept_buckets: frozenset[Bucket] = frozenset()
    reductions_in_flight: int = MAX_REDUCTIONS_IN_FLIGHT
    backward_arena: bool = False
    recomputed: frozenset[str] = frozenset()


Item = TypeVar("Item")


class OfCalls(list[Item]):
    """The results of a model's compilations, oldest first. Before the first call, an index raises an error that says so."""

    def __getitem__(self, index: Any) -> Any:
        if not self and not isinstance(index, slice):
            raise coded_error(IndexError, "trace.nothing-compiled-yet")
        return super().__getitem__(index)


_TRACES = ("differentiated", "joint", "forward_before", "forward", "backward_before", "backward")


def _none() -> None:
    """Return the default of a trace. With a factory, the class has no such attribute, so a deleted trace is noticed."""


def _operands_of(bsym: BoundSymbol) -> SimpleNamespace:
    """Return the symbol of a bound symbol with its operands and results, in a fraction of its memory."""
    return SimpleNamespace(sym=bsym.sym, args=bsym.args, kwargs=bsym.kwargs, output=bsym.output)


@dataclass
class CompiledTraces:
    """The traces and schedules compiled for one set of input shapes and flags.

    A transform keeps the traces of the sets that were compiled last; with ``max_memory``, those of all sets. Of older
    sets it keeps the schedules, and what the prediction of memory for others needs; reading their traces is an error.

    Attributes:
        no_sync: whether it was compiled for ``no_sync``.
        number: how many sets were compiled earlier.
        call: the inputs and flags.
        settings: the settings with which it was compiled.
        choice: the outcome of ``prefetch="auto"`` or ``max_memory``, a
            :class:`~thunder_fsdp_sched.extras.planning.search.Choice`; ``None`` without them.
        parameters: the parameter name of each argument that is a parameter, keyed by the argument's name.
        traced: the fingerprint of what Thunder has traced (see ``ir.traced_computation``), to find later compilations
            that can share ``differentiated``; ``None`` if none can.
        inputs: what the program has read from its inputs; ``None`` if the other mode of ``no_sync`` needs another
            trace.
        shares: the number of the earlier compilation whose joint trace was reused; ``None`` if there was none.
        differentiated: the joint trace as Thunder has made it, with one ``fsdp_unshard`` for each parameter.
        joint: the joint trace with bucketed communication, before fusion (forward alone without gradients).
        forward_before, backward_before: the execution traces that Thunder passes to us, with communication unsorted.
        forward, backward: the traces that run. Backward is ``None`` without gradients.
        forward_schedule, backward_schedule: the communication of these traces, as values.
        pass_seconds: processor time (seconds) of each pass, keyed by its name.
        buckets: the buckets of the module.
        attached: objects that extras keep with these traces, by names under which they are attributes as well.
    """

    no_sync: bool
    number: int = 0
    call: CallSignature = NO_CALL
    settings: StepSettings = StepSettings()
    choice: Any = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    traced: tuple[Any, ...] | None = None
    inputs: TracedInputs | None = field(default=None, repr=False, compare=False)
    shares: int | None = None
    differentiated: TraceCtx | None = field(default_factory=_none, repr=False, compare=False)
    joint: TraceCtx | None = field(default_factory=_none, repr=False, compare=False)
    forward_before: TraceCtx | None = field(default_factory=_none, repr=False, compare=False)
    forward: TraceCtx | None = field(default_factory=_none, repr=False, compare=False)
    forward_schedule: Schedule | None = None
    backward_before: TraceCtx | None = field(default_factory=_none, repr=False, compare=False)
    backward: TraceCtx | None = field(default_factory=_none, repr=False, compare=False)
    backward_schedule: Schedule | None = None
    pass_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    buckets: Sequence[Bucket] = ()
    attached: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _bsyms: list[Any] | None = field(default=None, repr=False)  # operands alone, once the traces are forgotten

    @cached_property
    def memory(self) -> Any:
        """The :class:`~thunder_fsdp_sched.StepMemory` of a step on this rank, computed when it is first asked for."""
        return self.predict_memory()

    def predict_memory(
        self,
        *,
        device: str | None = None,
        accumulated: bool | Iterable[CompiledTraces] = False,
        others: Iterable[CompiledTraces] = (),
        merged: bool = False,
    ) -> Any:
        """Return the :class:`~thunder_fsdp_sched.StepMemory` of a step on this rank; see :meth:`StepMemory.of`.

        Args:
            device: the type of device, such as ``"cuda"``; by default that of the buckets.
            accumulated: the traces of the earlier micro-batches of a window under ``no_sync``, whose gradients are not
                reduced yet. ``True`` if they gave gradients to the same buckets as this step, which holds unless
                micro-batches run different blocks.
            others: other traces of the module that have run. What they keep allocated between steps counts: arenas,
                casts of shards, receive buffers.
            merged: use the merged traces where there are some. Then the result holds if other ranks need all
                collectives in which these take part; usually memory is less. It leaves out two things. Copies of
                offloaded or encoded buckets that are sent for other ranks may stay longer, those of at most
                ``merging.SERVED_IN_FLIGHT`` buckets. And only other ranks may have accumulated gradients of a bucket
                that no program of the step reduces.
        """
        earlier = ([self] if accumulated else []) if isinstance(accumulated, bool) else [*accumulated]
        others = [*others]
        changed = load("extras.ranks_differ.start:with_merged") if merged else lambda traces: traces
        that_run = {id(one): changed(one) for one in (self, *earlier, *others)}
        return load("extras.step_memory.step_memory:StepMemory").of(
            that_run[id(self)].traces,
            self.buckets,
            device=device,
            accumulated=NO_PENDING_GRADS.union(*(that_run[id(one)].pending_grads for one in earlier)),
            others=[that_run[id(other)].bsyms for other in others if other is not self],
        )

    @property
    def traces(self) -> tuple[TraceCtx, ...]:
        """The traces that run: forward, and backward if there is one."""
        return tuple(trace for trace in (self.forward, self.backward) if trace is not None)

    @property
    def bsyms(self) -> Sequence[Any]:
        """The bound symbols of the traces that run. Of forgotten traces, only the operands of this package's symbols,
        which effects and costs need, and ``None`` for the others.
        """
        return self._bsyms or [bsym for trace in self.traces for bsym in trace.bound_symbols]

    def forget_traces(self) -> None:
        """Free the traces, which take most of a compilation's memory, except for what other compilations need."""
        if self._bsyms is None:
            if self.choice is not None and self.no_sync:
                _ = self.pending_grads  # which later searches ask for
            self._bsyms = [_operands_of(bsym) if declared(bsym) is not NOTHING else None for bsym in self.bsyms]
            self.traced, self.inputs, self.attached = None, None, {}
            for name in _TRACES:
                delattr(self, name)

    def __getattr__(self, name: str) -> Any:
        if name in (*_TRACES, "traces", "memory", "pending_grads"):  # properties whose error this one replaces, too
            raise coded_error(AttributeError, "trace.compiled-traces-dropped", call=self.call, number=self.number)
        if name in (attached := vars(self).get("attached", {})):
            return attached[name]
        raise AttributeError(name)

    @cached_property
    def pending_grads(self) -> PendingGrads:
        """The gradients that backward leaves under ``no_sync``; or would leave unsharded, if it reduces them."""
        if self.backward is None:
            return NO_PENDING_GRADS
        found: PendingGrads = load("extras.step_memory.value_memory:pending_grads_of")(self.backward.bound_symbols)
        return found

    @property
    def schedule(self) -> StepSchedule:
        """The schedules of forward and backward together."""
        assert self.forward_schedule is not None
        return StepSchedule(self.forward_schedule, self.backward_schedule, self.no_sync)
