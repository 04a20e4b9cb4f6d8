"""State dicts of a jitted module, and of modules that contain it: those of the original module.

Thunder's own ``state_dict`` and ``load_state_dict`` know neither hooks nor tied names, and their rows are plain tensors,
which ``dcp.save``, ``torch.save`` and all other code would mistake for whole parameters. So a sharded jitted module has
attributes that hide these methods of its class and call those of the original module, whose guards turn rows into
entries and back (see [Note: The module's own parameters] in ``module_parameters``). A module that contains the jitted one
calls ``state_dict`` of each child, so it uses them, too.

[Note: Names in state dicts]
torch's wrappers for activation checkpointing are modules of their own: their prefix is part of a parameter's name, but
not of its name in a state dict. Thunder, traces and buckets use the former, :func:`state_name` returns the latter.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from thunder.core.module import ThunderModule

from ...errors import coded_error
from ...private_torch import state_name
from ...runtime.bucket import Bucket
from ...runtime.row_dtensor import DTENSORS, RowDTensor
from ...sharding.sharded_module import ShardedModule
from ...sharding.state_dict import ORIGINAL
from .whole_buckets import gather_ahead


def rows_by_name(model: ThunderModule) -> dict[str, torch.Tensor]:
    """Return rows and buffers by their names in a state dict, each once; they share the memory of the model."""
    return {state_name(name): value for name, value in ThunderModule.state_dict(model).items()}


def gather_entries(
    entries: Mapping[str, Any], sharded: ShardedModule, *, keeps: bool = True, to_cpu: bool = True
) -> dict[str, Any]:
    """Gather the DTensors of a state dict; a collective.

    Cost: for each bucket one round of agreement and one gather, whatever the number of ranks and parameters; one of
    each for every other DTensor, such as optimizer state and results of hooks. A rank that keeps nothing has one bucket
    at a time in memory.

    Args:
        sharded: the module, which knows the names that share a parameter; each parameter is gathered once.
        keeps: if not, return ``None`` in place of each tensor on this rank.
        to_cpu: move each tensor to host memory as soon as it is gathered.
    """

    def kept(value: torch.Tensor) -> torch.Tensor | None:
        return None if not keeps else value.detach().cpu() if to_cpu else value.detach()

    leading = {name: sharded.names_of(name)[0] for name in entries}
    whole: dict[str, Any] = {}  # by leading name
    of_bucket: dict[Bucket, dict[str, int]] = {}
    for name, value in entries.items():
        if (found := _location(value)) is not None:
            of_bucket.setdefault(found[0], {}).setdefault(leading[name], found[1])
    if wanted := [(bucket, bucket.spec.dtype) for bucket in sharded.buckets if bucket in of_bucket]:
        for bucket, tensors in gather_ahead(sharded, "the whole state dict", wanted, own_memory=True):
            for name, index in of_bucket[bucket].items():
                value = tensors[index].to(bucket.spec.shard_device)
                whole[name] = kept(value)
                del value
            del tensors
    for name, value in entries.items():
        if leading[name] not in whole:
            if isinstance(value, DTENSORS):
                value = value.full_tensor()
            elif isinstance(value, torch.Tensor) and keeps and not to_cpu:
                value = value.clone()  # a buffer or an ignored parameter, which later steps change
            whole[leading[name]] = kept(value) if isinstance(value, torch.Tensor) else value
    return {name: whole[leading[name]] for name in entries}


def _location(entry: Any) -> tuple[Bucket, int] | None:
    """Return the bucket and the index of a parameter whose rows an entry shares; ``None`` if it is something else."""
    found = entry.rows.in_bucket if isinstance(entry, RowDTensor) else None
    return found if found is not None and entry._local_tensor is found[0].shard_views[found[1]] else None


class JittedState:
    """The replacements for methods of a jitted module's class. They do not keep the module alive."""

    def __init__(self, reference: weakref.ref[ThunderModule], sharded: ShardedModule) -> None:
        self._reference = reference
        self._sharded = sharded
        self._prefix = ""

    def state_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the original module's state dict, whose entries share memory with the model; no communication.

        Raises:
            NotImplementedError: another transform has created parameters or buffers.
            RuntimeError: a parameter was converted or moved after it was sharded.
            ValueError: ``keep_vars`` is set, or ranks have different parameters under one name.
        """
        self._sharded.module_params.check_shards()
        return self._module().state_dict(**kwargs)

    def original_state_dict(
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the original module's state dict with whole parameters, each gathered once; a collective.

        No entry shares memory with the model.
        """
        params = self._sharded.module_params
        params.is_gathering = True
        try:
            entries = self.state_dict(keep_vars=keep_vars)
        finally:
            params.is_gathering = False
        self._sharded.check_initialized()
        whole = gather_entries(entries, self._sharded, to_cpu=False)
        destination = OrderedDict() if destination is None else destination
        destination.update({prefix + name: value for name, value in whole.items()})
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load entries with this rank's rows, or its rows of whole tensors, into the original module.

        Returns:
            The names that are missing and those that are unexpected, as the unsharded module's method.

        Raises:
            NotImplementedError: another transform has created parameters or buffers.
            RuntimeError: an entry has another shape or holds other rows, or (``strict``) names differ. In the first
                case nothing is changed.
            ValueError: ``assign``.
        """
        return self._module().load_state_dict(state_dict, strict, assign)

    def load_original_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load whole parameters and buffers, or some of them; each rank takes its rows.

        Raises:
            RuntimeError: a shape differs, or the module has no such entry.
        """
        whole = {name.removeprefix("."): value for name, value in state_dict.items()}  # as Thunder names the root's
        if unexpected := self.load_state_dict(whole, strict=False).unexpected_keys:
            raise coded_error(RuntimeError, "state-dict.unknown-original-entry", name=unexpected[0])

    def set_buffer(self, name: str, value: torch.Tensor | None) -> None:
        """Replace a buffer that forward has assigned, in the original module as well.

        Thunder's own method would leave it in the last step's graph, and the root module's buffers under another name.
        """
        name, value = name.removeprefix("."), value if value is None else value.detach()
        ThunderModule.set_buffer(self._model, name, value)
        path, _, leaf = name.rpartition(".")
        self._sharded.module.get_submodule(path)._buffers[leaf] = value
        self._sharded.module_params.objects.replaced()  # so that putting back the former buffer counts as a change

    def before_load(self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Rename entries to the names that torch expects in a module that contains the jitted one."""
        self._prefix = prefix
        names = [name for name in state_dict if name.startswith(prefix)]
        if not all(name.startswith(prefix + ORIGINAL) for name in names):
            for name in names:
                state_dict[prefix + ORIGINAL + name[len(prefix) :]] = state_dict.pop(name)

    def after_load(self, module: torch.nn.Module, incompatible: Any) -> None:
        """Rename missing and unexpected entries back."""
        for names in (incompatible.missing_keys, incompatible.unexpected_keys):
            original = self._prefix + ORIGINAL
            names[:] = [self._prefix + n[len(original) :] if n.startswith(original) else n for n in names]

    def _module(self) -> torch.nn.Module:
        """Return the original module, whose state dict is complete."""
        self._sharded.module_params.check()
        self._sharded.take_attributes()
        model, module = self._model, self._sharded.module
        named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        own = {name for name, _ in itertools.chain(*named)}
        for name in (*model._overrides_parameters, *model._overrides_buffers):
            if name not in own:
                raise coded_error(NotImplementedError, "state-dict.parameter-of-another-transform", name=name)
        return module

    @property
    def _model(self) -> ThunderModule:
        model = self._reference()
        assert model is not None, "the jitted module is gone"
        return model
