"""Typed access to the operands of this package's bound symbols, so that no pass depends on argument positions.

The printed form of each symbol is in the docstring of ``symbols``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from ..runtime.bucket import Bucket
from ..runtime.memory import Slot


def bucket_of(bsym: BoundSymbol) -> Bucket:
    """Return the bucket of any symbol that communicates, waits, accumulates or writes a gradient."""
    return cast(Bucket, bsym.args[0])


class _Operands:
    """The operands of one bound symbol."""

    __slots__ = ("bsym",)

    def __init__(self, bsym: BoundSymbol) -> None:
        self.bsym = bsym

    @property
    def bucket(self) -> Bucket:
        return bucket_of(self.bsym)


class Issue(_Operands):
    """``future = fsdp_all_gather(bucket, slot, *shards)`` or ``future = fsdp_reduce_scatter(bucket, slot, *grads)``."""

    __slots__ = ()

    @property
    def slot(self) -> Slot:
        """The memory for the unsharded bucket; only after ``assign_slots``."""
        return cast(Slot, self.bsym.args[1])

    @property
    def tensors(self) -> Sequence[TensorProxy | None]:
        """The shards or gradients, in the order of parameters; ``None`` for those that the trace does not use."""
        return self.bsym.args[2:]

    def with_slot(self, slot: Slot, bucket: Bucket | None = None) -> BoundSymbol:
        """Return the bound symbol with another slot, and with another bucket that shares its memory if one is given."""
        return self.bsym.from_bsym(args=(bucket or self.bucket, slot, *self.tensors))


class Gather(Issue):
    """``future = fsdp_all_gather(bucket, slot, *shards)``, also with ``secondary=shard``."""

    __slots__ = ()

    @property
    def shards(self) -> Sequence[TensorProxy | None]:
        return self.tensors

    @property
    def secondary(self) -> TensorProxy | None:
        """The secondary shard that is sent, ``None`` if the shards are."""
        return cast("TensorProxy | None", self.bsym.kwargs.get("secondary"))


class Reduction(Issue):
    """``future = fsdp_reduce_scatter(bucket, slot, *grads)``."""

    __slots__ = ()

    @property
    def grads(self) -> Sequence[TensorProxy | None]:
        return self.tensors


class Wait(_Operands):
    """``(*tensors,) = fsdp_wait_params(bucket, future)``, and the same for gradients or across replicas."""

    __slots__ = ()

    @property
    def future(self) -> FutureTensorProxy:
        return cast(FutureTensorProxy, self.bsym.args[1])

    def with_token(self, token: TensorProxy | None) -> BoundSymbol:
        """Return the bound symbol with the token that keeps fusions apart, or without one."""
        return self.bsym.from_bsym(args=(self.bucket, self.future, *(() if token is None else (token,))))


class OneParameter(_Operands):
    """``param = fsdp_unshard(bucket, index, shard)`` or ``grad = fsdp_reduce(bucket, index, grad)``."""

    __slots__ = ()

    @property
    def index(self) -> int:
        """The number of the parameter in the bucket."""
        return cast(int, self.bsym.args[1])

    @property
    def tensor(self) -> TensorProxy:
        return cast(TensorProxy, self.bsym.args[2])
