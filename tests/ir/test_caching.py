"""Bound symbols that cache derived facts behave like Thunder's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import Debug

import pytest
from internals import caching
from models import CASES, GPT, compile_model
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, from_trace, tracectx

FLAT = ("flat_args", "flat_proxy_args", "flat_outs", "flat_proxy_outs")


def traces_of(make: Callable[[], Any]) -> list[TraceCtx]:
    compiled = compile_model(lambda: make().double(), debug=Debug(differentiate_once=False))
    assert compiled.differentiated is not None
    return [compiled.differentiated, *compiled.traces]


def plain(bsym: BoundSymbol) -> BoundSymbol:
    """Return a copy of Thunder's own class."""
    return BoundSymbol.from_bsym(bsym)


def _caches(bsym: BoundSymbol) -> bool:
    return type(bsym) is not BoundSymbol and isinstance(bsym, BoundSymbol)


def check_same(ours: BoundSymbol, expected: BoundSymbol) -> None:
    assert _caches(ours) and not _caches(expected)
    assert ours.sym is expected.sym and ours.tags == expected.tags and ours.header == expected.header
    assert (ours.source_filename, ours.source_positions) == (expected.source_filename, expected.source_positions)
    for name in FLAT:
        pairs = zip(getattr(ours, name), getattr(expected, name), strict=True)
        assert all(one is other or one == other for one, other in pairs)
    assert str(ours) == str(expected)  # with subsymbols


@pytest.fixture(scope="module")
def traces() -> list[TraceCtx]:
    kinds = [CASES["buffers"], CASES["checkpointed"], CASES["tied_weights"], lambda: GPT(blocks=1)]
    return [trace for make in kinds for trace in traces_of(make)]


def test_the_program_is_the_same(traces: list[TraceCtx]) -> None:
    for trace in traces:
        expected, ours = from_trace(trace), from_trace(trace)
        expected.bound_symbols = list(map(plain, trace.bound_symbols))
        ours.bound_symbols = list(map(plain, trace.bound_symbols))
        assert ours.python() == expected.python()
        ours.bound_symbols = list(map(caching, ours.bound_symbols))
        assert all(map(_caches, ours.bound_symbols))
        assert ours.python() == expected.python() and str(ours) == str(expected)
        context, in_full = ours.python_ctx(), expected.python_ctx()
        used = {name: value for name, value in in_full.items() if name in context}
        assert context == used
        unused = in_full.keys() - context.keys()  # names of objects that this package's symbols print themselves
        assert all(name.startswith("_") and name not in expected.python() for name in unused)


def kinds(trace: TraceCtx) -> list[BoundSymbol]:
    """Return one bound symbol of each kind."""
    return list(
        {(b.sym.name, *map(type, b.flat_args), *map(type, b.flat_outs)): b for b in trace.bound_symbols}.values()
    )


def test_copies_are_those_of_thunder(traces: list[TraceCtx]) -> None:
    for trace in traces:
        with tracectx(trace):
            for bsym in kinds(trace):
                ours, expected = caching(plain(bsym)), plain(bsym)
                for one in (ours, expected):
                    one.flat_proxy_args, one.flat_proxy_outs, one.are_all_args_constant  # noqa: B018  fills the caches
                assert ours.tags is not ours.from_bsym().tags
                changes: list[dict[str, Any]] = [{}, {"tags": {BoundSymbolTag.BACKWARD}}, {"subsymbols": []}]
                if bsym.sym.executor is not None and bsym.sym.executor.name == "torch":
                    # Symbols of others expect certain arguments.
                    changes += [{"args": bsym.args[::-1]}, {"args": ()}, {"output": ()}, {"output": bsym.args[:1]}]
                for change in changes:
                    check_same(ours.from_bsym(**change), expected.from_bsym(**change))


def test_swaps_are_those_of_thunder(traces: list[TraceCtx]) -> None:
    chooser = random.Random(0)
    for number, trace in enumerate(traces):
        proxies = {p.name: p for bsym in trace.bound_symbols for p in _tensors_below(bsym)}
        with tracectx(trace):
            others = {variableify(p): p.replace_name(f"{p.name}_in_{number}") for p in proxies.values()}
            for bsym in kinds(trace):
                ours, expected = caching(plain(bsym)), plain(bsym)
                swap = {key: others[key] for key in others if chooser.random() < 0.3}
                for skip in ((), (True,), (False, True), (True, True, True)):
                    swapped = caching(ours.from_bsym_swap_proxies(swap, *skip))
                    check_same(swapped, expected.from_bsym_swap_proxies(swap, *skip))
                assert ours.from_bsym_swap_proxies({}) is ours


def _tensors_below(bsym: BoundSymbol) -> list[TensorProxy]:
    own = [p for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs) if isinstance(p, TensorProxy)]
    return own + [proxy for sub in bsym.subsymbols for proxy in _tensors_below(sub)]
