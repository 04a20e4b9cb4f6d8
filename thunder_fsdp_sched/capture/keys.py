"""Keys of values that tracing can observe, and of bound symbols: equal keys mean equal transformation."""

from __future__ import annotations

from types import CellType, MethodType, NoneType
from typing import Any, NamedTuple

import torch
from thunder.core.devices import Device
from thunder.core.dtypes import dtype
from thunder.core.proxies import FutureTensorProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from ..ir.symbols import fsdp_reduce, fsdp_unshard
from ..private_interpreter import is_hooked
from ..runtime.bucket import Bucket

Parameter = tuple[Bucket, int]
"""A parameter: its bucket, and its index there."""

_BY_VALUE = (
    *(NoneType, bool, int, str, bytes, range, slice, type(Ellipsis), frozenset),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

_DEPTH = 4
"""How deep containers are compared; anything deeper must be the same object."""

_LONG = 512
"""The length above which a container must be the same object, because comparing it takes too long."""


def key_of(value: Any, depth: int = _DEPTH) -> Any:
    """Return an object that is equal for values which a trace cannot tell apart.

    Numbers, strings and the like count by value, containers by their contents, tensors by their metadata, because a
    trace has proxies in their place, and modules by their class and whether they have hooks, because the attributes that
    a program reads are compared one by one. Any other object counts by its identity.
    """
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)  # 0.0 is not -0.0
    if kind in _BY_VALUE:
        return kind, (value.start, value.stop, value.step) if kind is slice else value
    if depth < _DEPTH and isinstance(value, torch.nn.Module | torch.Tensor):
        return "object", Same(value)  # in a container, from which it may be read unnoticed
    if isinstance(value, torch.nn.Module):
        return "module", kind, is_hooked(value)
    if isinstance(value, torch.Tensor):
        return kind, tuple(value.shape), value.dtype, value.device, value.layout, value.requires_grad
    if kind is MethodType:
        return "method", value.__func__, Same(value.__self__)
    if kind is CellType:
        return "cell"  # its contents are read separately
    if kind is torch.Size:
        return kind, tuple(value)
    if depth and isinstance(value, tuple | list | set | dict) and len(value) <= _LONG:
        if isinstance(value, dict):
            return "dict", kind, tuple((key_of(k, 0), key_of(v, depth - 1)) for k, v in value.items())
        return "items", kind, tuple(key_of(item, depth - 1) for item in value)
    return "object", Same(value)


class Same:
    """Equal for one object only, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class ModuleCall:
    """The tag of the bound symbols that one call of a module has added to a trace."""


class Structure(NamedTuple):
    """The structure of bound symbols and values.

    Attributes:
        key: equal for values that differ only in their proxies, their parameters and the calls they belong to.
        proxies: the proxies in order of appearance, by name.
        parameters: the parameters that are unsharded or reduced, in order of appearance.
    """

    key: tuple[Any, ...]
    proxies: dict[str, Proxy]
    parameters: tuple[Parameter, ...]


class _Unknown(Exception):
    """A proxy is of a kind that is not known here."""


class StructuralKeys:
    """Computes structures of values in one trace, which it assumes to stay alive."""

    def __init__(self) -> None:
        self._facts: dict[int, Any] = {}  # of proxies by their identity, without tags
        self._facts_of_parameters: dict[Parameter, Any] = {}
        self._shared: dict[Any, Any] = {}  # one object for equal facts

    def of(self, *values: Any) -> Structure | None:
        """Return the structure of bound symbols and other values; ``None`` if it is unknown."""
        self._key: list[Any] = []
        self._proxies: dict[str, Proxy] = {}
        self._numbers: dict[str, int] = {}
        self._parameters: dict[Parameter, int] = {}
        try:
            for value in values:
                self._add(value)
        except _Unknown:
            return None
        return Structure(tuple(self._key), self._proxies, tuple(self._parameters))

    def _add(self, value: Any) -> None:
        if isinstance(value, Proxy):
            facts = self._facts.get(id(value))
            if facts is None:
                facts = self._facts[id(value)] = self._facts_of(value)
            number = self._numbers.get(value.name)
            if number is None:
                number = self._numbers[value.name] = len(self._numbers)
                self._proxies[value.name] = value
            self._key += (number, facts, frozenset(value.tags) if value.tags else None)
            return
        kind = type(value)
        if kind is tuple or kind is list:
            self._key += (kind, len(value))
            for item in value:
                self._add(item)
        elif kind is dict:
            self._key += (kind, len(value))
            for key, item in value.items():
                self._add(key)
                self._add(item)
        elif isinstance(value, BoundSymbol):
            self._add_bsym(value)
        elif isinstance(value, Device | dtype):
            self._key += (kind, str(value))
        else:
            self._key.append(key_of(value, 0))

    def _add_bsym(self, bsym: BoundSymbol) -> None:
        positions = bsym.source_positions
        line = None if positions is None else positions.lineno
        tags = frozenset(tag for tag in bsym.tags if not isinstance(tag, ModuleCall))
        self._key += (Same(bsym.sym), bsym.header, bsym.source_filename, line, self._shared.setdefault(tags, tags))
        if bsym.sym in (fsdp_unshard, fsdp_reduce):
            self._add_parameter(*bsym.args)
            self._add(bsym.output)
            return
        self._add(bsym.args)
        self._add(bsym.kwargs)
        self._add(bsym.output)
        for context in (bsym._call_ctx, bsym._import_ctx, bsym._object_ctx):
            self._add(dict(context or {}))
        self._key.append(len(bsym.subsymbols))
        for sub in bsym.subsymbols:
            self._add_bsym(sub)

    def _add_parameter(self, bucket: Bucket, index: int, tensor: Proxy) -> None:
        parameter = bucket, index
        facts = self._facts_of_parameters.get(parameter)
        if facts is None:
            spec = bucket.spec
            dtypes = spec.param_dtype, spec.dtype, spec.reduce_dtype
            shapes = tuple(spec.params[index].shape), tuple(spec.layout.placements[index].shard_shape(bucket.rank))
            facts = str(spec.device), str(spec.shard_device), dtypes, shapes
            self._facts_of_parameters[parameter] = facts
        self._key += (self._parameters.setdefault(parameter, len(self._parameters)), facts)
        self._add(tensor)

    def _facts_of(self, proxy: Proxy) -> Any:
        kind = type(proxy)
        facts: tuple[Any, ...]
        if isinstance(proxy, TensorProxy | FutureTensorProxy):
            facts = tuple(proxy.shape), str(proxy.device), str(proxy.dtype), proxy.requires_grad
            if isinstance(proxy, TensorProxy):
                facts += str(proxy.true_dtype), proxy.distparallel_type, proxy.thunder_fsdp_padding_size
        elif isinstance(proxy, NumberProxy):
            facts = key_of(proxy.value, 0), proxy.python_type, proxy.constraint
        else:
            raise _Unknown
        facts = kind, *facts
        return self._shared.setdefault(facts, facts)
