"""The hooks of a module and its submodules, which traces contain as they were when the module was traced."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..private_interpreter import hook_dicts

__all__ = ["check_hooks", "count_hooks"]

HookCounts = tuple[tuple[str, int], ...]

_dicts: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, list[dict[int, Any]]]] = weakref.WeakKeyDictionary()


def count_hooks(module: torch.nn.Module) -> HookCounts:
    """Return the number of hooks of each module that has any, by name, and of those of all modules, as ``"*"``."""
    counts = ((name, sum(map(len, dicts))) for name, dicts in _dicts_of(module).items())
    return tuple((name, count) for name, count in counts if count)


def check_hooks(module: Any, hooks: HookCounts) -> None:
    """Raise an error, which makes Thunder look for other traces, if modules have other hooks than ``hooks``.

    Args:
        module: the jitted module.
        hooks: the result of :func:`count_hooks` when it was traced.
    """
    model = module._model
    if hooks or any(map(any, _dicts_of(model).values())):
        now = count_hooks(model)
        if now != hooks:
            raise RuntimeError(f"these traces were compiled with the hooks {hooks}, and now there are {now}")


def _dicts_of(module: torch.nn.Module) -> dict[str, list[dict[int, Any]]]:
    if module not in _dicts:
        own = {name: list(hook_dicts(submodule)) for name, submodule in module.named_modules()}
        _dicts[module] = {"*": list(hook_dicts(None)), **own}
    return _dicts[module]
