"""Error feedback: what rounding a bucket's last gradients has lost, which is added to the next ones.

[Note: Error feedback]
A rank adds the rounding errors of its last gradients to the next ones (1-bit SGD, Seide et al. 2014; LoCo,
arXiv:2407.04480). They stand for gradients that were asked for and applied, in units of the loss:

- Gradients of a loss that is scaled have scaled errors. A ``GradScaler`` changes its scale between two steps, and nothing in
  a backward tells the scale. So the scaler is noted when it unscales gradients of the bucket, and errors are multiplied by
  the present scale over the one that they have. A scale that something else changes is unknown. If something else unscales
  gradients with torch's operator, feedback starts from zero after each step.
- A step that the scaler skips applies nothing. Its errors are dropped, and feedback starts from zero: to keep what was there
  before would take as much memory again. An error that is not finite counts as zero.
- A backward that was asked for other gradients (``torch.autograd.grad`` of inputs, ``backward(inputs=...)``) neither adds
  nor changes the errors of a parameter whose gradient autograd drops.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..plan.specs import BucketSpec
from ..private_torch import loss_scale_of


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
        self._scaler: Callable[[], Any] = lambda: None
        self._scale_of_lost: torch.Tensor | None = None
        self._found_inf: list[torch.Tensor] = []  # of the step that has applied the gradients, unless one is not 0

    @contextmanager
    def added_to(self, flat: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """Add the errors to gradients, give the memory to fill with what is sent of them, and keep what that has lost.

        It gives ``None`` if none of the gradients is wanted.
        """
        wanted = self._wanted()
        if not wanted:
            yield None
            return
        others = {i: view.clone() for i, view in enumerate(self._views) if i not in wanted}
        for index in others:
            self._views[index].zero_()
        scale = self._scale()
        factor = self._factor(scale)
        flat.add_(self.lost) if factor is None else flat.addcmul_(self.lost, factor)
        yield self.lost
        torch.sub(flat, self.lost, out=self.lost).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for index, view in others.items():
            self._views[index].copy_(view)
        self._scale_of_lost = None if scale is None else scale.clone()
        self._found_inf.clear()

    def unscaled(self, scaler: Any, scale: torch.Tensor | None, found_inf: torch.Tensor) -> None:
        """Note that gradients of the bucket have been unscaled.

        Args:
            scaler: the ``GradScaler``; ``None`` if something unknown does it.
            scale: a copy of its scale.
            found_inf: not 0 if the step is skipped. It may still change, with gradients of other dtypes.
        """
        if scaler is None:
            self.load(None)
            return
        self._scaler = weakref.ref(scaler)
        self._scale_of_lost = scale
        self._found_inf.append(found_inf)

    def in_units_of_loss(self) -> torch.Tensor:
        """Return the errors for a loss that is not scaled."""
        factor = self._factor(None)
        return self.lost if factor is None else self.lost * factor

    def load(self, errors: torch.Tensor | None) -> None:
        """Take over errors for a loss that is not scaled; ``None`` for zeros."""
        if errors is None:
            self.lost.zero_()
        else:
            self.lost.copy_(errors)
        self._scale_of_lost = torch.ones((), device=self.lost.device)
        self._found_inf.clear()

    def _scale(self) -> torch.Tensor | None:
        scaler = self._scaler()
        scale = None if scaler is None else loss_scale_of(scaler)
        return None if scale is None else scale.to(self.lost.device, non_blocking=True)

    def _factor(self, scale: torch.Tensor | None) -> torch.Tensor | None:
        """Return by what errors are multiplied for gradients of a loss scaled by ``scale``; ``None`` for 1."""
        if self._scale_of_lost is None:
            return None
        before = self._scale_of_lost.to(self.lost.device, non_blocking=True)
        factor = before.reciprocal() if scale is None else scale / before
        for found_inf in self._found_inf:
            factor *= found_inf.to(self.lost.device, non_blocking=True).reshape(()) == 0
        return factor.to(self.lost.dtype).clamp(max=torch.finfo(self.lost.dtype).max)
