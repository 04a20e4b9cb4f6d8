"""The option for the formats in which parameters and gradients travel."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ... import option_checks as checks
from ...errors import coded_error
from ...option_groups import Option, OptionGroup, option
from ...plan.specs import BucketSpec
from .formats import FORMATS, Format, Wire


class CommPolicy(OptionGroup):
    """The formats in which parameters and gradients travel: an argument of ``fsdp`` like ``MixedPrecisionPolicy``.

    Elements are rounded to nearest. The model computes with decoded values; shards stay exact.

    Args:
        gather: the format of gathers, ``"bfloat16"`` or ``"int8"``; ``None`` for the exact values in
            ``param_dtype``.
        reduce: the format of reductions, one of the same; ``None`` for ``reduce_dtype``. Ranks exchange encoded gradients,
            decode them and add them up in float32, in the order of ranks, so ``"bfloat16"`` adds more precisely than
            ``reduce_dtype=torch.bfloat16``.
        block: number of elements that share a scale; ``"bfloat16"`` has no scales.
        exempt: parameters that travel exactly: names of parameters or modules, or patterns such as ``"*.head.*"``.
        min_ndim: parameters with fewer dimensions (norms, biases) are exempt, too; 0 for none.
        error_feedback: whether each rank keeps the rounding errors of its gradients, and adds them to the next ones.
            They take as many bytes as the unsharded gradients.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it and the choices.
    """

    gather: str | None = option(default=None, check=checks.one_of(*FORMATS, None))
    reduce: str | None = option(default=None, check=checks.one_of(*FORMATS, None))
    block: int = option(
        default=128, check=checks.is_a(int, "a number of elements (int)", checks.at_least(1, "elements"))
    )
    exempt: Option[list[str] | tuple[str, ...], tuple[str, ...]] = option(default=(), check=checks.names)
    min_ndim: int = option(default=2, check=checks.is_a(int, "a number of dimensions (int)"))
    error_feedback: bool = option(default=False, check=checks.flag)

    def __post_init__(self) -> None:
        if self.error_feedback and self.reduce is None:
            choices = ", ".join(map(repr, FORMATS))
            raise coded_error(ValueError, "option.comm-error-feedback-without-reduce", choices=choices)

    @property
    def encodes(self) -> bool:
        """Whether anything travels encoded."""
        return (self.gather, self.reduce) != (None, None)

    def exempts(self, names: Iterable[str], ndim: int) -> bool:
        """Return whether a parameter with these names and so many dimensions travels exactly."""
        return ndim < self.min_ndim or any(matches(pattern, name) for pattern in self.exempt for name in names)

    def check_exempt(self, names: Sequence[str]) -> None:
        """Check that each name in ``exempt`` is that of a parameter or a module.

        Args:
            names: the names of all parameters.

        Raises:
            ValueError: one is not.
        """
        for pattern in self.exempt:
            if not any(matches(pattern, name) for name in names):
                raise coded_error(
                    ValueError,
                    "option.comm-exempt-matches-nothing",
                    pattern=pattern,
                    names=", ".join(map(repr, names[:3])),
                )

    def in_dtype(self, computed: torch.dtype) -> CommPolicy | None:
        """Return the policy of parameters that are unsharded in this dtype; ``None`` if it encodes none of them."""
        if not computed.is_floating_point or not self.encodes:
            return None
        if self.gather == "bfloat16" and computed.itemsize <= 2:  # it would save no bytes
            return replace(self, gather=None).in_dtype(computed)
        return self

    def gather_wire(self, spec: BucketSpec) -> Wire | None:
        """Return the layout of the bytes that each rank sends to gather a bucket; ``None`` if it sends exact values."""
        return self._wire(spec, self.gather, spec.param_dtype)

    def reduce_wire(self, spec: BucketSpec) -> Wire | None:
        """Return the layout of the bytes that ranks exchange to reduce a bucket; ``None`` if the transport reduces.

        If only gathers are encoded, ``all_to_all`` also has one, so that all segments travel, exactly, in one exchange.
        """
        if self.reduce is None and self.gather is not None and spec.comm.transport == "all_to_all":
            return self._wire_of(spec, Format(spec.reduce_dtype), spec.reduce_dtype)
        return self._wire(spec, self.reduce, spec.reduce_dtype)

    def _wire(self, spec: BucketSpec, encoding: str | None, exact: torch.dtype) -> Wire | None:
        return None if encoding is None else self._wire_of(spec, FORMATS[encoding], exact)

    def _wire_of(self, spec: BucketSpec, encoded: Format, exact: torch.dtype) -> Wire:
        segments = [(s.shard_numel, Format(exact) if s.exempt else encoded) for s in spec.layout.segments]
        return Wire.of(
            [segment for segment in segments if segment[0]], self.block, on_gpu=spec.comm.computes_on == "cuda"
        )


def matches(pattern: str, name: str) -> bool:
    """Return whether ``pattern`` is a parameter's name, the name of a module that contains it, or a pattern of its name."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)
