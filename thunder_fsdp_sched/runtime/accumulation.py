"""The gradients of a bucket that ``no_sync`` has accumulated and no backward has returned yet.

[Note: Two ways to accumulate]
``accumulate="unsharded"`` adds whole gradients to :attr:`Accumulation.unsharded`, without communication. The backward that
ends the window adds its own and reduces the sum once: the fewest bytes sent. ``"sharded"`` reduces the gradients of each
micro-batch and adds this rank's rows to :attr:`Accumulation.sharded`: the least memory, with as many bytes sent as without
``no_sync``. Across replicas, both are reduced once, at the end. So the divide factor and the ``all_reduce_hook`` are
applied once in both cases, to the accumulated gradients. One window may contain both, because traces of different
shapes may accumulate differently.

Rounding to bfloat16 after each addition costs accuracy. So reduced rows are added up in the dtype of the parameters, or in
that of reductions if it is wider, as FSDP2 adds to ``.grad``. Across replicas, the sum is sent in the dtype of reductions.
Unsharded gradients are added up in the dtype of reductions, as by FSDP2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from ..errors import coded_error
from ..extensions import load
from ..private_torch import backward_number

if TYPE_CHECKING:
    from ..plan.specs import BucketSpec

AccumulationMode = Literal["unsharded", "sharded"]
"""A way to accumulate gradients under ``no_sync``; see [Note: Two ways to accumulate]."""


class Accumulation:
    """The sums of a bucket's gradients in a window; see [Note: Two ways to accumulate].

    Attributes:
        unsharded: flat unsharded gradients, not reduced yet.
        sharded: this rank's flat rows, reduced within the sharding group but not across replicas, in
            ``spec.accumulate_dtype``.
        params: the indices of the parameters that have gradients in either.
        used: those of them that an output with a gradient has reached on this rank: see [Note: Outputs without
            gradient] in ``unused_outputs``. The gradients of the others are zeros.
        is_running: whether a ``no_sync`` backward has added gradients and has not run to its end.
        dropped: the number of failed backwards of this window whose gradients were dropped.
        deferred: sharded gradients of parameters for which the running backward has none, but an earlier ``no_sync``
            backward or another rank had one; added to ``.grad`` at the end of backward.
    """

    def __init__(self, spec: BucketSpec) -> None:
        self._spec = spec
        self.deferred: dict[int, torch.Tensor] = {}
        self.discard()

    def discard(self) -> None:
        """Drop all gradients."""
        self.unsharded: torch.Tensor | None = None
        self.sharded: torch.Tensor | None = None
        self.params: set[int] = set()
        self.used: set[int] = set()
        self.is_running = False
        self.dropped = 0
        self._backward = -1  # the number of the backward that runs
        self._is_first = False  # whether all gradients here are those of the running backward
        self.deferred = {}

    def from_others(self) -> frozenset[int]:
        """Return the parameters whose gradients the running backward gets from other ranks, even if it has none itself.

        There are none, except in the accumulation of ranks that differ, which overrides this.
        """
        return frozenset()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been accumulated."""
        return self.unsharded is None and self.sharded is None

    def begin(self) -> None:
        """Note that a backward under ``no_sync`` has begun to add gradients."""
        self.check_complete()
        if not self.is_running:
            self._is_first = self.is_empty
            self.is_running, self._backward = True, backward_number()

    def check_complete(self) -> None:
        """Drop what a failed backward has added.

        Raises:
            RuntimeError: a backward under ``no_sync`` failed after adding some of its gradients to earlier ones.
        """
        if self.is_running and self._backward == backward_number() >= 0:
            return  # this backward adds its own gradients, and then those of collectives that it serves
        if self.is_running and self._is_first:
            dropped = self.dropped + 1
            self.discard()
            self.dropped = dropped
        elif self.is_running:
            raise coded_error(RuntimeError, "gradient.sum-of-partial-backward", bucket=self._spec.name)

    def with_reduced(self, shard: torch.Tensor) -> torch.Tensor:
        """Add :attr:`sharded` to the flat reduced gradients of the running backward, in place unless the sum is wider."""
        return shard if self.sharded is None else shard.to(self._spec.accumulate_dtype).add_(self.sharded)

    def flush(self, params: Sequence[torch.nn.Parameter], *, ends_window: bool) -> None:
        """Add to ``.grad`` the gradients that backward cannot return; at the end of a window, drop all others."""
        deferred, self.deferred = self.deferred, {}
        if ends_window:
            self.discard()
        if deferred:
            accumulate = load("extras.parameter_hooks:accumulate")
            for index, grad in deferred.items():
                accumulate(params[index], grad)
