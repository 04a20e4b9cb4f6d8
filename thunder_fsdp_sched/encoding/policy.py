"""Which formats parameters and gradients travel in: what users write."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .formats import GATHER_FORMATS, REDUCE_FORMATS


@dataclass(frozen=True)
class CommPolicy:
    """The formats in which parameters and gradients travel: an argument of ``fsdp``, beside ``MixedPrecisionPolicy``.

    Elements are rounded to nearest. What the model computes with is the decoded value; shards stay exact.

    Args:
        gather: the format of gathers: ``"bfloat16"``, ``"float8_e4m3fn"``, ``"int8"``, ``"mxfp8"`` (blocks of 32 with E8M0
            scales); ``None`` for the exact values in ``param_dtype``.
        reduce: the format of reductions: ``"bfloat16"``, ``"float8_e4m3fn"``, ``"int8"``, ``"int4"``; ``None`` for
            ``reduce_dtype``. Ranks exchange encoded gradients, decode them and add them up in float32, in the order of
            ranks, so ``"bfloat16"`` adds more precisely than ``reduce_dtype=torch.bfloat16``.
        block: number of elements that share a scale, even; ``"bfloat16"`` has no scales, ``"mxfp8"`` has blocks of its own.
        exempt: parameters that travel exactly: names of parameters or modules, or patterns such as ``"*.head.*"``.
        min_ndim: parameters with fewer dimensions (norms, biases) are exempt, too; 0 for none.
        error_feedback: whether each rank keeps what rounding its gradients has lost, and adds it to the next ones. It takes
            as many bytes as the unsharded gradients.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it and the choices.
    """

    gather: str | None = None
    reduce: str | None = None
    block: int = 128
    exempt: tuple[str, ...] = ()
    min_ndim: int = 2
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for name, known in (("gather", GATHER_FORMATS), ("reduce", REDUCE_FORMATS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                choices = ", ".join(map(repr, known))
                raise ValueError(f"CommPolicy: {name}: expected None, {choices}, got {value!r}")
        if isinstance(self.block, bool) or not isinstance(self.block, int):
            raise TypeError(f"CommPolicy: block: expected a number of elements (int), got {self.block!r}")
        if self.block <= 0 or self.block % 2:
            raise ValueError(f"CommPolicy: block: expected a positive, even number of elements, got {self.block}")
        exempt: Any = self.exempt
        if not isinstance(exempt, (list, tuple)) or not all(isinstance(name, str) for name in exempt):
            raise TypeError(f"CommPolicy: exempt: expected a list or tuple of names, got {exempt!r}")
        object.__setattr__(self, "exempt", tuple(exempt))
        if isinstance(self.min_ndim, bool) or not isinstance(self.min_ndim, int):
            raise TypeError(f"CommPolicy: min_ndim: expected a number of dimensions (int), got {self.min_ndim!r}")
        if not isinstance(self.error_feedback, bool):
            raise TypeError(f"CommPolicy: error_feedback: expected a bool, got {self.error_feedback!r}")
        if self.error_feedback and self.reduce is None:
            formats = ", ".join(map(repr, REDUCE_FORMATS))
            raise ValueError(f"CommPolicy: error_feedback: nothing is lost without reduce; choose one of {formats}")

    @property
    def encodes(self) -> bool:
        """Whether anything travels encoded."""
        return (self.gather, self.reduce) != (None, None)

    def exempts(self, names: Iterable[str], ndim: int) -> bool:
        """Return whether a parameter with these names and so many dimensions travels exactly."""
        return ndim < self.min_ndim or any(matches(pattern, name) for pattern in self.exempt for name in names)

    def __str__(self) -> str:
        default = CommPolicy()
        given = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return f"CommPolicy({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def matches(pattern: str, name: str) -> bool:
    """Return whether ``pattern`` is a parameter's name, the name of a module that contains it, or a pattern of its name."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)
