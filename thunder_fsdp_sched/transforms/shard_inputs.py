"""Unpack shards in place of parameters, and unshard each at its first use, before autograd.

Outputs of the model never alias a slot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

from ..ir.inspection import args_of, outs_of, return_of, with_bound_symbols
from ..ir.operator_facts import Aliases, facts_of, is_pure
from ..ir.symbols import fsdp_check_hooks, fsdp_check_no_sync, fsdp_unshard
from ..plan.specs import Strided
from ..runtime.bucket import Bucket
from ..runtime.module_hooks import TracedHooks
from ..runtime.row_dtensor import local_rows


def unpacked_parameters(prologue: TraceCtx) -> dict[str, str]:
    """Return the parameter name of each proxy that the prologue unpacks, keyed by the proxy's name."""
    return {bsym.output.name: bsym.args[1] for bsym in prologue.bound_symbols if bsym.sym is prims.unpack_parameter}


def refuse_foreign_parameters(
    prologue: TraceCtx,
    module: torch.nn.Module,
    shards: Mapping[str, torch.nn.Parameter],
    known: Collection[str],
) -> None:
    """Raise an error if forward reads a parameter other than by its name in the module.

    The gradient of such a parameter would not be reduced. Runs on the prologue before ``shard_prologue``, and changes
    nothing. The prologue shows where forward reads a value. The first of these parameters is unpacked by name; the last
    is read from a list and refused::

        t_head_weight: "cpu f32[64, 64]" = module.get_parameter('head.weight')
        obj1: "Any" = module.tied
        t_tied_0: "cpu f32[32, 64]" = obj1[0]

    Args:
        module: the user's module, which the prologue unpacks.
        shards: this rank's shard of each parameter, keyed by each of its names.
        known: names of parameters that the prologue may unpack.

    Raises:
        ValueError: names the attribute or the parameter.
    """
    for name in unpacked_parameters(prologue).values():
        if name not in known:
            raise ValueError(
                f"fsdp: forward reads parameter {name!r}, which the module did not have at thunder.jit, so it is neither "
                f"sharded nor are its gradients reduced. Add it before thunder.jit"
            )
    read: dict[str, tuple[Any, str]] = {}
    for bsym in prologue.bound_symbols:
        if bsym.sym is prims.unpack_function_obj:
            read[bsym.output.name] = module, "self"
        elif bsym.sym in _READS and getattr(bsym.args[0], "name", None) in read:
            source, path = read[bsym.args[0].name]
            value, path = _read(bsym, source, path)
            if isinstance(value, torch.nn.Parameter):
                names = [name for name, shard in shards.items() if shard is value]
                instead = f"which is parameter {names[0]!r}: read it as self.{names[0]}" if names else "a parameter"
                raise ValueError(
                    f"fsdp: forward reads {path}, {instead}. Only what named_parameters() of the module names is sharded "
                    f"and has its gradients reduced"
                    + ("" if names else "; register it as a parameter, or make it a buffer if it is constant")
                )
            read[bsym.output.name] = value, path


_READS = (prims.unpack_thunder_module, prims.unpack_submodule, prims.unpack_attr, prims.unpack_getitem)


def _read(bsym: BoundSymbol, source: Any, path: str) -> tuple[Any, str]:
    """Return the value that a bound symbol of the prologue reads from ``source``, and the expression for it."""
    if bsym.sym is prims.unpack_thunder_module:
        return source, path
    key = bsym.args[1]
    if bsym.sym is prims.unpack_submodule:
        return source.get_submodule(key), f"{path}.{key}"
    if bsym.sym is prims.unpack_attr:
        return getattr(source, key, None), f"{path}.{key}"
    try:
        return source[key], f"{path}[{key!r}]"
    except Exception:  # the index is computed at run time
        return None, path


def shard_prologue(
    prologue: TraceCtx,
    *,
    shards: Mapping[str, torch.nn.Parameter],
    no_sync: bool,
    hooks: TracedHooks,
) -> TraceCtx:
    """Make the prologue expect shards: give each parameter's proxy the shape of this rank's rows, and check the DTensor.

    Runs first, on the prologue, right after Thunder has traced the module; ``insert_unshard`` then changes the
    computation. It always runs, and also covers parameters that the prologue checks but the computation does not read.
    Before::

        module: "Any" = thunder.core.module.get_thunder_module(module0)
        t_blocks_0_weight: "cpu f32[64, 64]" = module.get_parameter('blocks.0.weight')
        prims.check_tensor_shape_and_metadata(t_blocks_0_weight, (64, 64), 'cpu', torch.float32, True)

    After::

        module: "Any" = thunder.core.module.get_thunder_module(module0)
        fsdp_check_no_sync(module, False)
        fsdp_check_hooks(module, traced_hooks)
        t_blocks_0_weight: "cpu f32[32, 64]" = module.get_parameter('blocks.0.weight')
        prims.check_tensor_shape_and_metadata(t_blocks_0_weight, (64, 64), 'cpu', torch.float32, True)

    The parameter is a DTensor with the shape of the unsharded one. Its proxy has the shape of this rank's rows.

    Args:
        shards: this rank's shard of each parameter, keyed by each of its names.
        no_sync: whether the traces are compiled for ``no_sync``. Thunder reuses a cache entry only in the same state.
        hooks: those of the module that was traced. Thunder reuses a cache entry only with the same.

    Raises:
        NotImplementedError: the traces unpack more than one module.
    """
    unpacked = unpacked_parameters(prologue)
    modules = [bsym.output for bsym in prologue.bound_symbols if bsym.sym is prims.unpack_thunder_module]
    if len(modules) > 1:
        raise NotImplementedError("fsdp: the compiled function uses more than one module; jit the outermost one")
    bsyms = []
    for bsym in prologue.bound_symbols:
        if bsym.sym is prims.unpack_parameter and bsym.args[1] in shards:
            become_shard(bsym.output, shards[bsym.args[1]])
        elif bsym.sym is prims.check_tensor_shape_and_metadata and unpacked.get(bsym.args[0].name) in shards:
            shard = shards[unpacked[bsym.args[0].name]]
            device = devices.to_device(shard.device).device_str()
            bsym = bsym.from_bsym(args=(bsym.args[0], tuple(shard.shape), device, shard.dtype, shard.requires_grad))
        bsyms.append(bsym)
        if bsym.sym is prims.unpack_thunder_module:
            # The module is an argument so that transforms that sort checks by their inputs see the dependency.
            bsyms.append(fsdp_check_no_sync.bind(bsym.output, no_sync, output=None))
            bsyms.append(fsdp_check_hooks.bind(bsym.output, hooks, output=None))
    return with_bound_symbols(prologue, bsyms, "fsdp: shard the prologue")


def become_shard(proxy: TensorProxy, param: torch.nn.Parameter) -> None:
    """Turn the proxy of a parameter into that of its shard, in place: traces and prologue share proxies by name."""
    shard = local_rows(param)
    proxy._shape = tuple(shard.shape)
    proxy._numel = shard.numel()
    proxy._ndim = shard.ndim
    proxy._device = devices.to_device(shard.device)
    dtype = dtypes.to_dtype(shard.dtype)
    if proxy.dtype is not dtype:  # the module was traced with parameters in lower precision
        proxy._dtype = proxy._true_dtype = dtype
    proxy._requires_grad = param.requires_grad


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
        NotImplementedError: the model changes a sharded parameter in place, or reads by position in memory what is
            cloned here.
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
    names: dict[str, str] = {}  # of each unsharded value, by its name
    strided: dict[str, Strided] = {}  # those whose place in their storage has changed
    from_params: set[str] = set()  # values that derive from parameters alone
    copies: dict[Any, TensorProxy] = {}  # clones of views that backward could not recompute
    copied: dict[str, str] = {}  # values that may share memory with such a view, with the operator's name
    copied_by: dict[str, str] = {}  # that operator, by the name of the clone
    aliases = Aliases()
    model_aliases = Aliases()  # those of the original model, without our clones

    def unshard(argument: str) -> None:
        if argument in arguments and argument not in unsharded:
            bucket, index = place = locations[parameters[argument]]
            full = fsdp_unshard(bucket, index, tied[place][0])
            unsharded.update({arg.name: full for arg in tied[place]})
            names[full.name] = parameters[argument]
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
            aliases.add(bsym)
            model_aliases.add(bsym)
            _refuse_in_place(bsym, model_aliases, names, copied)
            _refuse_by_position(bsym, aliases, names, strided, copied_by)
            new.bound_symbols.append(bsym)
            if _reads_only(bsym, from_params):
                from_params.update(outs_of(bsym))
            elif not bsym.subsymbols and not isinstance(bsym.sym.id, PrimIDs):
                for out in bsym.flat_proxy_outs:
                    if isinstance(out, TensorProxy) and aliases.roots(out.name) & names.keys():
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
    return is_pure(bsym) and all(p.name in values for p in bsym.flat_proxy_args if isinstance(p, TensorProxy))


def _refuse_in_place(
    bsym: BoundSymbol, aliases: Aliases, parameters: Mapping[str, str], copied: Mapping[str, str]
) -> None:
    for root in sorted(aliases.roots(*facts_of(bsym).writes)):
        if root in parameters:
            raise NotImplementedError(
                f"fsdp: the model changes parameter {parameters[root]!r} in place during forward "
                f"({bsym.sym.name}), which would be lost with the unsharded copy. Make it a buffer, or list it in "
                f"ignored_params."
            )
        if root in copied:
            raise NotImplementedError(
                f"fsdp: the model changes a tensor in place ({bsym.sym.name}) that {copied[root]} may have returned a view "
                f"of, together with one of a parameter. Clone the tensor first."
            )


def _refuse_by_position(
    bsym: BoundSymbol,
    aliases: Aliases,
    parameters: Mapping[str, str],
    strided: Mapping[str, Strided],
    copied_by: Mapping[str, str],
) -> None:
    for root in sorted(aliases.roots(*facts_of(bsym).by_position)):
        if root in copied_by:
            raise NotImplementedError(
                f"fsdp: the model addresses a tensor by position in memory ({bsym.sym.name}) that {copied_by[root]} may "
                f"have returned as a view of a parameter, and that is a copy here. Clone the parameter first."
            )
        if root in strided:
            raise ValueError(
                f"fsdp: {bsym.sym.name} addresses parameter {parameters[root]!r} by position in memory. Before thunder.jit "
                f"it had strides {strided[root].strides} and storage offset {strided[root].offset}, but unsharded it is "
                f"contiguous at offset 0, so the values would be others. Give it contiguous memory of its own before "
                f"thunder.jit, `p.data = p.data.clone(memory_format=torch.contiguous_format)`, and adapt the positions; "
                f"or list it in ignored_params."
            )
