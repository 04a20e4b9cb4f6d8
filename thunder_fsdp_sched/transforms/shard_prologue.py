from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..errors import coded_error
from ..ir.inspection import args_of, with_bound_symbols
from ..ir.symbols import (
    become_shard,
    fsdp_assign_attributes,
    fsdp_check_inputs,
    fsdp_check_module,
    fsdp_check_number,
)
from ..runtime.traced_inputs import MemoryOfInputs, TracedInputs
from ..runtime.traced_module import TracedModule


def unpacked_parameters(prologue: TraceCtx) -> dict[str, str]:
    """Return the parameter name of each proxy that the prologue unpacks, keyed by the proxy's name."""
    return {bsym.output.name: bsym.args[1] for bsym in prologue.bound_symbols if bsym.sym is prims.unpack_parameter}


def parameters_among(arguments: Sequence[Any], prologue: TraceCtx) -> dict[str, str]:
    """Return the parameter name of each argument of the computation that is a parameter, keyed by the argument's name."""
    unpacked = unpacked_parameters(prologue)
    pairs = zip(prologue.output[0], arguments, strict=True)
    return {arg.name: unpacked[value.name] for value, arg in pairs if getattr(value, "name", None) in unpacked}


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
            raise coded_error(ValueError, "parameter.added-after-jit", name=name)
    read: dict[str, tuple[Any, str]] = {}
    for bsym in prologue.bound_symbols:
        if bsym.sym is prims.unpack_function_obj:
            read[bsym.output.name] = module, "self"
        elif bsym.sym in _READS and getattr(bsym.args[0], "name", None) in read:
            source, path = read[bsym.args[0].name]
            value, path = _read(bsym, source, path)
            if isinstance(value, torch.nn.Parameter):
                names = [name for name, shard in shards.items() if shard is value]
                if names:
                    raise coded_error(ValueError, "parameter.read-by-other-path", path=path, name=names[0])
                raise coded_error(ValueError, "parameter.not-registered", path=path)
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
    module: torch.nn.Module,
    shards: Mapping[str, torch.nn.Parameter],
    no_sync: bool,
    inputs: TracedInputs | None,
    memory_of_inputs: MemoryOfInputs,
) -> TraceCtx:
    """Make the prologue expect shards: give each parameter's proxy the shape of this rank's rows, and check the DTensor.

    Runs on the prologue after ``guard_outputs``; ``insert_unshard`` then changes the computation. It always runs, and also
    covers parameters that the prologue checks but the computation does not read. Before::

        # kwargs: "Any"
        module: "Any" = thunder.core.module.get_thunder_module(module0)
        t_blocks_0_weight: "cpu f32[64, 64]" = module.get_parameter('blocks.0.weight')
        prims.check_tensor_shape_and_metadata(t_blocks_0_weight, (64, 64), 'cpu', torch.float32, True)
        m1: "Any" = module.get_submodule('blocks.0')
        i2: "bool True" = m1.training
        prims.check_number_type_and_value(i2, True)

    After::

        # kwargs: "Any"
        fsdp_check_inputs(args, kwargs, traced_inputs)
        module: "Any" = thunder.core.module.get_thunder_module(module0)
        fsdp_check_module(module, traced_module)
        t_blocks_0_weight: "cpu f32[32, 64]" = module.get_parameter('blocks.0.weight')

    The parameter is a DTensor with the shape of the unsharded one. Its proxy has the shape of this rank's rows. One check of
    all parameters, and of all numbers and strings that are read from modules, takes a fraction of the host time of
    Thunder's own checks, one for each.

    Args:
        module: the user's module. Thunder reuses a cache entry only if it has not changed: see ``TracedModule``.
        shards: this rank's shard of each parameter, keyed by each of its names.
        no_sync: whether the traces are compiled for ``no_sync``.
        inputs: the values read from the program's inputs. Thunder reuses a cache entry only for such inputs.
        memory_of_inputs: the memory layout that the traces expect of their arguments.

    Raises:
        NotImplementedError: the traces unpack more than one module.
    """
    unpacked = unpacked_parameters(prologue)
    modules = [bsym for bsym in prologue.bound_symbols if bsym.sym is prims.unpack_thunder_module]
    roots = {bsym.output.name for bsym in prologue.bound_symbols if bsym.sym is prims.unpack_function_obj}
    if len(modules) > 1 and not all(bsym.args[0].name in roots for bsym in modules):
        raise coded_error(NotImplementedError, "module.several-modules-in-function")
    reads, folded = _reads_of_attributes(prologue, modules[0].output.name) if modules else ([], set())
    jitted = {bsym.output.name: bsym.args[0] for bsym in modules if bsym.args[0].name in roots}
    bsyms: list[BoundSymbol] = []
    checked: dict[str, torch.nn.Parameter] = {}
    for number, bsym in enumerate(prologue.bound_symbols):
        if number in folded:
            continue
        if bsym.sym is prims.unpack_parameter and bsym.args[1] in shards:
            become_shard(bsym.output, shards[bsym.args[1]])
        elif bsym.sym is prims.check_tensor_shape_and_metadata and unpacked.get(bsym.args[0].name) in shards:
            name = unpacked[bsym.args[0].name]
            checked[name] = shards[name]
            continue
        elif bsym.sym is prims.check_number_type_and_value and isinstance(bsym.args[1], (float, complex)):
            bsym = fsdp_check_number.bind(*bsym.args, output=None)  # Thunder's takes -0.0 for 0.0
        elif bsym.sym is prims.unpack_attr and bsym.args[0].name in jitted:  # the jitted module has other hooks
            bsym = bsym.from_bsym(args=(jitted[bsym.args[0].name], *bsym.args[1:]))
        bsyms.append(bsym)
    arguments = {bsym.output.name: bsym.output for bsym in bsyms if bsym.sym is prims.unpack_trivial}
    if inputs is not None and len(inputs):  # first, because errors of unpacking name no input
        check = fsdp_check_inputs.bind(arguments["args"], arguments["kwargs"], inputs, output=None)
        bsyms.insert(1 + max(i for i, b in enumerate(bsyms) if b.sym is prims.unpack_trivial), check)
    if modules:  # the module is an argument, so that transforms that sort checks by their inputs see the dependency
        check = fsdp_check_module.bind(modules[0].output, TracedModule(module, no_sync, reads, checked), output=None)
        bsyms.insert(1 + next(i for i, bsym in enumerate(bsyms) if bsym is modules[0]), check)
    of_module = {b.output.name for b in bsyms if b.sym in (prims.unpack_parameter, prims.unpack_buffer)}
    written, contiguous = (tuple(sorted(names - of_module)) for names in memory_of_inputs)
    if written or contiguous:
        from ..ir.check_memory import fsdp_check_memory  # here, because most programs write nothing

        tensors = [p for p in prologue.output[0] if isinstance(p, TensorProxy) and p.name not in of_module]
        check = fsdp_check_memory.bind(written, contiguous, tuple(p.name for p in tensors), *tensors, output=None)
        bsyms.insert(len(bsyms) - 1, check)
    if inputs is not None and inputs.assigned:  # last: if a check fails, other traces run instead
        assign = fsdp_assign_attributes.bind(arguments["args"], arguments["kwargs"], inputs, output=None)
        bsyms.insert(len(bsyms) - 1, assign)
    return with_bound_symbols(prologue, bsyms, "fsdp: shard the prologue")


def _reads_of_attributes(prologue: TraceCtx, module: str) -> tuple[list[tuple[str, str, Any]], set[int]]:
    """Return the attributes that the prologue reads only to compare them, and the positions of the bound symbols.

    Args:
        module: the name of the root module's proxy.

    Returns:
        the path of a module, the name of its attribute, and its value, for each read.
    """
    users: dict[str, list[int]] = defaultdict(list)
    for position, bsym in enumerate(prologue.bound_symbols):
        for name in args_of(bsym):
            users[name].append(position)
    paths = {module: ""}
    reads: dict[tuple[str, str, Any], None] = {}
    folded: set[int] = set()
    for position, bsym in enumerate(prologue.bound_symbols):
        if bsym.sym is prims.unpack_submodule and bsym.args[0].name == module:
            paths[bsym.output.name] = bsym.args[1]
        elif bsym.sym is prims.unpack_attr and bsym.args[0].name in paths:
            user = [prologue.bound_symbols[user] for user in users[bsym.output.name]]
            if (
                len(user) == 1
                and user[0].sym in _COMPARES
                and getattr(user[0].args[0], "name", None) == bsym.output.name
            ):
                reads[paths[bsym.args[0].name], bsym.args[1], user[0].args[1]] = None
                folded |= {position, *users[bsym.output.name]}
    for position, bsym in enumerate(prologue.bound_symbols):
        if bsym.sym is prims.unpack_submodule and folded.issuperset(users[bsym.output.name]):
            folded.add(position)
    return list(reads), folded


_COMPARES = (prims.check_number_type_and_value, prims.check_string_value)
