"""Tensors that modules keep in attributes, lists, tuples and dicts, besides registered parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["params_in_containers", "replace_in_containers", "tensors_in_containers"]

_REGISTERED = ("_parameters", "_buffers", "_modules")
_DEPTH = 3
"""How many containers inside each other are looked into."""


def replace_in_containers(
    module: torch.nn.Module, find_replacement: Callable[[str, torch.Tensor], torch.Tensor | None]
) -> None:
    """Replace tensors that ``module`` and its submodules keep in containers.

    Args:
        find_replacement: gets the path of a tensor below ``module`` and the tensor; returns the tensor that takes its
            place, or ``None``.
    """

    def visit(path: str, value: Any, depth: int) -> Any:
        """Return the value with its replacements, which is the same object if it could be changed in place."""
        if isinstance(value, torch.Tensor):
            replacement = find_replacement(path, value)
            return value if replacement is None else replacement
        if not depth or not isinstance(value, (list, tuple, dict)):
            return value
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        changed = {key: new for key, old in items if (new := visit(f"{path}[{key!r}]", old, depth - 1)) is not old}
        if changed and isinstance(value, tuple):
            elements = [changed.get(number, item) for number, item in items]
            return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)
        if isinstance(value, (list, dict)):
            for key, new in changed.items():
                value[key] = new
        return value

    for prefix, submodule in module.named_modules():
        attributes = vars(submodule)
        for key, value in list(attributes.items()):
            if key not in _REGISTERED:
                new = visit(f"{prefix}.{key}".lstrip("."), value, _DEPTH)
                if new is not value:
                    attributes[key] = new


def tensors_in_containers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the paths and tensors that ``module`` and its submodules keep in containers."""
    found: list[tuple[str, torch.Tensor]] = []
    replace_in_containers(module, lambda path, tensor: found.append((path, tensor)))
    return found


def params_in_containers(module: torch.nn.Module, names: dict[int, str]) -> dict[str, str]:
    """Return the names of parameters that containers below ``module`` hold, keyed by their paths.

    Args:
        names: the names of the parameters to look for, keyed by ``id``.
    """
    return {path: names[id(tensor)] for path, tensor in tensors_in_containers(module) if id(tensor) in names}
