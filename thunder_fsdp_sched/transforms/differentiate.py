"""Differentiate the computation and let executors claim its operators, once for blocks that are alike.

[Note: Blocks are differentiated once]
Thunder differentiates a computation operator by operator, and executors claim the results one by one. Both take as long as
tracing all blocks of a model one after the other. So Thunder is handed a trace that computes nothing
(``without_computation``), and this pass calls Thunder's own functions for the real one, in Thunder's order:

1. Bound symbols are tagged with the calls of modules that have added them; see [Note: Regions] in
   ``ir.bound_symbols``. Regions of equal structure repeat, even if each of their modules had to be traced.
2. Thunder differentiates one region of each kind as a computation by itself, and its operators are claimed.
3. Each region is replaced by one ``fsdp_run``. Its grad rule makes one for its forward and one for its backward, so
   Thunder differentiates the rest of the computation around them.
4. Each of these is replaced by copies of the bound symbols of step 2. Then dead code is eliminated.

Up to names, the result is the joint trace that Thunder makes of the whole computation. Even the gradients of one value
are added in the same order. A region does not count as repeated if the result could differ: if a bound symbol changes
something in place, is recomputed in backward or belongs to ``checkpoint``; if an executor or a rule is not known to
give the same result each time (``_repeatable``); or if an input also gets a gradient from bound symbols after the
region, which would have to be added in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, get_tracectx
from thunder.core.transform_common import dce
from thunder.core.transforms import get_grad, put_grad
from thunder.extend import Executor, FusionExecutor, OperatorExecutor, StatefulExecutor
from thunder.transforms.autodiff import grad_transform_on_trace

from ..ir.bound_symbols import BoundSymbolCopies, RepeatedRegion, find_repeated_regions
from ..ir.gradients import needing_gradient
from ..ir.inspection import (
    args_of,
    defined_by,
    forward_part,
    is_inexact,
    is_recomputed,
    names,
    nested,
    outs_of,
    return_of,
)
from ..ir.operator_facts import share_facts
from ..ir.registry import executor, register
from ..ir.symbols import only_in_between
from ..private_thunder import gradient_rules_of, renamed, requiring_gradient
from .claim_operators import claim_operators


def differentiate(trace: TraceCtx, *, executors: Sequence[Executor], has_gradients: bool) -> TraceCtx:
    """Return the joint trace of a computation with its operators claimed; forward alone without gradients.

    Runs on the computation after ``insert_unshard``, in place of Thunder's autograd and ``claim_operators``.

    Args:
        executors: the executors that claim operators, in order of priority.
        has_gradients: whether there is a backward.
    """
    trace = dce(trace)
    *computation, returned = trace.bound_symbols
    transform = partial(_transform, executors=executors, has_gradients=has_gradients)
    outputs = frozenset(names(tree_iter(returned.args))) - {*names(trace.args)}
    outputs |= {*names(tree_iter(returned.args[0]["output"]))}
    last_use = {name: position for position, bsym in enumerate(computation) for name in args_of(bsym)}
    last_use |= dict.fromkeys(outputs, len(computation))
    needing = needing_gradient(trace) if has_gradients else frozenset[str]()
    calls: dict[int, _RegionCall] = {}
    for regions in find_repeated_regions(computation, last_use, _repeatable(executors)):
        # A gradient from bound symbols after a region, for an input that needs one, would be added in between.
        inputs = ((region, proxy.name) for region in regions for proxy in region.inputs)
        if any(name in needing and last_use[name] >= region.stop for region, name in inputs):
            continue
        first = regions[0]
        program = _program(computation[first.start : first.stop], first, trace, transform)
        if program is not None:
            calls.update((region.start, _RegionCall(program, first, region, needing)) for region in regions)
    if not calls:
        return transform(trace)
    with_calls = from_trace(trace)
    position = 0
    while position < len(trace.bound_symbols):
        call = calls.get(position)
        with_calls.bound_symbols.append(trace.bound_symbols[position] if call is None else call.bound_symbol)
        position = position + 1 if call is None else call.region.stop
    joint = transform(with_calls)
    expanded = from_trace(joint)
    for bsym in joint.bound_symbols:
        expanded.bound_symbols += _expand(bsym, expanded) if bsym.sym is fsdp_run else [bsym]
    return dce(expanded)


def _transform(trace: TraceCtx, *, executors: Sequence[Executor], has_gradients: bool) -> TraceCtx:
    joint = grad_transform_on_trace(trace) if has_gradients else trace
    return claim_operators(joint, executors=executors)


#
# Bound symbols that may be repeated
#


_OWNERS = ("thunder", "thunder_fsdp_sched")
_ONLY_ALONE = {OpTags.IN_PLACE, OpTags.DONT_DCE}


def _repeatable(executors: Sequence[Executor]) -> Callable[[BoundSymbol], bool]:
    """Return a function that tells whether a bound symbol is claimed and differentiated in the same way each time.

    It may not be if an executor keeps state, or if one of them or a rule is neither Thunder's nor this package's.
    """

    @cache
    def has_known_rules(sym_id: Hashable) -> bool:
        found = [impl for each in executors if (impl := each.implmap.get(sym_id)) is not None]
        rules = [f for impl in found for f in (impl.checker, impl.execution_transform, impl.grad_transform)]
        metas = [getattr(impl.symbol, "meta", None) for impl in found]
        return all(map(_is_owned, (*rules, *metas, *gradient_rules_of(sym_id))))

    def is_repeatable(bsym: BoundSymbol) -> bool:
        is_unpacking = bsym.sym.id is PrimIDs.UNPACK_TRIVIAL
        return not is_unpacking and all(has_known_rules(b.sym.id) and not _is_special(b) for b in nested([bsym]))

    return is_repeatable if all(map(_is_known, executors)) else lambda bsym: False


def _is_known(executor: Executor) -> bool:
    kind = type(executor)
    if isinstance(executor, StatefulExecutor) or not isinstance(executor, OperatorExecutor | FusionExecutor):
        return False
    return kind.__module__.partition(".")[0] in _OWNERS


def _is_owned(function: Any) -> bool:
    function = None if function is None else inspect.unwrap(function)
    if isinstance(function, Symbol):
        function = function.meta
    return function is None or str(getattr(function, "__module__", None)).partition(".")[0] in _OWNERS


def _is_special(bsym: BoundSymbol) -> bool:
    """Return whether a bound symbol is not differentiated by itself, or has an effect."""
    sym = bsym.sym
    return (
        not _ONLY_ALONE.isdisjoint((*bsym.tags, *(sym.tags or ())))
        or sym.id in (ltorch.checkpoint.id, PrimIDs.COPY_)
        or sym.name == "copy_"
        or is_recomputed(bsym)
    )


#
# The program of a region
#


class _RegionProgram(NamedTuple):
    """The bound symbols that Thunder has made of one region.

    Attributes:
        inputs: the proxies that it reads.
        output: its result.
        forward: the bound symbols that compute it.
        saved: their other results that backward reads.
        grad: the gradient of the result.
        backward: the bound symbols that compute the gradients of inputs.
        grads: for each input, its gradient; ``None`` if it has none.
    """

    inputs: tuple[Proxy, ...]
    output: TensorProxy
    forward: Sequence[BoundSymbol]
    saved: tuple[TensorProxy, ...]
    grad: TensorProxy | None
    backward: Sequence[BoundSymbol]
    grads: tuple[TensorProxy | None, ...]

    def results(self, part: _Part) -> tuple[TensorProxy, ...]:
        """Return the distinct results of a part; ``grad`` is none of backward's, even if it is the gradient of an input."""
        if part == "backward":
            return tuple({g.name: g for g in self.grads if g is not None and g is not self.grad}.values())
        return (self.output, *self.saved) if part == "forward" else (self.output,)


_Part = Literal["all", "forward", "backward"]
"""All of a program without gradients; the forward; the backward, which reads the inputs and results of forward."""


def _program(
    bsyms: Sequence[BoundSymbol], region: RepeatedRegion, trace: TraceCtx, transform: Callable[[TraceCtx], TraceCtx]
) -> _RegionProgram | None:
    """Return the program of a region; ``None`` if its backward is not a function of the result's gradient alone."""
    single = from_trace(trace)
    arguments = [requiring_gradient(p) if is_inexact(p) else p for p in region.inputs]
    returned = return_of(trace).from_bsym(args=({"output": (region.output,), "flat_args": arguments},))
    unpacked = [prims.unpack_trivial.bind(p, name=p.name, output=p) for p in arguments]
    single.bound_symbols = [*unpacked, *bsyms, returned]
    joint = transform(single)
    trace.name_ctr = joint.name_ctr
    forward: list[BoundSymbol] = []
    backward: list[BoundSymbol] = []
    for bsym, is_forward in zip(joint.bound_symbols[:-1], forward_part(joint), strict=False):
        if bsym.sym.id is not PrimIDs.UNPACK_TRIVIAL:
            (forward if is_forward else backward).append(bsym)
    result = return_of(joint).args[0]
    grads = result["output"] if "fw_flat_out" in result else ()
    (output,) = result.get("fw_flat_out", result["output"])
    given = [bsym for bsym in backward if bsym.sym.id is PrimIDs.GET_GRAD]
    backward = [bsym for bsym in backward if bsym.sym.id is not PrimIDs.GET_GRAD]
    grad = given[0].output if given else None
    if len(given) > 1 or not _defines(forward, output):
        return None
    if not all(each is None or each is grad or _defines(backward, each) for each in grads):
        return None
    made = {out.name: out for bsym in forward for out in defined_by(bsym)}
    saved = {name: made[name] for bsym in backward for name in args_of(bsym) if name in made and name != output.name}
    if not all(isinstance(each, TensorProxy) for each in saved.values()):
        return None
    return _RegionProgram(region.inputs, output, forward, tuple(saved.values()), grad, backward, tuple(grads))


def _defines(bsyms: Sequence[BoundSymbol], proxy: Proxy) -> bool:
    return any(proxy.name in outs_of(bsym) for bsym in bsyms)


#
# Calls of programs, which Thunder differentiates
#


class _RegionCall:
    """A region that a program computes: the opaque argument of ``fsdp_run``. Thunder would flatten a dataclass.

    Attributes:
        parameters: the region's parameters, keyed by those of the program.
        needed: for each input, whether its gradient is needed.
    """

    def __init__(
        self, program: _RegionProgram, first: RepeatedRegion, region: RepeatedRegion, needing: Collection[str]
    ) -> None:
        self.program = program
        self.region = region
        self.parameters = dict(zip(first.parameters, region.parameters, strict=True))
        self.needed = tuple(proxy.name in needing for proxy in region.inputs)

    @property
    def bound_symbol(self) -> BoundSymbol:
        return fsdp_run.bind(self, "all", *self.region.inputs, output=(self.region.output,))


def _expand(bsym: BoundSymbol, trace: TraceCtx) -> Sequence[BoundSymbol]:
    """Return copies of a program's bound symbols that replace a call."""
    call, part, *arguments = bsym.args
    program, results = call.program, call.program.results(part)
    read = (program.grad, *program.inputs, program.output, *program.saved) if part == "backward" else program.inputs
    originals = program.backward if part == "backward" else program.forward
    new = (*arguments, *bsym.output)
    renames = {old.name: other for old, other in zip((*read, *results), new, strict=True)}
    copies = BoundSymbolCopies(trace, renames, parameters=call.parameters)
    found = [copies.copy(each) for each in originals]
    for each, original in zip(found, originals, strict=True):
        share_facts(each, original, copies.new)
    return found


def _run_meta(call: _RegionCall, part: _Part, *inputs: Proxy) -> tuple[Any, ...]:
    return tuple(renamed(proxy, get_tracectx(), set(proxy.tags)) for proxy in call.program.results(part))


def _run_grad(call: _RegionCall, part: _Part, *inputs: Proxy) -> Any:
    program = call.program
    output, *saved = fsdp_run(call, "forward", *inputs)
    if program.grad is not None:
        grad = get_grad(output)
        computed = fsdp_run(call, "backward", grad, *inputs, output, *saved)
        grads = {old.name: new for old, new in zip(program.results("backward"), computed, strict=True)}
        grads[program.grad.name] = grad
        for proxy, of_program, is_needed in zip(inputs, program.grads, call.needed, strict=True):
            if of_program is not None and is_needed:
                put_grad(proxy, grads[of_program.name])
    return (output,)


fsdp_run = register("fsdp_run", only_in_between, meta=_run_meta)
executor.register_implementation(fsdp_run, fsdp_run, grad_transform=_run_grad)
