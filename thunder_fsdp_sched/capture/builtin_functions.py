"""Builtin functions and methods of containers in Python, for the interpreter: see [Note: Callbacks] in ``callbacks``.

Thunder does not know some of these methods, and others compute something else: ``index`` ignores where to start, ``get`` of
a ``defaultdict`` adds the key, and ``in`` does not find an object that is unequal to itself.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from thunder.core.interpreter import get_interpreterruntimectx, make_opaque


def builtin_map(function: Callable[..., Any], /, *iterables: Iterable[Any]) -> Iterator[Any]:
    return (function(*values) for values in zip(*iterables, strict=False))


def builtin_filter(function: Callable[[Any], Any] | None, iterable: Iterable[Any], /) -> Iterator[Any]:
    return (value for value in iterable if (value if function is None else function(value)))


def builtin_sorted(iterable: Iterable[Any], /, *, key: Callable[[Any], Any], reverse: bool = False) -> list[Any]:
    values = list(iterable)
    return [values[index] for index in _order([key(value) for value in values], reverse)]


def list_sort(values: list[Any], /, *, key: Callable[[Any], Any] | None = None, reverse: bool = False) -> None:
    values[:] = [values[index] for index in _order(values if key is None else [key(v) for v in values], reverse)]


def _extreme(choose: Callable[..., Any], *values: Any, key: Callable[[Any], Any], **default: Any) -> Any:
    if len(values) == 1:
        values = tuple(values[0])
    if not values:
        return choose((), **default)
    return values[_position(choose, [key(value) for value in values])]


builtin_max, builtin_min = partial(_extreme, max), partial(_extreme, min)


def builtin_sum(values: Iterable[Any], /, start: Any = 0) -> Any:
    if isinstance(start, str | bytes | bytearray):
        raise TypeError("sum() can't sum strings or bytes [use join(seq) instead]")
    for value in values:
        start = start + value
    return start


def builtin_call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def list_insert(values: list[Any], index: int, value: Any, /) -> None:
    values[index:index] = [value]


def list_clear(values: list[Any], /) -> None:
    values[:] = []


def mapping_clear(mapping: dict[Any, Any], /) -> None:
    for key in list(mapping):
        del mapping[key]


def mapping_popitem(mapping: dict[Any, Any], last: bool = True) -> tuple[Any, Any]:
    if not mapping:
        raise KeyError("popitem(): dictionary is empty")
    key = list(mapping)[-1 if last else 0]
    return key, mapping.pop(key)


@make_opaque
def _order(keys: list[Any], reverse: bool) -> list[int]:
    return sorted(range(len(keys)), key=keys.__getitem__, reverse=reverse)


@make_opaque
def _position(choose: Callable[..., int], keys: list[Any]) -> int:
    return choose(range(len(keys)), key=keys.__getitem__)


def builtin_zip(*, strict: bool = False) -> Iterator[Any]:
    return iter(())


def builtin_iter(function: Callable[[], Any], sentinel: Any, /) -> Iterator[Any]:
    while not _is_same(value := function(), sentinel):
        yield value


@make_opaque
def builtin_exc_info() -> tuple[Any, Any, Any]:
    error = get_interpreterruntimectx().exception_stack[-1]
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


def builtin_reversed(values: Sequence[Any], /) -> Iterator[Any]:
    return (values[position] for position in range(len(values) - 1, -1, -1))


def _is_same(one: Any, other: Any) -> Any:
    return one is other or one == other


def sequence_contains(values: Sequence[Any], value: Any, /) -> bool:
    return any(_is_same(each, value) for each in values)


def sequence_count(values: Sequence[Any], value: Any, /) -> int:
    return len([None for each in values if _is_same(each, value)])


def sequence_index(values: Sequence[Any], value: Any, start: int = 0, stop: int = sys.maxsize, /) -> int:
    for position in range(*slice(start, stop).indices(len(values))):
        if _is_same(values[position], value):
            return position
    raise ValueError(f"{value!r} is not in the {type(values).__name__}")


def list_remove(values: list[Any], value: Any, /) -> None:
    del values[sequence_index(values, value)]


def list_iadd(values: list[Any], others: Iterable[Any], /) -> list[Any]:
    values.extend(others)
    return values


def list_imul(values: list[Any], times: int, /) -> list[Any]:
    values[:] = values * times
    return values


def mapping_get(mapping: dict[Any, Any], key: Any, default: Any = None, /) -> Any:
    return dict.__getitem__(mapping, key) if dict.__contains__(mapping, key) else default


def mapping_setdefault(mapping: dict[Any, Any], key: Any, default: Any = None) -> Any:
    if key not in mapping:
        mapping[key] = default
    return mapping[key]


def ordered_move_to_end(mapping: OrderedDict[Any, Any], key: Any, last: bool = True) -> None:
    value = mapping.pop(key)
    others = [] if last else list(mapping.items())
    for other, _ in others:
        del mapping[other]
    mapping[key] = value
    mapping.update(others)


def mapping_fromkeys(keys: Iterable[Any], value: Any = None, /) -> dict[Any, Any]:
    return {key: value for key in keys}


def attrgetter_call(getter: Any, owner: Any, /) -> Any:
    return _one_or_all([_attribute(owner, path.split(".")) for path in getter.__reduce__()[1]])


def _attribute(owner: Any, names: Iterable[str]) -> Any:
    for name in names:
        owner = getattr(owner, name)
    return owner


def itemgetter_call(getter: Any, owner: Any, /) -> Any:
    return _one_or_all([owner[key] for key in getter.__reduce__()[1]])


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def methodcaller_call(caller: Any, owner: Any, /) -> Any:
    make, args = caller.__reduce__()
    if isinstance(make, partial):  # with keyword arguments
        return getattr(owner, make.args[0])(*args, **make.keywords)
    return getattr(owner, args[0])(*args[1:])
