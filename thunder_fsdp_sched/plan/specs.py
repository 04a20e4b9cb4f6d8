"""Specifications of parameters and buckets: pure data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .layout import Layout


class Strided(NamedTuple):
    """The place of a parameter in its storage, in elements."""

    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, with all its names if it is tied.

    Attributes:
        names: every name of the parameter in the module. Plans and messages use the first.
        shape: shape of the unsharded parameter.
        strided: its place in its storage before sharding, if it was not contiguous or not at the start. An unsharded
            parameter is both.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    strided: Strided | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        trained = "" if self.requires_grad else ", frozen"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{' = '.join(self.names)}: {dtype}{list(self.shape)} on {self.device.type}{trained}"


class GroupKey(NamedTuple):
    """The process group over which parameters are sharded, by description, its size, and the number of replicas."""

    group: str
    size: int
    replicas: int = 1


class BucketOptions(NamedTuple):
    """Options in which the parameters of one bucket agree.

    Attributes:
        reshard_after_forward: true for ZeRO-3, false for ZeRO-2.
        param_dtype: dtype of unsharded parameters; ``None`` for the dtype of the shards.
        reduce_dtype: dtype in which gradients are sent and reduced; ``None`` for ``param_dtype``.
        divide_factor: what the sum of gradients over ranks is divided by; ``None`` for the number of ranks.
        secondary_size: over how many ranks the parameters are sharded between forward and backward; ``None`` for all.
    """

    reshard_after_forward: bool = True
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    divide_factor: float | None = None
    secondary_size: int | None = None


@dataclass(frozen=True)
class CommSpec:
    """The way in which a bucket is sent.

    Attributes:
        transport: name of the transport.
        reason: why this transport was chosen.
        per_param: whether it needs a layout that splits every parameter evenly by rows.
        staging: whether its slots have a second half, with the elements in the order in which ranks send them.
        param_dtype: dtype of unsharded parameters; ``None`` for the dtype of the shards.
        reduce_dtype: dtype in which gradients are sent and reduced; ``None`` for ``param_dtype``.
        offload: whether shards and their gradients are stored on the CPU; shards are copied to the device to be sent.
        pin_memory: whether they are stored in page-locked memory there.
    """

    transport: str = "flat"
    reason: str = "default"
    per_param: bool = False
    staging: bool = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    offload: bool = False
    pin_memory: bool = False


@dataclass(frozen=True)
class BucketSpec:
    """The parameters of one bucket. They share dtype, device, ``requires_grad`` and process group.

    Attributes:
        name: unique in the plan, made from the module path (``transformer.h.0``).
        reshard_after_forward: true for ZeRO-3 (gathered again for backward), false for ZeRO-2 (stays unsharded).
        group: description of the process group over which it is sharded.
        replicas: number of ranks that hold a copy of each shard, including this one.
        divide_factor: what the sum of gradients over ranks is divided by; ``None`` for the number of ranks.
        secondary_size: number of ranks among which backward gathers it from their secondary shards; ``None`` if it
            gathers among all. See [Note: Secondary shards] in ``runtime.secondary``.
    """

    name: str
    params: tuple[ParamSpec, ...]
    layout: Layout
    reshard_after_forward: bool
    comm: CommSpec = CommSpec()
    group: str = ""
    replicas: int = 1
    divide_factor: float | None = None
    secondary_size: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of shards and of sharded gradients."""
        return self.params[0].dtype

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of unsharded parameters."""
        return self.comm.param_dtype or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of unsharded gradients, in their slot and when sent."""
        return self.comm.reduce_dtype or self.param_dtype

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The dtype in which reduced gradients are added up under ``no_sync``."""
        return torch.promote_types(self.reduce_dtype, self.dtype)

    @property
    def accumulated_bytes(self) -> int:
        """Bytes of this rank's rows of reduced gradients as they are added up under ``no_sync``."""
        return self.layout.shard_numel * self.accumulate_dtype.itemsize

    @property
    def device(self) -> torch.device:
        """The device of unsharded parameters and gradients, and of the collectives."""
        return self.params[0].device

    @property
    def shard_device(self) -> torch.device:
        """The device of shards and sharded gradients."""
        return torch.device("cpu") if self.comm.offload else self.device

    @property
    def requires_grad(self) -> bool:
        return self.params[0].requires_grad

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded parameters in ``param_dtype``, padding included."""
        return self.layout.unsharded_numel * self.param_dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of the unsharded gradients in ``reduce_dtype``, padding included."""
        return self.layout.unsharded_numel * self.reduce_dtype.itemsize

    @property
    def padding_bytes(self) -> int:
        """Bytes of the unsharded buffer that belong to no parameter."""
        return self.layout.padding_numel * self.param_dtype.itemsize

    @property
    def sent_numel(self) -> int:
        """Elements of the shards of all ranks together."""
        return self.layout.shard_numel * self.layout.world_size

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard buffer, padding included."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def param_bytes(self) -> int:
        """Bytes of the unsharded parameters without padding, in their own dtype."""
        return sum(p.numel for p in self.params) * self.dtype.itemsize
