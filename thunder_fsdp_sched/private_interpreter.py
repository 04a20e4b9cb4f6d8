"""Private names of Thunder's interpreter, each used in one function only: see ``private_thunder``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import GeneratorType
from typing import Any

import torch
from thunder.core.interpreter import (
    INTERPRETER_CALLBACKS,
    InterpreterCompileCtx,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    _interpret_call,
    get_interpreterruntimectx,
    interpreter_needs_wrap,
    make_generator,
)
from thunder.core.jit_ext import (
    _general_jit_lookaside_map,
    _infer_name_postfix_from_provenance,
    record_source_loc_in_symbol_header,
    register_general_jit_lookaside,
)
from thunder.core.proxies import Proxy, variableify


def call_interpreted(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Let Thunder's interpreter call ``function`` with wrapped arguments; return the wrapped result, or its signal."""
    return _interpret_call(function, *args, **kwargs)


def call_recording(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that records bound symbols, with wrapped arguments; return the wrapped result, or its signal.

    The bound symbols get the line of the program that is interpreted, which errors name.
    """
    return interpreter_needs_wrap(record_source_loc_in_symbol_header(function))(*args, **kwargs)


def is_interpreted_generator(value: Any) -> bool:
    """Return whether a value is a generator whose function Thunder's interpreter interprets."""
    return isinstance(value, GeneratorType) and value.gi_code in make_generator.__code__.co_consts


def call_module_as_torch(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Interpret what ``nn.Module.__call__`` does, with hooks."""
    return call_interpreted(_wrapped_call_impl, module, *args, **kwargs)


def _wrapped_call_impl(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    if module._compiled_call_impl is not None:
        return module._compiled_call_impl(*args, **kwargs)
    return module._call_impl(*args, **kwargs)


def look_aside_module_calls(lookaside: Callable[..., Any]) -> None:
    """Let Thunder's interpreter call ``lookaside(module, ...)``, with wrapped values, wherever a module is called."""
    register_general_jit_lookaside(torch.nn.Module._wrapped_call_impl)(lookaside)


def look_aside_checkpoints(lookaside: Callable[..., Any]) -> None:
    """Let Thunder's interpreter call ``lookaside`` wherever a program calls ``torch.utils.checkpoint.checkpoint``.

    Args:
        lookaside: called with Thunder's own lookaside, then with the wrapped arguments of the call.
    """
    checkpoint = torch.utils.checkpoint.checkpoint
    register_general_jit_lookaside(checkpoint)(partial(lookaside, _general_jit_lookaside_map[checkpoint]))


def observed_by(context: Any, observer: Any, uncached: Sequence[type]) -> Any:
    """Return a context like ``context`` that passes instructions, calls and values to wrap through ``observer``.

    Args:
        context: Thunder's ``InterpreterCompileCtx``.
        observer: has ``interpret(interpret, inst, **state)``, ``look_aside(look_aside, function, *args, **kwargs)`` and
            ``wrap(wrap, value)``, which call their first argument to do what ``context`` does.
        uncached: types whose values are wrapped anew at each read, so that the observer sees each path to them.
    """
    wrap = context._callbacks[INTERPRETER_CALLBACKS.WRAP_CALLBACK]

    return InterpreterCompileCtx(
        opcode_interpreter=partial(observer.interpret, context._opcode_interpreter),
        fn_lookaside=partial(observer.look_aside, context._fn_lookaside),
        callbacks={**context._callbacks, INTERPRETER_CALLBACKS.WRAP_CALLBACK: partial(observer.wrap, wrap)},
        with_provenance_tracking=True,
        uncacheable_classes=(*context._uncacheable_classes, *uncached),
    )


def replace_key(value: WrappedValue, key: Any) -> None:
    """Change the provenance of a value, as if the program had read it under the constant ``key``."""
    provenance = value.provenance
    constant = ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value=key)
    value.provenance = ProvenanceRecord(provenance.inst, inputs=[provenance.inputs[0], constant])
    value.provenance.ext_flag = provenance.ext_flag


def identify_key(value: WrappedValue) -> None:
    """Let Thunder make an identifier from a key that is not one, such as the name of the submodule ``block-1``."""
    key = value.provenance.inputs[1]
    if key.inst is PseudoInst.CONSTANT and type(key.value) is str and not f"_{key.value}".isidentifier():
        replace_key(value, _NamedText(key.value))


@contextmanager
def unique_name(value: WrappedValue, known: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let Thunder give a tensor that the program reads a unique name while it wraps it.

    Thunder joins the names on the path by "_", so it would give the weights of ``a.b`` and of ``a_b`` one name.

    Args:
        known: the tensors of this trace that have a name, by name.
    """
    provenance, tensor = value.provenance, value.value
    if provenance.inst not in READS:
        yield
        return
    named: list[_NamedText | _NumberedIndex] = []
    step = provenance
    while step.inst in READS:
        step, key = step.inputs
        if isinstance(key.value, _NamedText):
            named.append(key.value)
    for text in named:
        text.suffix = ""
    try:
        name, key = _infer_name_postfix_from_provenance(provenance), provenance.inputs[1]
        if name and key.inst is PseudoInst.CONSTANT and known.setdefault(name, tensor) is not tensor:
            number = next(n for n in itertools.count(1) if known.setdefault(f"{name}_{n}", tensor) is tensor)
            named.append(numbered := (_NamedText if isinstance(key.value, str) else _NumberedIndex)(key.value))
            replace_key(value, numbered)
            numbered.suffix = f"_{number}"
        yield
    finally:
        for text in named:
            text.suffix = None


READS = (PseudoInst.LOAD_ATTR, PseudoInst.BINARY_SUBSCR)
"""The instructions that read an attribute or an item, in the provenance of a value."""


class _NamedText(str):
    """A key whose text is a valid part of an identifier, and may end in a number, while Thunder makes a name from it."""

    suffix: str | None = None

    def __str__(self) -> str:
        text = str.__str__(self)
        return text if self.suffix is None else re.sub(r"\W", "_", text) + self.suffix


class _NumberedIndex(int):
    suffix: str | None = None

    def __str__(self) -> str:
        return int.__repr__(self) + (self.suffix or "")


def find_attributes(source: WrappedValue) -> None:
    """Let Thunder find an object's ``__dict__`` when the program assigns an attribute.

    At the first assignment Thunder replaces the dictionary by a copy. At the next one it would not find the copy, and would
    lose the first assignment.
    """
    attributes = source.attribute_wrappers.get("__dict__")
    if attributes is not None:
        get_interpreterruntimectx().cache_wrapper(attributes)


@contextmanager
def unique_checks(context: Any) -> Iterator[None]:
    """In this context, let Thunder add each check to the prologue once, and find duplicates by their hashes.

    Thunder itself compares each check with all earlier ones, which takes quadratic time.
    """
    context._constraints = checks = _UniqueChecks(context._constraints)
    try:
        yield
    finally:
        context._constraints = checks[:]


class _UniqueChecks(list[Any]):
    """A list of checks that drops duplicates, and looks empty to Thunder's own search for an equal check."""

    def __init__(self, checks: list[Any]) -> None:
        super().__init__(checks)
        self._known = {_key_of_check(check) for check in checks}

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def append(self, check: Any) -> None:
        if (key := _key_of_check(check)) not in self._known:
            self._known.add(key)
            super().append(check)


def _key_of_check(check: Any) -> Any:
    # Slices have no hash before Python 3.12.
    parts = (part.__reduce__() if isinstance(part, slice) else part for part in check)
    return tuple(variableify(part) if isinstance(part, Proxy) else part for part in parts)


def has_been_modified(context: Any) -> bool:
    """Return whether the program has assigned an attribute or a buffer of its inputs."""
    return bool(context._additional_outputs)
