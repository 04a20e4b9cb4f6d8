"""Changes that let a planned step fit into the memory of a device, ranked by simulated time.

[Note: The search for suggestions]
Each change is tried alone. If none fits, the one that needs least memory is kept, and the others are tried on top of it,
up to ``_ROUNDS`` changes together. Nothing is scaled or estimated: each suggestion has traces of its own, so its peak and
its time are those of a compiled step. All but two kinds of changes are planned again from the trace of the plan itself
(see [Note: Planning again] in ``replanning``). Other inputs and dtypes need a dry run of their own; how many of these are
made is limited, because tracing takes most of the time.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from thunder.core.pytree import tree_flatten, tree_map
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from ...option_groups import Sharding
from ...plan.specs import ShardingStrategy
from ...sizes import human_bytes
from ..low_precision.policy import CommPolicy
from .dry_run import DryRun, dry_run_step, module_and_inputs, replan
from .fake_ranks import Made
from .fit import describe_origins, optimizer_state_bytes, origins_of
from .search import MemoryLimitError

HEADROOM = 0.05
"""The share of a device's memory to leave free for what no trace shows: workspaces of kernels, the allocator."""

_ROUNDS = 3
"""How many changes are tried together."""

_WIDTH = 80
"""Columns of the printed suggestions."""

_DOUBLINGS = 3
"""How often the number of ranks is doubled at most."""


@dataclass(frozen=True)
class Suggestion:
    """A change of a planned step, or several together, with the resulting memory and simulated time.

    Attributes:
        changes: the changes as a user writes them, such as ``'prefetch=0'``; empty for the plan itself.
        peak_bytes: peak memory on this rank with optimizer state.
        fits: whether that leaves the headroom free.
        extra_seconds: the difference from the plan in the simulated time of a step.
        step: the planned step with these changes.
    """

    changes: tuple[str, ...]
    peak_bytes: int
    fits: bool
    extra_seconds: float
    step: DryRun = field(repr=False, compare=False)

    @property
    def step_seconds(self) -> float:
        """Simulated time of a step, of all its micro-batches."""
        return self.step.seconds

    @cached_property
    def samples(self) -> int:
        """Samples of a step on one rank; where unknown, a micro-batch counts as one."""
        return (samples_of(self.step.make) or 1) * self.step.micro_batches

    @property
    def seconds_per_sample(self) -> float:
        """Simulated time of a step divided by the samples of one rank."""
        return self.step_seconds / self.samples

    @property
    def world_size(self) -> int:
        """Number of ranks, each on a device of its own."""
        return self.step.world_size

    @property
    def traced(self) -> bool:
        """Whether the model was traced for it; otherwise it is planned again from the trace of the plan."""
        return self.step.traced

    @property
    def detail(self) -> str:
        """The effect of the changes; may be empty."""
        return _detail(self.step) if self.changes else ""

    def __str__(self) -> str:
        figures = (
            f"{'fits' if self.fits else 'does not fit'}, {human_bytes(self.peak_bytes, 4)}; "
            f"{1e3 * self.extra_seconds:+,.2f} ms a step, {1e3 * self.seconds_per_sample:,.2f} ms a sample, "
            f"{self.world_size} ranks"
        )
        return "\n".join([" and ".join(self.changes), figures, *([self.detail] if self.detail else [])])


class Suggestions:
    """Changes of a planned step, those first that fit, by their simulated time for a sample.

    Attributes:
        plan: the plan without a change.
        ranked: the suggestions. Those that do not fit come last, by their memory.
        headroom: bytes of the device's memory to leave free.
        dry_runs: how many dry runs were made.
        untried: changes that were not tried or are impossible, each with the reason.
        least: the least bytes that a step needs with any of the changes, and these changes.
    """

    def __init__(
        self,
        step: DryRun,
        headroom: int,
        optimizer_bytes: float | None,
        allowed_dry_runs: int,
        progress: Callable[[str], None],
    ) -> None:
        self.headroom = headroom
        self.dry_runs = 0
        self.untried: list[str] = []
        self._optimizer_bytes = optimizer_bytes
        self._allowed_dry_runs = allowed_dry_runs
        self._progress = progress
        self._limit = step.cluster.memory - headroom  # bytes that a step may need
        peak = step.memory.with_optimizer_state(self._optimizer_state(step)).peak.nbytes
        self.plan = Suggestion((), peak, peak <= self._limit, 0.0, step)
        self.least = peak, ""
        self.ranked = sorted(self._find(), key=lambda s: (not s.fits, s.seconds_per_sample if s.fits else s.peak_bytes))

    def __str__(self) -> str:
        cluster = self.plan.step.cluster
        lines = [
            f"what to change, fastest first; {human_bytes(self.headroom, 4)} are left free, the plan takes "
            f"{1e3 * self.plan.step_seconds:,.2f} ms:"
        ]
        for number, suggestion in enumerate(self.ranked, start=1):
            first, *others = str(suggestion).split("\n")
            lines += [f"{number}. {first}", *(f"   {line}" for line in others)]
        if not any(suggestion.fits for suggestion in (self.plan, *self.ranked)):
            nbytes, changes = self.least
            lines.append(
                f"nothing fits: the least is {human_bytes(nbytes, 4)}{f', with {changes}' if changes else ''}, so "
                f"{cluster.name} lacks {human_bytes(nbytes - self._limit, 4)}"
            )
        traced = [" and ".join(s.changes) for s in self.ranked if s.traced]
        lines.append(
            f"traced: the plan{''.join(f', {text}' for text in traced)}; the others are planned again from its trace"
        )
        lines += [f"not tried: {reason}" for reason in self.untried]
        wrapped = (textwrap.wrap(line, _WIDTH, subsequent_indent="   ", break_long_words=False) for line in lines)
        return "\n".join(line for part in wrapped for line in part)

    def _find(self) -> list[Suggestion]:
        """Try each change alone, then several together while nothing fits."""
        if self.plan.fits:
            return self._try(faster_changes(self.plan.step), self.plan)
        base, used, found = self.plan, set[str](), list[Suggestion]()
        for _ in range(_ROUNDS):
            possible = smaller_changes(base.step, self._max_memory(base.step))
            changes = [change for change in possible if change.kind not in used]
            tried = self._try(changes, base)
            found += tried
            best = min(tried, key=lambda suggestion: suggestion.peak_bytes, default=base)
            if best.peak_bytes >= base.peak_bytes or any(suggestion.fits for suggestion in tried):
                break
            used.add(next(change.kind for change in changes if change.text == best.changes[-1]))
            base = best
        return found

    def _try(self, changes: Iterable[Change], base: Suggestion) -> list[Suggestion]:
        """Return the possible changes on top of ``base``; of several that differ in degree, up to the first that fits."""
        tried: list[Suggestion] = []
        for _, degrees in itertools.groupby(changes, key=lambda change: change.kind):
            for change in degrees:
                tried += (suggestions := self._on(base, change))
                if any(suggestion.fits for suggestion in suggestions):
                    break
        return tried

    def _on(self, base: Suggestion, change: Change) -> list[Suggestion]:
        """Return ``base`` with a further change; nothing, with a reason in ``untried``, if that is impossible."""
        changes = (*base.changes, change.text)
        text = " and ".join(changes)
        if change.make is not None and self.dry_runs == self._allowed_dry_runs:
            self.untried.append(f"{text} needs a dry run, and {self.dry_runs} were allowed")
            return []
        self.dry_runs += change.make is not None
        how = "planning again" if change.make is None else f"dry run {self.dry_runs} of {self._allowed_dry_runs}"
        self._progress(f"{how}: {text}")
        try:
            step = change.apply(base.step)
        except MemoryLimitError as error:
            least = error.least_bytes + self._optimizer_state(base.step)
            self.least = min(self.least, (least, text))
            self.untried.append(f"{text}: with as much recomputed as helps, a step needs {human_bytes(least, 4)}")
            return []
        except ValueError as error:
            self.untried.append(f"{text}: {error}")
            return []
        peak = step.memory.with_optimizer_state(self._optimizer_state(step)).peak.nbytes
        self.least = min(self.least, (peak, text))
        return [Suggestion(changes, peak, peak <= self._limit, step.seconds - self.plan.step_seconds, step)]

    def _max_memory(self, step: DryRun) -> int:
        """Return the bytes that a step may need: what optimizer state and the rounding of the device's allocator leave."""
        unrounded = max(memory.peak.nbytes for memory in step.predict_memories())
        rounding = max(step.memory.peak.nbytes - unrounded, 0)
        return self._limit - self._optimizer_state(step) - rounding

    def _optimizer_state(self, step: DryRun) -> int:
        return optimizer_state_bytes(step.compiled.buckets, self._optimizer_bytes)


def suggest(
    step: DryRun,
    *,
    optimizer_bytes: float | None = None,
    headroom: int | None = None,
    dry_runs: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> Suggestions:
    """Return what to change in a planned step so that it fits its cluster's devices; if it fits, what makes it faster.

    See [Note: The search for suggestions].

    Args:
        step: a dry run, or a step that was planned again.
        optimizer_bytes: bytes of optimizer state for each element that trains; by default those of AdamW.
        headroom: bytes of the device's memory to leave free; by default :data:`HEADROOM` of them.
        dry_runs: how many further dry runs may be made, for changes that need a trace of their own.
        progress: called with a line of text before each plan.

    Raises:
        RuntimeError: this process has a default process group.
        ValueError: ``headroom`` or ``dry_runs`` is negative.
    """
    if dry_runs < 0 or (headroom is not None and headroom < 0):
        raise ValueError(f"dry_runs and headroom must not be negative, got {dry_runs} and {headroom}")
    headroom = int(HEADROOM * step.cluster.memory) if headroom is None else headroom
    return Suggestions(step, headroom, optimizer_bytes, dry_runs, progress)


class Change(NamedTuple):
    """A change of a planned step.

    Attributes:
        text: the change as a user writes it: ``'prefetch=0'``.
        kind: its kind; several changes of one kind exclude each other.
        options: the arguments of :func:`~.dry_run.replan` that change.
        make: returns the module and its inputs, if the model must be traced again.
    """

    text: str
    kind: str
    options: Mapping[str, Any]
    make: Callable[[], Made] | None = None

    def apply(self, step: DryRun) -> DryRun:
        """Return the step planned with this change."""
        if self.make is None:
            return replan(step, **self.options)
        numbers = {name: getattr(step, name) for name in ("world_size", "replicas", "micro_batches")}
        return dry_run_step(self.make, on=step.cluster, **numbers, **{**step.options, **self.options})


def smaller_changes(step: DryRun, max_memory: int) -> Iterator[Change]:
    """Yield changes that may lower the memory of a step.

    Args:
        step: a planned step.
        max_memory: bytes that the step may need, without optimizer state.
    """
    options = step.options
    sharding = step.transform.options.sharding_strategy
    if sharding.strategy == "zero2":
        yield _strategy(sharding, "zero3")
    if step.replicas > 1:
        yield _option("replicas", 1)
    if step.micro_batches > 1 and (options.get("accumulate"), options.get("max_memory")) == (None, None):
        yield _option("accumulate", "sharded")
    if options.get("schedule") is None:
        yield from (_option("prefetch", distance) for distance in (1, 0) if distance < step.compiled.settings.prefetch)
        if step.compiled.backward is not None and max_memory > 0 and options.get("max_memory") is None:
            yield _option("max_memory", max_memory, f"{max_memory:_}")
    if not isinstance(options.get("offload_policy"), CPUOffloadPolicy) and not step.cluster.synchronous:
        yield _option("offload_policy", CPUOffloadPolicy(), "CPUOffloadPolicy()")
    for doubling in range(1, _DOUBLINGS + 1):
        yield _option("world_size", step.world_size * 2**doubling)
    policy = options.get("mp_policy") or MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy) and policy.param_dtype is None and _has_long_dtypes(step):
        text = "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        lower = replace(policy, param_dtype=torch.bfloat16)
        yield Change(text, "mp_policy", {"mp_policy": lower}, step.make)
    samples = samples_of(step.make)
    if samples is not None and samples > 1:
        half = samples // 2
        text = f"half the batch ({half} of {samples} samples a rank)"

        def make() -> Any:
            module, *inputs = module_and_inputs(step.make)
            return module, *tree_map(lambda x: x[:half] if isinstance(x, torch.Tensor) else x, inputs)

        yield Change(text, "batch", {}, make)


def faster_changes(step: DryRun) -> Iterator[Change]:
    """Yield changes that may lower the time of a step, at the cost of memory or of precision."""
    if step.options.get("schedule") is not None:
        return
    sharding = step.transform.options.sharding_strategy
    if (sharding.strategy, sharding.max_unsharded_bytes) == ("zero3", None):
        yield _strategy(replace(sharding, secondary_ranks=None), "zero2")
    if step.transform.options.prefetch != "auto":
        yield _option("prefetch", "auto")
    if step.options.get("comm_policy") is None and step.options.get("transport") != "all_reduce":
        yield _option("comm_policy", policy := CommPolicy(gather="int8", reduce="bfloat16"), str(policy))


def samples_of(make: Callable[[], Made]) -> int | None:
    """Return the number of samples of the inputs: the first dimension, if all tensors share it; otherwise ``None``."""
    _, args, kwargs = module_and_inputs(make)
    sizes = {t.shape[0] if t.ndim else None for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
    return sizes.pop() if len(sizes) == 1 else None


def _has_long_dtypes(step: DryRun) -> bool:
    long = (torch.float32, torch.float64)
    return torch.bfloat16 in step.cluster.flops and any(b.spec.param_dtype in long for b in step.compiled.buckets)


def _option(name: str, value: Any, text: str | None = None) -> Change:
    text = text or (f'"{value}"' if isinstance(value, str) else str(value))
    return Change(f"{name}={text}", name, {name: value})


def _strategy(sharding: Sharding, strategy: ShardingStrategy) -> Change:
    changed = replace(sharding, strategy=strategy)
    is_plain = changed == Sharding(strategy)
    return _option("sharding_strategy", strategy if is_plain else changed)


def _detail(step: DryRun) -> str:
    """Return what the changes mean: where memory goes, and what ``max_memory`` and ``prefetch="auto"`` have chosen."""
    compiled, parts = step.compiled, []
    assert compiled.forward is not None
    if isinstance(step.options.get("offload_policy"), CPUOffloadPolicy):
        parts.append(
            "shards, their gradients and optimizer state are in host memory; the optimizer there is not simulated"
        )
    if step.transform.options.prefetch == "auto":
        parts.append(f"chooses prefetch={compiled.settings.prefetch}")
    if compiled.settings.recomputed:
        parts.append(f"recompute {describe_origins(compiled.settings.recomputed, compiled.forward)}")
    if compiled.settings.offloaded:
        origins = origins_of(compiled.forward)
        moved = sum(origins[name].nbytes for name in compiled.settings.offloaded if name in origins)
        named = describe_origins(compiled.settings.offloaded, compiled.forward)
        parts.append(f"move {human_bytes(moved, 4)} to host memory and back: {named}")
    if compiled.choice is not None and compiled.choice.chosen.kept_buckets:
        parts.append(f"keep {len(compiled.choice.chosen.kept_buckets)} buckets unsharded until backward")
    return "; ".join(parts)
