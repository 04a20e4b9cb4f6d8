"""Iterators over lists, tuples and dictionaries, and views of dictionaries, for Thunder's interpreter.

Native code does not know the position of Thunder's iterators; Thunder's views compare unequal and lack most methods. These
classes return wrapped values to the interpreter and plain ones to native code, from one position, and end when Python's do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from functools import partial
from types import GeneratorType
from typing import Any

from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    do_raise,
    wrap,
    wrap_args,
    wrap_const,
    wrapped_build_tuple,
)

from .private_interpreter import call_interpreted, is_interpreted_generator


class _Iterator:
    """An iterator over a list or tuple. Unlike Thunder's, it does not continue after its end if the list has grown."""

    def __init__(self, sequence: WrappedValue, is_reversed: bool) -> None:
        self.sequence, self._step = sequence, -1 if is_reversed else 1
        self._position = len(sequence.item_wrappers) - 1 if is_reversed else 0

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        if (position := self.advance()) is None:
            raise StopIteration
        return self.sequence.value[position]

    def advance(self) -> int | None:
        """Return the position of the next item; ``None`` at the end."""
        position = self._position
        if not 0 <= position < len(self.sequence.item_wrappers):
            self._position = -1
            return None
        self._position += self._step
        return position


def _iterate(sequence: WrappedValue, *, is_reversed: bool = False) -> WrappedValue:
    sequence.track_items()
    provenance = ProvenanceRecord(PseudoInst.GET_ITER, inputs=[sequence.provenance])
    return wrap(_Iterator(sequence, is_reversed), provenance=provenance)


class _MappingView:
    """A view of a dictionary."""

    _mapping: Any
    of: Any

    def __iter__(self) -> Any:
        return iter(type(self).of(self._mapping))

    def __reversed__(self) -> Any:
        return reversed(type(self).of(self._mapping))


class _MappingKeys(_MappingView, KeysView[Any]):
    of = dict.keys


class _MappingValues(_MappingView, ValuesView[Any]):
    of = dict.values


class _MappingItems(_MappingView, ItemsView[Any, Any]):
    of = dict.items


def _view(kind: Any, mapping: WrappedValue) -> WrappedValue:
    mapping.track_items()
    view = wrap(kind(mapping.value), provenance=ProvenanceRecord(PseudoInst.GET_ITER, inputs=[mapping.provenance]))
    view.attribute_wrappers["_mapping"] = mapping
    return view


class _ViewIterator:
    """An iterator over a view, as ``_Iterator`` is one over a list."""

    def __init__(self, mapping: WrappedValue, keys: Iterator[Any], kind: type) -> None:
        self.mapping, self.keys, self.kind = mapping, keys, kind

    def __iter__(self) -> _ViewIterator:
        return self

    def __next__(self) -> Any:
        key = next(self.keys)
        if self.kind is _MappingKeys:
            return key
        value = self.mapping.value[key]
        return value if self.kind is _MappingValues else (key, value)


def _iterate_view(view: WrappedValue, *, is_reversed: bool = False) -> WrappedValue:
    mapping = call_interpreted(getattr, view, wrap_const("_mapping"))
    keys = reversed(mapping.value) if is_reversed else iter(mapping.value)
    provenance = ProvenanceRecord(PseudoInst.GET_ITER, inputs=[view.provenance])
    return wrap(_ViewIterator(mapping, keys, type(view.value)), provenance=provenance)


def _next_of_view(iterator: WrappedValue) -> Any:
    mapping = iterator.value.mapping
    try:
        key = mapping.key_wrappers[next(iterator.value.keys)]
    except (StopIteration, RuntimeError) as error:  # at its end, or because the dictionary has changed
        return do_raise(error)
    if iterator.value.kind is _MappingKeys:
        return key
    value = call_interpreted(dict.__getitem__, mapping, key)
    return value if iterator.value.kind is _MappingValues else wrapped_build_tuple((key, value))


def _next(iterator: WrappedValue) -> Any:
    if (position := iterator.value.advance()) is None:
        return do_raise(StopIteration())  # here, because each frame that an exception passes is slow
    sequence = iterator.value.sequence
    kind = list if isinstance(sequence.value, list) else tuple
    return call_interpreted(kind.__getitem__, sequence, wrap_const(position))


def _next_of_generator(generator: WrappedValue) -> Any:
    try:
        item = next(generator.value)
    except Exception as error:
        return do_raise(error)
    inputs = [wrap_const(GeneratorType.__next__).provenance, wrap_args((generator,)).provenance]
    return wrap(item, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=inputs))


def next_item(_: Any, args: tuple[WrappedValue, ...], kwargs: Any) -> Callable[..., Any] | None:
    """Return the function that takes the next item of one of these iterators; ``None`` for others."""
    iterator = args[0]
    if (
        is_interpreted_generator(iterator.value) and iterator.provenance.inst is PseudoInst.CONSTANT
    ):  # the program made it
        return _next_of_generator
    return {_Iterator: _next, _ViewIterator: _next_of_view}.get(type(iterator.value))


reverse = partial(_iterate, is_reversed=True)
METHODS: dict[int, Callable[..., Any]] = {
    id(list.__iter__): _iterate,
    id(tuple.__iter__): _iterate,
    id(list.__reversed__): reverse,
    id(_Iterator.__next__): _next,
    id(_MappingView.__iter__): _iterate_view,
    id(_MappingView.__reversed__): partial(_iterate_view, is_reversed=True),
    id(_ViewIterator.__next__): _next_of_view,
    **{
        id(getattr(kind, name)): partial(_view, view)
        for kind in (dict, OrderedDict)
        for name, view in (("keys", _MappingKeys), ("values", _MappingValues), ("items", _MappingItems))
    },
}
"""The functions that the interpreter calls in place of these methods, by the identity of the method."""
