"""Error feedback: what rounding a bucket's last gradients has lost, which is added to the next ones.

[Note: Error feedback]
A rank adds the rounding errors of its last gradients to the next ones (1-bit SGD, Seide et al. 2014; LoCo,
arXiv:2407.04480). They stand for gradients that were asked for, in units of the loss. A backward that was asked
for other gradients (``torch.autograd.grad`` of inputs, ``backward(inputs=...)``) neither adds nor changes the errors of a
parameter whose gradient autograd drops. An error that is not finite counts as zero.

A ``GradScaler`` changes the scale of the loss between two steps and skips steps, and nothing in a backward tells either. So
it is refused when it unscales such gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ...plan.specs import BucketSpec


class ErrorFeedback:
    """The error feedback of one bucket on this rank: see [Note: Error feedback].

    Args:
        wanted: returns the indices of the parameters whose gradients the running backward was asked for.

    Attributes:
        lost: the errors, laid out as the unsharded buffer; zeros at first.
    """

    def __init__(self, spec: BucketSpec, wanted: Callable[[], frozenset[int]]) -> None:
        with torch.inference_mode(False):
            self.lost = torch.zeros(spec.layout.unsharded_numel, dtype=spec.reduce_dtype, device=spec.device)
        self._views = spec.layout.unsharded_views(self.lost)
        self._wanted = wanted

    @contextmanager
    def added_to(self, flat: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """Add the errors to gradients, yield a buffer for their decoded values, and store the new rounding errors in it.

        It gives ``None`` if none of the gradients is wanted.
        """
        wanted = self._wanted()
        if not wanted:
            yield None
            return
        others = {i: view.clone() for i, view in enumerate(self._views) if i not in wanted}
        for index in others:
            self._views[index].zero_()
        flat.add_(self.lost)
        yield self.lost
        torch.sub(flat, self.lost, out=self.lost).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for index, view in others.items():
            self._views[index].copy_(view)
