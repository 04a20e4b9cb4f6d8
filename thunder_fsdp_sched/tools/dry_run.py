"""Plan a training step for any cluster: trace the model on the meta device and simulate it, without downloads."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from thunder.extend import Executor
from torch.distributed.device_mesh import init_device_mesh

from ..api import fsdp
from ..pipeline import CompiledTraces
from ..simulator.clusters import ClusterSpec, cluster
from ..simulator.cost import AnalyticCost
from ..simulator.simulate import Timeline, simulate
from ..trace.step_memory import StepMemory
from ..transform import FSDPTransform
from . import gpu_attention
from .fake_ranks import Made, compile_as_rank, fake_rank, jit
from .replanning import NeedsTrace, plan_again

__all__ = ["DryRun", "check_made", "dry_run_step", "find_model", "replan"]


@dataclass(frozen=True)
class DryRun:
    """A planned step.

    Attributes:
        transform: the transform with the plan, the traces and the schedules.
        before: the step without the sorting pass, with communication where Thunder puts it.
        after: the step as scheduled.
        make: returns the module and its inputs.
        world_size: number of ranks.
        replicas: number of copies of the shards.
        options: options of :func:`thunder_fsdp_sched.fsdp`.
        traced: whether the model was traced for this plan; otherwise the trace is that of another plan of the same step,
            see [Note: Planning again] in ``replanning``.
    """

    transform: FSDPTransform
    cluster: ClusterSpec
    before: Timeline
    after: Timeline
    make: Callable[[], Made]
    world_size: int
    replicas: int
    options: Mapping[str, Any]
    traced: bool = True

    @property
    def compiled(self) -> CompiledTraces:
        """The traces of the step."""
        return self.transform.compiled[-1]

    @cached_property
    def memory(self) -> StepMemory:
        """The memory of the step on rank 0, without optimizer state, as the allocator of the cluster's devices rounds it."""
        return self.compiled.predict_memory(device="cpu" if self.cluster.synchronous else "cuda")


def dry_run_step(
    make: Callable[[], Made], *, world_size: int, on: ClusterSpec | str, replicas: int = 1, **options: Any
) -> DryRun:
    """Trace and schedule a model as rank 0 of ``world_size`` ranks, in this process, and simulate its step.

    On a cluster of GPUs attention is that of their fused kernels: see [Note: Planned attention] in ``gpu_attention``.

    Args:
        make: returns the module and its inputs, on the meta device.
        world_size: number of ranks.
        replicas: number of copies of the shards; ``world_size / replicas`` consecutive ranks share one (hybrid
            sharding).
        on: the cluster, or the name of a preset.
        **options: options of :func:`thunder_fsdp_sched.fsdp`.

    Raises:
        RuntimeError: this process already has a default process group.
        ValueError: the cluster is unknown, options are invalid, or ``make`` returns something else.
    """
    spec = cluster(on)
    transform = compile_as_rank(
        partial(_checked, make),
        _factory(spec, world_size, replicas, options),
        rank=0,
        world_size=world_size,
        executors=_executors(spec),
    )
    return _simulated(transform, spec, make, world_size, replicas, options)


def replan(
    step: DryRun,
    *,
    world_size: int | None = None,
    on: ClusterSpec | str | None = None,
    replicas: int | None = None,
    **options: Any,
) -> DryRun:
    """Plan a step again with other options, without tracing its model again: the result is that of :func:`dry_run_step`.

    It takes about a tenth of the time of a dry run; see [Note: Planning again] in ``replanning``.

    Args:
        step: a dry run, or a step that was planned again.
        world_size: number of ranks, by default that of ``step``.
        replicas: number of replicas, by default that of ``step``.
        on: the cluster, by default that of ``step``.
        **options: options of :func:`thunder_fsdp_sched.fsdp` that change, besides those of ``step``.

    Raises:
        NeedsTrace: these options change what the model computes, such as the dtype of unsharded parameters.
        RuntimeError, ValueError: as for :func:`dry_run_step`.
    """
    spec = cluster(on or step.cluster)
    if spec.synchronous != step.cluster.synchronous:
        raise NeedsTrace(f"on: {spec.name!r} and {step.cluster.name!r} run other kernels, so trace the model again")
    options = {**step.options, **options}
    world_size, replicas = world_size or step.world_size, replicas or step.replicas
    with fake_rank(0, world_size):
        transform = _factory(spec, world_size, replicas, options)()
        module, *_ = _checked(step.make)
        plan_again(step.transform, transform, jit(module, transform, _executors(spec)))
    return _simulated(transform, spec, step.make, world_size, replicas, options, traced=False)


def _factory(
    spec: ClusterSpec, world_size: int, replicas: int, options: Mapping[str, Any]
) -> Callable[[], FSDPTransform]:
    if replicas < 1 or world_size % replicas:
        raise ValueError(f"replicas: {world_size} ranks cannot hold {replicas} copies of equal size")

    def make_transform() -> FSDPTransform:
        mesh: dict[str, Any] = {}
        if replicas > 1:
            shape = (replicas, world_size // replicas)
            mesh["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        return fsdp(cluster=spec, **mesh, **options)

    return make_transform


def _checked(make: Callable[[], Made]) -> tuple[Any, ...]:
    return check_made(make(), getattr(make, "__name__", "make"))


def _executors(spec: ClusterSpec) -> tuple[Executor, ...]:
    return () if spec.synchronous else (gpu_attention.executor,)


def _simulated(
    transform: FSDPTransform,
    spec: ClusterSpec,
    make: Callable[[], Made],
    world_size: int,
    replicas: int,
    options: Mapping[str, Any],
    *,
    traced: bool = True,
) -> DryRun:
    compiled = transform.compiled[-1]
    assert compiled.forward is not None and compiled.forward_before is not None
    cost = AnalyticCost(spec)
    before = simulate(compiled.forward_before, compiled.backward_before, cost)
    after = simulate(compiled.forward, compiled.backward, cost)
    return DryRun(transform, spec, before, after, make, world_size, replicas, options, traced)


def check_made(made: object, factory: str) -> tuple[Any, ...]:
    """Return the result of a factory: a module, its arguments and optionally its keyword arguments.

    Raises:
        ValueError: the factory returned something else.
    """
    parts = made if isinstance(made, tuple) else ()
    module, args, kwargs = (*parts, {})[:3] if len(parts) in (2, 3) else (None, (), {})
    if not isinstance(module, torch.nn.Module) or not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        got = f"({', '.join(type(part).__name__ for part in parts)})" if parts else f"a {type(made).__name__}"
        raise ValueError(f"{factory!r} must return (module, args) or (module, args, kwargs), but returned {got}")
    return module, tuple(args), kwargs


def find_model(name: str, *, batch: int, length: int, dtype: torch.dtype) -> Callable[[], Made]:
    """Return a factory by name: ``module:factory``, a LitGPT configuration, or a Hugging Face model type.

    Weights are random and on the meta device; nothing is downloaded. A factory takes no arguments and returns
    ``(module, inputs)`` itself; the other two are language models on ``batch`` sequences of ``length`` tokens.

    Raises:
        ValueError: there is no such name. The message lists the attempts and the extra that would be needed.
    """
    if ":" in name:
        return _imported(name)
    tried = []
    for find in (_litgpt, _hugging_face):
        try:
            return find(name, batch, length, dtype)
        except (ImportError, ValueError, KeyError) as error:
            tried.append(f"{find.__name__.strip('_')}: {error}")
    raise ValueError(f"model: {name!r} is neither module:factory nor a known configuration; " + "; ".join(tried))


def _imported(name: str) -> Callable[[], Made]:
    module, _, attribute = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model: {name!r} cannot be imported: {error}") from error
    if not callable(make):
        raise ValueError(f"model: {name!r} is of type {type(make).__name__}, not a function that makes a model")
    return make


def _litgpt(name: str, batch: int, length: int, dtype: torch.dtype) -> Callable[[], Made]:
    from litgpt import GPT, Config

    config = Config.from_name(name, block_size=length)

    def make() -> Made:
        with torch.device("meta"):
            model = GPT(config).to(dtype)
            return _Loss(model), (_tokens(batch, length), _tokens(batch, length))

    return make


def _hugging_face(name: str, batch: int, length: int, dtype: torch.dtype) -> Callable[[], Made]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, use_cache=False)

    def make() -> Made:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
            return _Loss(model), (_tokens(batch, length), _tokens(batch, length))

    return make


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.zeros((batch, length), dtype=torch.int64)


class _Loss(torch.nn.Module):
    """A language model with its loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        out = self.model(tokens)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
