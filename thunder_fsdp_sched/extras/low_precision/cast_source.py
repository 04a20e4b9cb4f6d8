"""The cast or encoding of a bucket's shard that its gathers send.

[Note: Reuse of casts]
Every gather of a forward casts again, because some writes to a parameter cannot be detected: those of optimizers with their
own kernels, and those through ``to_local().data``. Backward reuses the cast of its own forward, provided that no other
forward has cast since, and that neither a parameter's version nor the number of optimizer steps in this process has changed.
Within an accumulation window, a bucket that is not gathered again is not cast again either: see [Note: Gathered once in a
window] in ``runtime.bucket``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...plan.specs import BucketSpec
from ...private_torch import labelled
from ...runtime.autograd import is_of_running_backward, moment
from ...runtime.bucket import ShardSource


class CastShardSource(ShardSource):
    """The source that sends a cast of the shard in lower precision, or an encoding of it, made in each forward.

    Args:
        allocate: allocates memory for the cast.
        version: returns numbers that differ after each detectable write to the shard.
    """

    _cast: torch.Tensor | None = None
    _of: tuple[int, ...] = ()
    _cast_at = 0

    def __init__(
        self,
        spec: BucketSpec,
        shard: torch.Tensor,
        allocate: Callable[[], torch.Tensor],
        version: Callable[[], tuple[int, ...]],
    ) -> None:
        super().__init__(spec, shard)
        self._allocate = allocate
        self._version = version

    def shard(self, *, reuse_cast: bool) -> torch.Tensor:
        of = self._version()
        if self._cast is None:
            with torch.inference_mode(False):
                self._cast = self._allocate()
        elif reuse_cast and of == self._of and is_of_running_backward(self._cast_at):
            return self._cast
        self._of = ()  # invalid until the cast is complete
        with torch.no_grad(), labelled("cast", self._spec.name):
            fill_sent(self._spec, self._cast, self._shard)
        self._of, self._cast_at = of, moment()
        return self._cast

    def free(self) -> None:
        self._cast = None


def fill_sent(spec: BucketSpec, sent: torch.Tensor, shard: torch.Tensor) -> None:
    """Fill ``sent`` with a cast or an encoding of this rank's shard."""
    if (wire := spec.gather_wire) is None:
        sent.copy_(shard)
    else:
        wire.encode([segment[None] for segment in spec.layout.shard_segments(shard)], sent[None])
