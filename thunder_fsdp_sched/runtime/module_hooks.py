"""The hooks of a module and its submodules, which traces contain as they were when the module was traced."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch

from ..errors import coded_error
from ..private_torch import find_hooks


class UntracedHook:
    """A hook that is removed while its module is traced."""


class TracedHooks:
    """The hooks of a module and its submodules, and those of all modules, when the module was traced.

    It keeps the hooks alive, so that no later hook gets the identity of one of them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._hooks = _find(list(module.modules()))
        self._accepted: list[
            Any
        ] = []  # the latest numbers and hooks that were the same, those of untraced ones included

    def __str__(self) -> str:
        return "traced_hooks"  # in the prologue

    def check(self, modules: list[torch.nn.Module]) -> None:
        """Raise an error unless these modules have the same hooks now, added once and in the same order."""
        found = list(itertools.chain.from_iterable(find_hooks(modules)))
        if len(found) == len(self._accepted) and all(map(operator.is_, found, self._accepted)):
            return
        now = _find(modules)
        is_same = len(now) == len(self._hooks) and all(
            number == traced_number and hook is traced
            for (number, hook), (traced_number, traced) in zip(now, self._hooks, strict=True)
        )
        if not is_same:
            raise coded_error(
                RuntimeError, "module.hooks-changed-after-compilation", expected=len(self._hooks), found=len(now)
            )
        self._accepted = found


def check_hooks(module: Any, hooks: TracedHooks) -> None:
    """Raise an error, which makes Thunder look for other traces, if modules have other hooks than ``hooks``.

    Args:
        module: the jitted module, which keeps the list of its submodules.
    """
    known = module.__dict__.get("_fsdp_hooked")
    if known is None:
        module.__dict__["_fsdp_hooked"] = known = list(module._model.modules())
    hooks.check(known)


def _find(modules: list[torch.nn.Module]) -> list[tuple[int, Any]]:
    return [found for found in find_hooks(modules) if not isinstance(found[1], UntracedHook)]
