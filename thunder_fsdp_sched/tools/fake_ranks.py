"""Compile as one rank of many in a single process, without sending or running anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder
import torch
import torch.distributed as dist

from ..transform import FSDPTransform

__all__ = ["Made", "compile_as_rank"]

Made = tuple[torch.nn.Module, tuple[Any, ...]]
"""A module and the positional arguments of a call."""


def compile_as_rank(
    make: Callable[[], tuple[Any, ...]],
    transform: FSDPTransform | Callable[[], FSDPTransform],
    *,
    rank: int,
    world_size: int,
) -> FSDPTransform:
    """Compile a module's forward and backward as ``rank`` of ``world_size`` would, over a fake process group.

    Args:
        make: returns the module, its positional arguments, and optionally its keyword arguments. Tensors may be on the
            meta device.
        transform: the result of :func:`thunder_fsdp_sched.fsdp`, which has the traces afterwards. Or a function that
            returns it, called after the process group is created, as meshes and further groups require.

    Raises:
        RuntimeError: this process already has a default process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError(
            "compiling for other ranks needs a process without a process group (it makes a fake one), but "
            "torch.distributed is initialized here"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        if not isinstance(transform, FSDPTransform):
            transform = transform()
        module, args, *kwargs = make()
        jitted = thunder.jit(module, transforms=[transform])
        args, named = transform.cast_inputs(args, kwargs[0] if kwargs else {})
        thunder.compile_data(jitted).get_computation_and_inputs(*args, **named)
    finally:
        dist.destroy_process_group()
    return transform
