"""Trace modules that are alike once: see [Note: Repeated modules] in ``records``."""

from __future__ import annotations

import builtins
import logging
from typing import Any

import torch
from thunder.core.compile_data import get_cache_option, get_compile_data
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, get_interpretercompilectx, unwrap
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.options import CACHE_OPTIONS
from thunder.core.proxies import unvariableify

from ..private_interpreter import cache_info, checks_of, has_been_modified, renames_of
from .arguments import Arguments, flatten
from .copies import repeat
from .grad_modes import GradMode, grad_mode_of
from .module_calls import call_forward
from .observer import Observer, Unrepeatable
from .paths import ATTRIBUTE, BUILTINS, FUNCTION, ITEM, Path
from .records import Record, make_record

__all__ = ["Repetition"]

_LOGGER = logging.getLogger(__name__)

_DEFAULTS = ("default_dtype", "default_device")
"""The state of torch that operators read."""

_MOST = 16
"""How many records are kept for calls with the same arguments of modules of one class."""


class Repetition:
    """Traces the module calls of one jitted module, and gives calls that are alike copies of the same bound symbols.

    Records are kept from one compilation to the next, so that calls with other flags profit from earlier ones.

    Attributes:
        recorded: how many calls of the present compilation were recorded.
        repeated: how many were repeated.
        refused: why others can be neither, by the path of the module.
    """

    def __init__(self) -> None:
        self._records: dict[Any, list[Record]] = {}
        self._trace: Any = None
        self.recorded = self.repeated = 0
        self.refused: dict[Path, str] = {}

    def __call__(self, module: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        """Trace a call of a module without hooks, with wrapped values; return the wrapped result, or a signal."""
        context, data = get_jit_ctx(), get_compile_data()
        if context.computation_trace is not self._trace:
            self._begin(context.computation_trace, module)
        place = self._observer.paths.of(module.provenance)
        try:
            if place is None or place[:1] != (FUNCTION,) or (FUNCTION,) not in self._roots:
                raise Unrepeatable("the module is not a part of the compiled one")
            if has_been_modified(context):
                raise Unrepeatable("the program has modified a module")
            if not data.autocast_stack.is_empty() or get_cache_option() is not CACHE_OPTIONS.CONSTANT_VALUES:
                raise Unrepeatable("autocast, or symbolic values")
            if self._is_shared(unwrap(module), place):
                raise Unrepeatable("a part of the module was called as a part of another one")
            arguments = flatten(args, kwargs)
        except Unrepeatable as reason:
            self._refuse(place, reason)
            return call_forward(module, *args, **kwargs)
        key = type(unwrap(module)), arguments.token, *map(cache_info().get, _DEFAULTS)
        records, mode = self._records.setdefault(key, []), grad_mode_of(data)
        for record in records:
            if record.validity.covers(mode, arguments.detached) and record.fits(place, self._roots):
                self.repeated += 1
                self._note_checks()
                self._observer.uses_of_grad_mode += not record.validity.is_portable
                self._observer.reads.extend(read.at(place) for read in record.reads)
                return repeat(
                    record,
                    module,
                    place,
                    arguments,
                    mode=mode,
                    context=context,
                    roots=self._roots,
                    root=self._root,
                    written=self._written,
                    checked=self._names,
                )
        return self._record(records, mode, place, arguments, module, args, kwargs)

    def _begin(self, trace: Any, module: WrappedValue) -> None:
        """Begin a new compilation, whose first module call is that of the outermost module."""
        self._trace = trace
        self._observer = Observer(get_interpretercompilectx())
        self._roots: dict[Path, Any] = {(BUILTINS,): vars(builtins)}
        self._root = module.provenance
        self._written: set[Any] = set()  # paths that the prologue checks, each with the check
        self._checked: set[Path] = set()  # all beginnings of these paths
        self._names: set[str] = set()  # of the proxies that the prologue checks
        self._noted = 0
        self._places: dict[torch.nn.Module, Path] = {}  # where each module was called first
        self._depth = self.recorded = self.repeated = 0
        self.refused = {}
        if self._observer.paths.of(module.provenance) == (FUNCTION,):
            self._roots[FUNCTION,] = unwrap(module)

    def _record(
        self,
        records: list[Record],
        mode: GradMode,
        place: Path,
        arguments: Arguments,
        module: WrappedValue,
        args: Any,
        kwargs: Any,
    ) -> Any:
        context, observer = get_jit_ctx(), self._observer
        scope, checks, renames = context.computation_trace.peek_scope(), checks_of(context), renames_of(context)
        operators = context.ad_hoc_executor.opmap
        before = len(scope), len(checks), len(renames), len(operators)
        reads, effects, uses = len(observer.reads), len(observer.effects), observer.uses_of_grad_mode
        self._note_checks()
        is_known = place in self._checked  # then full tracing adds fewer checks than it will for others
        observer.reads.append(place)
        self._depth += 1
        try:
            if self._depth > 1:
                result = call_forward(module, *args, **kwargs)
            else:
                with observer.observe():
                    result = call_forward(module, *args, **kwargs)
        finally:
            self._depth -= 1
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return result
        try:
            if is_known:
                raise Unrepeatable("the program has read the module before it calls it")
            observer.check(reads, effects)
            if has_been_modified(context):
                raise Unrepeatable("the program has modified a module")
            if len(operators) != before[3]:
                raise Unrepeatable("the program defines an operator")
            if grad_mode_of(get_compile_data()) != mode:
                raise Unrepeatable("the program leaves another grad mode")
            named = {unvariableify(old).name: renames[old].name for old in list(renames)[before[2] :]}
            record = make_record(
                place,
                arguments,
                result,
                reads=observer.reads[reads:],
                aliases=observer.aliases,
                bsyms=scope[before[0] :],
                checks=checks[before[1] :],
                renames=named,
                mode=mode,
                uses_mode=observer.uses_of_grad_mode != uses,
                paths=observer.paths,
                roots=self._roots,
            )
        except Unrepeatable as reason:
            self._refuse(place, reason)
            return result
        records.append(record)
        del records[:-_MOST]
        self.recorded += 1
        return result

    def _is_shared(self, module: torch.nn.Module, place: Path) -> bool:
        """Return whether a part of the module is known in another place, under which the prologue checks it."""
        places = {
            part: (*place, *(step for key in name.split(".") if key for step in ((ATTRIBUTE, "_modules"), (ITEM, key))))
            for name, part in module.named_modules()
        }
        return any(self._places.setdefault(part, path) != path for part, path in places.items())

    def _note_checks(self) -> None:
        """Note which values the prologue checks by now."""
        checks = checks_of(get_jit_ctx())
        for check, proxy, *_ in checks[self._noted :]:
            self._names.add(proxy.name)
            path = self._observer.paths.of(proxy.history) if getattr(proxy, "history", None) is not None else None
            if path is not None:
                self._written.add((path, check))
                self._checked.update(path[:length] for length in range(1, len(path)))
        self._noted = len(checks)

    def _refuse(self, place: Path | None, reason: Unrepeatable) -> None:
        self.refused[place or ()] = str(reason)
        _LOGGER.debug("a module call is traced in full: %s: %s", place, reason)
