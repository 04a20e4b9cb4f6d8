"""Operators of executors that users register: what they share memory with is observed, or declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched.ir.operator_facts import facts_of

import pytest
import thunder
import torch
from coded import coded
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor

executor = thunder.extend.OperatorExecutor("operators_of_a_user")
_kept = torch.zeros(4, 4)


def doubled(x: Tensor, w: Tensor) -> Tensor:
    return x * 2 + w


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return w.t()


def into_kept_memory(x: Tensor, w: Tensor) -> Tensor:
    return torch.mul(x, w, out=_kept)


def kept_memory(x: Tensor, w: Tensor) -> Tensor:
    return _kept


def by_address(x: Tensor, w: Tensor) -> Tensor:
    assert x.data_ptr()  # as kernels of other languages need it; fake tensors have none
    return x * w


def facts(function: Callable[..., Tensor], name: str, **declared: Any) -> tuple[tuple[str, ...], bool, bool]:
    symbol = executor.register_operator(name, meta=lambda x, w: TensorProxy(like=x), fn=function)
    if declared:
        tfs.declare_operator(symbol, **declared)
    trace = TraceCtx()
    with tracectx(trace):
        x, w = (
            TensorProxy(n, shape=(4, 4), device=thunder.devices.cpu, dtype=thunder.float32, requires_grad=False)
            for n in ("x", "w")
        )
        symbol(x, w)
    found = facts_of(trace.bound_symbols[-1])
    (out,) = (p.name for p in trace.bound_symbols[-1].flat_proxy_outs)
    return found.aliases.get(out, ()), found.pure, found.known


def test_functions_of_users_are_observed_and_not_taken_for_pure() -> None:
    assert facts(doubled, "doubled") == ((), False, True)
    assert facts(transposed, "transposed") == (("w",), False, True)


@pytest.mark.parametrize("function", [into_kept_memory, kept_memory, by_address])
def test_functions_that_keep_memory_or_read_addresses_are_unknown(function: Callable[..., Tensor]) -> None:
    assert facts(function, function.__name__) == (("x", "w"), False, False)


def test_operators_can_be_declared() -> None:
    assert facts(by_address, "declared_pure", pure=True) == ((), True, True)
    assert facts(by_address, "declared_view", views=True) == (("x", "w"), False, True)
    with pytest.raises(TypeError, check=coded("trace.symbol-not-registered")):
        tfs.declare_operator(torch.mul)  # type: ignore[arg-type]
    with pytest.raises(TypeError, check=coded("trace.symbol-not-registered")):
        tfs.declare_operator(thunder.torch.layer_norm)
    symbol = executor.register_operator("badly_declared", like=thunder.torch.sin, fn=torch.sin)
    with pytest.raises(TypeError, check=coded("trace.operator-fact-not-bool", "pure", "no")):
        tfs.declare_operator(symbol, pure="no")  # type: ignore[arg-type]
