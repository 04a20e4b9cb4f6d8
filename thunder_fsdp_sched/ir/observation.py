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
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
from thunder.core import devices, dtypes
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.pytree import tree_unflatten
from thunder.core.symbol import BoundSymbol
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..private_thunder import shape_of
from ..private_torch import schema_of
from ..process_state import Reentrant

_TRUSTED_NAMESPACES = frozenset({"aten", "prim", "prims"})
"""Namespaces whose operators have the tag ``nondeterministic_seeded`` if they draw random numbers. Others may lack it."""

_UNINITIALIZED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
)

_SEEDS = frozenset({"philox_seed", "seed"})
"""Names of arguments for a state of the generator: an operator that takes it draws the same numbers again."""

_DEVICE = re.compile(r"(cpu|cuda|meta|xpu|mps|hpu|privateuseone)(:\d+)?")

_DIMENSIONS_OF = {torch.channels_last: 4, torch.channels_last_3d: 5}
"""The memory formats besides the contiguous one, each with the number of dimensions of its tensors."""

_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")
"""The logger of each operator that does not accept its arguments."""

_MAX_CACHED = 10_000
"""How many calls are cached; a model has a few hundred."""


class Observed(NamedTuple):
    """Facts about one call of a function.

    Attributes:
        aliases: for each returned tensor, the indices of the tensor arguments with which it shares memory.
        pure: whether equal arguments yield equal results, and nothing else changes.
        writes: indices of the tensor arguments that it modifies in place.
        by_position: indices of the tensor arguments whose storages it addresses by position, as ``as_strided`` does.
        strides: the strides of each returned tensor; ``None`` if it is contiguous.
        storages: for each returned tensor, the index of the first one in the same storage, and the storage's bytes.
        temporary_bytes: the most bytes that exist at once during the call, besides the inputs and what is returned.
        operators: names of the base operators that it calls, without namespace.
        draws: whether it draws random numbers. Operators outside of torch's own namespaces may draw without a sign of it.
        flops: additions and multiplications by dtype, by the formulas of ``torch.utils.flop_counter``.
        elsewhere: whether it writes or returns memory that is neither an argument's nor allocated by the call.
    """

    aliases: tuple[frozenset[int], ...]
    pure: bool
    writes: frozenset[int]
    by_position: frozenset[int]
    strides: tuple[tuple[int, ...] | None, ...] = ()
    storages: tuple[tuple[int, int], ...] = ()
    temporary_bytes: int = 0
    operators: frozenset[str] = frozenset()
    draws: bool = False
    flops: Mapping[torch.dtype, int] | None = None
    elsewhere: bool = False


class _TensorArgument(NamedTuple):
    """A tensor argument of a call; equal tensors have equal numbers."""

    number: int
    shape: tuple[Any, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None


_cache: dict[Any, Observed | None] = {}


def observe_call(
    bsym: BoundSymbol, function: Callable[..., Any], strides: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[Observed, ...]:
    """Return the facts about a call of ``function`` with the arguments of a bound symbol.

    There are none if it cannot be run on fake tensors, and several if its arguments name other memory formats.

    Args:
        strides: strides of tensor proxies by name, for facts about exactly this call. Tensors without an entry are
            contiguous.
    """
    leaves, spec = bsym.flat_args_and_spec
    arguments = describe(leaves, strides or {})
    if arguments is None:
        return ()
    formats = [torch.contiguous_format]
    if strides is None:
        formats += [a for a in arguments if isinstance(a, torch.memory_format) and a in _DIMENSIONS_OF]
    call = function, spec, identity_of(arguments)
    found = []
    for layout in formats:
        if (key := (call, layout)) not in _cache:
            if len(_cache) >= _MAX_CACHED:
                _cache.clear()
            _cache[key] = _try(function, arguments, spec, layout)
        found.append(_cache[key])
    return tuple([observed for observed in found if observed is not None])


def _observe(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Observed:
    """Run ``function`` with tensors of the active :class:`FakeTensorMode`, and return the facts.

    Tensor arguments are numbered in the order in which they appear, each tensor once.
    """
    inputs = list({id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}.values())
    recorder = Recorder(inputs)
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
    strides = tuple(None if t.layout is not torch.strided or t.is_contiguous() else tuple(t.stride()) for t in outs)
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
        recorder.flops,
        recorder.writes_elsewhere or not all(map(recorder.knows, outs)),
    )


class Recorder(TorchDispatchMode):
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
        self.writes_elsewhere = False
        self.by_position: set[int] = set()
        self.uninitialized: set[StorageWeakRef] = set()
        self.operators: set[str] = set()
        self.flops: Counter[torch.dtype] = Counter()
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
        named = named_arguments(func, args, kwargs)
        if flops := _flops(func.overloadpacket, args, kwargs, out):
            self.flops[next(a.dtype for a in args if isinstance(a, torch.Tensor))] += flops
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(named.get(argument.name)):
                    if isinstance(tensor, torch.Tensor):
                        self.writes |= self.inputs.get(_storage(tensor), frozenset())
                        self.writes_elsewhere |= not self.knows(tensor)
                        self.uninitialized.discard(_storage(tensor))
        addressed = named.get("self") if any(a.name == "storage_offset" for a in schema.arguments) else None
        if isinstance(addressed, torch.Tensor):
            self.by_position |= self.inputs.get(_storage(addressed), frozenset())
        if func.namespace not in _TRUSTED_NAMESPACES:
            self.deterministic = False
            self.custom_alias |= any(r.alias_info is not None for r in schema.returns)
        if draws(func, named):
            self.deterministic, self.draws = False, True
        if schema.name.removeprefix("aten::") in _UNINITIALIZED:
            self.uninitialized.update(_storage(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        return out

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares memory with an argument, or lies in memory that the call has allocated."""
        return _storage(tensor) in self.inputs or _storage(tensor) in self.new

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


def named_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a base operator by name, with the defaults of those that are not given."""
    arguments = schema_of(operator).arguments
    named = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return named | dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)


def draws(operator: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether a base operator of torch draws random numbers.

    Args:
        arguments: as ``named_arguments`` returns them.
    """
    return (
        torch.Tag.nondeterministic_seeded in operator.tags
        and arguments.get("dropout_p") != 0.0
        and not any(argument.name in _SEEDS for argument in schema_of(operator).arguments)
    )


def _flops(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of a call of a base operator; 0 if there is no formula."""
    if packet is getattr(torch.ops.aten, "_grouped_mm", None):
        a, b = args[0].shape, args[1].shape
        # Each row (or column) of the ragged side is multiplied with one group only: the FLOPs are those of one group.
        return 2 * math.prod(a[-2:]) * int(b[-1]) * (int(a[0]) if len(a) == len(b) == 3 else 1)
    return int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0


@contextlib.contextmanager
def _ignore_warnings() -> Iterator[None]:
    """Show no warnings, and no log messages about operators that fail on fake tensors."""
    was_disabled, _LOGGER.disabled = _LOGGER.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _LOGGER.disabled = was_disabled


_quiet = Reentrant(_ignore_warnings)


def _try(
    function: Callable[..., Any], arguments: Sequence[Any], spec: Any, layout: torch.memory_format
) -> Observed | None:
    """Observe a call with torch's dtypes and devices, or else with Thunder's; return ``None`` if both fail."""
    for convert in (True, False):
        try:
            with fake_mode():
                args, kwargs = fake_arguments(arguments, spec, layout, convert=convert)
                return _observe(function, *args, **kwargs)
        except Exception:  # after any error nothing is known about the function
            continue
    return None


@contextlib.contextmanager
def fake_mode(device: str = "cpu") -> Iterator[None]:
    """Let torch run on fake tensors on a device, by default the CPU, without autograd, autocast and warnings."""
    with (
        _quiet,
        torch.device(device),
        torch.autocast(device, enabled=False),
        torch.no_grad(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def fake_arguments(
    arguments: Sequence[Any], spec: Any, layout: torch.memory_format = torch.contiguous_format, *, convert: bool = True
) -> Any:
    """Return the arguments of a call, with fake tensors for those that ``describe`` has described.

    Args:
        convert: whether Thunder's dtypes and devices become torch's. All devices become that of ``fake_mode``.
    """
    tensors = {a.number: _empty(a, layout) for a in arguments if type(a) is _TensorArgument}
    return tree_unflatten([_fake(a, tensors, convert) for a in arguments], spec)


def _empty(tensor: _TensorArgument, layout: torch.memory_format) -> torch.Tensor:
    shape = tuple(map(int, tensor.shape))
    if tensor.strides is not None:
        return torch.empty_strided(shape, tensor.strides, dtype=tensor.dtype)
    fits = _DIMENSIONS_OF.get(layout, len(shape)) == len(shape)
    return torch.empty(shape, dtype=tensor.dtype, memory_format=layout if fits else torch.contiguous_format)


def _fake(argument: Any, tensors: Mapping[int, torch.Tensor], convert: bool) -> Any:
    if isinstance(argument, _TensorArgument):
        return tensors[argument.number]
    is_device = isinstance(argument, torch.device) or (isinstance(argument, str) and _DEVICE.fullmatch(argument))
    if is_device or (convert and isinstance(argument, devices.Device)):
        return torch.empty(0).device  # without a real tensor, which `torch.get_default_device` makes on a GPU
    if convert and isinstance(argument, dtypes.dtype):
        return to_torch_dtype(argument)
    return argument


_CONSTANTS = (bool, int, float, complex, str, slice, NoneType, EllipsisType)
_KINDS = (torch.dtype, torch.device, torch.layout, torch.memory_format, dtypes.dtype, devices.Device)


def describe(leaves: Sequence[Any], strides: Mapping[str, tuple[int, ...]]) -> list[Any] | None:
    """Return the arguments of a call without proxies, or ``None`` if one cannot be converted."""
    numbers: dict[str, int] = {}
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, TensorProxy):
            number, shape = numbers.setdefault(leaf.name, len(numbers)), tuple(map(_value, shape_of(leaf)))
            described.append(_TensorArgument(number, shape, to_torch_dtype(leaf.dtype), strides.get(leaf.name)))
        elif isinstance(leaf, NumberProxy):
            described.append(leaf.value)
        elif isinstance(leaf, (*_CONSTANTS, *_KINDS)):
            described.append(leaf)
        else:
            return None
    return described


def identity_of(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key that is equal for equal described arguments; ``True`` and ``1`` differ."""
    return tuple([(type(a), a if type(a) is _TensorArgument else str(a)) for a in arguments])


def _value(size: Any) -> Any:
    return size.value if isinstance(size, NumberProxy) else size


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def attention_backends() -> tuple[bool, ...]:
    """Return which kernels of attention torch may use; ``torch.nn.attention.sdpa_kernel`` sets them."""
    backends = torch.backends.cuda
    return (
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
    )
