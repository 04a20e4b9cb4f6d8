"""Values that show that a tensor was never initialized.

[Note: Uninitialized values]
Memory for tensors from the meta device is filled with ``nan``, or with an extreme integer. A tensor that has only such
values at the first call was not initialized: not by ``param_init_fn``, a checkpoint or the user. A version counter
would not show it, because initialization often writes through ``.data``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
from thunder.core.module import ThunderModule

from ...errors import coded_error


def make_blank(tensor: torch.Tensor) -> None:
    """Fill ``tensor`` with the value that :func:`is_blank` recognizes."""
    with torch.no_grad():
        tensor.fill_(_blank_of(tensor.dtype))


def is_blank(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is unchanged since :func:`make_blank`; false if it has no elements."""
    if not tensor.numel() or tensor.dtype is torch.bool:
        return False
    tensor = tensor.detach()
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(torch.isnan(tensor.float() if tensor.dtype.itemsize == 1 else tensor).all())
    return bool((tensor == _blank_of(tensor.dtype)).all())


def _blank_of(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return 0
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max


def refuse_blank(model: ThunderModule, began_on_meta: Collection[str]) -> None:
    """Raise an error if parameters or buffers have not been initialized.

    Args:
        began_on_meta: the names of those that have had no values.

    Raises:
        RuntimeError: names them.
    """
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    blank = [n for n, t in tensors.items() if t.is_meta or (n in began_on_meta and is_blank(t))]
    if blank:
        raise coded_error(
            RuntimeError,
            "parameter.no-values-yet",
            names=", ".join(blank[:3]),
            more=f" and {len(blank) - 3} more" if len(blank) > 3 else "",
        )
