"""State dicts of a jitted module, and of modules that hold it: entries that know which rows of a parameter they are.

Thunder's ``state_dict`` would give this rank's rows as plain tensors, which ``dcp.save``, ``torch.save`` and everything else
takes for whole parameters. It runs no hooks. So a sharded jitted module has attributes that hide the methods of its class,
for itself and for a module that holds it, which asks each child for its ``state_dict``.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from thunder.core.module import ThunderModule

from .own_parameters import refuse_assign, refuse_keep_vars
from .pieces import param_entry, rows_from
from .sharding import ShardedModule

__all__ = ["hold_entries", "rows_by_name"]

_ORIGINAL = "_model."
"""Prefix of the original module's names in a jitted module."""


def hold_entries(model: ThunderModule, sharded: ShardedModule) -> None:
    """Make ``state_dict`` of ``model`` hold entries in place of rows, and ``load_state_dict`` take them or whole tensors."""
    state = _JittedState(model, sharded)
    model.state_dict = state.state_dict
    model.original_state_dict = state.original_state_dict
    model.load_state_dict = state.load_state_dict
    model.register_load_state_dict_pre_hook(state.before_load)
    model.__reduce_ex__ = _refuse_copies


def rows_by_name(model: ThunderModule) -> dict[str, torch.Tensor]:
    """Return what Thunder's own ``state_dict`` gives: this rank's rows and buffers, each once, sharing their memory."""
    return ThunderModule.state_dict(model)


class _JittedState:
    """What a sharded jitted module has in place of the methods of its class. It does not keep the module alive."""

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
            ValueError: ``keep_vars``, or ranks hold different parameters under one name.
        """
        if self._gives_rows:
            return rows_by_name(self._model)
        refuse_keep_vars(keep_vars)
        self._sharded.own.check()
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()  # type: ignore[attr-defined]
        for name, value in rows_by_name(self._model).items():
            for known_as in self._sharded.names_of(name):
                place = self._sharded.places.get(known_as)
                destination[prefix + known_as] = value if place is None else param_entry(*place)
        return destination

    def original_state_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Do what Thunder's method does, which hands what ``state_dict`` gives to transforms: rows."""
        self._gives_rows = True
        try:
            return ThunderModule.original_state_dict(self._model, **kwargs)
        finally:
            self._gives_rows = False

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load entries of this rank's rows, or whole tensors of which it takes its rows.

        Raises:
            RuntimeError: an entry has another shape or holds other rows, or (``strict``) names differ. In the first case
                nothing is changed.
            ValueError: ``assign``.
        """
        self._sharded.own.check()
        model, errors = self._model, []
        loaded = dict(state_dict)
        for name in rows_by_name(model):
            for known_as in self._sharded.names_of(name):
                place, value = self._sharded.places.get(known_as), loaded.get(known_as)
                if place is None or not isinstance(value, torch.Tensor):
                    continue
                if assign:
                    refuse_assign(known_as)
                del loaded[known_as]  # Thunder knows one name of each
                try:
                    loaded[name] = rows_from(*place, value)
                except ValueError as error:
                    errors.append(f"size mismatch for {known_as}: {error}")
        if errors:
            raise RuntimeError("Error(s) in loading state_dict:\n\t" + "\n\t".join(errors))
        return ThunderModule.load_state_dict(model, loaded, strict, assign)

    def before_load(self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Give entries the names that torch looks for below a module that holds the jitted one."""
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
