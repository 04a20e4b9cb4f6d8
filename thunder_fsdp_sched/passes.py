"""The context that passes read, the rows of the table of passes, and the executors that run them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from thunder.core.trace import TraceCtx
from thunder.extend import Executor, FusionExecutor

from .compiled_traces import CompiledTraces, StepSettings
from .extensions import load
from .logs import Artifacts, log_pass
from .options import Options
from .runtime.bucket import Bucket
from .runtime.memory import Arena
from .runtime.module_hooks import TracedHooks
from .runtime.traced_inputs import MemoryOfInputs, TracedInputs

if TYPE_CHECKING:
    from .runtime.trace_start import TraceStart

PhaseName = Literal[
    "epilogue", "prologue", "computation", "autograd", "joint", "bucketed", "fused", "split", "scheduled", "finished"
]
"""When a pass runs: on the epilogue, the prologue and the computation that Thunder has traced; to differentiate it; on the
joint trace of forward and backward until its settings are chosen, then until operators are fused, and after that; on the
forward or backward trace when Thunder has split them; until its schedule is read, and after the ranks have compared it."""


@dataclass
class Context:
    """The input of the passes of one compilation, besides traces. A candidate of the search has a copy with other settings.

    Attributes:
        buckets: those of the module.
        locations: the bucket of each parameter and its index there, keyed by each of its names.
        shards: this rank's shard of each parameter, keyed by each of its names.
        options: those that the passes go by.
        traces: the results so far.
        settings: the chosen ones.
        no_sync: whether the trace is compiled for ``no_sync``.
        hooks: those of the module, as it was traced.
        inputs: what the program has read from its inputs.
        memory_of_inputs: what the traces expect of the memory of arguments.
        executors: those that claim operators, in order of priority.
        computation: as Thunder traced it; ``None`` for a step that is planned again.
        has_gradients: whether ``differentiate`` finds some; ``None`` if Thunder differentiates.
        trains: whether the step has a backward.
        split: the latest trace as Thunder has split it.
        forward: the forward trace, once it is scheduled.
        start: of a trace on the control channel, if the ranks agree before each run.
        artifacts: where traces are dumped.
        arena_of: returns the arena of a bucket; another one for candidates of the search.
    """

    buckets: Sequence[Bucket]
    locations: Mapping[str, tuple[Bucket, int]]
    shards: Mapping[str, torch.nn.Parameter]
    options: Options
    traces: CompiledTraces
    settings: StepSettings
    no_sync: bool
    hooks: TracedHooks
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
    artifacts: Artifacts = field(default_factory=Artifacts)
    arena_of: Callable[[Bucket], Arena] = lambda bucket: bucket.arena

    @property
    def agrees_before_issue(self) -> bool:
        """Whether the round of agreement ends before the first collective: on another backend than NCCL, which runs both."""
        return any(b.ranks.group.backend_for(b.spec.device) != "nccl" for b in self.buckets)


Condition = tuple[str, Callable[[TraceCtx, Context], bool]]
"""When a pass runs: in words, for the docs, and whether it does on a trace in a context."""

_Value = TypeVar("_Value")


def given(value: _Value | None) -> _Value:
    """Return an argument that is there whenever the pass runs."""
    assert value is not None
    return value


class Later:
    """A pass that is loaded when it first runs: one that an option asks for, or that few programs need.

    Args:
        path: its module and name, for :func:`~.extensions.load`; without a name, that of its module.
    """

    def __init__(self, path: str) -> None:
        module, _, name = path.partition(":")
        self.__name__ = name or module.rpartition(".")[2]
        self.path = f"{module}:{self.__name__}"

    def __call__(self, trace: TraceCtx, **arguments: Any) -> TraceCtx:
        changed: TraceCtx = load(self.path)(trace, **arguments)
        return changed


@dataclass(frozen=True)
class Step:
    """A row of the table.

    Attributes:
        pass_: the pass.
        bind: runs the pass on a trace, with its arguments from a context; ``None`` if it has none.
        when: whether it runs.
        searched: whether candidates of the search run it, too.
        required: whether numbers, or errors in place of wrong ones, depend on it; see ``Debug(skip_passes=...)``.
    """

    pass_: Callable[..., TraceCtx]
    bind: Callable[[TraceCtx, Context], TraceCtx] | None = None
    when: Condition = ("", lambda trace, c: True)
    searched: bool = False
    required: bool = True

    @property
    def name(self) -> str:
        return self.pass_.__name__

    def run(self, trace: TraceCtx, context: Context) -> TraceCtx:
        return self.pass_(trace) if self.bind is None else self.bind(trace, context)


class Phase:
    """Passes that run one after the other.

    Attributes:
        name: see :data:`PhaseName`.
        before: what happens in Thunder, or in ``transform.Compilation``, since the previous phase.
        steps: its rows.
    """

    def __init__(self, name: PhaseName, before: str, *steps: Step) -> None:
        self.name, self.before, self.steps = name, before, steps

    def run(self, trace: TraceCtx, context: Context, *, search: bool = False) -> TraceCtx:
        """Run the passes; log what each has changed, record its processor time, and check its result if an option says so.

        Args:
            search: whether this is a candidate of the search, of which nothing is recorded.
        """
        for step in self.steps:
            if (search and not step.searched) or step.name in context.options.debug.skip_passes:
                continue
            if not step.when[1](trace, context):
                continue
            started, before = time.process_time(), trace
            trace = step.run(before, context)
            if search:
                continue
            seconds = time.process_time() - started
            context.traces.pass_seconds[step.name] += seconds
            log_pass(step.name, seconds, before, trace)
            context.artifacts.log_pass(step.name, "forward" if context.forward is None else "backward", trace)
            if context.options.debug.check_passes:
                load("proof.well_formed:check_well_formed")(trace, step.name)
        return trace


Order = tuple[Callable[..., TraceCtx], Callable[..., TraceCtx], str]
"""A pass that stands before another one, and because of what."""


def check_order(phases: Sequence[Phase], order: Sequence[Order]) -> None:
    """Raise an error if a pass stands only after one that it must precede."""
    passes = [step.pass_ for phase in phases for step in phase.steps]
    for first, then, why in order:
        if passes.index(first) > len(passes) - 1 - passes[::-1].index(then):
            raise ValueError(f"passes: {first.__name__} must stand before {then.__name__}, because {why}")


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
