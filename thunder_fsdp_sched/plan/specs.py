"""Specifications of parameters and buckets: pure data."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..encoding.formats import FORMATS, Format
from ..encoding.policy import CommPolicy
from ..encoding.wire import Wire
from .layout import Layout

ShardingStrategy = Literal["zero2", "zero3"]


class StridedView(NamedTuple):
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
    strided: StridedView | None = None

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


@dataclass(frozen=True)
class BucketOptions:
    """Options that functions may decide for each module, with the names of the arguments of ``fsdp``.

    Attributes:
        sharding_strategy: ``"zero3"`` if gathered again for backward, ``"zero2"`` if unsharded until then.
        mp_policy: of a bucket, only the dtypes that differ from that of the shards.
        comm_policy: the formats in which parameters and gradients travel.
        gradient_divide_factor: what the sum of gradients over ranks is divided by; ``None`` for the number of ranks.
        reshard_after_forward: the number of ranks among which backward gathers from secondary shards; ``None`` for all.
            See [Note: Secondary shards] in ``runtime.bucket_aliases``.
    """

    sharding_strategy: ShardingStrategy = "zero3"
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    comm_policy: CommPolicy = field(default_factory=CommPolicy)
    gradient_divide_factor: float | None = None
    reshard_after_forward: int | None = None


@dataclass(frozen=True)
class CommSpec:
    """How a bucket is communicated."""

    transport: str = "flat"
    reason: str = "default"  # why this transport was chosen
    per_param: bool = False  # whether it needs a layout that splits every parameter evenly by rows
    staging: bool = False  # whether slots have a second half, with the elements in the order in which ranks send them
    offload: bool = (
        False  # whether shards and their gradients are on the CPU; shards are copied to the device to be sent
    )
    pin_memory: bool = False  # whether they are stored in page-locked memory there


@dataclass(frozen=True)
class BucketSpec:
    """The parameters of one bucket. They share dtype, device, ``requires_grad`` and process group.

    Attributes:
        name: unique in the plan, made from the module path (``transformer.h.0``).
        options: those that may differ between buckets.
        group: description of the process group over which it is sharded.
        replicas: number of ranks that hold a copy of each shard, including this one.
    """

    name: str
    params: tuple[ParamSpec, ...]
    layout: Layout
    options: BucketOptions = BucketOptions()
    comm: CommSpec = CommSpec()
    group: str = ""
    replicas: int = 1

    def with_options(self, **changed: Any) -> BucketSpec:
        """Return the specification with other values of some options."""
        return replace(self, options=replace(self.options, **changed))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of shards and of sharded gradients."""
        return self.params[0].dtype

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of unsharded parameters."""
        return self.options.mp_policy.param_dtype or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of unsharded gradients, in their slot and when sent."""
        return self.options.mp_policy.reduce_dtype or self.param_dtype

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The dtype in which reduced gradients are added up under ``no_sync``."""
        return torch.promote_types(self.reduce_dtype, self.dtype)

    @property
    def accumulated_bytes(self) -> int:
        """Bytes of this rank's rows of reduced gradients as they are added up under ``no_sync``."""
        return self.layout.shard_numel * self.accumulate_dtype.itemsize

    @functools.cached_property
    def gather_wire(self) -> Wire | None:
        """The layout of the encoded bytes that each rank sends to gather the bucket; ``None`` if it sends exact values."""
        return self._wire(self.options.comm_policy.gather, self.param_dtype)

    @functools.cached_property
    def reduce_wire(self) -> Wire | None:
        """The layout of the bytes that ranks exchange to reduce gradients; ``None`` if the transport reduces them.

        If only gathers are encoded, ``all_to_all`` also has one, so that all segments travel, exactly, in one exchange.
        """
        policy = self.options.comm_policy
        if policy.reduce is None and policy.gather is not None and self.comm.transport == "all_to_all":
            return self._wire_of(Format(self.reduce_dtype), self.reduce_dtype)
        return self._wire(policy.reduce, self.reduce_dtype)

    def _wire(self, encoding: str | None, exact: torch.dtype) -> Wire | None:
        return None if encoding is None else self._wire_of(FORMATS[encoding], exact)

    def _wire_of(self, encoded: Format, exact: torch.dtype) -> Wire:
        segments = [(s.shard_numel, Format(exact) if s.exempt else encoded) for s in self.layout.segments]
        return Wire.of([segment for segment in segments if segment[0]], self.options.comm_policy.block)

    @property
    def sends_copy(self) -> bool:
        """Whether a gather sends a cast or an encoding of the shard."""
        return self.gather_wire is not None or self.param_dtype != self.dtype

    @property
    def sent_shard(self) -> tuple[int, torch.dtype]:
        """Elements, and their dtype, of what a rank sends to gather the bucket."""
        if self.gather_wire is not None:
            return self.gather_wire.nbytes, torch.uint8
        return self.layout.shard_numel, self.param_dtype

    @property
    def sent_bytes(self) -> int:
        """Bytes of what a rank sends to gather the bucket."""
        numel, dtype = self.sent_shard
        return numel * dtype.itemsize

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
