"""Modules that begin on the meta device: initialized one submodule after the other, straight into the shards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .buffers import Bucket

__all__ = ["initialize"]


def initialize(
    module: nn.Module,
    init: Callable[[nn.Module], object],
    device: torch.device,
    places: dict[str, tuple[Bucket, int]],
    take: Callable[[str, torch.Tensor], None],
) -> None:
    """Gives each submodule that owns tensors on the meta device real ones, lets ``init`` fill them and takes them over.

    Submodules come in the order of the module tree, so that random numbers are drawn as for the whole module at once. No
    more than one submodule's own tensors exist beside the shards. Parameters are on the meta device again afterwards.

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
            take(full_name, made)
            if full_name in places:
                own[name] = tensor
