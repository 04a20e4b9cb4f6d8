"""The check that a module has not changed since traces were compiled for it."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
from thunder.core.module import ThunderModule
from thunder.distributed import get_skip_data_parallel_grad_sync

from ..errors import coded_error
from ..private_torch import find_hooks, states_of
from .traced_inputs import is_same

_MODULES = "_fsdp_modules"
"""The attribute of the jitted module with the user's module, its submodules, and their registries of parts."""


class UntracedHook:
    """A hook that is removed while its module is traced."""


class TracedModule:
    """The state of a module when it was traced, with which each call compares the module.

    Compared are whether ``no_sync`` is on; the numbers and strings among attributes that the program has read; how many
    submodules, parameters and buffers each module has (other checks compare the known ones); the hooks of all modules;
    and the sharded parameters, with their dtypes and ``requires_grad``. (Gathers notice a parameter that is on another
    device or whose rows are in other memory.) What changes most often is compared first. The hooks are kept alive, so
    that no later hook gets the identity of one of them.

    Args:
        module: the user's module.
        no_sync: whether the traces are compiled for ``no_sync``.
        reads: the path of a module, the name of its attribute, and its value.
        parameters: the sharded ones that the program reads, by name.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        no_sync: bool,
        reads: Sequence[tuple[str, str, Any]],
        parameters: Mapping[str, torch.nn.Parameter],
    ) -> None:
        self._no_sync, self._reads = no_sync, reads
        self._attributes = [name for _, name, _ in reads]
        # The modules with these attributes. Other checks refuse other modules. Weak, because traces keep none alive.
        self._owners: list[weakref.ref[Any]] = []
        self._values = [value for _, _, value in reads]  # or the latest that are equal
        modules = list(module.modules())
        self._sizes = list(map(len, _registered(modules)))
        self._hooks = _traced(find_hooks(modules))
        # The latest numbers and hooks, including untraced ones, among which the traced ones were as expected.
        self._all_hooks: list[Any] = []
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._states = states_of(self._parameters)

    def __str__(self) -> str:
        return "traced_module"  # in the prologue

    def check(self, model: ThunderModule) -> None:
        """Raise an error unless the module is as it was traced."""
        if get_skip_data_parallel_grad_sync() is not self._no_sync:
            raise RuntimeError(f"these traces were compiled for no_sync={self._no_sync}")
        if not self._owners:
            self._owners = [weakref.ref(model.get_submodule(path) if path else model) for path, _, _ in self._reads]
        values = [getattr(owner(), name) for owner, name in zip(self._owners, self._attributes, strict=True)]
        if not _are(values, self._values):
            self._accept_values(values)
        modules, registered = vars(model).get(_MODULES) or _find_modules(model)
        if list(map(len, registered)) != self._sizes:
            modules, registered = _find_modules(model)
            if list(map(len, registered)) != self._sizes:
                raise coded_error(RuntimeError, "module.parts-changed-since-tracing")
        hooks = find_hooks(modules)
        if not _are(numbered := list(chain.from_iterable(hooks)), self._all_hooks):
            self._accept_hooks(_traced(hooks))
            self._all_hooks = numbered
        parameters = list(map(model._overrides_parameters.get, self._names))
        if not _are(parameters, self._parameters) or states_of(parameters) != self._states:
            self._refuse_parameters(parameters)

    def _accept_values(self, values: list[Any]) -> None:
        for (path, name, expected), value in zip(self._reads, values, strict=True):
            if not is_same(value, expected):
                raise coded_error(
                    RuntimeError,
                    "module.attribute-changed-since-tracing",
                    attribute=f"{path}.{name}".lstrip("."),
                    value=value,
                    expected=expected,
                )
        self._values = values

    def _accept_hooks(self, hooks: list[tuple[int, Any]]) -> None:
        pairs = zip(hooks, self._hooks, strict=False)
        if len(hooks) != len(self._hooks) or not all(n == m and hook is known for (n, hook), (m, known) in pairs):
            raise coded_error(
                RuntimeError, "module.hooks-changed-after-compilation", expected=len(self._hooks), found=len(hooks)
            )

    def _refuse_parameters(self, parameters: list[torch.nn.Parameter]) -> NoReturn:
        is_same = list(map(operator.is_, parameters, self._parameters))
        if all(is_same):
            is_same = list(map(operator.eq, states_of(parameters), self._states))
        raise coded_error(RuntimeError, "parameter.changed-since-tracing", name=self._names[is_same.index(False)])


def _find_modules(model: ThunderModule) -> tuple[list[torch.nn.Module], list[dict[str, Any]]]:
    """Return the modules that the user's module has now, and their registries of parts."""
    modules = list(model._model.modules())
    found = vars(model)[_MODULES] = modules, _registered(modules)
    return found


def _registered(modules: Iterable[torch.nn.Module]) -> list[dict[str, Any]]:
    return [found for module in modules for found in (module._modules, module._parameters, module._buffers)]


def _are(found: Sequence[Any], known: Sequence[Any]) -> bool:
    """Return whether two lists contain the same objects."""
    return len(found) == len(known) and all(map(operator.is_, found, known))


def check_module(model: ThunderModule, traced: TracedModule) -> None:
    """Raise an error, which makes Thunder look for other traces, unless the module is as it was traced."""
    traced.check(model)


def _traced(hooks: Iterable[tuple[int, Any]]) -> list[tuple[int, Any]]:
    return [found for found in hooks if not isinstance(found[1], UntracedHook)]
