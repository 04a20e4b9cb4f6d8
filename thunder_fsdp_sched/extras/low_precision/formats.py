"""The formats, the encoding and decoding of blocks of elements, and the bytes of a bucket that travels encoded.

[Note: Formats]
A format with scales divides a rank's elements into blocks. The largest magnitude of a block is mapped to the largest code,
and the others in proportion, rounded to nearest (half to even), so a code is off by at most half a scale. Scales are
float32.

An infinity or a NaN makes the scale of its block infinite or NaN, and with it every decoded element of that block: no
overflow gets lost on its way to a check such as that of ``GradScaler``.

[Note: Wires]
A rank sends a bucket as a run of bytes: its codes and scales, segment by segment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from ...plan.layout import round_up


class Format(NamedTuple):
    """One format.

    Attributes:
        dtype: the dtype of codes.
        largest: the largest magnitude of a code; 0 for a cast, which has no scales.
    """

    dtype: torch.dtype
    largest: float = 0.0


FORMATS: dict[str, Format] = {
    "bfloat16": Format(torch.bfloat16),
    "int8": Format(torch.int8, 127.0),
}

_SMALLEST = torch.finfo(torch.float32).tiny
"""The smallest scale: below it, dividing by a scale would overflow."""

_CHUNK = 1 << 18
"""Elements that a CPU encodes or decodes at once, so that intermediate results stay in its cache."""


def encode(form: Format, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Encode blocks.

    Args:
        x: ``(ranks, blocks, block)`` elements, floating point.
        codes: ``(ranks, blocks, block)``, to be filled.
        scales: ``(ranks, blocks, 1)``, to be filled; unused by a cast.
    """
    if not form.largest:
        codes.copy_(x)
    elif x.device.type == "cuda":
        # Codes and scales are views of the same bytes in different dtypes, which no compiled function may write.
        own = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (codes, scales)]
        _each(_encode, form, x, *own)
        codes.copy_(own[0])
        scales.copy_(own[1])
    else:
        _each(_encode, form, x, codes, scales)


def decode(form: Format, out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill ``out`` with decoded blocks; shapes as in :func:`encode`."""
    if not form.largest:
        out.copy_(codes)
    else:
        _each(_decode, form, out, codes, scales)


def decode_mean(form: Format, out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill ``out``, ``(1, blocks, block)``, with the mean over ranks of decoded blocks, added up in the order of ranks."""
    codes, scales = codes.transpose(0, 1)[None], scales.transpose(0, 1)[None]
    _each(_decode_mean, form, out, codes, scales if form.largest else codes)


def _each(function: Callable[..., None], form: Format, *tensors: torch.Tensor) -> None:
    """Call a function of blocks: on a GPU compiled and once, on a CPU for chunks."""
    if tensors[0].device.type == "cuda":
        _compiled(function, form, _kind(tensors))(form, *tensors)
        return
    step = max(1, _CHUNK // max(tensor.shape[-1] for tensor in tensors))
    for of_rank in zip(*tensors, strict=True):
        for chunk in zip(*(tensor.split(step) for tensor in of_rank), strict=True):
            function(form, *chunk)


def _kind(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return facts for which torch compiles again although sizes are dynamic: dtypes, sizes of 1, equal sizes."""
    sizes = [size for tensor in tensors for size in tensor.shape]
    equal = tuple(0 if size == 1 else sizes.index(size) + 1 for size in sizes)
    return equal, tuple((tensor.dtype, tensor.is_contiguous()) for tensor in tensors)


@functools.cache
def _compiled(
    function: Any, form: Format, kind: tuple[Any, ...] = (), backend: str = "inductor"
) -> Callable[..., None]:
    # Each kind of arguments has a copy of the code, because torch limits how often one code object is compiled. Beyond that
    # limit, it would run uncompiled; fullgraph makes that an error.
    own = FunctionType(function.__code__.replace(), function.__globals__)
    return torch.compile(own, dynamic=True, fullgraph=True, backend=backend)


def _encode(form: Format, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    scale = scales.copy_(_magnitude(x).div_(form.largest).clamp_(min=_SMALLEST))
    scaled = torch.div(x, scale, out=torch.empty(x.shape, dtype=torch.float32, device=x.device))
    codes.copy_(scaled.round_())


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each block; NaN if there is one."""
    return torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)).float()


def _decode(form: Format, out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    x = out if out.dtype is torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    _decode_into(x, form, codes, scales)
    if x is not out:
        out.copy_(x)


def _decode_mean(form: Format, out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Add up in the order of ranks, the last dimension but one of codes and scales."""
    world_size, dtype = codes.shape[-2], sum_dtype(form)
    total = out if out.dtype is dtype else torch.empty(out.shape, dtype=dtype, device=out.device)
    _decode_into(total, form, codes.select(-2, 0), scales.select(-2, 0))
    if not form.largest:
        for rank in range(1, world_size):
            total += codes.select(-2, rank)
    elif world_size > 1:
        x = torch.empty(out.shape, dtype=dtype, device=out.device)
        for rank in range(1, world_size):
            _decode_into(x, form, codes.select(-2, rank), scales.select(-2, rank))
            total += x
    total.div_(world_size)
    if total is not out:
        out.copy_(total)


def _decode_into(x: torch.Tensor, form: Format, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill ``x``, of the dtype of sums, with decoded blocks."""
    x.copy_(codes)
    if form.largest:
        x *= scales


def sum_dtype(form: Format) -> torch.dtype:
    """Return the dtype in which ranks add up values that travel in a format."""
    return torch.float64 if form.dtype is torch.float64 else torch.float32


def bytes_on_gpu(form: Format, numel: int, block: int, *, decodes: bool) -> int:
    """Return the bytes that encoding or decoding ``numel`` elements takes on a GPU: see :func:`encode`."""
    if decodes or not form.largest:
        return 0
    return numel * form.dtype.itemsize + numel // block * torch.float32.itemsize


def temporary_bytes(form: Format, numel: int, block: int, dtype: torch.dtype, *, decodes: bool, adds: bool) -> int:
    """Return the peak of the bytes that encoding or decoding allocates and frees on a CPU.

    Args:
        numel: elements of the longest run, whole blocks.
        dtype: the dtype of the elements before encoding.
        decodes: whether they are decoded.
        adds: whether those of several ranks are added up.
    """
    if not (form.largest or adds):
        return 0
    chunk = min(numel, max(1, _CHUNK // block) * block)
    blocks = chunk // block
    own = sum_dtype(form) if adds else torch.float32
    nbytes = chunk * own.itemsize * (not decodes or dtype is not own)
    if not form.largest:
        return nbytes
    nbytes += chunk * own.itemsize * adds
    return nbytes if decodes else max(nbytes, 3 * blocks * dtype.itemsize)


_ALIGNMENT = 16
"""Alignment (bytes) of codes and scales."""


class _Part(NamedTuple):
    """The layout of one segment of the bytes that a rank sends.

    Attributes:
        numel: elements of the segment that each rank owns.
        block: number of elements in a block; 1 for a cast.
        blocks: number of blocks, of which the last may be partly empty.
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
    """The layout of the bytes that each rank sends.

    Attributes:
        parts: the layout of each segment that has elements.
        nbytes: bytes that each rank sends.
        on_gpu: whether it is encoded and decoded by compiled kernels.
    """

    parts: tuple[_Part, ...]
    nbytes: int
    on_gpu: bool = False

    @classmethod
    def of(cls, segments: Iterable[tuple[int, Format]], block: int, *, on_gpu: bool = False) -> Wire:
        """Return the layout for segments, given by the elements that each rank owns; they are aligned."""
        parts: list[_Part] = []
        end = 0
        for numel, form in segments:
            size = block if form.largest else 1
            part = _Part(form, numel, size, -(-numel // size), codes=end, scales=0)
            part = part._replace(scales=round_up(end + part.code_bytes, _ALIGNMENT))
            end = round_up(part.scales + part.scale_bytes, _ALIGNMENT)
            parts.append(part)
        return cls(tuple(parts), end, on_gpu)

    def encode(self, segments: Sequence[torch.Tensor], wire: torch.Tensor) -> None:
        """Encode each segment, ``(ranks, elements)``, into ``wire``, ``(ranks, nbytes)``."""
        for part, x in zip(self.parts, segments, strict=True):
            _each_run(encode, part, x, wire, fills_x=False)

    def decode(self, wire: torch.Tensor, segments: Sequence[torch.Tensor]) -> None:
        """Fill each segment, ``(ranks, elements)``, from ``wire``, ``(ranks, nbytes)``."""
        for part, out in zip(self.parts, segments, strict=True):
            _each_run(decode, part, out, wire, fills_x=True)

    def decode_mean(self, wire: torch.Tensor, segments: Sequence[torch.Tensor]) -> None:
        """Fill each segment of one rank, ``(1, elements)``, with the mean over ranks of its values in ``wire``."""
        for part, out in zip(self.parts, segments, strict=True):
            _each_run(decode_mean, part, out, wire, fills_x=True)

    def temporary_bytes(self, ranks: int, dtype: torch.dtype, *, decodes: bool = False, adds: bool = False) -> int:
        """Return the peak of the bytes that a call of the methods above allocates and frees.

        Args:
            ranks: the first dimension of segments.
            dtype: the dtype of segments.
            decodes: whether it is not :meth:`encode`.
            adds: whether it is :meth:`decode_mean`.
        """

        def of_run(part: _Part, blocks: int) -> int:
            form, numel = part.form, blocks * part.block
            if self.on_gpu:
                return bytes_on_gpu(form, ranks * numel, part.block, decodes=decodes)
            return temporary_bytes(form, numel, part.block, dtype, decodes=decodes, adds=adds)

        return max((_temporary(part, ranks, dtype, of_run) for part in self.parts), default=0)


def _temporary(part: _Part, ranks: int, dtype: torch.dtype, of_run: Callable[[_Part, int], int]) -> int:
    whole, rest = divmod(part.numel, part.block)
    of_whole, of_rest = (of_run(part, blocks) for blocks in (whole, 1))
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
