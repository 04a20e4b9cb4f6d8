"""Plan a training step for any cluster: trace the model on the meta device and simulate it, without downloads."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import thunder
import torch.distributed as dist
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
from ..step_memory.rows import StepRows
from ..step_memory.step_memory import StepMemory
from . import gpu_attention
from .clusters import ClusterSpec, cluster
from .cost import AnalyticCost
from .models import Made, module_and_inputs
from .simulate import simulate_rows
from .timeline import Timeline

_ranks = is_a(int, "an int", at_least(1, "ranks"))


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
            memory = last.predict_memory(device=device)
            return (MicroBatches(1, self._simulate(memory.step), memory),)
        earlier = self.transform.compiled[-2]
        memory = earlier.predict_memory(device=device, accumulated=True, others=[last])
        of_last = last.predict_memory(device=device, accumulated=[earlier], others=[earlier])
        between = MicroBatches(self.micro_batches - 2, self._simulate(memory.step, in_window=True), memory)
        return (
            MicroBatches(1, self._simulate(memory.step), memory),
            *[between] * (between.number > 0),
            MicroBatches(1, self._simulate(of_last.step, in_window=True), of_last),
        )

    @cached_property
    def before(self) -> Timeline:
        """The step without the sorting pass, with communication where Thunder puts it.

        In an accumulation window, its last micro-batch, as :attr:`after` is.
        """
        traces = self.compiled.forward_before, self.compiled.backward_before
        return self._simulate(StepRows(*(trace for trace in traces if trace is not None)))

    @property
    def after(self) -> Timeline:
        """The step as scheduled."""
        return self.rows[-1].timeline

    def _simulate(self, step: StepRows, *, in_window: bool = False) -> Timeline:
        return simulate_rows(step, AnalyticCost(self.cluster), in_window=in_window)

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
