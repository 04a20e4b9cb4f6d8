"""Analysis beside brute force: on random traces, and on real ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import (
    BEFORE_TRACE,
    Analysis,
    Bucket,
    args_of,
    facts_of,
    fsdp_all_gather,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
    outs_of,
    symbol_named,
)
from synthetic_traces import make_buckets, tensor
from thunder.core import dtypes, prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import OperatorExecutor

executor = OperatorExecutor("liveness_test")
fsdp_matmul_into = symbol_named("fsdp_matmul_into")


def _refuses(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError  # so nothing can be observed about it


unknown = executor.register_operator("unknown", meta=lambda a, b: TensorProxy(like=a), fn=_refuses)


@st.composite
def bound_symbols(draw: st.DrawFn) -> list[BoundSymbol]:
    """Compute that reads any earlier values, views of views among it; gathers, reductions, and gradients in place."""
    buckets = make_buckets(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    trace = TraceCtx()
    with tracectx(trace):
        condition = tensor(dtype=dtypes.bool8)
        values = [tensor(), tensor()]
        waited = [fsdp_wait_params(b, fsdp_all_gather(b, None, *(tensor() for _ in b.spec.params))) for b in buckets]
        issued = list(zip(trace.bound_symbols[::2], trace.bound_symbols[1::2], strict=True))
        trace.bound_symbols.clear()

        def pick() -> TensorProxy:
            return values[draw(st.integers(0, len(values) - 1))]

        pending: list[tuple[Bucket, TensorProxy]] = []
        sharded: list[TensorProxy] = []  # of another shape
        for step in draw(st.lists(st.sampled_from("gwnntttumrd"), min_size=1, max_size=30)):
            if step in "gw" and issued:
                gather, wait = issued[0]
                trace.bound_symbols.append(gather if gather not in trace.bound_symbols else wait)
                if trace.bound_symbols[-1] is wait:
                    values += waited[len(waited) - len(issued)]
                    del issued[0]
            elif step == "n":
                values.append(prims.where(condition, pick(), pick()))
            elif step == "t":
                values.append(prims.transpose(pick(), (1, 0)))
            elif step == "u":
                values.append(unknown(pick(), pick()))
            elif step == "m":
                bucket = draw(st.sampled_from(buckets))
                grads = [
                    fsdp_matmul_into(bucket, None, i, pick(), pick()) if draw(st.booleans()) else pick()
                    for i in range(len(bucket.spec.params))
                ]
                values.append(prims.neg(pick()))
                pending.append((bucket, fsdp_reduce_scatter(bucket, None, *grads)))
            elif step == "r" and pending:
                sharded += fsdp_wait_grads(*pending.pop(draw(st.integers(0, len(pending) - 1))))
            elif step == "d":
                prims.python_del(pick())
        prims.python_return((*values[2:4], *sharded[1:]))
    return trace.bound_symbols


def roots_of(bsyms: Sequence[BoundSymbol], name: str) -> set[str]:
    """The values whose memory ``name`` may share, from one bound symbol to the one before."""
    for bsym in bsyms:
        if name in outs_of(bsym) and (inputs := facts_of(bsym).aliases.get(name)):
            return set().union(*(roots_of(bsyms, i) for i in inputs))
    return {name}


def uses(bsyms: Sequence[BoundSymbol], root: str) -> list[int]:
    return [
        position
        for position, bsym in enumerate(bsyms)
        if bsym.sym.id is not PrimIDs.DEL and any(root in roots_of(bsyms, arg) for arg in args_of(bsym))
    ]


@settings(deadline=None)
@given(bound_symbols(), st.data())
def test_values_and_slots_are_those_of_brute_force(bsyms: list[BoundSymbol], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(bsyms)))
    live = Analysis(bsyms[:cut], bsyms[cut:])
    read = [bsym for bsym in bsyms if bsym.sym.id is not PrimIDs.DEL]
    names = {name for bsym in read for name in (*args_of(bsym), *outs_of(bsym))}
    assert {value.proxy.name for value in live.values} == names
    for name in names:
        value = live.value(name)
        made = [position for position, bsym in enumerate(bsyms) if name in outs_of(bsym)]
        reads = [
            position for position, bsym in enumerate(bsyms) if bsym in read for arg in args_of(bsym) if arg == name
        ]
        roots = roots_of(bsyms, name)
        assert value.first == live.defined([name]) == (made[0] if made else BEFORE_TRACE)
        assert value.reads == reads
        assert live.first_read([name]) == (reads[0] if reads else None)
        assert live.roots([name]) == {root.proxy.name for root in value.roots} == roots
        if roots == {name}:
            assert value.used == live.last_use([name]) == max(uses(bsyms, name), default=value.first)

    issues = [p for p, bsym in enumerate(bsyms) if bsym.sym in (fsdp_all_gather, fsdp_reduce_scatter)]
    assert list(live.slots) == issues
    for issue in issues:
        bsym, found = bsyms[issue], live.slots[issue]
        wait = next((p for p, b in enumerate(bsyms) if bsym.output.name in args_of(b)), issue)
        params = outs_of(bsyms[wait]) if bsym.sym is fsdp_all_gather and wait > issue else ()
        writers = [p for p, b in enumerate(bsyms) if b.sym is fsdp_matmul_into and set(outs_of(b)) & set(args_of(bsym))]
        writers = writers if bsym.sym is fsdp_reduce_scatter else []
        assert (found.bucket, found.is_gather, found.issue, sorted(set(found.writes))) == (
            bsym.args[0],
            bsym.sym is fsdp_all_gather,
            issue,
            sorted(set(writers)),
        )
        assert found.first == min([issue, *writers])
        assert found.last == max([wait, *(p for param in params for p in uses(bsyms, param))])
        for index, param in enumerate(params):
            assert found.accesses[index] == max([wait, *uses(bsyms, param)])
