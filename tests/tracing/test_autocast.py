"""Calls after ``torch.autocast``: they compute in full precision, and are compiled as fast as before."""

from __future__ import annotations

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from models import Stack
from ranks import on_ranks


@pytest.mark.parametrize("cache", ["constant values", "no caching"])
@on_ranks(2)
def test_calls_after_autocast_compute_in_full_precision(cache: str) -> None:
    torch.manual_seed(0)
    model, reference = Stack(1), Stack(1)
    reference.load_state_dict(model.state_dict())
    transform = fsdp()
    jitted = thunder.jit(model, transforms=[transform], cache=cache)
    x = torch.randn(6, 4)

    def check(x: torch.Tensor) -> None:
        output, expected = jitted(x), reference(x)
        assert output.dtype is expected.dtype
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)

    for _ in range(1 if cache == "no caching" else 2):  # without a cache, the second round compiles the same again
        with torch.autocast("cpu", torch.bfloat16):
            assert jitted(x).dtype is torch.bfloat16
        check(x)
        check(x[:3])
        with torch.no_grad():
            check(x)
        jitted(x).sum().backward()
        reference(x).sum().backward()
        for own, param in zip(jitted.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), param.grad, rtol=1e-5, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            check(x[:2])


def test_modes_after_autocast_share_a_joint_trace_and_repeat_modules(one_rank: None) -> None:
    transform = fsdp()
    model = thunder.jit(Stack(3), transforms=[transform])
    x = torch.randn(6, 4)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
    model(x)
    with model.no_sync():
        model(x)
    assert [compiled.shares for compiled in transform.compiled] == [None, None, 1]
    assert transform._repetition.repeated > 0
    assert not transform._repetition.refused
