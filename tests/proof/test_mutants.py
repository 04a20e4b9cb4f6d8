"""Mutants of sorted traces: the proof refuses those that compute wrong values.

The oracle is ``slot_executor``, which knows nothing of the proof. Values are random, so two different ones are not equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thunder_fsdp_sched import VerificationError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from internals import assign_slots, is_declared, sort_communication, verify, verify_again, write_grads_in_place
from random_models import quiet
from random_traces import LIMITS, inputs_of, traces
from slot_executor import SlotExecutor
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

KINDS = ("swap", "move", "drop", "double", "slot", "operand", "operands", "results")


@dataclass
class Mutant:
    """A sorted trace, and one of its copies with one change."""

    kind: str
    trace: TraceCtx
    mutated: TraceCtx


@st.composite
def mutants(draw: Any, kinds: tuple[str, ...] = KINDS) -> Mutant:
    trace, _ = draw(traces())
    found = assign_slots(sort_communication(write_grads_in_place(trace), **draw(LIMITS)))
    bsyms = list(found.bound_symbols)
    first = sum(bsym.sym.name == "unpack_trivial" for bsym in bsyms)
    kind, last = draw(st.sampled_from(kinds)), len(bsyms) - 2
    at, other = draw(st.integers(first, last)), draw(st.integers(first, last))
    own = st.sampled_from([i for i, bsym in enumerate(bsyms) if is_declared(bsym.sym)])
    if kind == "swap":
        bsyms[at], bsyms[other] = bsyms[other], bsyms[at]
    elif kind == "move":
        bsyms.insert(other, bsyms.pop(at))
    elif kind == "drop":
        del bsyms[at]
    elif kind == "double":
        bsyms.insert(max(at, other) + 1, bsyms[at])
    elif kind == "slot":
        slots = {i: slot for i, b in enumerate(bsyms) if (slot := _slot_of(b)) is not None}
        at = draw(st.sampled_from([*slots]))
        slot = draw(
            st.sampled_from([s for s in slots.values() if s.end - s.offset == slots[at].end - slots[at].offset])
        )
        bsyms[at] = bsyms[at].from_bsym(args=(bsyms[at].args[0], slot, *bsyms[at].args[2:]))
    elif kind == "results":
        at = draw(own)
        bsyms[at] = bsyms[at].from_bsym(output=_shuffled(draw, bsyms[at].output))
    elif kind == "operands":
        at = draw(own)
        bsyms[at] = bsyms[at].from_bsym(args=_shuffled(draw, bsyms[at].args))
    else:
        at = draw(own)
        bsyms[at] = bsyms[at].from_bsym(args=_with_another(draw, bsyms, at))
    mutated = from_trace(found)
    mutated.bound_symbols = bsyms
    return Mutant(kind, found, mutated)


def _slot_of(bsym: BoundSymbol) -> Any:
    return bsym.args[1] if bsym.sym.name in ("fsdp_all_gather", "fsdp_reduce_scatter", "fsdp_matmul_into") else None


def _tensors_in(values: Any) -> list[int]:
    """Return the positions of tensors of one shape and dtype."""
    return (
        [i for i, v in enumerate(values) if isinstance(v, TensorProxy) and v.dtype is dtypes.float32] if values else []
    )


def _shuffled(draw: Any, values: Any) -> Any:
    positions = _tensors_in(values) if isinstance(values, tuple) else []
    if len(positions) < 2:
        return values
    new = list(values)
    one, other = draw(st.permutations(positions))[:2]
    new[one], new[other] = new[other], new[one]
    return tuple(new)


def _with_another(draw: Any, bsyms: list[BoundSymbol], at: int) -> Any:
    args = bsyms[at].args
    positions = _tensors_in(args)
    if not positions:
        return args
    known = [out for bsym in bsyms for out in bsym.flat_proxy_outs if _tensors_in([out])]
    new = list(args)
    new[draw(st.sampled_from(positions))] = draw(st.sampled_from(known))
    return tuple(new)


def _returned(trace: TraceCtx, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor] | None:
    """Return what a trace returns; nothing if it reads what is not there."""
    executor = SlotExecutor(inputs)
    try:
        executor.run(trace)
        return [executor.values[arg.name].clone() for arg in trace.bound_symbols[-1].flat_proxy_args]
    except KeyError:
        return None


def _is_right(mutant: Mutant) -> bool:
    inputs = inputs_of(mutant.trace)
    expected, actual = _returned(mutant.trace, inputs), _returned(mutant.mutated, inputs)
    return actual is not None and all(map(torch.equal, expected, actual))


@quiet(150)
@given(mutants())
def test_what_computes_wrong_values_is_refused(mutant: Mutant) -> None:
    if not _is_right(mutant):
        with pytest.raises(VerificationError):
            verify(mutant.mutated, original=mutant.trace)
        with pytest.raises(VerificationError):
            verify_again([mutant.trace], [mutant.mutated], max_gathers_in_flight=None, after="a mutation")
