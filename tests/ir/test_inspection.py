"""Questions about bound symbols and joint traces."""

from __future__ import annotations

from thunder_fsdp_sched.ir.inspection import derivation, forward_part

from synthetic_traces import tensor
from thunder.core import prims
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, tracectx


def test_a_result_of_a_fusion_derives_from_all_subsymbols_that_it_needs() -> None:
    trace = TraceCtx()
    with tracectx(trace):
        x = tensor()
        negated, other = prims.neg(x), prims.mul(x, x)
        total = prims.add(prims.mul(negated, x), x)
    neg, not_needed, mul, add = trace.bound_symbols
    fusion = Symbol("fused0", lambda x: None, is_fusion=True)
    bsym = fusion.bind(x, output=(total, other), subsymbols=tuple(trace.bound_symbols))
    assert derivation(bsym, total.name) == [neg, mul, add]
    assert derivation(bsym, other.name) == [not_needed]
    assert derivation(mul, mul.output.name) == [mul]


def test_all_of_a_joint_trace_without_gradients_is_forward() -> None:
    with tracectx(trace := TraceCtx()):
        x = tensor()
        result = prims.gt(x, 0.0)
        prims.python_return({"output": (), "fw_flat_out": (result,), "flat_args": (x,)})
    assert forward_part(trace) == [True, False]
