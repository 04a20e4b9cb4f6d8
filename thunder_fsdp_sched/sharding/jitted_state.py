"""State dicts of a jitted module, and of modules that contain it: entries that record which rows they hold.

Thunder's ``state_dict`` would return this rank's rows as plain tensors, which ``dcp.save``, ``torch.save`` and all
other code would mistake for whole parameters. It runs no hooks. So a sharded jitted module has attributes that hide the
methods of its class. A module that contains it calls ``state_dict`` of each child, so it uses them, too.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from thunder.core.module import ThunderModule

from .module_parameters import refuse_assign, refuse_keep_vars
from .sharded_module import ShardedModule
from .state_entries import loaded_param, param_entry

__all__ = ["hold_entries", "rows_by_name"]

_ORIGINAL = "_model."
"""The prefix of the original module's names in a jitted module."""


def hold_entries(model: ThunderModule, sharded: ShardedModule) -> None:
    """Make ``state_dict`` of ``model`` return entries instead of rows, and ``load_state_dict`` accept both."""
    state = _JittedState(model, sharded)
    model.state_dict = state.state_dict
    model.original_state_dict = state.original_state_dict
    model.load_state_dict = state.load_state_dict
    model.register_load_state_dict_pre_hook(state.before_load)
    model.__reduce_ex__ = _refuse_copies
    model._fqn_modifiers = _fqn_modifiers


def _fqn_modifiers() -> dict[str, str]:
    """Tell ``torch.distributed.checkpoint.state_dict`` that the names in a state dict leave out the child ``_model``."""
    return {"": _ORIGINAL.rstrip(".")}


def rows_by_name(model: ThunderModule) -> dict[str, torch.Tensor]:
    """Return the result of Thunder's own ``state_dict``: rows and buffers, each once, sharing their memory."""
    return ThunderModule.state_dict(model)


class _JittedState:
    """The replacements for methods of a jitted module's class. They do not keep the module alive."""

    def __init__(self, model: ThunderModule, sharded: ShardedModule) -> None:
        self._reference = weakref.ref(model)
        self._sharded = sharded
        self._gives_rows = False

    def state_dict(
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the entries of the original module's state dict; no communication. They share memory with the model.

        Parameters are DTensors where their rows are spread evenly, else :class:`RowPiece`, under all of their names.

        Raises:
            ValueError: ``keep_vars`` is set, or ranks have different parameters under one name.
        """
        if self._gives_rows:
            return rows_by_name(self._model)
        refuse_keep_vars(keep_vars)
        self._sharded.module_params.check()
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()  # type: ignore[attr-defined]
        for name, value in rows_by_name(self._model).items():
            for known_as in self._sharded.names_of(name):
                place = self._sharded.locations.get(known_as)
                destination[prefix + known_as] = value if place is None else param_entry(*place)
        return destination

    def original_state_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Do the same as Thunder's method, which passes the rows of ``state_dict`` to transforms."""
        self._gives_rows = True
        try:
            return ThunderModule.original_state_dict(self._model, **kwargs)
        finally:
            self._gives_rows = False

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load entries with this rank's rows, or its rows of whole tensors.

        Raises:
            RuntimeError: an entry has another shape or holds other rows, or (``strict``) names differ. In the first
                case nothing is changed.
            ValueError: ``assign``.
        """
        self._sharded.module_params.check()
        model, errors = self._model, []
        loaded = dict(state_dict)
        for name in rows_by_name(model):
            for known_as in self._sharded.names_of(name):
                place, value = self._sharded.locations.get(known_as), loaded.get(known_as)
                if place is None or not isinstance(value, torch.Tensor):
                    continue
                if assign:
                    refuse_assign(known_as)
                del loaded[known_as]  # Thunder has one name for each
                try:
                    loaded[name] = loaded_param(*place, value)
                except ValueError as error:
                    errors.append(f"size mismatch for {known_as}: {error}")
        if errors:
            raise RuntimeError("Error(s) in loading state_dict:\n\t" + "\n\t".join(errors))
        return ThunderModule.load_state_dict(model, loaded, strict, assign)

    def before_load(self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Rename entries to the names that torch expects in a module that contains the jitted one."""
        names = [name for name in state_dict if name.startswith(prefix)]
        if all(name.startswith(prefix + _ORIGINAL) for name in names):
            return
        for name in names:
            state_dict[prefix + _ORIGINAL + name[len(prefix) :]] = state_dict.pop(name)

    @property
    def _model(self) -> ThunderModule:
        model = self._reference()
        assert model is not None, "the jitted module is gone"
        return model


def _refuse_copies(protocol: Any) -> NoReturn:
    raise TypeError(
        "a jitted module that is sharded cannot be copied or pickled: its parameters are views of shard buffers. Copy the "
        "module before thunder.jit, or save full_state_dict(model)"
    )
