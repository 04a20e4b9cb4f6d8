"""Effects of operators on inputs with the strides that they have.

A result's memory may depend on strides (a reshape copies a transposed tensor), so an operator is observed with the strides
that earlier operators have returned. A bound symbol keeps what was observed for each choice of strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from thunder.core.prims import PrimIDs
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from ...ir.effects import Allocation, Effects, effects, is_declared
from ...ir.inspection import UNPACKING, args_of, defined_by, nbytes_of
from ...ir.operator_facts import facts_of, observed_call, tensors_read, tensors_returned
from ...private_thunder import OBSERVED_EFFECTS


def observed_effects(bsym: BoundSymbol, strides: Mapping[str, tuple[int, ...]]) -> Effects:
    """Return the effects of a bound symbol with the views that it returns and the memory that it allocates.

    Args:
        strides: strides by name, of inputs that are not contiguous. They change the effects of operators that are not ours
            only.
    """
    kept = effects(bsym)
    if is_declared(bsym.sym) or bsym.sym.id in UNPACKING or bsym.sym.id in (PrimIDs.DEL, PrimIDs.RETURN):
        return kept
    observed: dict[Any, Effects] = vars(bsym).setdefault(OBSERVED_EFFECTS, {})
    key = tuple([strides.get(name) for name in args_of(bsym)])
    if key not in observed:
        observed[key] = _observed(bsym, kept, strides)
    return observed[key]


def observed(bsyms: Iterable[BoundSymbol]) -> Iterator[tuple[Effects, dict[str, tuple[int, ...]]]]:
    """Yield the effects of each bound symbol on inputs with the strides that they have, and the strides of these inputs.

    Strides are those that the bound symbols before it have returned, by name. Values without are contiguous.
    """
    strides: dict[str, tuple[int, ...]] = {}
    for bsym in bsyms:
        e = observed_effects(bsym, strides)
        yield e, strides
        for out in () if bsym.sym.id in UNPACKING else defined_by(bsym):  # perhaps saved by an earlier trace
            known = e.strides.get(out.name) or strides.get(e.layouts.get(out.name, ""))
            if known is None:
                strides.pop(out.name, None)
            else:
                strides[out.name] = known


def _observed(bsym: BoundSymbol, known: Effects, strides: Mapping[str, tuple[int, ...]]) -> Effects:
    """Return the effects of an operator that is not ours, on inputs with these strides."""
    facts, call = facts_of(bsym), observed_call(bsym, strides)
    inputs, outs, by_name = tensors_read(bsym), tensors_returned(bsym), {p.name: p for p in bsym.flat_proxy_args}
    views: dict[str, tuple[str, ...]] = {}
    found: dict[str, tuple[int, ...]] = {}
    memory = []
    for out in defined_by(bsym):
        nbytes = nbytes_of(out) if isinstance(out, TensorProxy) else 0
        if call is not None and out.name in outs:
            index = outs.index(out.name)
            first, nbytes = call.storages[index]
            if (of_out := call.strides[index]) is not None:
                found[out.name] = of_out
            of = tuple(inputs[i] for i in sorted(call.aliases[index])) or (outs[first],) * (first != index)
            is_new = not of
        else:
            of = tuple(name for name in facts.aliases.get(out.name, ()) if _may_be_view(out, by_name[name]))
            is_new = not (of and facts.known)
        views[out.name] = of
        if is_new:
            memory.append(Allocation(out.name, nbytes, device_of(out), kind="values"))
    if call is not None and call.temporary_bytes:
        tensors = (p for p in (*bsym.flat_proxy_outs, *bsym.flat_proxy_args) if isinstance(p, TensorProxy))
        device = next(map(device_of, tensors), "cpu")
        memory.append(Allocation(None, call.temporary_bytes, device, "call", "temporaries", bsym.sym.name))
    operators, flops = (None, None) if call is None else (call.operators, call.flops)
    return replace(known, views=views, strides=found, operators=operators, flops=flops, allocates=tuple(memory))


def device_of(proxy: object) -> str:
    """Return the type of the device of a value."""
    return proxy.device.type if isinstance(proxy, (TensorProxy, FutureTensorProxy)) else "cpu"


def _may_be_view(value: object, base: object) -> bool:
    """Return whether dtype and device allow that a value, whose operator may return a view of ``base``, is one."""
    return (
        isinstance(value, TensorProxy)
        and isinstance(base, TensorProxy)
        and (value.dtype, value.device) == (base.dtype, base.device)
    )
