"""The context that passes read, the runner of passes, and the executors through which Thunder calls them."""

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
    """The input of one compilation's passes, besides traces. Candidates of the search have copies with other settings.

    Attributes:
        module: the user's module.
        buckets: the buckets of the module.
        locations: the bucket of each parameter and its index there, keyed by each of its names.
        shards: this rank's shard of each parameter, keyed by each of its names.
        options: the user's options, or those of a candidate of the search.
        traces: the results so far.
        settings: the chosen settings.
        no_sync: whether the trace is compiled for ``no_sync``.
        artifacts: writes dumps of traces.
        inputs: the values that the program has read from its inputs.
        memory_of_inputs: the memory layout that the traces expect of their arguments.
        executors: the executors that claim operators, in order of priority.
        fusions: those of them that can fuse operators.
        computation: the traced computation, before ``insert_unshard``.
        has_gradients: whether ``differentiate`` makes a backward; ``None`` if Thunder differentiates.
        trains: whether the step has a backward.
        split: the forward or backward trace as Thunder split it, whichever is being scheduled.
        forward: the forward trace, once it is scheduled.
        start: the ``TraceStart`` of this trace, if the ranks agree before each run.
        arena_of: returns the arena of a bucket; candidates of the search have arenas of their own.
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
        """Whether the round of agreement ends before the first collective is issued; with NCCL they may overlap."""
        return any(b.ranks.group.backend_for(b.spec.device) != "nccl" for b in self.buckets)


_Arguments = ParamSpec("_Arguments")


class Run:
    """A runner of passes, which logs the changes of each pass, records its processor time, and may check its result.

    Args:
        search: whether the trace is a candidate of the search, for which nothing is logged or recorded.
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
        """Run a pass and return its result; return ``trace`` itself if an option skips the pass."""
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
        name: the name of the executor.
        run: the passes.
        claims: whether it claims all operators for fusion, so that ``run`` gets them before later executors claim any.
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
