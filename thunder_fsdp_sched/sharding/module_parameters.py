"""The module's own parameters: shards, except while Thunder traces and inside ``eager``.

[Note: The module's own parameters]
The parameters of a sharded module are DTensors (:class:`RowDTensor`) over this rank's rows, which are views of a shard
buffer. They have the attributes and hooks of the parameters that they have replaced, in the module and in its lists. So
optimizers, parameter groups by submodule, ``requires_grad_``, hooks and ``zero_grad`` work as on any other module. Using a
replaced parameter is an error: see [Note: Former parameters]. Thunder's prologue reads the new objects.

Thunder traces with the shapes in the module, which must then be whole. So during tracing, *placeholders* on the meta
device replace the shards. They are inserted after a miss in Thunder's cache (``private_cache.watch_compilations``), and
removed when the first transform receives the trace, or when tracing has failed. ``eager`` also uses them, for
parameters that are not gathered. ``unsharded`` replaces shards by *whole* parameters. Both are *stand-ins* of shards.
Lists, tuples and dicts of the module that hold parameters hold the same ones.

Code that is unaware of this would compute with rows, or save them as if they were the parameter. *Guards* are hooks on
each module that has sharded parameters. They refuse calls outside of tracing and ``eager``, ``deepcopy``, and pickling.
They make ``state_dict`` return DTensors (see [Note: Entries of state dicts] in ``extras.state_dicts.entries``), and
``load_state_dict`` accept such entries or whole tensors. Guards of calls are removed while Thunder traces, because it
would interpret them. The jitted module does the same: see ``extras.state_dicts.jitted``.

:class:`RegisteredObjects` finds objects of the module that users have replaced. Former parameters are another matter:
they are in no module any more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..capture.leaves import Leaves
from ..errors import coded_error
from ..extensions import load
from ..private_torch import state_name
from ..runtime.bucket import Bucket
from ..runtime.memory import address
from ..runtime.row_dtensor import local_rows
from ..runtime.traced_module import UntracedHook

_REGISTERED = ("_parameters", "_buffers", "_modules")
_DEPTH = 3
"""How deeply nested containers are searched."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A parameter under one of its names: its shard, and the parameter of whole shape that stands for it in traces.

    Attributes:
        owner: the module that has it, under the name ``leaf``.
        placeholder: on the meta device; the same for all names.
    """

    name: str
    owner: nn.Module
    leaf: str
    bucket: Bucket
    index: int
    placeholder: nn.Parameter

    @property
    def shard(self) -> nn.Parameter:
        return self.bucket.params[self.index]

    @property
    def param(self) -> nn.Parameter | None:
        return self.owner._parameters.get(self.leaf)


class ModuleParameters:
    """The parameters of one sharded module: shards, or placeholders or whole parameters in their place.

    Attributes:
        stand_ins: the parameters that are in the module in place of shards now, keyed by the ``id`` of the shard.
        placeholders: the parameters of whole shape on the meta device, keyed by the ``id`` of the shard.
        is_gathering: whether the entries of a state dict will be gathered; then ranks may have different parameters.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket], leaves: Leaves) -> None:
        self.stand_ins: Mapping[int, nn.Parameter] = {}
        self.is_gathering = False
        self._module = module
        self._buckets = buckets
        self._entries = list(_entries(module, buckets))
        for entry in self._entries:
            entry.owner._parameters[entry.leaf] = entry.shard
        self.placeholders = {id(entry.shard): entry.placeholder for entry in self._entries}
        self.objects = RegisteredObjects(module, ((e.owner._parameters, e.leaf, e.name) for e in self._entries))
        owners = {id(e.owner) for e in self._entries}
        self._guards = [
            (_Guard(f"{path}." if path else "", guarded, self, self._entries), guarded)
            for path, guarded in module.named_modules()
            if any(id(child) in owners for child in guarded.modules())
        ]
        self._leaves = leaves
        self._call_guards: list[RemovableHandle] = []
        for guard, guarded in self._guards:
            guarded.register_state_dict_pre_hook(guard.check_state_dict)
            guarded.register_state_dict_post_hook(partial(guard.put_entries))  # torch sets an attribute of the hook
            guarded.register_load_state_dict_pre_hook(guard.shard_loaded_entries)
        self.replace_shards({})

    def check(self) -> None:
        """Raise an error if a parameter or a submodule was replaced, because the new one would be neither trained nor read.

        It is cheap enough for every call.

        Raises:
            RuntimeError: names the replaced object, or the module has whole parameters.
        """
        if self.has_whole:
            raise coded_error(RuntimeError, "step.parameters-whole-inside-unsharded")
        for name, former, present in () if self.has_placeholders else self.objects.replaced():
            what, how = "parameter", "copy into it: `with torch.no_grad(): p.copy_(new)`, or load_state_dict"
            if isinstance(former, nn.Module) or former is None:
                how = "change the module before thunder.jit, and make another sharded module"
                what = "submodule" if isinstance(present if former is None else former, nn.Module) else what
            raise coded_error(RuntimeError, "module.part-replaced-after-jit", role=what, name=name, fix=how)

    def check_shards(self) -> None:
        """Raise an error if a shard was converted, moved (``module.double()``), or given other memory.

        Raises:
            RuntimeError: names the parameter.
        """
        for bucket in self._buckets:
            for index, (spec, shard) in enumerate(zip(bucket.spec.params, bucket.params, strict=True)):
                if shard.dtype != bucket.spec.dtype:
                    raise coded_error(
                        RuntimeError,
                        "module.converted-after-sharding",
                        name=spec.name,
                        expected=bucket.spec.dtype,
                        found=shard.dtype,
                    )
                if shard.device != bucket.shard.device:
                    raise coded_error(
                        RuntimeError,
                        "module.moved-after-sharding",
                        name=spec.name,
                        expected=bucket.shard.device,
                        found=shard.device,
                    )
                if address(local_rows(shard)) != bucket.shard_pointers[index]:
                    raise bucket.lost_shard(index)

    @property
    def has_placeholders(self) -> bool:
        return self.stand_ins is self.placeholders

    @property
    def has_whole(self) -> bool:
        """Whether there are whole parameters in the module (``unsharded``)."""
        return bool(self.stand_ins) and not self.has_placeholders

    def is_whole(self, entry: Entry) -> bool:
        return self.has_whole and id(entry.shard) in self.stand_ins

    def replace_shards(self, stand_ins: Mapping[int, nn.Parameter]) -> None:
        """Put stand-ins in place of shards, keyed by the ``id`` of the shard, and shards in place of all others.

        Calls are guarded unless these are :attr:`placeholders`.
        """
        new_of: dict[int, nn.Parameter] = {}
        for entry in self._entries:
            present, new = (params.get(id(entry.shard), entry.shard) for params in (self.stand_ins, stand_ins))
            if new is not present:
                if new is entry.placeholder:
                    new.requires_grad_(present.requires_grad)
                    attributes = {**vars(present), "_thunder_device": vars(new)["_thunder_device"]}
                    vars(new).clear()
                    vars(new).update(attributes)
                new_of[id(present)] = entry.owner._parameters[entry.leaf] = new
        replace_in_containers(self._module, new_of)
        self.stand_ins = stand_ins
        for handle in self._call_guards:
            handle.remove()
        if not self.has_placeholders:
            unguarded = set(self._leaves.parts()) if self._leaves else ()  # leaves run with their hooks
            guards = ((guard, module) for guard, module in self._guards if module not in unguarded)
            self._call_guards = [m.register_forward_pre_hook(guard, prepend=True) for guard, m in guards]

    def replace_placeholders(self) -> None:
        """Put the shards back if there are placeholders in the module."""
        if self.has_placeholders:
            self.replace_shards({})

    def find_replaced(self) -> str | None:
        """Return the name of a stand-in that is no longer in the module, if there is one."""
        names = (e.name for e in self._entries if self.stand_ins.get(id(e.shard), e.param) is not e.param)
        return next(names, None)

    def entries_of(self, bucket: Bucket) -> list[Entry]:
        """Return the entries of the parameters in ``bucket`` that the module has."""
        return [entry for entry in self._entries if entry.bucket is bucket]

    def in_containers(self) -> dict[str, str]:
        """Return the names of sharded parameters that modules keep in lists, tuples or dicts, keyed by path."""
        names = {id(e.shard): e.name for e in reversed(self._entries)}
        return {path: names[id(t)] for path, t in tensors_in_containers(self._module) if id(t) in names}


class RegisteredObjects:
    """The parameters, submodules and buffers in the dicts of their modules, one list that is compared in one pass.

    Parameters and submodules that are ``None`` are among them. ``TracedModule`` notices new ones.

    Args:
        parameters: the dict of each, its key there, and its name in messages.

    Attributes:
        copies: other dicts that contain the buffers, keyed by their names.
    """

    def __init__(self, module: nn.Module, parameters: Iterable[tuple[dict[str, Any], str, str]]) -> None:
        self.copies: list[dict[str, Any]] = []
        owners = list(module.named_modules(remove_duplicate=False))
        modules = [(m._modules, k, f"{path}.{k}") for path, m in owners for k in m._modules]
        missing = [
            (m._parameters, k, f"{path}.{k}") for path, m in owners for k, p in m._parameters.items() if p is None
        ]
        buffers = [(m._buffers, k, f"{path}.{k}") for path, m in owners for k in m._buffers]
        links = [*parameters, *missing, *modules, *buffers]
        self._buffers = len(links) - len(buffers)  # where they begin
        self._dicts, self._keys = [objects for objects, _, _ in links], [key for _, key, _ in links]
        self._names = [name.lstrip(".") for _, _, name in links]
        self._known = list(map(dict.get, self._dicts, self._keys))

    def replaced(self) -> list[tuple[str, Any, Any]]:
        """Return replaced parameters and submodules (name, former, present), and update the copies of buffers.

        It is cheap enough for every call.
        """
        if all(map(operator.is_, map(dict.get, self._dicts, self._keys), self._known)):
            return []
        replaced = []
        for at, present in enumerate(map(dict.get, self._dicts, self._keys)):
            if present is self._known[at]:
                continue
            if at < self._buffers:
                replaced.append((self._names[at], self._known[at], present))
                continue
            self._known[at] = present
            for copies in self.copies:
                copies[self._names[at]] = present
                if present is None:
                    del copies[self._names[at]]
        return replaced


class _Guard(UntracedHook):
    """The hooks on a module that refuse uses that would mistake its rows for whole parameters."""

    def __init__(self, path: str, module: nn.Module, params: ModuleParameters, entries: Sequence[Entry]) -> None:
        self._is_root = not path
        self._label = path.rstrip(".") or "the module"
        self._params = params
        self._own = {entry.leaf: entry for entry in entries if entry.owner is module}
        self._below = [(state_name(e.name[len(path) :]), e) for e in entries if e.name.startswith(path)]

    def __call__(self, module: nn.Module, args: Any) -> NoReturn:
        if self._params.has_whole:
            self._params.check()
        raise coded_error(RuntimeError, "module.part-called-by-itself", label=self._label, type=type(module).__name__)

    @property
    def __name__(self) -> str:
        raise coded_error(AttributeError, "module.sharded-hooks-scripted", label=self._label)

    def check_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars:
            raise coded_error(ValueError, "state-dict.keep-vars-of-sharded")
        if self._is_root and not self._params.has_whole:  # once for all submodules
            self._params.check()

    def put_entries(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Replace plain rows in a state dict with entries that record which rows they hold."""
        load("extras.state_dicts.entries:put_entries")(self._params, self._own, state_dict, prefix)

    def shard_loaded_entries(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
    ) -> None:
        """Replace loaded entries with this rank's rows, all of them before torch copies the first into its shard."""
        assigns = local_metadata.get("assign_to_params_buffers", False)
        load("extras.state_dicts.entries:shard_loaded_entries")(
            self._params, self._below, state_dict, prefix, assigns=assigns
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copies(self._label)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(4)


def refuse_copies(label: str, *_: Any) -> NoReturn:
    """Raise the error for a copy of the jitted module, or of a module in it."""
    raise coded_error(TypeError, "module.sharded-model-copied", label=label)


def find_owner(module: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """Return the submodule that has the parameter ``name``, and its name there; ``None`` if a transform created it."""
    path, _, leaf = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None
    return (owner, leaf) if owner._parameters.get(leaf) is not None else None


def _entries(module: nn.Module, buckets: Sequence[Bucket]) -> Iterator[Entry]:
    for bucket in buckets:
        for index, (spec, shard) in enumerate(zip(bucket.spec.params, bucket.params, strict=True)):
            # The dtype is that of the unsharded parameter, which may be lower precision.
            whole = torch.empty(spec.shape, dtype=bucket.spec.param_dtype, device="meta")
            placeholder = nn.Parameter(whole, shard.requires_grad)
            # Thunder reads this as the device of a parameter on the meta device.
            placeholder._thunder_device = spec.device  # type: ignore[attr-defined]
            for name in spec.names:
                found = find_owner(module, name)
                if found is not None:
                    yield Entry(name, *found, bucket, index, placeholder)


def replace_in_containers(module: nn.Module, new_of: Mapping[int, torch.Tensor]) -> None:
    """Replace tensors that ``module`` and its submodules keep in attributes, lists, tuples and dicts.

    Args:
        new_of: the tensors that take the place of others, keyed by the ``id`` of the replaced one.
    """
    _replace_in_attributes(module, lambda _, tensor: new_of.get(id(tensor), tensor))


def tensors_in_containers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the paths and tensors that ``module`` and its submodules keep in attributes, lists, tuples and dicts."""
    found: list[tuple[str, torch.Tensor]] = []

    def keep(path: str, tensor: torch.Tensor) -> torch.Tensor:
        found.append((path, tensor))
        return tensor

    _replace_in_attributes(module, keep)
    return found


def _replace_in_attributes(module: nn.Module, replace: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace each tensor besides parameters and buffers by ``replace(path, tensor)``."""
    for prefix, submodule in module.named_modules():
        attributes = vars(submodule)
        for key, value in list(attributes.items()):
            if key not in _REGISTERED:
                new = _replace_in_value(f"{prefix}.{key}".lstrip("."), value, _DEPTH, replace)
                if new is not value:
                    attributes[key] = new


def _replace_in_value(path: str, value: Any, depth: int, replace: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with other tensors: the same list or dict, changed in place, or another tuple."""
    if isinstance(value, torch.Tensor):
        return replace(path, value)
    if not depth or not isinstance(value, (list, tuple, dict)):
        return value
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    replaced = [(key, old, _replace_in_value(f"{path}[{key!r}]", old, depth - 1, replace)) for key, old in items]
    changed = {key: new for key, old, new in replaced if new is not old}
    if changed and isinstance(value, tuple):
        elements = [new for _, _, new in replaced]
        return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)
    if not isinstance(value, tuple):
        for key, new in changed.items():
            value[key] = new
    return value
