"""The facts about each operator, those of users among them, agree with its actual behaviour on the CPU."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched.ir.inspection import derivation, forward_part
from thunder_fsdp_sched.ir.operator_facts import observed_call

import pytest
import thunder
import thunder.torch as ltorch
import torch
from coded import coded
from internals import caching, effects, facts_of, symbol_named
from operator_calls import Call, calls
from synthetic_traces import tensor
from thunder.core import prims
from thunder.core.devices import to_device
from thunder.core.dtypes import to_dtype
from thunder.core.langctxs import Languages, reset_langctx, resolve_language, set_langctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors import pythonex, torchex
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

DECOMPOSED = "torch.einsum('ii->i'"
"""A call that Thunder decomposes into operators that copy, while torch's own function returns a view."""


UNKNOWN = {"adaptive_avg_pool2d_backward as traced", "torch.argsort as traced", "torch.Tensor.is_cpu as traced"}
"""Thunder's variants of operators whose arguments differ from torch's. They are known once an executor has claimed them."""


class Outcome(NamedTuple):
    """The effects of a call, such as the arguments whose memory each returned tensor shares."""

    aliases: list[set[int]]
    pure: bool
    writes: set[int]


def run(call: Call) -> Outcome | None:
    """Call the function with two different random seeds and return the effects, or ``None`` if outputs are unsuitable."""
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (call.args, call.kwargs))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        before = [t.clone() for t in given]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outs = [o for o in tree_leaves(call.function(*args, **kwargs)) if isinstance(o, torch.Tensor)]
        if any(o.layout is not torch.strided or o.numel() == 0 for o in outs):
            return None
        aliases = [{i for i, t in enumerate(given) if _shares_memory(o, t)} for o in outs]
        writes = {i for i, (t, b) in enumerate(zip(given, before, strict=True)) if not _same(t, b)}
        results.append((outs, Outcome(aliases, True, writes)))
    (first, outcome), (second, _) = results
    same = len(first) == len(second) and all(map(_same, first, second))
    return outcome._replace(pure=same and not outcome.writes)


def _shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and b.numel() > 0


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def trace_of(call: Call) -> tuple[TraceCtx, list[str], list[TensorProxy]] | None:
    """Return the trace of a call, the names of its arguments, and its outputs, or ``None`` if Thunder cannot trace it."""
    trace = TraceCtx()
    token = set_langctx(resolve_language(Languages.TORCH))
    try:
        with tracectx(trace), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args, kwargs = tree_map_only(
                torch.Tensor,
                lambda t: TensorProxy(shape=t.shape, device=to_device(t.device), dtype=to_dtype(t.dtype)),
                (call.args, call.kwargs),
            )
            given = [p.name for p in tree_leaves((args, kwargs)) if isinstance(p, TensorProxy)]
            trace.push_scope(bsyms := [])
            outs = call.symbol(*args, **kwargs)
            trace.pop_scope()
            trace.bound_symbols = bsyms
    except Exception:
        return None
    finally:
        reset_langctx(token)
    return trace, given, [o for o in tree_leaves(outs) if isinstance(o, TensorProxy)]


def claim(trace: TraceCtx, bsyms: Iterable[BoundSymbol]) -> list[BoundSymbol]:
    """Return the bound symbols as claimed by Thunder's torch and Python executors, with the original outputs' names."""
    claimed: list[BoundSymbol] = []
    for bsym in bsyms:
        for executor in (torchex.ex, pythonex.ex):
            if not executor.can_execute(bsym):
                continue
            transform = executor.get_execution_transform(bsym) or executor.implmap[bsym.sym.id].symbol
            with tracectx(trace):
                trace.push_scope(new := [])
                out = transform(*bsym.args, **bsym.kwargs)
                trace.pop_scope()
            renamed = {
                new_out.name: old_out
                for new_out, old_out in zip(_proxies(out), _proxies(bsym.output), strict=True)
                if new_out.name != old_out.name
            }
            from thunder.core.proxies import variableify

            swaps = {variableify(p): renamed[p.name] for b in new for p in b.flat_proxy_outs if p.name in renamed}
            claimed += [b.from_bsym_swap_proxies(swaps) for b in new]
            break
        else:
            claimed += claim(trace, bsym.subsymbols)
    return claimed


def _proxies(value: Any) -> list[TensorProxy]:
    return [p for p in tree_leaves(value) if isinstance(p, TensorProxy)]


def reported(bsyms: Iterable[BoundSymbol], given: list[str], outs: list[TensorProxy]) -> tuple[Outcome, bool]:
    """Return the combined facts about several bound symbols, and whether all of them are known."""
    roots_of: dict[str, frozenset[str]] = {}
    pure = known = True
    writes: set[str] = set()

    def roots(*names: str) -> frozenset[str]:
        return frozenset().union(*(roots_of.get(name, {name}) for name in names))

    for bsym in bsyms:
        facts = facts_of(bsym)
        pure, known = pure and facts.pure, known and facts.known
        writes |= roots(*facts.writes)
        roots_of.update({out: roots(*inputs) for out, inputs in facts.aliases.items()})
    shared = [{i for i, name in enumerate(given) if name in roots(o.name)} for o in outs]
    return Outcome(shared, pure, {i for i, name in enumerate(given) if name in writes}), known


def contradictions(said: Outcome, known: bool, actual: Outcome) -> list[str]:
    found = []
    if actual.writes - said.writes and known:
        found.append(f"it writes arguments {actual.writes}, but the facts say {said.writes}")
    if said.pure and not actual.pure:
        found.append("it is not pure, but the facts say that it is")
    if len(said.aliases) != len(actual.aliases):
        if any(actual.aliases) and not any(said.aliases):
            found.append(f"outputs alias {actual.aliases}, but the facts say {said.aliases}")
    else:
        for number, (ours, real) in enumerate(zip(said.aliases, actual.aliases, strict=True)):
            if real - ours:
                found.append(f"output {number} shares memory with arguments {real}, but the facts say {ours}")
    return found


def test_no_operator_contradicts_the_facts_about_it() -> None:
    wrong: list[str] = []
    unknown: set[str] = set()
    symbols: set[str] = set()
    count: Counter[str] = Counter()
    for call in calls():
        actual, traced = run(call), trace_of(call)
        if actual is None or traced is None:
            continue
        trace, given, outs = traced
        symbols.add(call.symbol.id)
        levels = {"traced": trace.bound_symbols}
        with contextlib.suppress(NotImplementedError, RuntimeError, TypeError, ValueError):  # Thunder cannot run it
            levels["claimed"] = claim(trace, trace.bound_symbols)
        for level, bsyms in levels.items():
            said, known = reported(bsyms, given, outs)
            wrong += [f"{call} as {level}: {text}" for text in contradictions(said, known, actual)]
            count[level] += 1
            count["views"] += any(actual.aliases)
            count["impure"] += not actual.pure
            count["writing"] += bool(actual.writes)
            if not known:
                unknown.add(f"{call.symbol.id} as {level}")
    wrong = [text for text in wrong if not text.startswith(DECOMPOSED)]
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)
    assert len(symbols) > 500
    assert min(count["views"], count["impure"], count["writing"]) > 100
    assert unknown <= UNKNOWN


def test_only_unchanged_copies_keep_the_facts_of_the_original() -> None:
    trace = TraceCtx()
    with tracectx(trace):
        x, y = (
            TensorProxy(name, shape=(2, 3), device=to_device("cpu"), dtype=to_dtype(torch.float32)) for name in "xy"
        )
        ltorch.transpose(x, 0, 1)
    (original,) = map(caching, trace.bound_symbols)
    facts = facts_of(original)
    assert [*facts.aliases.values()] == [("x",)]
    swapped = original.from_bsym(args=(y, 0, 1))
    assert [*facts_of(swapped).aliases.values()] == [("y",)]
    of_others = original.from_bsym(subsymbols=[sub.from_bsym() for sub in original.subsymbols])
    assert facts_of(original.from_bsym()) is facts
    assert facts_of(original.from_bsym(tags={BoundSymbolTag.BACKWARD})) is facts
    assert facts_of(of_others) is not facts


@pytest.mark.parametrize("dtype", [torch.float64, to_dtype(torch.float64)], ids=["torch", "Thunder"])
def test_calls_with_dtypes_of_torch_or_of_thunder_are_observed(dtype: Any) -> None:
    with tracectx(trace := TraceCtx()):
        x = TensorProxy("x", shape=(2, 3), device=to_device("cpu"), dtype=to_dtype(torch.float32))
        ltorch.sum(x, 0, dtype=dtype)
    assert observed_call(trace.bound_symbols[-1], {}) is not None


def test_facts_about_own_symbols_are_what_they_declare_and_return() -> None:
    for module in ("mends.write_out_of_place", "transforms.keep_fusions_apart"):  # which only some models need
        import_module(f"thunder_fsdp_sched.{module}")
    trace, tensors = TraceCtx(), {"x": torch.zeros(2, 3), "y": torch.zeros(2, 3)}
    for name, read in {"fsdp_detached": "x", "fsdp_with_value": "xy"}.items():
        symbol = symbol_named(name)
        with tracectx(trace):
            args = [
                TensorProxy(None, shape=(2, 3), device=to_device("cpu"), dtype=to_dtype(torch.float32)) for _ in read
            ]
            out = symbol(*args)
        bsym, given = trace.bound_symbols[-1], [tensors[name] for name in read]
        returned = bsym._call_ctx[symbol.name](*given)
        shared = tuple(a.name for a, t in zip(args, given, strict=True) if _shares_memory(returned, t))
        assert effects(bsym).aliases == facts_of(bsym).aliases == {out.name: shared}
    barrier = symbol_named("fsdp_fusion_barrier").bind(*args, output=(x := args[0], y := args[1])[::-1])
    assert facts_of(barrier).aliases == effects(barrier).aliases == {y.name: (x.name,), x.name: (y.name,)}


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
