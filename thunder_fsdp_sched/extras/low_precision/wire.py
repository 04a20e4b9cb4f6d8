"""The bytes of a bucket that travels encoded: for each rank its codes and scales, segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ...sizes import round_up
from .formats import Format, decode, decode_mean, encode, temporary_bytes

_ALIGNMENT = 16
"""Alignment (bytes) of codes and scales."""


class _Part(NamedTuple):
    """One segment of what a rank sends.

    Attributes:
        numel: elements of it that each rank owns.
        block: number of elements in a block; 1 for a cast.
        blocks: the last of them may be partly empty.
        codes: offset of the codes, in bytes.
        scales: offset of the scales.
    """

    form: Format
    numel: int
    block: int
    blocks: int
    codes: int
    scales: int

    def on(self, wire: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes and the scales, as views of ``(ranks, bytes)``."""
        codes = wire[:, self.codes : self.codes + self.code_bytes].view(self.form.dtype)
        scales = wire[:, self.scales : self.scales + self.scale_bytes].view(torch.float32)
        return codes.unflatten(1, (self.blocks, -1)), scales.unsqueeze(-1)

    @property
    def code_bytes(self) -> int:
        return self.blocks * self.block * self.form.dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        return self.blocks * torch.float32.itemsize if self.form.largest else 0


class Wire(NamedTuple):
    """The layout of what each rank sends.

    Attributes:
        parts: one for each segment that has elements.
        nbytes: bytes that each rank sends.
    """

    parts: tuple[_Part, ...]
    nbytes: int

    @classmethod
    def of(cls, segments: Iterable[tuple[int, Format]], block: int) -> Wire:
        """Return the layout for segments of which each rank owns so many elements, one after the other, aligned."""
        parts: list[_Part] = []
        end = 0
        for numel, form in segments:
            size = block if form.largest else 1
            part = _Part(form, numel, size, -(-numel // size), codes=end, scales=0)
            part = part._replace(scales=round_up(end + part.code_bytes, _ALIGNMENT))
            end = round_up(part.scales + part.scale_bytes, _ALIGNMENT)
            parts.append(part)
        return cls(tuple(parts), end)

    def encode(self, segments: Sequence[torch.Tensor], wire: torch.Tensor) -> None:
        """Fill ``wire``, ``(ranks, nbytes)``, with what so many ranks own of each segment, ``(ranks, elements)``."""
        for part, x in zip(self.parts, segments, strict=True):
            _each_run(encode, part, x, wire, fills_x=False)

    def decode(self, wire: torch.Tensor, segments: Sequence[torch.Tensor]) -> None:
        """Fill each segment, ``(ranks, elements)``, from ``wire``, ``(ranks, nbytes)``."""
        for part, out in zip(self.parts, segments, strict=True):
            _each_run(decode, part, out, wire, fills_x=True)

    def decode_mean(self, wire: torch.Tensor, segments: Sequence[torch.Tensor]) -> None:
        """Fill each segment of one rank, ``(1, elements)``, with the mean over ranks of what ``wire`` has of it."""
        for part, out in zip(self.parts, segments, strict=True):
            _each_run(decode_mean, part, out, wire, fills_x=True)

    def temporary_bytes(self, ranks: int, dtype: torch.dtype, *, decodes: bool = False, adds: bool = False) -> int:
        """Return the most bytes that a call of the methods above allocates and frees on a CPU.

        Args:
            ranks: the first dimension of segments.
            dtype: of segments.
            decodes: whether it is not :meth:`encode`.
            adds: whether it is :meth:`decode_mean`.
        """
        return max((_temporary(part, ranks, dtype, decodes, adds) for part in self.parts), default=0)


def _temporary(part: _Part, ranks: int, dtype: torch.dtype, decodes: bool, adds: bool) -> int:
    whole, rest = divmod(part.numel, part.block)
    of_whole, of_rest = (
        temporary_bytes(part.form, blocks * part.block, part.block, dtype, decodes=decodes, adds=adds)
        for blocks in (whole, 1)
    )
    return max(of_whole, bool(rest) * (of_rest + ranks * part.block * dtype.itemsize))


def _each_run(
    function: Callable[..., None], part: _Part, x: torch.Tensor, wire: torch.Tensor, *, fills_x: bool
) -> None:
    """Call a function for the whole blocks of ``x``, and for a padded copy of the last block if that is shorter."""
    codes, scales = part.on(wire)
    whole, rest = divmod(part.numel, part.block)
    if whole:
        blocks = x[:, : whole * part.block].unflatten(1, (whole, part.block))
        function(part.form, blocks, codes[:, :whole], scales[:, :whole])
    if rest:
        last = x.new_zeros(x.shape[0], 1, part.block)
        if not fills_x:
            last[:, 0, :rest] = x[:, -rest:]
        function(part.form, last, codes[:, whole:], scales[:, whole:])
        if fills_x:
            x[:, -rest:] = last[:, 0, :rest]
