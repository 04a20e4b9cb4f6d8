"""Initialize a module on the meta device one submodule at a time, directly into the shards.

[Note: Uninitialized values]
Memory for tensors from the meta device is filled with ``nan``, or with an extreme integer. A tensor that has only such
values at the first call was not initialized: not by ``param_init_fn``, a checkpoint or the user. A version counter
would not show it, because initialization often writes through ``.data``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..private_api import replace_data
from ..runtime.bucket import Bucket

__all__ = ["initialize", "is_blank", "make_blank"]


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


def initialize(
    module: nn.Module,
    init: Callable[[nn.Module], object],
    device: torch.device,
    locations: dict[str, tuple[Bucket, int]],
    take: Callable[[str, torch.Tensor], None],
    *,
    keeps: Callable[[str], bool],
) -> None:
    """Materialize the tensors that each submodule owns on the meta device, initialize them with ``init``, and shard them.

    Submodules are visited in the order of the module tree, so random numbers are drawn as for the whole module. Besides
    the shards, only the tensors of one submodule exist at a time. Afterwards the parameters in ``locations`` are on the
    meta device again; all others are the same objects, with memory.

    Args:
        init: called with each submodule. Changes that it makes to other submodules are lost.
        device: the device of the materialized tensors.
        locations: bucket and index of each sharded parameter, keyed by each of its names.
        take: called with each name and its initialized tensor: a whole parameter, to be sharded, or a buffer.
        keeps: whether a name's tensor is not initialized: it has values, which may be those of another rank.
    """
    for path, submodule in module.named_modules():
        owned = (submodule._parameters, submodule._buffers)
        on_meta = [
            (own, name, tensor)
            for own in owned
            for name, tensor in own.items()
            if tensor is not None and tensor.is_meta and not keeps(f"{path}.{name}".lstrip("."))
        ]
        if not on_meta:
            continue
        for own, name, tensor in on_meta:
            real = torch.empty_like(tensor, device=device)
            make_blank(real)
            if isinstance(tensor, nn.Parameter):
                # In the dtype of the shards, because the module's own parameter may already have that of unsharded
                # parameters.
                location = locations.get(f"{path}.{name}".lstrip("."))
                real = real if location is None else real.to(location[0].spec.dtype)
                own[name] = nn.Parameter(real, tensor.requires_grad)
            else:
                own[name] = real
        with torch.no_grad():
            init(submodule)
        for own, name, tensor in on_meta:
            full_name = f"{path}.{name}".lstrip(".")
            made = own[name]
            assert made is not None
            if full_name in locations:
                take(full_name, made)
            elif isinstance(tensor, nn.Parameter):
                replace_data(tensor, made.detach())
                take(full_name, tensor)
            else:
                take(full_name, made)
            if isinstance(tensor, nn.Parameter):
                own[name] = tensor
