"""The modules of a model that are not traced: see [Note: Leaf modules] in ``extras.leaf_modules.run``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from .paths import Path

AUTO = "auto"
"""Stands for every module that Thunder cannot trace, in place of the name of a leaf module."""


CALLS = frozenset(
    map(
        id,
        (
            torch.autograd.Function.apply.__func__,  # type: ignore[attr-defined]
            torch._ops.OpOverloadPacket.__call__,
            torch._ops.OpOverload.__call__,
        ),
    )
)
"""The identities of torch's functions that call an autograd function or an operator, which Thunder may not know."""


class Leaves(dict[torch.nn.Module, str]):
    """The leaf modules of a model, each with its path.

    Attributes:
        model: the model that contains them.
        automatic: whether modules that cannot be traced become leaves.
        output_like: functions that return tensors like a leaf's outputs, by the path of the leaf.
        calls: the calls that were traced, by module or function, and then by a key of what they pass.
        obstacle: the innermost module whose trace has failed although it can be a leaf, with the error.
        names: the names of calls in traces.
        written: the attributes changed by leaves that forward has called so far, by module and name, each with the path of
            the leaf.
        arguments: the tensors among the arguments of the running call, with their paths, by the names of their proxies.
        announced: the classes of modules, and the functions, of which a warning has said that they run as they are.
    """

    def __init__(self, model: torch.nn.Module, *, automatic: bool = False) -> None:
        super().__init__()
        self.model, self.automatic = model, automatic
        self.output_like: dict[str, Callable[..., Any]] = {}
        self.calls: dict[Hashable, dict[Any, Any]] = {}
        self.obstacle: tuple[torch.nn.Module, BaseException] | None = None
        self.arguments: dict[str, tuple[Path, torch.Tensor]] = {}
        self.announced: set[Hashable] = set()
        self.names: set[str] = set()
        self.written: dict[tuple[torch.nn.Module, str], str] = {}

    def summary(self) -> list[str]:
        """Return the patterns of their paths, each with the class and the number of modules."""
        found = Counter((pattern_of(path), type(module).__name__) for module, path in self.items())
        return [f"{pattern} ({kind}, {count} times)" for (pattern, kind), count in found.items()]

    def parts(self) -> Iterator[torch.nn.Module]:
        """Yield all modules that run as they are."""
        for leaf in self:
            yield from leaf.modules()


def pattern_of(path: str) -> str:
    """Return a pattern for a module and those like it in other blocks: ``layers.*.mlp`` for ``layers.0.mlp``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
