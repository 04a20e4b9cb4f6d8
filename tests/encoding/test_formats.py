"""Formats on the wire: errors within their bounds, bits of a slow reference, and what is not finite stays so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

from thunder_fsdp_sched.extras.low_precision import formats
from thunder_fsdp_sched.extras.low_precision.formats import FORMATS, Wire

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import quiet

EXACT = FORMATS["bfloat16"]._replace(dtype=torch.float64)
INT8 = FORMATS["int8"]
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BLOCKS = (3, 4, 6, 32, 128, 1000)


def send(form: Any, x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, Wire]:
    """Encode the elements of some ranks, ``(ranks, elements)``, and return the bytes and what is decoded."""
    wire = Wire.of([(x.shape[1], form)], block)
    sent = torch.full((x.shape[0], wire.nbytes), 0xA5, dtype=torch.uint8)
    wire.encode([x], sent)
    decoded = torch.full_like(x, math.nan)
    wire.decode(sent, [decoded])
    return sent, decoded, wire


def slowly_decoded(form: Any, sent: torch.Tensor, wire: Wire, dtype: torch.dtype) -> torch.Tensor:
    """Decode one element after the other, from bytes at offsets that are computed here."""
    [part] = wire.parts
    rows = []
    for of_rank in sent:
        codes = of_rank[part.codes : part.codes + part.code_bytes]
        scales = of_rank[part.scales : part.scales + part.scale_bytes].view(torch.float32)
        elements = []
        for index in range(part.numel):
            block = index // part.block
            code = codes.view(form.dtype)[index].float()
            elements.append((code * scales[block] if form.largest else code).to(dtype))
        rows.append(torch.stack(elements))
    return torch.stack(rows)


def drawn(shape: Sequence[int], seed: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "many magnitudes":
        x *= 10.0 ** torch.randint(-12, 12, shape, generator=generator)
    elif kind == "subnormal":
        x *= 2.0**-130
    elif kind == "large":
        x = x.clamp(-3, 3) * 2.0**126
    elif kind == "sparse":
        x *= torch.rand(shape, generator=generator) < 0.1
    return x.to(dtype)


KINDS = ("normal", "many magnitudes", "subnormal", "large", "sparse", "zero")
CASES = st.tuples(
    st.integers(1, 3), st.integers(1, 300), st.sampled_from(BLOCKS), st.sampled_from(DTYPES), st.sampled_from(KINDS)
)


def check_bounds(name: str, x: torch.Tensor, decoded: torch.Tensor, scales: torch.Tensor) -> None:
    """Check the bound of a format."""
    form, exact = FORMATS[name], x.double()
    error = (decoded.double() - exact).abs()
    rounded = exact.abs() * 2.0**-8 if x.dtype is torch.bfloat16 else exact.abs() * 2.0**-22  # of what is decoded
    if not form.largest:
        bound = exact.abs() * 2.0**-8 + 2.0**-134  # half a unit in the last place
    else:
        bound = scales.double() / 2 + rounded
    assert (error <= bound).all(), (name, (error / bound).max())


@pytest.mark.parametrize("name", FORMATS)
def test_errors_are_within_the_bound_and_bits_those_of_a_slow_reference(name: str) -> None:
    form = FORMATS[name]

    @quiet(40)
    @given(CASES, st.integers(0, 2**30))
    def check(case: tuple[int, int, int, torch.dtype, str], seed: int) -> None:
        ranks, numel, block, dtype, kind = case
        x = drawn((ranks, numel), seed, dtype, kind) if kind != "zero" else torch.zeros(ranks, numel, dtype=dtype)
        sent, decoded, wire = send(form, x, block)
        [part] = wire.parts
        scales = part.on(sent)[1].expand(-1, -1, part.block).reshape(ranks, -1)[:, :numel]
        check_bounds(name, x, decoded, scales)
        assert kind != "zero" or not decoded.any()
        if numel <= 100:
            assert torch.equal(decoded, slowly_decoded(form, sent, wire, dtype))

    check()


def test_chunks_are_decoded_as_the_whole() -> None:
    x = torch.randn(2, (1 << 16) + 4173)
    _, decoded, _ = send(INT8, x, 128)
    for begin in range(0, x.shape[1], 1 << 15):
        piece = slice(begin, begin + (1 << 15))
        assert torch.equal(send(INT8, x[:, piece].contiguous(), 128)[1], decoded[:, piece])


def test_a_cpu_that_flushes_subnormal_numbers_encodes_and_decodes_the_same() -> None:
    x = torch.randn(3, 2048)
    x = torch.cat([x, torch.randn(3, 100).exp(), x * 2.0**-100], 1)

    def sent_and_decoded() -> tuple[torch.Tensor, ...]:
        sent, decoded, wire = send(INT8, x, 128)
        mean = torch.empty(1, x.shape[1])
        wire.decode_mean(sent, [mean])
        return sent, decoded, mean

    expected = sent_and_decoded()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        flushed = sent_and_decoded()
    finally:
        torch.set_flush_denormal(False)
    assert all(map(torch.equal, flushed, expected))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_stays_so_and_leaves_other_blocks_alone(name: str, dtype: torch.dtype, bad: float) -> None:
    form, x = FORMATS[name], torch.randn(2, 40).to(dtype)
    block = 32
    clean, at = send(form, x, block)[1], 33  # in the last block, partly filled
    x[1, at] = bad
    decoded = send(form, x, block)[1]
    assert not decoded[1, at].isfinite()
    own = torch.zeros(2, 40, dtype=torch.bool)
    own[1, (at // block * block if form.largest else at) : (at // block + 1) * block if form.largest else at + 1] = True
    assert not decoded[own].isfinite().any()
    assert torch.equal(decoded[~own], clean[~own])


@pytest.mark.parametrize("name", [*FORMATS, "exact"])
def test_means_are_added_up_in_float32_in_the_order_of_ranks(name: str) -> None:
    form = FORMATS.get(name, EXACT)
    for ranks, numel, dtype in ((1, 9, torch.float32), (3, 77, torch.float64), (5, 130, torch.bfloat16)):
        if name == "exact" and dtype is not torch.float64:
            continue
        x = drawn((ranks, numel), ranks, dtype, "many magnitudes")
        sent, _, wire = send(form, x, 32)
        mean = torch.full((1, numel), math.nan, dtype=dtype)
        wire.decode_mean(sent, [mean])
        decoded = [torch.full((1, numel), 0.0, dtype=torch.float64 if name == "exact" else torch.float32)]
        total = torch.zeros_like(decoded[0])
        for rank in range(ranks):
            wire.decode(sent[rank : rank + 1], decoded)
            total = decoded[0].clone() if rank == 0 else total + decoded[0]
        assert torch.equal(mean, (total / ranks).to(dtype))


def all_at_once(function: Any, form: Any, *tensors: torch.Tensor) -> None:
    function(form, *tensors)


def compiled(function: Any, form: Any, *tensors: torch.Tensor) -> None:
    """Call a function as on a GPU, but without a compiler of kernels."""
    own = [tensor.clone() for tensor in tensors]  # none that shares bytes with one of another dtype
    formats._compiled(function, form, backend="aot_eager")(form, *own)
    for tensor, value in zip(tensors, own, strict=True):
        tensor.copy_(value)


# Whole blocks, which are compiled once.
@pytest.mark.parametrize(("gpu", "numel"), [(all_at_once, 300), (compiled, 320)])
def test_all_blocks_at_once_as_on_a_gpu_have_the_bits_of_chunks(gpu: Any, numel: int) -> None:
    x, results = torch.randn(3, numel), []
    for each in (formats._each, gpu):
        with mock.patch.object(formats, "_each", each):
            sent, decoded, wire = send(INT8, x, 32)
            wire.decode_mean(sent, [mean := torch.empty(1, numel)])
        results.append((sent, decoded, mean))
    assert all(map(torch.equal, *results))


def test_segments_follow_each_other_aligned_and_do_not_overlap() -> None:
    segments = [(5, FORMATS["int8"]), (3, EXACT), (33, FORMATS["bfloat16"]), (1, FORMATS["int8"])]
    wire, x = Wire.of(segments, 4), [torch.randn(2, numel).double() for numel, _ in segments]
    end = 0
    for part in wire.parts:
        assert end <= part.codes < end + 16 and part.codes % 16 == part.scales % 16 == 0
        assert part.codes + part.code_bytes <= part.scales
        end = part.scales + part.scale_bytes
    assert end <= wire.nbytes < end + 16
    sent, out = torch.empty(2, wire.nbytes, dtype=torch.uint8), [torch.empty_like(one) for one in x]
    wire.encode(x, sent)
    wire.decode(sent, out)
    assert all(torch.equal(send(form, one, 4)[1], o) for one, o, (_, form) in zip(x, out, segments, strict=True))
    assert torch.equal(out[1], x[1])


def test_a_wire_needs_the_documented_bytes() -> None:
    shares = [Wire.of([(1 << 20, form)], 128).nbytes / (4 << 20) for form in FORMATS.values()]
    assert shares == [0.5, 0.2578125]
