"""Specifications of parameters and buckets, and the plan of all buckets: pure data."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..errors import coded_error
from ..extensions import load
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


class WireFormat(Protocol):
    """The layout of the encoded bytes that each rank sends; ``extras.low_precision.formats.Wire`` documents the methods."""

    @property
    def nbytes(self) -> int: ...

    def encode(self, segments: Sequence[torch.Tensor], wire: torch.Tensor) -> None: ...

    def decode(self, wire: torch.Tensor, segments: Sequence[torch.Tensor]) -> None: ...

    def decode_mean(self, wire: torch.Tensor, segments: Sequence[torch.Tensor]) -> None: ...

    def temporary_bytes(self, ranks: int, dtype: torch.dtype, *, decodes: bool = ..., adds: bool = ...) -> int: ...


class Encoding(Protocol):
    """The formats in which a bucket is sent: a :class:`~thunder_fsdp_sched.CommPolicy`, which documents the methods."""

    @property
    def gather(self) -> str | None: ...

    @property
    def reduce(self) -> str | None: ...

    @property
    def error_feedback(self) -> bool: ...

    def exempts(self, names: Iterable[str], ndim: int) -> bool: ...

    def check_exempt(self, names: Sequence[str]) -> None: ...

    def in_dtype(self, computed: torch.dtype) -> Encoding | None: ...

    def gather_wire(self, spec: BucketSpec) -> WireFormat | None: ...

    def reduce_wire(self, spec: BucketSpec) -> WireFormat | None: ...


class GroupKey(NamedTuple):
    """The process group over which parameters are sharded, by description, its size, and the number of replicas."""

    group: str
    size: int
    replicas: int = 1


@dataclass(frozen=True)
class BucketOptions:
    """Options that functions may decide for each module, with the names of ``fsdp`` and :class:`Sharding`.

    Attributes:
        sharding_strategy: ``"zero3"`` if gathered again for backward, ``"zero2"`` if unsharded until then.
        mp_policy: of a bucket, only the dtypes that differ from that of the shards.
        comm_policy: the formats in which parameters and gradients are sent; ``None`` for exact values.
        gradient_divide_factor: the divisor of the sum of gradients over ranks; ``None`` for the number of ranks.
        secondary_ranks: the number of ranks among which backward gathers from secondary shards; ``None`` for all.
            See [Note: Secondary shards] in ``extras.secondary_shards``.
    """

    sharding_strategy: ShardingStrategy = "zero3"
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    comm_policy: Encoding | None = None
    gradient_divide_factor: float | None = None
    secondary_ranks: int | None = None

    @property
    def formats(self) -> tuple[str | None, str | None]:
        """The formats of gathers and of reductions; ``None`` for exact values."""
        policy = self.comm_policy
        return (None, None) if policy is None else (policy.gather, policy.reduce)


@dataclass(frozen=True)
class CommSpec:
    """How a bucket is communicated."""

    transport: str = "flat"
    reason: str = "default"  # why this transport was chosen
    per_param: bool = False  # whether it needs a layout that splits every parameter evenly by rows
    offload: bool = (
        False  # whether shards and their gradients are on the CPU; shards are copied to the device to be sent
    )
    pin_memory: bool = False  # whether they are stored in page-locked memory there
    computes_on: str = "cpu"  # the type of device that copies, casts and encodes; in a plan that of the planned ranks


@dataclass(frozen=True)
class BucketSpec:
    """The parameters of one bucket. They share dtype, device, ``requires_grad`` and process group.

    Attributes:
        name: unique in the plan, made from the module path (``transformer.h.0``).
        options: the options that may differ between buckets.
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

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of shards and of sharded gradients."""
        return self.params[0].dtype

    @functools.cached_property
    def param_dtype(self) -> torch.dtype:
        """The dtype of unsharded parameters."""
        return self.options.mp_policy.param_dtype or self.dtype

    @functools.cached_property
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
    def gather_wire(self) -> WireFormat | None:
        """The layout of the encoded bytes that each rank sends to gather the bucket; ``None`` if it sends exact values."""
        policy = self.options.comm_policy
        return None if policy is None else policy.gather_wire(self)

    @functools.cached_property
    def reduce_wire(self) -> WireFormat | None:
        """The layout of the bytes that ranks exchange to reduce gradients; ``None`` if the transport reduces them."""
        policy = self.options.comm_policy
        return None if policy is None else policy.reduce_wire(self)

    @property
    def has_error_feedback(self) -> bool:
        """Whether the rounding errors of gradients are added to the next ones."""
        policy = self.options.comm_policy
        return policy is not None and policy.error_feedback and self.reduce_wire is not None

    @property
    def sends_copy(self) -> bool:
        """Whether a gather sends a cast or an encoding of the shard."""
        return self.gather_wire is not None or self.param_dtype != self.dtype

    @property
    def sent_shard(self) -> tuple[int, torch.dtype]:
        """The number and the dtype of the elements that a rank sends to gather the bucket."""
        if self.gather_wire is not None:
            return self.gather_wire.nbytes, torch.uint8
        return self.layout.shard_numel, self.param_dtype

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends to gather the bucket."""
        numel, dtype = self.sent_shard
        return numel * dtype.itemsize

    @functools.cached_property
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
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard buffer, padding included."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def param_bytes(self) -> int:
        """Bytes of the unsharded parameters without padding, in their own dtype."""
        return sum(p.numel for p in self.params) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """All buckets of a model, in the order of the module tree. ``print`` shows them as a table.

    Attributes:
        world_size: size of the process group over which buckets are sharded by default.
        group: description of that process group.
    """

    buckets: tuple[BucketSpec, ...]
    world_size: int
    group: str

    def __iter__(self) -> Iterator[BucketSpec]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __str__(self) -> str:
        return str(load("extras.reports.texts:plan_text")(self))

    def __getitem__(self, name: str) -> BucketSpec:
        for bucket in self.buckets:
            if bucket.name == name:
                return bucket
        raise coded_error(KeyError, "plan.unknown-bucket", name=name, buckets=[b.name for b in self.buckets])

    @property
    def param_bytes(self) -> int:
        """Bytes of all unsharded parameters without padding."""
        return sum(b.param_bytes for b in self.buckets)
