"""The compiled encoders of a GPU, run here without a compiler of kernels, give the same bits as those of a CPU."""

from __future__ import annotations

from thunder_fsdp_sched.extras.low_precision import formats
from thunder_fsdp_sched.extras.low_precision.formats import FORMATS

import pytest
import torch
from profiles import LONG_ONLY


@pytest.mark.parametrize("name", ["int8", pytest.param("float8_e4m3fn", marks=LONG_ONLY)])
def test_compiled_functions_give_the_same_bits(name: str) -> None:
    form = FORMATS[name]
    block = 128
    x = torch.randn(2, 6, block, generator=torch.Generator().manual_seed(0))

    def all_bits(*, compiled: bool) -> list[torch.Tensor]:
        def call(function, *tensors):
            (formats._compiled(function, form, backend="aot_eager") if compiled else function)(form, *tensors)

        codes = torch.zeros(2, 6, block, dtype=form.dtype)
        scales = torch.zeros(2, 6, 1, dtype=torch.float32)
        decoded, mean = torch.empty_like(x), torch.empty(6, block)
        call(formats._encode, x, codes, scales)
        call(formats._decode, decoded, codes, scales)
        call(formats._decode_mean, mean, codes.transpose(0, 1), scales.transpose(0, 1))
        return [codes.view(torch.uint8), scales, decoded, mean]

    for eager, compiled in zip(all_bits(compiled=False), all_bits(compiled=True), strict=True):
        assert torch.equal(eager, compiled)
