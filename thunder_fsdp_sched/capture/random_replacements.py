"""Random functions of torch, written with functions that Thunder knows, for the interpreter.

Thunder would run each as one operator, and run it again for the gradient, with another sample.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return input.copy_(F.dropout(input, p, training)) if training else input


def _dropout1d(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if input.dim() not in (2, 3):
        raise RuntimeError(f"dropout1d: expected 2D or 3D input, but received a {input.dim()}D input")
    return _drop(input, p, training, inplace, leading=input.dim() - 1)


def _dropout2d(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return _drop(input, p, training, inplace, leading=2)  # torch takes three dimensions for (N, C, L)


def _dropout3d(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return _drop(input, p, training, inplace, leading=2 if input.dim() == 5 else 1)


def _alpha_dropout(input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> torch.Tensor:
    return _drop(input, p, training, inplace, leading=input.dim(), alpha=_ALPHA)


def _feature_alpha_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> torch.Tensor:
    return _drop(input, p, training, inplace, leading=2, alpha=_ALPHA)


def _drop(
    input: torch.Tensor, p: float, training: bool, inplace: bool, *, leading: int, alpha: float | None = None
) -> torch.Tensor:
    """Drop elements with the same first ``leading`` indices together; with ``alpha``, keep mean and variance of SELUs."""
    if p < 0.0 or p > 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return input
    if input.dim() < min(leading, 2):
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    ones = torch.ones([*input.shape[:leading], *[1] * (input.dim() - leading)], dtype=input.dtype, device=input.device)
    kept = F.dropout(ones, p)
    if alpha is None or p == 1.0:
        output = input * kept
    else:
        kept = (kept > 0).to(input.dtype)
        scale = ((alpha * alpha * p + 1) * (1 - p)) ** -0.5
        output = input * (kept * scale) + ((kept - 1) * (alpha * scale) + alpha * scale * p)
    return input.copy_(output) if inplace else output


def _gumbel_softmax(
    logits: torch.Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> torch.Tensor:
    gumbels = -torch.ones_like(logits).exponential_().log()
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not hard:
        return soft
    return torch.zeros_like(logits).scatter(dim, soft.max(dim, keepdim=True)[1], 1.0) - soft.detach() + soft


_ALPHA = 1.7580993408473766
"""The negative of the limit of SELU, as in torch: its scale times its alpha."""

RANDOM: dict[int, Callable[..., torch.Tensor]] = {
    id(F.dropout): _dropout,
    id(F.dropout1d): _dropout1d,
    id(F.dropout2d): _dropout2d,
    id(F.dropout3d): _dropout3d,
    id(F.alpha_dropout): _alpha_dropout,
    id(F.feature_alpha_dropout): _feature_alpha_dropout,
    id(F.gumbel_softmax): _gumbel_softmax,
}
