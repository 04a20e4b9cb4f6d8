"""The rows of a step: each bound symbol of its traces with its effects, its costs and its values, read once.

[Note: Rows]
All predictions go over the rows of a :class:`StepRows`: when a statement runs, which memory is live, which slot is in
use, which communication is exposed, what backward may recompute. ``planning.simulate`` computes times from them,
``value_memory`` bytes, and pictures and tables show these results.

[Note: Observed strides]
A result's memory may depend on strides (a reshape copies a transposed tensor), so an operator is observed with the
strides that earlier operators have returned. A bound symbol keeps the observation for each choice of strides.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ...ir.analysis import Analysis
from ...ir.effects import effects, is_declared
from ...ir.inspection import UNPACKING, args_of, defined_by, is_statement, nbytes_of
from ...ir.operator_facts import facts_of, observed_call, tensors_read, tensors_returned
from ...ir.symbols import LEAF
from ...private_thunder import OBSERVED_COSTS
from .costs import Allocation, Costs, Row, Strides, device_of
from .symbol_costs import costs


class StepRows(Analysis):
    """Traces that run one after the other, as rows: see [Note: Rows]."""

    def __init__(self, *traces: Sequence[BoundSymbol] | TraceCtx) -> None:
        super().__init__(*traces)
        parts = [trace.bound_symbols if isinstance(trace, TraceCtx) else trace for trace in traces]
        self.begins = list(itertools.accumulate(map(len, parts[:-1]), initial=0))
        """The number of rows before each trace."""

    @cached_property
    def rows(self) -> list[Row]:
        return list(self._read_rows())

    @property
    def rows_of_forward(self) -> int:
        """The number of rows of the first trace, after which the positions of backward begin."""
        return [*self.begins, len(self.bsyms)][1]

    @cached_property
    def statements(self) -> list[Row]:
        """The rows that have schedule positions."""
        return [row for row in self.rows if is_statement(row.bsym)]

    def _read_rows(self) -> Iterator[Row]:
        strides: dict[str, tuple[int, ...]] = {}
        in_place: set[str] = set()  # gradients in the slot of their reduction
        position = 0
        for at, bsym in enumerate(self.bsyms):
            e, of_inputs = self.effects[at], {name: strides[name] for name in args_of(bsym) if name in strides}
            c = observed_costs(bsym, of_inputs)
            copied: Iterable[Any] = bsym.flat_proxy_args if c.work is not None and c.work.touches else ()
            tensors = tuple(p for p in copied if type(p) is TensorProxy and p.name not in in_place)
            trace = bisect.bisect_right(self.begins, at) - 1
            yield Row(bsym, trace, position, e, c, of_inputs, self.args[at], self.outs[at], tensors)
            if e.fills is not None:
                in_place.update(e.in_place)
            position += is_statement(bsym)
            for out in () if bsym.sym.id in UNPACKING else defined_by(bsym):  # perhaps saved by an earlier trace
                known = c.strides.get(out.name) or strides.get(c.layouts.get(out.name, ""))
                if known is None:
                    strides.pop(out.name, None)
                else:
                    strides[out.name] = known


def declared_rows(bsyms: Iterable[BoundSymbol | None]) -> list[Row]:
    """Return the rows of the symbols of this package alone, without values; ``None`` stands for another symbol."""
    return [Row(b, 0, 0, effects(b), costs(b), {}) for b in bsyms if b is not None and is_declared(b.sym)]


def observed_costs(bsym: BoundSymbol, strides: Strides) -> Costs:
    """Return the costs of a bound symbol, with the views that it returns and the memory that it allocates.

    Args:
        strides: strides by name, of inputs that are not contiguous. They change the costs only of other packages'
            operators.
    """
    if is_declared(bsym.sym) or bsym.sym.id in UNPACKING or bsym.sym.id in (PrimIDs.DEL, PrimIDs.RETURN):
        return costs(bsym)
    observed: dict[Any, Costs] = vars(bsym).setdefault(OBSERVED_COSTS, {})
    key = tuple([strides.get(name) for name in args_of(bsym)])
    if key not in observed:
        observed[key] = _observed(bsym, strides)
    return observed[key]


def _observed(bsym: BoundSymbol, strides: Strides) -> Costs:
    """Return the costs of another package's operator, for inputs with these strides."""
    facts, call = facts_of(bsym), observed_call(bsym, strides)
    inputs, outs, by_name = tensors_read(bsym), tensors_returned(bsym), {p.name: p for p in bsym.flat_proxy_args}
    views: dict[str, tuple[str, ...]] = {}
    found: dict[str, tuple[int, ...]] = {}
    memory = []
    leaf = bsym.args[0] if bsym.sym.name.startswith(LEAF) else None
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
    if leaf is not None:
        flops = leaf.flops_of(bsym.sym.name)
        for state in [out for out in defined_by(bsym) if not isinstance(out, TensorProxy)]:  # its autograd graph
            inputs_and_outputs = (*bsym.args[1 : 1 + len(leaf.inputs)], *bsym.flat_proxy_outs)
            views[state.name] = tuple(inputs_and_outputs[number].name for number in sorted(leaf.kept))
            memory.append(Allocation(state.name, leaf.saved_bytes, leaf.outputs[0].device.type, kind="values"))
        temporary = leaf.bytes_of(bsym.sym.name) - sum(
            nbytes_of(out) for out in defined_by(bsym) if isinstance(out, TensorProxy)
        )
        memory.append(
            Allocation(None, max(temporary, 0), leaf.outputs[0].device.type, "call", "temporaries", bsym.sym.name)
        )
    return Costs(views=views, strides=found, operators=operators, flops=flops, allocates=tuple(memory))


def _may_be_view(value: object, base: object) -> bool:
    """Return whether a value has the dtype and device of ``base``, of which its operator may return a view."""
    return (
        isinstance(value, TensorProxy)
        and isinstance(base, TensorProxy)
        and (value.dtype, value.device) == (base.dtype, base.device)
    )
