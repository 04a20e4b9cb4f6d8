"""Plan a training step for any cluster: trace the model on the meta device and simulate it, without downloads.

[Note: Planned attention]
On a CPU and on the meta device, Thunder decomposes ``scaled_dot_product_attention`` into matrix multiplications and a
softmax, whose scores need ``heads x length x length`` elements. On a GPU its ``sdpa`` executor runs a fused kernel
instead, which saves one number for each row of the scores. So a plan for a cluster of GPUs uses that executor's symbols:
flash attention for 16-bit dtypes without a mask, memory-efficient attention for float32 and for masks of four
dimensions. Thunder asks the GPU which kernels it has; this executor assumes both.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import thunder
import thunder.torch as ltorch
import torch.distributed as dist
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import get_grad, put_grad, put_grads
from thunder.executors import sdpaex
from thunder.extend import Executor, OperatorExecutor
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
from .clusters import ClusterSpec, cluster
from .cost import AnalyticCost
from .models import Made, module_and_inputs
from .simulate import simulate_rows
from .timeline import Timeline

_MAX_HEAD_SIZE = 256
"""The largest size of a head (elements) that flash attention supports."""

gpu_attention = OperatorExecutor("fsdp_sched_gpu_attention", version="0.1")
"""The executor that claims ``scaled_dot_product_attention``; see [Note: Planned attention]."""


class _Attention(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``."""

    query: TensorProxy
    key: TensorProxy
    value: TensorProxy
    attn_mask: TensorProxy | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None

    @property
    def is_flash(self) -> bool:
        """Whether flash attention supports it."""
        is_short = self.query.dtype in (dtypes.bfloat16, dtypes.float16)
        return is_short and self.attn_mask is None and self.query.shape[-1] <= _MAX_HEAD_SIZE

    def run(self) -> Any:
        """Call the kernel, and return its outputs: the result, and what its backward needs."""
        options = self.dropout_p, self.is_causal
        if self.is_flash:
            return sdpaex.sdpfa_gradfwd(*self[:3], *options, scale=self.scale)
        return sdpaex.sdpea_gradfwd(*self[:3], self.attn_mask, *options, scale=self.scale)


def _check(*args: Any, **kwargs: Any) -> bool:
    call = _Attention(*args, **kwargs)
    query, mask = call.query, call.attn_mask
    if any(t.ndim != 4 or t.dtype is not query.dtype or t.shape[:2] != query.shape[:2] for t in call[:3]):
        return False
    batch, heads = query.shape[:2]
    if mask is not None and (mask.ndim != 4 or mask.shape[:2] not in ((batch, 1), (batch, heads))):
        return False
    return call.is_flash or query.dtype in (dtypes.bfloat16, dtypes.float16, dtypes.float32)


def _forward(*args: Any, **kwargs: Any) -> TensorProxy:
    return _Attention(*args, **kwargs).run()[0]


def _grad(*args: Any, **kwargs: Any) -> TensorProxy:
    call = _Attention(*args, **kwargs)
    inputs, mask, options = call[:3], call.attn_mask, (call.dropout_p, call.is_causal)
    out, *saved = call.run()
    grad = get_grad(out)
    if call.is_flash:
        *lengths, seed, offset, _ = saved[1:]  # after the sums of rows
        grads = sdpaex.sdpfa_bwd(grad, *inputs, out, saved[0], *lengths, *options, seed, offset, scale=call.scale)
    else:
        *grads, of_mask = sdpaex.sdpea_bwd(grad, *inputs, mask, out, *saved, *options, scale=call.scale)
        if mask is not None and of_mask is not None:
            put_grad(mask, of_mask)
    put_grads(inputs, grads)
    return out


gpu_attention.register_implementation(
    ltorch.scaled_dot_product_attention, checker=_check, execution_transform=_forward, grad_transform=_grad
)


_ranks = is_a(int, "an int", at_least(1, "ranks"))


class MicroBatches(NamedTuple):
    """Equal micro-batches of a step.

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
        """The micro-batches in order: the first gathers all buckets, the others reuse those that the window keeps."""
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

    On a cluster of GPUs attention is that of their fused kernels: see [Note: Planned attention].

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
        executors=() if spec.synchronous else (gpu_attention,),
        window=micro_batches > 1,
    )
    return DryRun(spec, world_size, micro_batches, compiled)


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int, *, on: ClusterSpec | None = None) -> Iterator[None]:
    """Act as ``rank`` of ``world_size`` ranks of a default process group that sends nothing.

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
    hook = sys.excepthook  # torch replaces it with one that prints "[rank0]: " before each line, for good
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
        window: whether to compile a micro-batch under ``no_sync`` first, so that this step ends a window.

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
