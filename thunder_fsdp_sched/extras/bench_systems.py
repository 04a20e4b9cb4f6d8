"""The systems of ``bench``: how FSDP2, DDP and this package are applied to any model.

Also here: the ranks that train it, its loss, and the bytes that our traces send and need.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import thunder
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from ..api import fsdp
from ..compiled_traces import CompiledTraces
from ..errors import coded_error
from ..ir.effects import sends
from ..option_groups import Init
from ..plan.bucketing import named_blocks
from .planning.models import Made, module_and_inputs
from .step_memory.step_memory import optimizer_state_bytes, optimizer_step_bytes


@contextmanager
def torchrun_ranks() -> Iterator[torch.device]:
    """Join the ranks that torchrun has started, unless there is a process group already; yield this rank's device.

    Raises:
        ValueError: there are no ranks, or too few GPUs.
    """
    joins = not dist.is_initialized()
    if joins and "LOCAL_RANK" not in os.environ:
        raise coded_error(ValueError, "bench.needs-several-ranks")
    local, ranks = (
        int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    gpus = torch.cuda.device_count()
    if 0 < gpus < ranks:
        raise coded_error(ValueError, "bench.more-ranks-than-gpus", ranks=ranks, gpus=gpus)
    if gpus:
        torch.cuda.set_device(local)
    if joins:
        dist.init_process_group("nccl" if gpus else "gloo")
    try:
        yield torch.device("cuda", local) if gpus else torch.device("cpu")
    finally:
        if joins:
            dist.destroy_process_group()


def parse_systems(text: str) -> list[str]:
    """Return names of :data:`SYSTEMS` that a text lists, separated by commas.

    Raises:
        ValueError: there is no such system.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise coded_error(ValueError, "bench.unknown-system", name=unknown[0], expected=", ".join(SYSTEMS))
    return names


@dataclass(frozen=True)
class Setup:
    """The model, and how to apply systems to it.

    Attributes:
        find: returns the factory of the module and its inputs.
        options: returns the options of :func:`thunder_fsdp_sched.fsdp` for a sharding strategy.
        policy: mixed precision; ``None`` without.
    """

    find: Callable[[], Callable[[], Made]]
    device: torch.device
    options: Callable[[str], dict[str, Any]]
    policy: MixedPrecisionPolicy | None = None

    def make(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Return the module, made with one seed on all ranks, and its inputs on the device.

        Raises:
            ValueError: the factory returns something else, or a tensor without values, or nothing to train.
        """
        torch.manual_seed(0)
        module, args, kwargs = module_and_inputs(self.find())
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        tensors |= {f"input {n}": t for n, t in enumerate(tree_leaves((args, kwargs))) if isinstance(t, torch.Tensor)}
        if on_meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise coded_error(ValueError, "bench.model-on-meta-device", name=on_meta[0])
        if not any(p.requires_grad for p in module.parameters()):
            raise coded_error(ValueError, "bench.no-trainable-parameter")
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(self.device), (args, kwargs))
        return module, args, kwargs


def _ours(strategy: str, module: nn.Module, group: Any, setup: Setup) -> tuple[Any, Any]:
    options = setup.options(strategy)
    transform = fsdp(**options, mp_policy=setup.policy, ranks=group, init=Init(device=setup.device))
    return thunder.jit(module, transforms=[transform]), transform


def _fsdp2(reshard: bool | None, module: nn.Module, group: Any, setup: Setup) -> tuple[Any, Any]:
    """Shard each block of a container that has buckets of its own with our package, and then the root with all others."""
    mesh, policy = DeviceMesh.from_group(group, setup.device.type), setup.policy or MixedPrecisionPolicy()
    parents = {module.get_submodule(b): module.get_submodule(b.rpartition(".")[0]) for b in named_blocks(module)}
    blocks = [block for block, parent in parents.items() if isinstance(parent, (nn.ModuleList, nn.Sequential))]
    for part in (*blocks, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return module, None


def _ddp(module: nn.Module, group: Any, setup: Setup) -> tuple[Any, Any]:
    if setup.policy is not None:
        raise coded_error(ValueError, "bench.mixed-precision-with-ddp")
    return DistributedDataParallel(module.to(setup.device), process_group=group), None


SYSTEMS: dict[str, Callable[[nn.Module, Any, Setup], tuple[Any, Any]]] = {
    "ours zero3": partial(_ours, "zero3"),
    "ours zero2": partial(_ours, "zero2"),
    "FSDP2 zero3": partial(_fsdp2, None),  # the default: the root's own parameters stay unsharded until backward
    "FSDP2 zero2": partial(_fsdp2, False),
    "DDP": _ddp,
}
"""Functions that apply a system to a module: they return the module to call, and our transform or ``None``."""


def loss_of(output: Any) -> torch.Tensor:
    """Return the first scalar with a gradient in a module's output, or else the sum of the mean squares of its tensors."""
    trained = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not trained:
        raise coded_error(ValueError, "bench.output-without-gradient")
    scalars = [t for t in trained if t.ndim == 0]
    return scalars[0] if scalars else torch.stack([t.float().square().mean() for t in trained]).sum()


def bytes_of(compiled: CompiledTraces) -> tuple[int, int]:
    """Return the bytes that a rank sends in a step, and those of its predicted peak with AdamW."""
    sent = 0.0
    for issue in filter(None, (sends(bsym) for trace in compiled.traces for bsym in trace.bound_symbols)):
        assert issue.traffic is not None and issue.group is not None and issue.bucket is not None
        twice = issue.traffic.is_reduce_scatter and issue.group.backend_for(issue.bucket.spec.device) == "gloo"
        ring = sum(issue.traffic.messages) * (1 - 1 / issue.group.size)
        sent += ring * issue.traffic.passes * (2 if twice else 1)
    buckets = compiled.buckets
    optimizer = optimizer_state_bytes(buckets), optimizer_step_bytes(buckets, foreach=False)
    return round(sent), compiled.memory.with_optimizer_state(*optimizer).peak.nbytes
