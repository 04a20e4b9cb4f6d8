"""Trace modules that are alike once: see [Note: Repeated modules] in ``records``."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from thunder.core.compile_data import get_cache_option, get_compile_data
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, unwrap
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.options import CACHE_OPTIONS

from ..private_thunder import cache_info, has_been_modified
from .copies import repeat
from .grad_modes import grad_mode_of
from .module_calls import call_forward
from .observer import Observer, Unrepeatable
from .paths import ATTRIBUTE, FUNCTION, ITEM, Path
from .records import Record, flatten, make_record

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
        observer = self._observer
        place = observer.paths.of(module.provenance)
        try:
            if place is None or place[:1] != (FUNCTION,) or (FUNCTION,) not in observer.roots:
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
        key = type(unwrap(module)), arguments.key, *map(cache_info().get, _DEFAULTS)
        records, mode = self._records.setdefault(key, []), grad_mode_of(data)
        observer.note_checks()
        for record in records:
            if record.validity.covers(mode, arguments.detached) and record.fits(place, observer.roots):
                self.repeated += 1
                observer.uses_of_grad_mode += not record.validity.is_portable
                observer.reads.extend(read.at(place) for read in record.reads)
                return repeat(record, observer, module, place, arguments, mode)
        is_known = place in observer.checked  # then full tracing adds fewer checks than it will for others
        since = observer.mark()
        observer.reads.append(place)
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
            records.append(make_record(observer, since, place, arguments, result, mode))
        except Unrepeatable as reason:
            self._refuse(place, reason)
            return result
        del records[:-_MOST]
        self.recorded += 1
        return result

    def _begin(self, trace: Any, module: WrappedValue) -> None:
        """Begin a new compilation, whose first module call is that of the outermost module."""
        self._trace = trace
        self._observer = Observer(module)
        self._places: dict[torch.nn.Module, Path] = {}  # where each module was called first
        self._depth = self.recorded = self.repeated = 0
        self.refused = {}

    def _is_shared(self, module: torch.nn.Module, place: Path) -> bool:
        """Return whether a part of the module is known in another place, under which the prologue checks it."""
        places = {
            part: (*place, *(step for key in name.split(".") if key for step in ((ATTRIBUTE, "_modules"), (ITEM, key))))
            for name, part in module.named_modules()
        }
        return any(self._places.setdefault(part, path) != path for part, path in places.items())

    def _refuse(self, place: Path | None, reason: Unrepeatable) -> None:
        self.refused[place or ()] = str(reason)
        _LOGGER.debug("a module call is traced in full: %s: %s", place, reason)
