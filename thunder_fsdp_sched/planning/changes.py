"""Changes of a planned step that can lower its memory or its time, as a user writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from thunder.core.pytree import tree_flatten, tree_map
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from .dry_run import DryRun, check_made
from .fake_ranks import Made

__all__ = ["Change", "faster_changes", "samples_of", "smaller_changes"]

_DOUBLINGS = 3
"""How often the number of ranks is doubled at most."""


@dataclass(frozen=True)
class Change:
    """A change of a planned step.

    Attributes:
        text: the change as a user writes it: ``'prefetch=0'``.
        kind: its kind; several changes of one kind exclude each other.
        options: the arguments of :func:`~.dry_run.replan` that change.
        make: returns the module and other inputs, if those change.
        needs_trace: whether the model must be traced again.
    """

    text: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[], Made] | None = None
    needs_trace: bool = False


def smaller_changes(step: DryRun, max_memory: int) -> Iterator[Change]:
    """Yield changes that may lower the memory of a step.

    Args:
        step: a planned step.
        max_memory: bytes that the step may need, without optimizer state.
    """
    options = step.options
    if options.get("sharding_strategy") == "zero2":
        yield _option("sharding_strategy", "zero3")
    if step.replicas > 1:
        yield _option("replicas", 1)
    if step.micro_batches > 1 and (options.get("accumulate"), options.get("max_memory")) == (None, None):
        yield _option("accumulate", "sharded")
    if options.get("schedule") is None:
        yield from (_option("prefetch", distance) for distance in (1, 0) if distance < step.compiled.prefetch)
        if step.compiled.backward is not None and max_memory > 0 and options.get("max_memory") is None:
            yield _option("max_memory", _rounded_down(max_memory))
    if not isinstance(options.get("offload_policy"), CPUOffloadPolicy) and not step.cluster.synchronous:
        yield _option("offload_policy", CPUOffloadPolicy(), "CPUOffloadPolicy()")
    for doubling in range(1, _DOUBLINGS + 1):
        yield _option("world_size", step.world_size * 2**doubling)
    policy = options.get("mp_policy") or MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy) and policy.param_dtype is None and _has_long_dtypes(step):
        text = "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        lower = replace(policy, param_dtype=torch.bfloat16)
        yield Change(text, "mp_policy", {"mp_policy": lower}, needs_trace=True)
    samples = samples_of(step.make)
    if samples is not None and samples > 1:
        half = samples // 2
        text = f"half the batch ({half} of {samples} samples a rank)"
        yield Change(text, "batch", make=_with_samples(step.make, samples, half), needs_trace=True)


def faster_changes(step: DryRun) -> Iterator[Change]:
    """Yield changes that may lower the time of a step at the cost of memory."""
    if step.options.get("schedule") is not None:
        return
    if step.options.get("sharding_strategy", "zero3") == "zero3" and step.options.get("max_unsharded_bytes") is None:
        yield _option("sharding_strategy", "zero2")
    if step.transform.options.prefetch != "auto":
        yield _option("prefetch", "auto")


def samples_of(make: Callable[[], Made]) -> int | None:
    """Return the number of samples of the inputs: the first dimension, if all tensors share it; otherwise ``None``."""
    _, args, kwargs = (*check_made(make(), "make"), {})[:3]
    sizes = {t.shape[0] if t.ndim else None for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
    return sizes.pop() if len(sizes) == 1 else None


def _with_samples(make: Callable[[], Made], samples: int, fewer: int) -> Callable[[], Made]:
    def make_fewer() -> Any:
        module, *inputs = check_made(make(), getattr(make, "__name__", "make"))
        return module, *(tree_map(lambda x: x[:fewer] if isinstance(x, torch.Tensor) else x, part) for part in inputs)

    return make_fewer


def _has_long_dtypes(step: DryRun) -> bool:
    long = (torch.float32, torch.float64)
    return torch.bfloat16 in step.cluster.flops and any(b.spec.param_dtype in long for b in step.compiled.buckets)


def _option(name: str, value: Any, text: str | None = None) -> Change:
    text = text or (f'"{value}"' if isinstance(value, str) else str(value))
    return Change(f"{name}={text}", name, {name: value})


def _rounded_down(nbytes: int) -> str:
    """Return a number of bytes with about four digits, such as ``"71.97GB"``, not more than ``nbytes``."""
    unit, name = next(((u, n) for u, n in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")) if nbytes >= u), (1, "B"))
    return f"{nbytes // (unit // 100) / 100:.2f}{name}" if unit > 1 else f"{nbytes}B"
