"""Analysis beside brute force: on random traces, and on real ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import (
    BEFORE_TRACE,
    Analysis,
    args_of,
    facts_of,
    fsdp_all_gather,
    fsdp_reduce_scatter,
    outs_of,
    sort_communication,
    symbol_named,
    write_grads_in_place,
)
from random_traces import LIMITS, traces
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.extend import OperatorExecutor

executor = OperatorExecutor("liveness_test")
fsdp_matmul_into = symbol_named("fsdp_matmul_into")


def _refuses(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError  # so nothing can be observed about it


unknown = executor.register_operator("unknown", meta=lambda a, b: TensorProxy(like=a), fn=_refuses)


@st.composite
def bound_symbols(draw: st.DrawFn) -> list[BoundSymbol]:
    """A backward with gradients in place and views; some of its operators are unknown, some values are deleted."""
    trace = write_grads_in_place(draw(traces(is_plain=True))[0])
    sorted_trace = sort_communication(trace, **draw(LIMITS))
    bsyms = [b for b in sorted_trace.bound_symbols if b.sym.id is not PrimIDs.UNPACK_TRIVIAL]
    for at in draw(st.lists(st.integers(0, len(bsyms) - 2), max_size=6)):
        bsym = bsyms[at]
        if bsym.sym.name == "matmul":
            bsyms[at] = unknown.bind(*bsym.args, output=bsym.output)
        elif bsym.sym.name in ("neg", "transpose", "where"):
            bsyms.insert(draw(st.integers(at + 1, len(bsyms) - 1)), prims.python_del.bind(bsym.output, output=None))
    return bsyms


def roots_of(bsyms: Sequence[BoundSymbol]) -> dict[str, set[str]]:
    """Return for each value those whose memory it may share."""
    roots: dict[str, set[str]] = {}
    for bsym in bsyms:
        for name in (*args_of(bsym), *outs_of(bsym)):
            inputs = facts_of(bsym).aliases.get(name, ())
            roots.setdefault(name, set().union(*(roots[i] for i in inputs)) or {name})
    return roots


@settings(deadline=None)
@given(bound_symbols(), st.data())
def test_values_and_slots_are_those_of_brute_force(bsyms: list[BoundSymbol], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(bsyms)))
    live = Analysis(bsyms[:cut], bsyms[cut:])
    read = [bsym for bsym in bsyms if bsym.sym.id is not PrimIDs.DEL]
    names = {name for bsym in read for name in (*args_of(bsym), *outs_of(bsym))}
    assert {value.proxy.name for value in live.values} == names
    all_roots = roots_of(bsyms)

    def uses(root: str) -> list[int]:
        return [
            at for at, bsym in enumerate(bsyms) if bsym in read and any(root in all_roots[a] for a in args_of(bsym))
        ]

    for name in names:
        value = live.value(name)
        made = [position for position, bsym in enumerate(bsyms) if name in outs_of(bsym)]
        reads = [
            position for position, bsym in enumerate(bsyms) if bsym in read for arg in args_of(bsym) if arg == name
        ]
        roots = all_roots[name]
        assert value.first == live.defined([name]) == (made[0] if made else BEFORE_TRACE)
        assert value.reads == reads
        assert live.first_read([name]) == (reads[0] if reads else None)
        assert live.roots([name]) == {root.proxy.name for root in value.roots} == roots
        if roots == {name}:
            assert value.used == live.last_use([name]) == max(uses(name), default=value.first)

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
        assert found.last == max([wait, *(p for param in params for p in uses(param))])
        for index, param in enumerate(params):
            assert found.accesses[index] == max([wait, *uses(param)])
