"""Records the operators that are called."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorded(TorchDispatchMode):
    """A context that records operators with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))

    @property
    def collectives(self) -> list[str]:
        """The names of the operators of process groups."""
        return [func.__name__.partition(".")[0] for func, _ in self.calls if func.namespace == "c10d"]

    @property
    def addresses(self) -> set[int]:
        """The addresses of the plain tensors that all other operators read."""
        others = (leaves for func, leaves in self.calls if func.namespace != "c10d")
        return {leaf.data_ptr() for leaves in others for leaf in leaves if type(leaf) is torch.Tensor}
