"""The symbols of leaf modules, and the pass that prepares them for autograd. See [Note: Leaf modules] in ``run``."""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.prims import OpTags
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transforms import get_grad, put_grad

from ...ir.bound_symbols import IN_CHECKPOINT
from ...ir.effects import declared
from ...ir.gradients import needing_gradient, with_gradient
from ...ir.inspection import args_of, outs_of, swap_args, with_bound_symbols
from ...ir.operator_facts import Aliases, Facts
from ...ir.registry import executor, print_call, register
from ...ir.symbols import effects_of_alias, tensor_proxy
from . import run
from .leaf import Leaf


def call(leaf: Leaf, *tensors: TensorProxy) -> list[TensorProxy]:
    """Trace a call of a leaf; return its outputs, with those detached that have no gradient.

    They are not tagged as constants, because Thunder takes an operator for a constant if one of its results is tagged.
    """
    outputs = fsdp_leaf(leaf, *tensors)
    return [
        ltorch.detach(out) if known.dtype.is_floating_point and not known.differentiable else out
        for out, known in zip(outputs, leaf.outputs, strict=True)
    ]


def _meta(leaf: Leaf, *tensors: TensorProxy) -> tuple[TensorProxy, ...]:
    return tuple(tensor_proxy(known.shape, known.device, known.dtype) for known in leaf.outputs)


def _forward_meta(leaf: Leaf, *tensors: TensorProxy) -> tuple[Proxy, ...]:
    return *_meta(leaf, *tensors), AnyProxy(None, prefix="leaf_state")


def _backward_meta(leaf: Leaf, state: Proxy, *tensors: TensorProxy) -> tuple[TensorProxy, ...]:
    known = zip((*leaf.inputs, *leaf.parameters), leaf.needs, strict=True)
    return tuple(tensor_proxy(m.shape, m.device, m.dtype) for m, is_needed in known if is_needed)


def _print(bsym: BoundSymbol, *printables: Any) -> str:
    return f"{print_call(bsym, *printables)}  # runs as it is: {bsym.args[0].title}"


def _facts(bsym: BoundSymbol) -> Facts:
    """Return the facts about a leaf: it may draw random numbers, and its autograd graph may hold its inputs."""
    leaf, outs = bsym.args[0], enumerate(bsym.flat_proxy_outs)
    inputs = tuple(tensor.name for tensor in bsym.args[1 : 1 + len(leaf.inputs)])
    holding = [out for number, out in outs if number in leaf.sharing or not isinstance(out, TensorProxy)]
    return Facts({out.name: inputs for out in holding if inputs}, pure=False, draws=True)


def _register(name: str, function: Any, meta: Any, *tags: OpTags) -> Any:
    # The tag keeps passes from recomputing a leaf, and from merging two of its calls.
    return register(name, function, meta=meta, printer=_print, tags=[OpTags.RANDOM_OP, *tags], facts=_facts)


# A leaf may change buffers, draw random numbers or raise an error, so it also runs if nothing reads its outputs.
fsdp_leaf = _register("fsdp_leaf", run.run, _meta, OpTags.DONT_DCE)
fsdp_leaf_forward = _register("fsdp_leaf_forward", run.forward, _forward_meta, OpTags.DONT_DCE)
fsdp_leaf_backward = _register("fsdp_leaf_backward", run.backward, _backward_meta)


fsdp_after = register("fsdp_after", lambda x, *_: x, effects_of_alias, lambda x, *_: TensorProxy(like=x))


def _after_grad(x: TensorProxy, *others: TensorProxy) -> TensorProxy:
    out = fsdp_after(x, *others)
    put_grad(x, get_grad(out))
    return out


executor.register_implementation(fsdp_after, fsdp_after, grad_transform=_after_grad)


def _grad(leaf: Leaf, *tensors: TensorProxy) -> Any:
    if not any(leaf.needs) or not leaf.is_differentiable:
        return fsdp_leaf(leaf, *tensors)
    *outputs, state = fsdp_leaf_forward(leaf, *tensors)
    grads = [get_grad(out) for out, known in zip(outputs, leaf.outputs, strict=True) if known.differentiable]
    found = fsdp_leaf_backward(leaf, state, *tensors[len(leaf.inputs) :], *grads)
    needed = [tensor for tensor, is_needed in zip(tensors, leaf.needs, strict=True) if is_needed]
    for tensor, grad in zip(needed, found, strict=True):
        put_grad(tensor, grad)
    return tuple(outputs)


executor.register_implementation(fsdp_leaf, fsdp_leaf, grad_transform=_grad)


def prepare_leaves(trace: TraceCtx) -> TraceCtx:
    """Note which gradients of leaf modules are needed, and clone their inputs that are views of parameters.

    A leaf in a region of ``torch.utils.checkpoint`` keeps its inputs, and runs its forward again in backward.

    Runs on the computation after ``insert_unshard`` and before autograd. A trace without leaves stays as it is. Before::

        (t9,) = fsdp_leaf(leaf_blocks_0_mlp, t1, t7, t8)

    After, if ``t1`` is a view of a parameter::

        t10 = ltorch.clone(t1)
        (t9,) = fsdp_leaf(leaf_blocks_0_mlp, t10, t7, t8)
    """
    needing = needing_gradient(trace)
    unsharded: set[str] = set()
    aliases = Aliases()
    new = with_bound_symbols(trace, (), "fsdp: prepare leaves")
    with tracectx(new):
        for bsym in trace.bound_symbols:
            aliases.add(bsym)
            if (single := declared(bsym).single) is not None and not single.reduces:
                unsharded.add(bsym.output.name)
            if bsym.sym is fsdp_leaf:
                leaf, *tensors = bsym.args
                passes = bool(with_gradient(bsym))
                needs = tuple(passes and t.name in needing and dtypes.is_inexact_dtype(t.dtype) for t in tensors)
                for i in range(len(leaf.inputs)):
                    if aliases.roots(tensors[i].name) & unsharded:
                        tensors[i] = ltorch.clone(tensors[i])
                leaf = leaf.needing(needs, recomputes=IN_CHECKPOINT in bsym.tags)
                bsym = bsym.from_bsym(args=(leaf, *tensors), _call_ctx={leaf.name: leaf})
            new.bound_symbols.append(bsym)
        _keep_unread(new)
    return new


def _keep_unread(trace: TraceCtx) -> None:
    """Let a result of the trace depend on leaves whose outputs nothing reads: otherwise they would run in backward."""
    *bsyms, last = trace.bound_symbols
    needed, unread = set(args_of(last)), list[TensorProxy]()
    for bsym in reversed(bsyms):
        if not needed.isdisjoint(outs_of(bsym)):
            needed.update(args_of(bsym))
        elif bsym.sym is fsdp_leaf:
            unread.append(bsym.flat_proxy_outs[0])
            needed.update(args_of(bsym))
    arguments = {arg.name for arg in trace.args}
    results = [out for out in tree_flatten(last.args[0]["output"])[0] if isinstance(out, TensorProxy)]
    result = next((out for out in results if out.name not in arguments), None)
    if unread and result is not None:
        trace.bound_symbols.pop()
        after = fsdp_after(result, *unread)
        trace.bound_symbols.append(swap_args(last, {result.name: after}))
