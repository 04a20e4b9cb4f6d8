"""Differentiate the computation and let executors claim its operators, once for blocks that are alike.

[Note: Blocks are differentiated once]
Thunder differentiates a computation operator by operator, and executors claim the results one by one. Both take as long as
tracing all blocks of a model one after the other. So Thunder is handed a trace that computes nothing
(``without_computation``), and this pass calls Thunder's own functions for the real one, in Thunder's order:

1. Bound symbols are tagged with the calls of modules that have added them; see [Note: Regions] in
   ``capture.bound_symbols``. Regions of equal structure repeat, also if their modules could not be traced once.
2. Thunder differentiates one region of each kind as a computation by itself, and its operators are claimed.
3. Each region is replaced by one ``fsdp_run``. Its grad rule makes a symbol for its forward and one for its
   backward, so Thunder differentiates the rest of the computation around them.
4. Each of these symbols is replaced by copies of the bound symbols of step 2. Then dead code is eliminated.

The result is the joint trace that Thunder makes of the whole computation, up to names, also in the order in which
gradients of one value are added. A region does not repeat if that could differ: if a bound symbol changes something in
place, is recomputed in backward or belongs to ``checkpoint``; if an executor or a rule is not known to give the same
result each time (``RepeatableRules``). Nor does a region whose input gets another gradient from bound symbols after it,
since that gradient would have to be added in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, from_trace, get_tracectx
from thunder.core.transform_common import dce
from thunder.core.transforms import get_grad, put_grad
from thunder.extend import Executor
from thunder.transforms.autodiff import grad_transform_on_trace

from ..capture.bound_symbols import BoundSymbolCopies, Region, find_repeated_regions
from ..ir.inspection import args_of, defined_by, forward_part, names, nested, outs_of, return_of
from ..ir.operator_facts import share_facts
from ..ir.registry import executor
from ..private_thunder import renamed, requiring_gradient
from .claim_operators import RepeatableRules, claim_operators


def differentiate(trace: TraceCtx, *, executors: Sequence[Executor], has_gradients: bool) -> TraceCtx:
    """Return the joint trace of a computation with its operators claimed; forward alone without gradients.

    Runs on the computation after ``insert_unshard``, in place of Thunder's autograd and ``claim_operators``.

    Args:
        executors: those that claim operators, in order of priority.
        has_gradients: whether there is a backward.
    """
    trace = dce(trace)
    *computation, returned = trace.bound_symbols
    may_repeat = partial(_may_repeat, RepeatableRules(executors))
    transform = partial(_transform, executors=executors, has_gradients=has_gradients)
    outputs = frozenset(names(tree_iter(returned.args))) - {*names(trace.args)}
    outputs |= {*names(tree_iter(returned.args[0]["output"]))}
    last_use = {name: position for position, bsym in enumerate(computation) for name in args_of(bsym)}
    last_use |= dict.fromkeys(outputs, len(computation))
    needing = _needing_gradient(trace) if has_gradients else frozenset[str]()
    calls: dict[int, _Call] = {}
    for regions in find_repeated_regions(computation, last_use, may_repeat):
        if not all(_sums_gradients(region, last_use, needing) for region in regions):
            continue
        program = _program(computation[regions[0].start : regions[0].stop], regions[0], trace, transform)
        if program is not None:
            calls.update((region.start, _Call(program, regions[0], region, needing)) for region in regions)
    if not calls:
        return transform(trace)
    joint = transform(_with_calls(trace, calls))
    expanded = from_trace(joint)
    for bsym in joint.bound_symbols:
        expanded.bound_symbols += _expand(bsym, expanded)
    return dce(expanded)


def _transform(trace: TraceCtx, *, executors: Sequence[Executor], has_gradients: bool) -> TraceCtx:
    joint = grad_transform_on_trace(trace) if has_gradients else trace
    return claim_operators(joint, executors=executors)


#
# Regions that may be repeated
#


_ONLY_ALONE = {BoundSymbolTag.RECOMPUTE_IN_BACKWARD, OpTags.IN_PLACE, OpTags.DONT_DCE}


def _may_repeat(is_repeatable: RepeatableRules, bsym: BoundSymbol) -> bool:
    if bsym.sym.id is PrimIDs.UNPACK_TRIVIAL or not is_repeatable(bsym):
        return False
    return not any(map(_is_special, nested([bsym])))


def _is_special(bsym: BoundSymbol) -> bool:
    """Return whether a bound symbol is not differentiated by itself, or has an effect."""
    sym = bsym.sym
    return (
        not _ONLY_ALONE.isdisjoint((*bsym.tags, *(sym.tags or ())))
        or sym.id in (ltorch.checkpoint.id, PrimIDs.COPY_)
        or sym.name == "copy_"
        or any(ProxyTag.RECOMPUTE_IN_BACKWARD in out.tags for out in bsym.flat_proxy_outs)
    )


def _needing_gradient(trace: TraceCtx) -> frozenset[str]:
    """Return the names of values that derive, through operators with gradients, from arguments that require them."""
    needing = {arg.name for arg in trace.args if isinstance(arg, TensorProxy) and arg.requires_grad}
    for bsym in trace.bound_symbols:
        if not needing.isdisjoint(args_of(bsym)):
            needing.update(out.name for out in defined_by(bsym) if ProxyTag.DETACHED_AUTOGRAD_GRAPH not in out.tags)
    return frozenset(needing)


def _sums_gradients(region: Region, last_use: Mapping[str, int], needing: Collection[str]) -> bool:
    """Return whether nothing after the region has a gradient for an input of the region that needs one."""
    return all(last_use[proxy.name] < region.stop for proxy in region.inputs if proxy.name in needing)


#
# The program of a region
#


class _Program(NamedTuple):
    """The bound symbols that Thunder has made of one region.

    Attributes:
        inputs: the proxies that it reads.
        output: its result.
        forward: the bound symbols that compute it.
        saved: what they define and backward reads.
        grad: the gradient of the result.
        backward: the bound symbols that compute the gradients of inputs.
        grads: for each input, its gradient; ``None`` if it has none.
    """

    inputs: tuple[Proxy, ...]
    output: TensorProxy
    forward: tuple[BoundSymbol, ...]
    saved: tuple[TensorProxy, ...] = ()
    grad: TensorProxy | None = None
    backward: tuple[BoundSymbol, ...] = ()
    grads: tuple[TensorProxy | None, ...] = ()

    @property
    def computed_grads(self) -> tuple[TensorProxy, ...]:
        """The gradients that backward computes, each once; the result's own gradient may be that of an input."""
        found = {grad.name: grad for grad in self.grads if grad is not None and grad is not self.grad}
        return tuple(found.values())


def _program(
    bsyms: Sequence[BoundSymbol], region: Region, trace: TraceCtx, transform: Callable[[TraceCtx], TraceCtx]
) -> _Program | None:
    """Return the program of a region; ``None`` if its backward is not a function of the result's gradient alone."""
    inputs, output = region.inputs, region.output
    single = from_trace(trace)
    arguments = [requiring_gradient(p) if _is_differentiable(p) else p for p in inputs]
    returned = return_of(trace).from_bsym(args=({"output": (output,), "flat_args": arguments},))
    unpacked = [prims.unpack_trivial.bind(p, name=p.name, output=p) for p in arguments]
    single.bound_symbols = [*unpacked, *bsyms, returned]
    joint = transform(single)
    trace.name_ctr = joint.name_ctr
    *rest, last = [bsym for bsym in joint.bound_symbols if bsym.sym.id is not PrimIDs.UNPACK_TRIVIAL]
    if "fw_flat_out" not in last.args[0]:
        (output,) = last.args[0]["output"]
        return _Program(inputs, output, tuple(rest)) if _defines(rest, output) else None
    (output,), grads = last.args[0]["fw_flat_out"], last.args[0]["output"]
    in_forward = dict(zip(map(id, joint.bound_symbols), forward_part(joint), strict=True))
    forward = [bsym for bsym in rest if in_forward[id(bsym)]]
    backward = [bsym for bsym in rest if not in_forward[id(bsym)]]
    given = [bsym for bsym in backward if bsym.sym.id is PrimIDs.GET_GRAD]
    backward = [bsym for bsym in backward if bsym.sym.id is not PrimIDs.GET_GRAD]
    if len(given) > 1 or not _defines(forward, output):
        return None
    grad = given[0].output if given else None
    if not all(each is None or each is grad or _defines(backward, each) for each in grads):
        return None
    made = {out.name: out for bsym in forward for out in bsym.flat_proxy_outs if out.name in outs_of(bsym)}
    saved = {name: made[name] for bsym in backward for name in args_of(bsym) if name in made and name != output.name}
    if not all(isinstance(each, TensorProxy) for each in saved.values()):
        return None
    return _Program(inputs, output, tuple(forward), tuple(saved.values()), grad, tuple(backward), tuple(grads))


def _is_differentiable(proxy: Proxy) -> bool:
    return isinstance(proxy, TensorProxy) and dtypes.is_inexact_dtype(proxy.dtype)


def _defines(bsyms: Sequence[BoundSymbol], proxy: Proxy) -> bool:
    return any(proxy.name in outs_of(bsym) for bsym in bsyms)


#
# Calls of programs, which Thunder differentiates
#


class _Call:
    """A region that is computed by a program: the opaque argument of its symbols. Thunder would flatten a dataclass.

    Attributes:
        parameters: the region's parameters, by those of the program.
        needed: for each input, whether its gradient is needed.
    """

    def __init__(self, program: _Program, first: Region, region: Region, needing: Collection[str]) -> None:
        self.program = program
        self.region = region
        self.parameters = dict(zip(first.parameters, region.parameters, strict=True))
        self.needed = tuple(proxy.name in needing for proxy in region.inputs)


def _with_calls(trace: TraceCtx, calls: Mapping[int, _Call]) -> TraceCtx:
    """Return the trace with a call in place of each region, by the region's position."""
    new = from_trace(trace)
    position = 0
    while position < len(trace.bound_symbols):
        call = calls.get(position)
        if call is None:
            new.bound_symbols.append(trace.bound_symbols[position])
            position += 1
        else:
            region = call.region
            new.bound_symbols.append(fsdp_run.bind(call, *region.inputs, output=region.output))
            position = region.stop
    return new


def _expand(bsym: BoundSymbol, trace: TraceCtx) -> Sequence[BoundSymbol]:
    """Return what runs in place of a bound symbol: copies of a program's bound symbols, or itself if it is no call."""
    if bsym.sym not in (fsdp_run, fsdp_run_forward, fsdp_run_backward):
        return [bsym]
    call, *arguments = bsym.args
    program = call.program
    if bsym.sym is fsdp_run_backward:
        old = (program.grad, *program.inputs, program.output, *program.saved, *program.computed_grads)
        new, bsyms = (*arguments, *bsym.output), program.backward
    else:
        old = (*program.inputs, program.output)
        new, bsyms = (*arguments, *bsym.flat_proxy_outs), program.forward
        if bsym.sym is fsdp_run_forward:
            old += program.saved
    renames = {each.name: other for each, other in zip(old, new, strict=True)}
    copies = BoundSymbolCopies(trace, renames, parameters=call.parameters)
    found = [copies.copy(each) for each in bsyms]
    for each, original in zip(found, bsyms, strict=True):
        share_facts(each, original, copies.new)
    return found


def _like(proxy: Proxy) -> Any:
    return renamed(proxy, get_tracectx(), set(proxy.tags))


def _run_meta(call: _Call, *inputs: Proxy) -> Any:
    return _like(call.program.output)


def _run_forward_meta(call: _Call, *inputs: Proxy) -> tuple[Any, ...]:
    return tuple(map(_like, (call.program.output, *call.program.saved)))


def _run_backward_meta(call: _Call, grad: Proxy, *values: Proxy) -> tuple[Any, ...]:
    return tuple(map(_like, call.program.computed_grads))


def _run_grad(call: _Call, *inputs: Proxy) -> Any:
    output, *saved = fsdp_run_forward(call, *inputs)
    program = call.program
    if program.grad is None:
        return output
    grad = get_grad(output)
    computed = fsdp_run_backward(call, grad, *inputs, output, *saved)
    grads = {old.name: new for old, new in zip(program.computed_grads, computed, strict=True)}
    grads[program.grad.name] = grad
    for proxy, of_program, is_needed in zip(inputs, program.grads, call.needed, strict=True):
        if of_program is not None and is_needed:
            put_grad(proxy, grads[of_program.name])
    return output


def _register(name: str, meta: Callable[..., Any], grad: Callable[..., Any] | None = None) -> Symbol:
    symbol = executor.register_operator(name, meta=meta, fn=_only_in_between)
    executor.register_implementation(symbol, symbol, grad_transform=grad)
    return symbol


def _only_in_between(*args: Any) -> None:
    raise AssertionError("calls of programs must be expanded before a trace runs")


fsdp_run = _register("fsdp_run", _run_meta, _run_grad)
fsdp_run_forward = _register("fsdp_run_forward", _run_forward_meta)
fsdp_run_backward = _register("fsdp_run_backward", _run_backward_meta)
