"""Modules that begin on the meta device: initialized one submodule after the other, straight into the shards.

[Note: Values that nobody has given]
Memory for what was on the meta device begins as ``nan``, or as an extreme integer. What still holds nothing else at
the first call was forgotten: by ``param_init_fn``, by a checkpoint, by the user. A version counter would not tell, since
initialization often writes through ``.data``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .buffers import Bucket
from .compat import replace_data

__all__ = ["initialize", "is_blank", "make_blank"]


def make_blank(tensor: torch.Tensor) -> None:
    """Fill ``tensor`` with what :func:`is_blank` recognizes."""
    with torch.no_grad():
        tensor.fill_(_blank_of(tensor.dtype))


def is_blank(tensor: torch.Tensor) -> bool:
    """Whether nobody has given ``tensor`` values since :func:`make_blank`; false if it has no elements to tell by."""
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


def initialize(
    module: nn.Module,
    init: Callable[[nn.Module], object],
    device: torch.device,
    places: dict[str, tuple[Bucket, int]],
    take: Callable[[str, torch.Tensor], None],
) -> None:
    """Gives each submodule that owns tensors on the meta device real ones, lets ``init`` fill them and takes them over.

    Submodules come in the order of the module tree, so that random numbers are drawn as for the whole module at once. No
    more than one submodule's own tensors exist beside the shards. Parameters in ``places`` are on the meta device again
    afterwards; the others are the same objects with memory.

    Args:
        init: called with each of the submodules; what it does to other submodules is lost.
        device: of the real tensors.
        places: bucket and index of each sharded parameter, by each of its names.
        take: is given each name and what became of it: whole parameters (to be cut), buffers.
    """
    for path, submodule in module.named_modules():
        owned = (submodule._parameters, submodule._buffers)
        on_meta = [(own, name, t) for own in owned for name, t in own.items() if t is not None and t.is_meta]
        if not on_meta:
            continue
        for own, name, tensor in on_meta:
            real = torch.empty_like(tensor, device=device)
            make_blank(real)
            if isinstance(tensor, nn.Parameter):
                # In the dtype of the shards: the module's own one may have that of the unsharded parameters by now.
                place = places.get(f"{path}.{name}".lstrip("."))
                real = real if place is None else real.to(place[0].spec.dtype)
                own[name] = nn.Parameter(real, tensor.requires_grad)
            else:
                own[name] = real
        with torch.no_grad():
            init(submodule)
        for own, name, tensor in on_meta:
            full_name = f"{path}.{name}".lstrip(".")
            made = own[name]
            assert made is not None
            if full_name in places:
                take(full_name, made)
            elif isinstance(tensor, nn.Parameter):
                replace_data(tensor, made.detach())
                take(full_name, tensor)
            else:
                take(full_name, made)
            if isinstance(tensor, nn.Parameter):
                own[name] = tensor
