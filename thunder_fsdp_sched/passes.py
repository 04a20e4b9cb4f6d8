"""The context that passes read, what runs a pass, and the executors at whose turn passes run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch
from thunder.core.trace import TraceCtx
from thunder.extend import Executor, FusionExecutor

from .compiled_traces import CompiledTraces, StepSettings
from .logs import Artifacts, log_pass
from .options import Options
from .runtime.bucket import Bucket
from .runtime.memory import Arena
from .runtime.traced_inputs import MemoryOfInputs, TracedInputs

if TYPE_CHECKING:
    from .runtime.trace_start import TraceStart


@dataclass
class Context:
    """The input of the passes of one compilation, besides traces. A candidate of the search has a copy with other settings.

    Attributes:
        module: the user's.
        buckets: those of the module.
        locations: the bucket of each parameter and its index there, keyed by each of its names.
        shards: this rank's shard of each parameter, keyed by each of its names.
        options: those that the passes go by.
        traces: the results so far.
        settings: the chosen ones.
        no_sync: whether the trace is compiled for ``no_sync``.
        artifacts: where traces are dumped.
        inputs: what the program has read from its inputs.
        memory_of_inputs: what the traces expect of the memory of arguments.
        executors: those that claim operators, in order of priority.
        computation: as Thunder traced it.
        has_gradients: whether ``differentiate`` finds some; ``None`` if Thunder differentiates.
        trains: whether the step has a backward.
        split: the latest trace as Thunder has split it.
        forward: the forward trace, once it is scheduled.
        start: of a trace on the control channel, if the ranks agree before each run.
        arena_of: returns the arena of a bucket; another one for candidates of the search.
    """

    module: torch.nn.Module
    buckets: Sequence[Bucket]
    locations: Mapping[str, tuple[Bucket, int]]
    shards: Mapping[str, torch.nn.Parameter]
    options: Options
    traces: CompiledTraces
    settings: StepSettings
    no_sync: bool
    artifacts: Artifacts
    inputs: TracedInputs | None = None
    memory_of_inputs: MemoryOfInputs = field(default_factory=MemoryOfInputs)
    executors: Sequence[Executor] = ()
    fusions: Sequence[FusionExecutor] = ()
    computation: TraceCtx | None = None
    has_gradients: bool | None = None
    trains: bool = False
    split: TraceCtx | None = None
    forward: TraceCtx | None = None
    start: TraceStart | None = None
    arena_of: Callable[[Bucket], Arena] = lambda bucket: bucket.arena

    @property
    def agrees_before_issue(self) -> bool:
        """Whether the round of agreement ends before the first collective: on another backend than NCCL, which runs both."""
        return any(b.ranks.group.backend_for(b.spec.device) != "nccl" for b in self.buckets)


_Arguments = ParamSpec("_Arguments")


class Run:
    """Runs passes of a compilation; logs what each has changed, records its processor time, and checks what it returns.

    Args:
        search: whether this is a candidate of the search, of which nothing is recorded.
    """

    def __init__(self, context: Context, *, search: bool = False) -> None:
        self.context, self.search = context, search

    def __call__(
        self,
        pass_: Callable[Concatenate[TraceCtx, _Arguments], TraceCtx],
        trace: TraceCtx,
        *args: _Arguments.args,
        **arguments: _Arguments.kwargs,
    ) -> TraceCtx:
        """Return the trace after a pass, or the same one if an option leaves the pass out."""
        context, name = self.context, pass_.__name__
        if name in context.options.debug.skip_passes:
            return trace
        started, before = time.process_time(), trace
        trace = pass_(before, *args, **arguments)
        if self.search:
            return trace
        seconds = time.process_time() - started
        context.traces.pass_seconds[name] += seconds
        log_pass(name, seconds, before, trace)
        context.artifacts.log_pass(name, "forward" if context.forward is None else "backward", trace)
        if context.options.debug.check_passes:
            from .proof.well_formed import check_well_formed  # here, because only tests check each pass

            check_well_formed(trace, name)
        return trace


class PassExecutor(FusionExecutor):
    """A fusion executor that runs our passes.

    Its ``fusion_pass`` is the only public hook that sees the joint trace before it is split.

    Args:
        name: of the executor.
        run: the passes.
        claims: whether all operators are left to ``run`` as they are, and no later executor claims one before it.
    """

    def __init__(self, name: str, run: Callable[[TraceCtx], TraceCtx], *, claims: bool = False) -> None:
        super().__init__(name)
        self.fusion_pass = run
        self._claims = claims

    def can_execute(self, bsym: Any) -> bool:
        return False

    def can_fuse(self, bsym: Any) -> bool:
        return self._claims

    def can_execute_or_fuse(self, bsym: Any) -> bool:
        return False  # Thunder's autograd asks, to find an executor's own formula for gradients
