"""Compile as one rank of many in a single process, without sending or running anything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import thunder
import torch
import torch.distributed as dist
from thunder.extend import Executor

from ...transform import FSDPTransform

Made = tuple[torch.nn.Module, tuple[Any, ...]]
"""A module and the positional arguments of a call."""


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of ``world_size`` ranks of a default process group that sends nothing.

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
        yield
    finally:
        dist.destroy_process_group()


def compile_as_rank(
    make: Callable[[], tuple[Any, ...]],
    transform: FSDPTransform | Callable[[], FSDPTransform],
    *,
    rank: int,
    world_size: int,
    executors: Sequence[Executor] = (),
) -> FSDPTransform:
    """Compile a module's forward and backward as ``rank`` of ``world_size`` would, over a fake process group.

    Args:
        make: returns the module, its positional arguments, and optionally its keyword arguments. Tensors may be on the
            meta device.
        transform: the result of :func:`thunder_fsdp_sched.fsdp`, which has the traces afterwards. Or a function that
            returns it, called after the process group is created, as meshes and further groups require.
        executors: executors of Thunder that come before its default ones.

    Raises:
        RuntimeError: this process already has a default process group.
    """
    with fake_rank(rank, world_size):
        if not isinstance(transform, FSDPTransform):
            transform = transform()
        module, args, *kwargs = make()
        jitted = jit(module, transform, executors)
        args, named = transform.cast_inputs(args, kwargs[0] if kwargs else {})
        transform.sharded.compile(jitted, args, named)
    return transform


def jit(module: torch.nn.Module, transform: FSDPTransform, executors: Sequence[Executor] = ()) -> Any:
    """Return the jitted module, with ``executors`` before Thunder's default ones; this shards but compiles nothing."""
    before = {"executors": (*executors, *thunder.get_default_executors())} if executors else {}
    return thunder.jit(module, transforms=[transform], **before)
