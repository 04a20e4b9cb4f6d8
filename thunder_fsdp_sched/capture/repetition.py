"""Trace modules that are alike once: see [Note: Repeated modules] in ``records``.

[Note: Module calls]
Thunder has one table of functions that it calls in place of others while it traces ("lookasides"). The first ``thunder.jit``
with ``fsdp`` registers one there for ``nn.Module.__call__``, for the rest of the process. In programs that ``fsdp`` does not
shard it does what torch does. What each call adds to the trace gets a tag: see [Note: Regions] in ``bound_symbols``.
So does what a call of ``torch.utils.checkpoint.checkpoint`` adds, which Thunder's own lookaside still traces.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from thunder.core.compile_data import get_cache_option, get_compile_data
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    do_raise,
    get_interpreterruntimectx,
    unwrap,
    wrap,
    wrap_const,
)
from thunder.core.jit_ext import EXT_FLAG_IS_CALLABLE, EXT_FLAG_IS_MODULE, get_jit_ctx
from thunder.core.options import CACHE_OPTIONS
from thunder.core.proxies import Proxy, variableify
from thunder.core.symbol import BoundSymbol

from ..extensions import load
from ..ir.symbols import LEAF
from ..private_interpreter import (
    added_checks,
    call_interpreted,
    call_module_as_torch,
    checks_of,
    has_been_modified,
    look_aside_checkpoints,
    look_aside_module_calls,
    renames_of,
)
from ..private_lookups import attribute
from ..private_thunder import cache_info, renamed
from ..private_torch import is_hooked
from .bound_symbols import IN_CHECKPOINT, BoundSymbolCopies, renew_calls, tag_call
from .input_reads import InputReads
from .leaves import Leaves
from .observer import Observer, Unrepeatable
from .paths import ATTRIBUTE, FUNCTION, ITEM, Path, evaluate
from .records import Arguments, GradMode, Record, flatten, grad_mode_of, kwargs_in, make_record, tags_in, ties_of
from .refusals import count_refused, latest_refused

_LOGGER = logging.getLogger(__name__)

_DEFAULTS = ("default_dtype", "default_device")
"""The state of torch that operators read."""

_MOST = 16
"""How many records are kept for calls with the same arguments of modules of one class."""

RECENT = 4
"""Of how many compilations the records are kept, and the traces. Both take most of the memory of a compilation."""


class Repetition:
    """Traces the module calls of one jitted module, and gives calls that are alike copies of the same bound symbols.

    Records are kept as long as one of the last compilations has used them, so that calls with other flags profit.
    """

    def __init__(self, input_reads: InputReads | None = None) -> None:
        self._input_reads = input_reads or InputReads()
        self._records: dict[Any, list[weakref.ref[Record]]] = {}
        self._used: deque[set[Record]] = deque(maxlen=RECENT)  # in the last compilations
        self._trace: Any = None
        self.recorded = self.repeated = 0  # calls of the present compilation
        self.refused: dict[Path, str] = {}  # why others can be neither, by the path of the module

    def __call__(self, module: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        """Trace a call of a module without hooks, with wrapped values; return the wrapped result, or a signal."""
        context, data = get_jit_ctx(), get_compile_data()
        if context.computation_trace is not self._trace:
            self._begin(context.computation_trace, module)
        observer = self._observer
        module_path = observer.paths.of(module.provenance)
        try:
            if module_path is None or module_path[:1] != (FUNCTION,) or (FUNCTION,) not in observer.roots:
                raise Unrepeatable("the module is not a part of the compiled one")
            if has_been_modified(context):
                raise Unrepeatable("the program has modified a module")
            if not data.autocast_stack.is_empty() or get_cache_option() is not CACHE_OPTIONS.CONSTANT_VALUES:
                raise Unrepeatable("autocast, or symbolic values")
            if self._is_shared(unwrap(module), module_path):
                raise Unrepeatable("a part of the module was called as a part of another one")
            arguments = flatten(args, kwargs)
        except Unrepeatable as reason:
            self._refuse(module_path, reason)
            return call_forward(module, *args, **kwargs)
        leaves = _callers[data][2]
        version = 0 if leaves is None else leaves.version
        key = type(unwrap(module)), arguments.key, version, *map(cache_info().get, _DEFAULTS)
        records, mode = self._records.setdefault(key, []), grad_mode_of(data)
        observer.note_checks()
        for record in (known for known in (ref() for ref in records) if known is not None):
            if (
                record.fits(module_path, observer.roots, mode, arguments.detached)
                and (new_leaves := _leaves_like(record, leaves, unwrap(module))) is not None
            ):
                self.repeated += 1
                self._used[-1].add(record)
                observer.uses_of_grad_mode += not record.is_portable
                read = [read.at(module_path) for read in record.reads]
                observer.reads.extend(read)
                self._input_reads.note_paths(read, observer.roots)
                return _repeat(record, observer, module, module_path, arguments, mode, new_leaves)
        is_known = module_path in observer.checked  # then full tracing adds fewer checks than it will for others
        since = observer.mark()
        observer.reads.append(module_path)
        self._depth += 1
        try:
            with observer.observe() if self._depth == 1 else contextlib.nullcontext():
                result = call_forward(module, *args, **kwargs)
        finally:
            self._depth -= 1
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return result
        try:
            if is_known:
                raise Unrepeatable("the program has read the module before it calls it")
            record = make_record(observer, since, module_path, arguments, result, mode)
        except Unrepeatable as reason:
            self._refuse(module_path, reason)
            return result
        self._used[-1].add(record)
        records.append(weakref.ref(record))
        del records[:-_MOST]
        self.recorded += 1
        return result

    def _begin(self, trace: Any, module: WrappedValue) -> None:
        """Begin a new compilation, whose first module call is that of the outermost module."""
        self._trace = trace
        self._used.append(set())
        alive = ((key, [ref for ref in refs if ref() is not None]) for key, refs in self._records.items())
        self._records = {key: refs for key, refs in alive if refs}
        self._observer = Observer(module)
        self._first_paths: dict[torch.nn.Module, Path] = {}  # where each module was called first
        self._depth = self.recorded = self.repeated = 0
        self.refused = {}

    def end(self) -> None:
        """End a compilation: free the log of what the program has read."""
        self._trace = None
        self.__dict__.pop("_observer", None)
        self.__dict__.pop("_first_paths", None)

    def _is_shared(self, module: torch.nn.Module, path: Path) -> bool:
        """Return whether a part of the module is known by another path, under which the prologue checks it."""
        paths = {
            part: (
                *path,
                *(step for key in name.split(".") if key for step in ((ATTRIBUTE, "_modules"), (ITEM, key))),
            )
            for name, part in module.named_modules()
        }
        return any(self._first_paths.setdefault(part, path) != path for part, path in paths.items())

    def _refuse(self, module_path: Path | None, reason: Unrepeatable) -> None:
        self.refused[module_path or ()] = str(reason)
        _LOGGER.debug("a module call is traced in full: %s: %s", module_path, reason)


#
# Copies of a recorded call
#


def _leaves_like(record: Record, leaves: Leaves | None, module: torch.nn.Module) -> dict[Any, Any] | None:
    """Return the calls of leaf modules in place of the recorded ones; ``None`` if they do not return the same."""
    if not record.leaves:
        return {}
    if ties_of(module) != record.ties:
        return None
    found: dict[Any, Any] = {}
    for leaf, path in record.leaves.items():
        like = load("extras.leaf_modules.capture:leaf_like")(leaves, leaf, module.get_submodule(path))
        if like is None:
            return None
        found[leaf] = like
    return found


def _repeat(
    record: Record,
    observer: Observer,
    module: WrappedValue,
    module_path: Path,
    arguments: Arguments,
    mode: GradMode,
    leaves: Mapping[Any, Any],
) -> WrappedValue:
    """Add copies of everything that the recorded call added to the traces; return the wrapped result of the call.

    Args:
        module_path: the path of ``module``, for which the record fits.
        arguments: those of the call, with the same key as in the recorded one.
        mode: the grad mode of the call, in which the record holds.
        leaves: the calls of leaf modules in place of the recorded ones.
    """
    context = observer.context
    copies = _Copies(record, observer, mode, {module_path: module.provenance, (FUNCTION,): observer.root}, leaves)
    copies.new.update(
        (old.name, wrapped.value) for old, wrapped in zip(record.arguments, arguments.tensors, strict=True)
    )
    for read, check, proxy, expected in record.checks:
        path = read.at(module_path)
        if (path, check) not in observer.written:
            copies.check(path, check, proxy, expected)
    for name, read in record.inputs.items():
        if name not in copies.new:
            copies.new[name] = copies.wrap_tensor(read.at(module_path)).value
    scope = context.computation_trace.peek_scope()
    added = [copies.copy(bsym) for bsym in record.bsyms]
    renew_calls(added)
    scope.extend(added)
    for old, name in record.renames.items():
        if not context.computation_trace.has_name(name):
            renames_of(context)[variableify(copies.new[old])] = copies.new[old].replace_name(name)
    provenance = ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[module.provenance])
    return wrap(copies.swap(record.result), provenance=provenance)


class _Copies(BoundSymbolCopies):
    """Copies for one repetition."""

    def __init__(
        self,
        record: Record,
        observer: Observer,
        mode: GradMode,
        provenances: dict[Path, ProvenanceRecord],
        leaves: Mapping[Any, Any],
    ) -> None:
        super().__init__(observer.context.computation_trace, {})
        self._leaves = leaves
        self._context = observer.context
        self._checked = observer.checked_names
        self._record = record
        self._mode = mode
        self._provenances = provenances
        self._known = dict(observer.roots)
        self._wrapped: dict[Path, WrappedValue] = {}

    def check(self, path: Path, check: Any, proxy: Proxy, expected: tuple[Any, ...]) -> None:
        """Write a check of the value at ``path`` to the prologue."""
        value = evaluate(path, self._known)
        if isinstance(value, torch.Tensor):
            self.new[proxy.name] = self.wrap_tensor(path).value  # Thunder checks what it wraps
            return
        if (value,) != expected or type(value) is not type(expected[0]):  # an attribute that the program does not read
            wrap(value, provenance=self._provenance(path))
            return
        new = renamed(proxy, self._trace, set(proxy.tags))
        new.history = self._provenance(path)
        self.new[proxy.name] = new
        checks_of(self._context).append((check, new, *expected))

    def wrap_tensor(self, path: Path) -> WrappedValue:
        """Return the tensor at ``path`` as the interpreter wraps it, with a proxy."""
        if path not in self._wrapped:
            with added_checks(self._context) as added:
                self._wrapped[path] = wrap(evaluate(path, self._known), provenance=self._provenance(path))
            is_new = self._checked.isdisjoint(check[1].name for check in added)
            for check in added:
                if is_new:
                    checks_of(self._context).append(check)
                else:
                    self._context.add_constraint(check)  # which leaves out those that there are
                self._checked.add(check[1].name)
        return self._wrapped[path]

    def copy(self, bsym: BoundSymbol) -> BoundSymbol:
        """Return a copy of a bound symbol, for the grad mode and the leaf modules of this call."""
        new = super().copy(bsym)
        if bsym.sym.name == LEAF and bsym.args[0] in self._leaves:
            leaf = self._leaves[bsym.args[0]]
            if not self._trace.has_name(leaf.name):
                self._trace.add_name(leaf.name)
            new = new.from_bsym(args=(leaf, *new.args[1:]), _call_ctx={leaf.name: leaf})
        if self._record.is_portable and (kwargs := kwargs_in(bsym, self._mode.enabled)) is not bsym.kwargs:
            new = new.from_bsym(kwargs=self.swap(kwargs))
        return new

    def tags_of(self, proxy: Proxy) -> set[Any]:
        tags = self._record.tags[proxy.name]
        return tags_in(proxy, tags, self._mode.enabled) if self._record.is_portable else set(tags)

    def _provenance(self, path: Path) -> ProvenanceRecord:
        """Return the provenance of the value at ``path``, as the interpreter makes it."""
        if path not in self._provenances:
            if len(path) == 1:
                return wrap_const(evaluate(path, self._known)).provenance
            kind, key = path[-1]
            inst = PseudoInst.LOAD_ATTR if kind == ATTRIBUTE else PseudoInst.BINARY_SUBSCR
            inputs = [self._provenance(path[:-1]), wrap_const(key).provenance]
            self._provenances[path] = ProvenanceRecord(inst, inputs=inputs)
            value = evaluate(path, self._known)
            if isinstance(value, torch.nn.Module):
                self._provenances[path].ext_flag |= EXT_FLAG_IS_MODULE
            elif callable(value):  # of a module, the prologue then reads it from the user's module, not the jitted one
                self._provenances[path].ext_flag |= EXT_FLAG_IS_CALLABLE
        return self._provenances[path]


#
# Calls of modules
#

_callers: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Callable[..., Any]], InputReads | None, Leaves | None]] = (
    weakref.WeakKeyDictionary()
)


def trace_module_calls(
    compile_data: Any,
    call: Callable[..., Any],
    reads: InputReads | None = None,
    leaves: Leaves | None = None,
) -> None:
    """Let ``call(module, *args, **kwargs)``, with wrapped values, trace the calls of modules without hooks.

    Thunder interprets ``nn.Module.__call__``, which tests eight dictionaries of hooks, and this takes half of its time.

    Args:
        compile_data: that of one jitted module; other programs that Thunder compiles are not affected.
        call: :func:`call_forward`, or something that calls it; the caller keeps it alive.
        reads: notes what the program reads from its inputs.
        leaves: modules that are not traced; see [Note: Leaf modules] in ``extras.leaf_modules.run``.
    """
    _register()
    _callers[compile_data] = weakref.ref(call), reads, leaves


@functools.cache
def _register() -> None:
    """Let Thunder call :func:`_call` and :func:`_checkpoint`; see [Note: Module calls]."""
    look_aside_module_calls(_call)
    look_aside_checkpoints(_checkpoint)


def call_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Interpret ``module.forward``."""
    forward = attribute(module, "forward")
    return forward if isinstance(forward, INTERPRETER_SIGNALS) else call_interpreted(forward, *args, **kwargs)


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    known = _callers.get(get_compile_data())
    call, reads, leaves = (None, None, None) if known is None else (known[0](), *known[1:])
    if call is None:
        return call_module_as_torch(module, *args, **kwargs)
    if leaves and unwrap(module) in leaves:
        return load("extras.leaf_modules.capture:call_leaf")(leaves, module, *args, **kwargs)
    if is_hooked(unwrap(module)):
        call = call_module_as_torch
    scope = get_jit_ctx().computation_trace.peek_scope()
    before, refused = len(scope), count_refused()
    is_automatic = leaves is not None and leaves.automatic
    try:
        result = call(module, *args, **kwargs) if reads is None else reads.call(call, module, *args, **kwargs)
    except Exception as error:  # in the interpreter itself
        if is_automatic:
            load("extras.leaf_modules.capture:note_obstacle")(leaves, error, module, *args, **kwargs)
        raise
    if count_refused() > refused and result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        result = do_raise(latest_refused())  # here, where the module is known that may run as it is
    if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        load("capture.module_in_error:name_in_error")(unwrap(module), names_leaf=not is_automatic)
        if is_automatic:
            raised = get_interpreterruntimectx().curexc
            load("extras.leaf_modules.capture:note_obstacle")(leaves, raised, module, *args, **kwargs)
    tag_call(scope[before:], unwrap(module))
    return result


def _checkpoint(lookaside: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Trace a call of ``torch.utils.checkpoint.checkpoint`` as Thunder does, and tag what it adds to the trace.

    Thunder adds it to the outermost scope. In a region within another one, that would be before what the outer one has
    added so far. Records of modules within the region, which may be repeated elsewhere, keep the untagged ones.
    """
    trace = get_jit_ctx().computation_trace
    before = len(trace.bound_symbols)
    result = lookaside(*args, **kwargs)
    added = trace.bound_symbols[before:]
    del trace.bound_symbols[before:]
    trace.peek_scope().extend(bsym.from_bsym(tags={*bsym.tags, IN_CHECKPOINT}) for bsym in added)
    return result
