"""One row of a step: see [Note: Rows] in ``rows``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from ...ir.analysis import Lifetime
from ...ir.effects import Effects
from .costs import Costs

Strides = Mapping[str, tuple[int, ...]]
"""Strides by name, of values that are not contiguous."""


class Row(NamedTuple):
    """One bound symbol of a step.

    Attributes:
        bsym: the bound symbol.
        trace: the index of its trace.
        position: its schedule position, where those of backward follow those of forward. That of the next row that has one
            if it has none.
        effects: its effects.
        costs: its costs on inputs with the strides that they have.
        strides: those of its inputs.
        args: the values that it reads, one for each operand.
        outs: the values that it defines.
        copied: the tensors that it copies, without those that are where it needs them, as gradients in a slot are.
    """

    bsym: BoundSymbol
    trace: int
    position: int
    effects: Effects
    costs: Costs
    strides: Strides
    args: tuple[Lifetime, ...] = ()
    outs: tuple[Lifetime, ...] = ()
    copied: tuple[TensorProxy, ...] = ()


def device_of(proxy: object) -> str:
    """Return the type of the device of a value."""
    return proxy.device.type if isinstance(proxy, (TensorProxy, FutureTensorProxy)) else "cpu"
