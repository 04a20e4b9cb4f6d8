"""Plan a training step for any cluster: trace the model on the meta device and simulate it, without downloads."""

from __future__ import annotations

import contextlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import thunder
import torch
import torch.distributed as dist
from thunder.core.trace import TraceCtx
from thunder.extend import Executor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from ...api import fsdp
from ...compiled_traces import CompiledTraces
from ...errors import coded_error
from ...option_checks import at_least, is_a
from ...option_groups import Ranks
from ...ranks.process_groups import PlannedRanks, plan_for
from ...transform import FSDPTransform
from ..step_memory.step_memory import StepMemory
from . import gpu_attention
from .clusters import ClusterSpec, cluster
from .cost import AnalyticCost
from .simulate import simulate
from .timeline import Timeline

_ranks = is_a(int, "an int", at_least(1, "ranks"))

Made = tuple[torch.nn.Module, tuple[Any, ...]]
"""A module and the positional arguments of a call."""


class MicroBatches(NamedTuple):
    """Micro-batches of a step that are alike.

    Attributes:
        number: how many there are.
        timeline: the simulated time of one.
        memory: its memory on rank 0, without optimizer state, as the allocator of the cluster's devices rounds it.
    """

    number: int
    timeline: Timeline
    memory: StepMemory


@dataclass(frozen=True)
class DryRun:
    """A planned step.

    Attributes:
        cluster: the machine.
        world_size: number of ranks.
        micro_batches: number of micro-batches between two optimizer steps.
        transform: the transform with the plan, the traces and the schedules.
    """

    cluster: ClusterSpec
    world_size: int
    micro_batches: int
    transform: FSDPTransform

    @property
    def compiled(self) -> CompiledTraces:
        """The traces of the step; in an accumulation window, of its last micro-batch."""
        return self.transform.compiled[-1]

    @cached_property
    def rows(self) -> tuple[MicroBatches, ...]:
        """The micro-batches in order: the first gathers all buckets, the others find those that the window keeps."""
        last, device = self.compiled, self.cluster.device_type
        if self.micro_batches == 1:
            return (MicroBatches(1, self._simulate(last.traces), last.predict_memory(device=device)),)
        earlier = self.transform.compiled[-2]
        memory = earlier.predict_memory(device=device, accumulated=True, others=[last])
        of_last = last.predict_memory(device=device, accumulated=[earlier], others=[earlier])
        between = MicroBatches(self.micro_batches - 2, self._simulate(earlier.traces, in_window=True), memory)
        return (
            MicroBatches(1, self._simulate(earlier.traces), memory),
            *[between] * (between.number > 0),
            MicroBatches(1, self._simulate(last.traces, in_window=True), of_last),
        )

    @cached_property
    def before(self) -> Timeline:
        """The step without the sorting pass, with communication where Thunder puts it.

        In an accumulation window, its last micro-batch, as :attr:`after` is.
        """
        traces = self.compiled.forward_before, self.compiled.backward_before
        return self._simulate([trace for trace in traces if trace is not None])

    @property
    def after(self) -> Timeline:
        """The step as scheduled."""
        return self.rows[-1].timeline

    def _simulate(self, traces: Sequence[TraceCtx], *, in_window: bool = False) -> Timeline:
        return simulate(traces, None, AnalyticCost(self.cluster), in_window=in_window)

    @property
    def seconds(self) -> float:
        """Simulated time between two optimizer steps: of all micro-batches."""
        return sum(row.number * row.timeline.step_seconds for row in self.rows)

    @property
    def memory(self) -> StepMemory:
        """The memory of the step; in an accumulation window, of the micro-batch that needs most."""
        return max((row.memory for row in self.rows), key=lambda memory: memory.peak.nbytes)


def dry_run_step(
    make: Callable[[], Made],
    *,
    world_size: int,
    on: ClusterSpec | str,
    replicas: int = 1,
    micro_batches: int = 1,
    **options: Any,
) -> DryRun:
    """Trace and schedule a model as rank 0 of ``world_size`` ranks, in this process, and simulate its step.

    On a cluster of GPUs attention is that of their fused kernels: see [Note: Planned attention] in ``gpu_attention``.

    Args:
        make: returns the module and its inputs, on the meta device.
        world_size: number of ranks.
        replicas: number of copies of the shards; ``world_size / replicas`` consecutive ranks share one (hybrid
            sharding).
        on: the cluster, or the name of a preset.
        micro_batches: how many times forward and backward run between two optimizer steps, all but the last under
            ``no_sync``.
        **options: options of :func:`thunder_fsdp_sched.fsdp`.

    Raises:
        RuntimeError: this process already has a default process group.
        TypeError, ValueError: the cluster is unknown, options or numbers are invalid, or ``make`` returns something else.
    """
    spec = cluster(on)
    if isinstance(options.get("offload_policy"), CPUOffloadPolicy):
        _ = spec.host_bytes_per_second  # raises ValueError if it is not known
    _ranks("world_size", world_size)
    is_a(int, "an int", at_least(1, "micro-batches"))("micro_batches", micro_batches)
    is_a(int, "an int", at_least(1, "copies"))("replicas", replicas)
    if world_size % replicas:
        raise coded_error(ValueError, "plan.replicas-do-not-divide-ranks", world_size=world_size, replicas=replicas)

    def transform() -> FSDPTransform:  # over the process group of the ranks
        more: dict[str, Any] = {}
        if replicas > 1:
            shape = replicas, world_size // replicas
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            more["ranks"] = replace(Ranks.of("ranks", options.get("ranks")), mesh=mesh)
        return fsdp(cluster=spec, **{**options, **more})

    compiled = compile_as_rank(
        partial(module_and_inputs, make),
        transform,
        rank=0,
        world_size=world_size,
        on=spec,
        executors=() if spec.synchronous else (gpu_attention.executor,),
        window=micro_batches > 1,
    )
    return DryRun(spec, world_size, micro_batches, compiled)


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int, *, on: ClusterSpec | None = None) -> Iterator[None]:
    """Be ``rank`` of ``world_size`` ranks of a default process group that sends nothing.

    Args:
        on: the cluster of the ranks, whose backend and devices they use. By default gloo for parameters on the CPU, and
            NCCL for those on GPUs and on the meta device.

    Raises:
        RuntimeError: this process already has a default process group.
        TypeError, ValueError: there is no such rank.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    is_a(int, "an int", at_least(0, ""))("rank", rank)
    if rank >= _ranks("world_size", world_size):
        raise coded_error(ValueError, "plan.rank-beyond-world-size", rank=rank, world_size=world_size)
    if dist.is_initialized():
        raise coded_error(RuntimeError, "plan.process-group-already-initialized")
    hook = sys.excepthook  # torch replaces it with one that prints "[rank0]: " in front of each line, and leaves it
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        if on is not None:
            plan_for(PlannedRanks(on.backend, on.device_type))
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def compile_as_rank(
    make: Callable[[], tuple[Any, ...]],
    transform: FSDPTransform | Callable[[], FSDPTransform],
    *,
    rank: int,
    world_size: int,
    on: ClusterSpec | None = None,
    executors: Sequence[Executor] = (),
    window: bool = False,
) -> FSDPTransform:
    """Compile a module's forward and backward as ``rank`` of ``world_size`` would, over a fake process group.

    Args:
        make: returns the module, its positional arguments, and optionally its keyword arguments. Tensors may be on the
            meta device.
        transform: the result of :func:`thunder_fsdp_sched.fsdp`, which has the traces afterwards. Or a function that
            returns it, called after the process group is created, as meshes and further groups require.
        on: the cluster of the ranks, as for :func:`fake_rank`; by default that of the transform, if it is given.
        executors: executors of Thunder that come before its default ones.
        window: whether to compile a micro-batch under ``no_sync`` first, with which this step ends a window.

    Raises:
        RuntimeError: this process already has a default process group.
    """
    if isinstance(transform, FSDPTransform):
        on = on or transform.options.cluster
    with fake_rank(rank, world_size, on=on):
        if not isinstance(transform, FSDPTransform):
            transform = transform()
        module, args, *kwargs = make()
        before = {"executors": (*executors, *thunder.get_default_executors())} if executors else {}
        jitted = thunder.jit(module, transforms=[transform], **before)
        args, named = transform.cast_inputs(args, kwargs[0] if kwargs else {})
        if window:
            with jitted.no_sync():
                transform.sharded.compile(jitted, args, named)
        transform.sharded.compile(jitted, args, named)
    return transform


def module_and_inputs(make: Callable[[], Made]) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the module, its positional and its keyword arguments.

    Raises:
        ValueError: ``make`` returns something else.
    """
    made: Any = make()
    parts: tuple[Any, ...] = made if isinstance(made, tuple) else ()
    module, args, kwargs = (*parts, {})[:3] if len(parts) in (2, 3) else (None, (), {})
    if not isinstance(module, torch.nn.Module) or not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        factory = getattr(make, "__name__", "make")
        got = f"({', '.join(type(part).__name__ for part in parts)})" if parts else f"a {type(made).__name__}"
        raise coded_error(ValueError, "plan.factory-returns-wrong-values", factory=factory, got=got)
    return module, tuple(args), kwargs


def find_model(name: str, *, batch: int, length: int, dtype: torch.dtype) -> Callable[[], Made]:
    """Return a factory by name: ``module:factory``, a LitGPT configuration, or a Hugging Face model type.

    Weights are random and on the meta device; nothing is downloaded. A factory takes no arguments and returns
    ``(module, inputs)`` itself; the others are language models on ``batch`` sequences of ``length`` tokens.

    Raises:
        ValueError: there is no such name. The message lists the attempts and the extra that would be needed.
    """
    if ":" in name:
        return _imported(name)
    tried = []
    for find in (_litgpt, _hugging_face):
        try:
            build = find(name, length, dtype)
        except (ImportError, ValueError, KeyError) as error:
            tried.append(f"{find.__name__.strip('_')}: {error}")
            if isinstance(error, ImportError):
                tried[-1] += f" (pip install {error.name})"
            continue

        def make() -> Made:
            with torch.device("meta"):
                tokens = torch.zeros((batch, length), dtype=torch.int64)
                return _Loss(build()), (tokens, tokens.clone())  # noqa: B023  # the first model that is found

        return make
    raise coded_error(ValueError, "plan.unknown-model", name=name, tried="; ".join(tried))


def _imported(name: str) -> Callable[[], Made]:
    try:
        make = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise coded_error(ValueError, "plan.model-not-importable", name=name, error=error) from error
    if not callable(make):
        raise coded_error(ValueError, "plan.model-name-not-callable", name=name, type=type(make).__name__)
    return make


def _litgpt(name: str, length: int, dtype: torch.dtype) -> Callable[[], torch.nn.Module]:
    from litgpt import GPT, Config

    config = Config.from_name(name, block_size=length)
    return lambda: GPT(config).to(dtype)


def _hugging_face(name: str, length: int, dtype: torch.dtype) -> Callable[[], torch.nn.Module]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, use_cache=False)
    return lambda: AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


class _Loss(torch.nn.Module):
    """A language model with its loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        out = self.model(tokens)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
