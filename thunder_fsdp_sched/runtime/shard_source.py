"""The tensor that a gather sends: the bucket's shard; a cast of it in ``extras.low_precision.cast_source``."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..plan.specs import BucketSpec
from ..private_torch import NO_CONTEXT


class ShardSource:
    """The source that sends the shard itself."""

    def __init__(self, spec: BucketSpec, shard: torch.Tensor) -> None:
        self._spec = spec
        self._shard = shard

    def shard(self, *, reuse_cast: bool) -> torch.Tensor:
        """Return the flat shard on the device and in the dtype in which it is sent; valid until the gather finishes.

        Args:
            reuse_cast: return the tensor that forward sent if it is known to be up to date.
        """
        return self._shard

    def send_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which to issue the gather of what :meth:`shard` has just returned."""
        return NO_CONTEXT

    def finish_copy(self) -> None:
        """Wait until the host may write the shard again, if it was offloaded: see ``extras.shard_offload``."""

    def free(self) -> None:
        """Free what :meth:`shard` has returned, after its gather."""
