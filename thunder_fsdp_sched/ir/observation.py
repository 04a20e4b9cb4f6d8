"""Run a torch function on fake tensors to find out which outputs share memory with inputs, and whether it is pure.

[Note: Observing a function]
The function that a trace calls runs once on fake tensors of the same shapes and dtypes. They have storages but no data,
so this needs no memory and draws no random numbers. A dispatch mode sees every base operator that the function calls:
its schema specifies which arguments it writes and whether it addresses memory by position (``storage_offset``), its
tags whether it draws random numbers. Afterwards the storages of outputs and inputs are compared. Schemas of composite
operators are not used, because some are wrong: ``dropout`` and ``einsum`` may return their input although their schemas
do not show it.

Fake inputs are contiguous, unless the caller asks about certain strides. If the call specifies another memory format, it
runs again with inputs of that format, because ``contiguous`` and ``to`` return such an input unchanged. The audit of the
first run covers all other dependence on strides.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from thunder.core import devices, dtypes
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import NumberProxy, TensorProxy
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..private_api import schema_of
from ..private_traces import shape_of

_TRUSTED_NAMESPACES = frozenset({"aten", "prim", "prims"})
"""Namespaces whose operators have the tag ``nondeterministic_seeded`` if they draw random numbers. Others may lack it."""

_UNINITIALIZED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
)

_SEEDS = frozenset({"philox_seed", "seed"})
"""Names of arguments for a state of the generator: an operator that takes it draws the same numbers again."""

_DEVICE = re.compile(r"(cpu|cuda|meta|xpu|mps|hpu|privateuseone)(:\d+)?")

_OTHER_FORMATS = (torch.channels_last, torch.channels_last_3d)

_MAX_CACHED = 10_000
"""How many calls are cached; a model has a few hundred."""


class Observed(NamedTuple):
    """Facts about one call of a function.

    Attributes:
        aliases: for each returned tensor, the indices of the tensor arguments with which it shares memory.
        pure: whether equal arguments yield equal results, and nothing else changes.
        writes: indices of the tensor arguments that it modifies in place.
        by_position: indices of the tensor arguments whose storages it addresses by position, as ``as_strided`` does.
        strides: the strides of each returned tensor.
        storages: for each returned tensor, the index of the first one in the same storage, and the storage's bytes.
        temporary_bytes: the most bytes that exist at once during the call, besides the inputs and what is returned.
        operators: names of the base operators that it calls, without namespace.
        draws: whether it draws random numbers. Operators outside of torch's own namespaces may draw without a sign of it.
    """

    aliases: tuple[frozenset[int], ...]
    pure: bool
    writes: frozenset[int]
    by_position: frozenset[int]
    strides: tuple[tuple[int, ...], ...] = ()
    storages: tuple[tuple[int, int], ...] = ()
    temporary_bytes: int = 0
    operators: frozenset[str] = frozenset()
    draws: bool = False


_cache: dict[Any, Observed | None] = {}


def observe_call(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    unflatten: Callable[[list[Any]], Any],
    structure: Any,
    strides: Mapping[str, tuple[int, ...]] | None = None,
) -> Observed | None:
    """Return the facts about a call of ``function`` in a trace, or ``None`` if it cannot be run on fake tensors.

    Args:
        leaves: the arguments of the bound symbol, flattened. Tensor proxies of one name are one tensor.
        unflatten: converts a list as long as ``leaves`` to ``(args, kwargs)``.
        structure: a hashable value that differs between calls of different structure.
        strides: strides of tensor proxies by name, to learn what this call does with just these. The others, and without
            it all, are contiguous.
    """
    described = _describe(leaves, strides)
    if described is None:
        return None
    key = (function, structure, described)
    if key not in _cache:
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        _cache[key] = _try(function, leaves, unflatten, strides)
    return _cache[key]


def observe(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Observed:
    """Run ``function`` with tensors of the active :class:`FakeTensorMode`, and return the facts.

    Tensor arguments are numbered in the order in which they appear, each tensor once.
    """
    inputs = _unique(t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    recorder = _Recorder(inputs)
    with recorder:
        outputs = function(*args, **kwargs)
    outs = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    everything = frozenset(range(len(inputs)))
    aliases = tuple(
        everything if recorder.custom_alias else recorder.inputs.get(_storage(out), frozenset()) for out in outs
    )
    refs = [_storage(out) for out in outs]
    blank = any(ref in recorder.uninitialized for ref in refs)
    pure = recorder.deterministic and not recorder.writes and not blank
    strides = tuple(tuple(t.stride()) if t.layout is torch.strided else () for t in outs)
    storages = tuple((refs.index(ref), out.untyped_storage().nbytes()) for ref, out in zip(refs, outs, strict=True))
    returned = sum(recorder.new.get(ref, 0) for ref in set(refs))
    return Observed(
        aliases,
        pure,
        frozenset(recorder.writes),
        frozenset(recorder.by_position),
        strides,
        storages,
        recorder.peak_bytes - returned,
        frozenset(recorder.operators),
        recorder.draws,
    )


class _Recorder(TorchDispatchMode):
    """A dispatch mode that collects facts from the schemas and tags of all base operators that run under it."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.inputs: dict[StorageWeakRef, frozenset[int]] = {}
        for index, tensor in enumerate(inputs):
            self.inputs[_storage(tensor)] = self.inputs.get(_storage(tensor), frozenset()) | {index}
        self.deterministic = True
        self.draws = False
        self.custom_alias = False
        self.writes: set[int] = set()
        self.by_position: set[int] = set()
        self.uninitialized: set[StorageWeakRef] = set()
        self.operators: set[str] = set()
        # Weak references keep addresses, by which storages are identified, from being used again.
        self.new: dict[StorageWeakRef, int] = {}
        self._alive: list[StorageWeakRef] = []
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        out = func(*args, **kwargs)
        self.operators.add(schema.name.rpartition("::")[2])
        self._count(out)
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(named.get(argument.name)):
                    if isinstance(tensor, torch.Tensor):
                        self.writes |= self.inputs.get(_storage(tensor), frozenset())
                        self.uninitialized.discard(_storage(tensor))
        addressed = named.get("self") if any(a.name == "storage_offset" for a in schema.arguments) else None
        if isinstance(addressed, torch.Tensor):
            self.by_position |= self.inputs.get(_storage(addressed), frozenset())
        if func.namespace not in _TRUSTED_NAMESPACES:
            self.deterministic = False
            self.custom_alias |= any(r.alias_info is not None for r in schema.returns)
        if (
            torch.Tag.nondeterministic_seeded in func.tags
            and named.get("dropout_p", None) != 0.0
            and not any(a.name in _SEEDS for a in schema.arguments)
        ):
            self.deterministic, self.draws = False, True
        if schema.name.removeprefix("aten::") in _UNINITIALIZED:
            self.uninitialized.update(_storage(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        return out

    def _count(self, out: Any) -> None:
        """Count the bytes that exist after an operator, without those of the inputs."""
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                storage = _storage(tensor)
                if storage not in self.inputs and storage not in self.new:
                    self.new[storage] = tensor.untyped_storage().nbytes()
                    self._alive.append(storage)
        self._alive = [storage for storage in self._alive if not storage.expired()]
        self.peak_bytes = max(self.peak_bytes, sum(self.new[storage] for storage in self._alive))


def _try(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    unflatten: Callable[[list[Any]], Any],
    strides: Mapping[str, tuple[int, ...]] | None,
) -> Observed | None:
    """Observe a call with torch's dtypes and devices, or else with Thunder's; return ``None`` if both fail."""
    formats = [x for x in leaves if isinstance(x, torch.memory_format) and x in _OTHER_FORMATS]
    layouts = [torch.contiguous_format, *(formats if strides is None else ())]
    observed = [_try_with(function, leaves, unflatten, layout, strides or {}) for layout in layouts]
    found = [o for o in observed if o is not None]
    if not found:
        return None
    first = found[0]
    for other in found[1:]:
        aliases = tuple(a | b for a, b in zip(first.aliases, other.aliases, strict=True))
        writes, by_position = first.writes | other.writes, first.by_position | other.by_position
        pure, draws = first.pure and other.pure, first.draws or other.draws
        first = Observed(aliases, pure, writes, by_position, draws=draws)
    return first


def _try_with(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    unflatten: Callable[[list[Any]], Any],
    layout: torch.memory_format,
    strides: Mapping[str, tuple[int, ...]],
) -> Observed | None:
    for convert in (True, False):
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                stack.enter_context(_quiet(logging.getLogger("torch._subclasses.fake_tensor")))
                stack.enter_context(torch.device("cpu"))
                stack.enter_context(torch.autocast("cpu", enabled=False))
                stack.enter_context(torch.no_grad())
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                tensors: dict[str, torch.Tensor] = {}
                args, kwargs = unflatten([_fake(leaf, tensors, convert, layout, strides) for leaf in leaves])
                return observe(function, *args, **kwargs)
        except Exception:  # after any error nothing is known about the function
            continue
    return None


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Keep torch from logging each operator that does not accept these arguments."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _fake(
    leaf: Any,
    tensors: dict[str, torch.Tensor],
    convert: bool,
    layout: torch.memory_format,
    strides: Mapping[str, tuple[int, ...]],
) -> Any:
    if isinstance(leaf, TensorProxy):
        shape = tuple(int(_value(size)) for size in shape_of(leaf))
        if leaf.name not in tensors and leaf.name in strides:
            tensors[leaf.name] = torch.empty_strided(
                shape, strides[leaf.name], dtype=to_torch_dtype(leaf.dtype), device="cpu"
            )
        elif leaf.name not in tensors:
            fits = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(layout, len(shape)) == len(shape)
            tensors[leaf.name] = torch.empty(
                shape,
                dtype=to_torch_dtype(leaf.dtype),
                device="cpu",
                memory_format=layout if fits else torch.contiguous_format,
            )
        return tensors[leaf.name]
    if isinstance(leaf, NumberProxy):
        return leaf.value
    if isinstance(leaf, torch.device) or (isinstance(leaf, str) and _DEVICE.fullmatch(leaf)):
        return torch.device("cpu")
    if convert and isinstance(leaf, devices.Device):
        return torch.device("cpu")
    if convert and isinstance(leaf, dtypes.dtype):
        return to_torch_dtype(leaf)
    return leaf


_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    slice,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    dtypes.dtype,
    devices.Device,
)


def _describe(leaves: Sequence[Any], strides: Mapping[str, tuple[int, ...]] | None) -> tuple[Any, ...] | None:
    """Return a key that is equal for calls with equal facts, or ``None`` if arguments cannot be converted to fake ones."""
    described: list[Any] = (
        [] if strides is None else [tuple(strides.get(p.name) for p in leaves if isinstance(p, TensorProxy))]
    )
    first: dict[str, int] = {}
    for leaf in leaves:
        if isinstance(leaf, TensorProxy):
            number = first.setdefault(leaf.name, len(first))
            described.append((number, tuple(_value(size) for size in shape_of(leaf)), leaf.dtype))
        elif isinstance(leaf, NumberProxy):
            described.append((type(leaf.value), leaf.value))
        elif isinstance(leaf, _PLAIN):
            described.append((type(leaf), str(leaf)))
        else:
            return None
    return tuple(described)


def _value(size: Any) -> Any:
    return size.value if isinstance(size, NumberProxy) else size


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
