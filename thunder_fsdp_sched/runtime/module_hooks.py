"""The hooks of a module and its submodules, which traces contain as they were when the module was traced."""

from __future__ import annotations

from typing import Any

import torch

from ..private_interpreter import hook_dicts

__all__ = ["check_hooks", "count_hooks"]

HookCounts = tuple[tuple[str, int], ...]


def count_hooks(module: torch.nn.Module) -> HookCounts:
    """Return the number of hooks of each module that has any, by name, and of those of all modules, as ``"*"``."""
    return _count(_dicts_of(module))


def check_hooks(module: Any, hooks: HookCounts) -> None:
    """Raise an error, which makes Thunder look for other traces, if modules have other hooks than ``hooks``.

    Args:
        module: the jitted module, which keeps the dictionaries of hooks.
        hooks: the result of :func:`count_hooks` when it was traced.
    """
    known = module.__dict__.get("_fsdp_hook_dicts")
    if known is None:
        module.__dict__["_fsdp_hook_dicts"] = known = _dicts_of(module._model)
    if hooks or any(map(any, known.values())):
        now = _count(known)
        if now != hooks:
            raise RuntimeError(f"these traces were compiled with the hooks {hooks}, and now there are {now}")


def _dicts_of(module: torch.nn.Module) -> dict[str, list[dict[int, Any]]]:
    own = {name: list(hook_dicts(submodule)) for name, submodule in module.named_modules()}
    return {"*": list(hook_dicts(None)), **own}


def _count(dicts: dict[str, list[dict[int, Any]]]) -> HookCounts:
    counts = ((name, sum(map(len, each))) for name, each in dicts.items())
    return tuple((name, count) for name, count in counts if count)
