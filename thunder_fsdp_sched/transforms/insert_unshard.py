"""Unshard each parameter at its first use, before autograd; outputs of the model never alias a slot."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

from ..errors import coded_error
from ..ir.inspection import args_of, outs_of, return_of, with_bound_symbols
from ..ir.operator_facts import Aliases, facts_of, is_pure
from ..ir.symbols import become_shard, fsdp_unshard
from ..plan.specs import StridedView
from ..runtime.bucket import Bucket


def insert_unshard(
    trace: TraceCtx,
    *,
    parameters: Mapping[str, str],
    locations: Mapping[str, tuple[Bucket, int]],
    shards: Mapping[str, torch.nn.Parameter],
) -> TraceCtx:
    """Replace each parameter among the arguments with its shard, and insert ``fsdp_unshard`` before its first use.

    Runs on the computation after ``shard_prologue`` and before Thunder's autograd, which differentiates
    ``fsdp_unshard`` into ``fsdp_reduce``. It always runs; parameters that are not in a bucket stay as they are.
    Before::

        t4 = ltorch.linear(x, t_blocks_0_weight, None)

    After::

        t19 = fsdp_unshard(bucket_blocks_0, 0, t_blocks_0_weight)
        t4 = ltorch.linear(x, t19, None)

    All names of a tied parameter share one unshard. Two kinds of values are cloned, because their slot is reused: an
    output that is an unsharded parameter or a view of one; and a view that backward could not recompute from parameters
    alone, either because the operator is unknown or because it also reads activations.

    Args:
        parameters: the parameter name of each argument that is a parameter, keyed by the argument's name.
        locations: the bucket of each parameter and its index there, keyed by each of its names.
        shards: this rank's shard of each parameter, keyed by each of its names.

    Raises:
        NotImplementedError: the model changes a sharded parameter in place, or reads a value that is cloned here by its
            position in memory.
        ValueError: an operator such as ``as_strided`` reads a parameter by position in memory, and the parameter was not
            contiguous before sharding.
    """
    arguments: set[str] = set()
    tied: dict[tuple[Bucket, int], list[TensorProxy]] = {}
    for arg in trace.args:
        name = parameters.get(arg.name) if isinstance(arg, Proxy) else None
        if name is not None and name in locations:
            become_shard(arg, shards[name])
            arguments.add(arg.name)
            tied.setdefault(locations[name], []).append(arg)

    unsharded: dict[str, TensorProxy] = {}  # by the name of any argument that is this parameter
    names: dict[str, str] = {}  # the parameter's name, by that of the unsharded value
    strided: dict[str, StridedView] = {}  # those that were not contiguous at the start of their storage
    from_params: set[str] = set()  # values that derive from parameters alone
    copies: dict[Any, TensorProxy] = {}  # clones of views that backward could not recompute
    copied: dict[str, str] = {}  # values that may share memory with such a view, with the operator's name
    copied_by: dict[str, str] = {}  # that operator, by the name of the clone
    aliases = Aliases()
    model_aliases = Aliases()  # those of the original model, without our clones
    views: set[str] = set()  # values that may share memory with a parameter
    seen: list[BoundSymbol] = []

    def unshard(argument: str) -> None:
        if argument in arguments and argument not in unsharded:
            bucket, index = location = locations[parameters[argument]]
            full = fsdp_unshard(bucket, index, tied[location][0])
            unsharded.update({arg.name: full for arg in tied[location]})
            names[full.name] = parameters[argument]
            views.add(full.name)
            if (before := bucket.spec.params[index].strided) is not None:
                strided[full.name] = before
            from_params.add(full.name)

    def give_away(output: Any) -> Any:
        if not isinstance(output, TensorProxy):
            return output
        unshard(output.name)  # if it is returned without any other use
        output = unsharded.get(output.name, output)
        output = copies.get(variableify(output), output)
        return ltorch.clone(output) if aliases.roots(output.name) & names.keys() else output

    new = with_bound_symbols(trace, (), "fsdp: insert unshard")
    with tracectx(new):
        for bsym in trace.bound_symbols[:-1]:
            if bsym.sym.name == "unpack_trivial":
                new.bound_symbols.append(bsym)
                continue
            for name in args_of(bsym):
                unshard(name)
            swaps = {variableify(p): unsharded[p.name] for p in bsym.flat_proxy_args if p.name in unsharded}
            bsym = bsym.from_bsym_swap_proxies(swaps) if swaps else bsym
            bsym = bsym.from_bsym_swap_proxies(copies, skip_output=True) if copies else bsym
            seen.append(bsym)
            # Finding facts takes long, and other operators can neither return a view of a parameter nor write to one.
            if copies or not views.isdisjoint(args_of(bsym)):
                aliases.add(bsym)
                model_aliases.add(bsym)
                _refuse_in_place(bsym, model_aliases, names, copied)
                _refuse_by_position(bsym, aliases, names, strided, copied_by)
                views.update(out for out in outs_of(bsym) if model_aliases.roots(out) & names.keys())
            new.bound_symbols.append(bsym)
            if _reads_only(bsym, from_params):
                from_params.update(outs_of(bsym))
            elif not bsym.subsymbols and not isinstance(bsym.sym.id, PrimIDs):
                for out in bsym.flat_proxy_outs:
                    if isinstance(out, TensorProxy) and aliases.roots(out.name) & names.keys():
                        if (
                            not copies
                        ):  # the operator may also return a view of an activation, so those count from here on
                            aliases, model_aliases = Aliases(seen), Aliases(seen)
                        copies[variableify(out)] = copy = ltorch.clone(out)
                        model_aliases.link(copy.name, out.name)
                        copied_by[copy.name] = bsym.sym.name
                        copied.update(dict.fromkeys(aliases.roots(out.name), bsym.sym.name))
        last = return_of(trace)
        returned = {**last.args[0], "output": tree_map(give_away, last.args[0]["output"])}
        new.bound_symbols.append(last.from_bsym(args=(returned,)))
    return new


def _reads_only(bsym: BoundSymbol, values: Collection[str]) -> bool:
    """Return whether ``bsym`` can be recomputed from these values."""
    return all(p.name in values for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)) and is_pure(bsym)


def _refuse_in_place(
    bsym: BoundSymbol, aliases: Aliases, parameters: Mapping[str, str], copied: Mapping[str, str]
) -> None:
    for root in sorted(aliases.roots(*facts_of(bsym).writes)):
        if root in parameters:
            raise coded_error(
                NotImplementedError,
                "module.changes-parameter-in-place",
                parameter=parameters[root],
                operator=bsym.sym.name,
            )
        if root in copied:
            raise coded_error(
                NotImplementedError,
                "module.changes-possible-view-in-place",
                operator=bsym.sym.name,
                source=copied[root],
            )


def _refuse_by_position(
    bsym: BoundSymbol,
    aliases: Aliases,
    parameters: Mapping[str, str],
    strided: Mapping[str, StridedView],
    copied_by: Mapping[str, str],
) -> None:
    for root in sorted(aliases.roots(*facts_of(bsym).by_position)):
        if root in copied_by:
            raise coded_error(
                NotImplementedError,
                "module.addresses-possible-view-by-position",
                operator=bsym.sym.name,
                source=copied_by[root],
            )
        if root in strided:
            raise coded_error(
                ValueError,
                "module.addresses-parameter-by-position",
                operator=bsym.sym.name,
                parameter=parameters[root],
                strides=strided[root].strides,
                offset=strided[root].offset,
            )
