"""Replace a module's parameters by sharded ones, in the module and in optimizers that were made before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from ..runtime.bucket import Bucket
from ..runtime.param_hooks import take_hooks
from ..runtime.rows import Rows
from .optimizer_state import forget_state

__all__ = [
    "mark_replaced",
    "replace_in_optimizer",
    "replace_in_optimizers_of",
    "replace_param",
    "replaced_by",
]

_REPLACED = "_fsdp_replaced_by"
"""The attribute of an unsharded parameter with the :class:`Rows` of the sharded one."""


class ReplacedParameter(torch.nn.Parameter):
    """A parameter whose place a sharded one has taken. It gets no gradient, so reading it or adding hooks is an error."""

    @property
    def grad(self) -> NoReturn:  # type: ignore[override]
        self._refuse()

    def register_hook(self, hook: Any) -> NoReturn:
        self._refuse()

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        rows: Rows = getattr(self, _REPLACED)
        raise RuntimeError(
            f"parameter {rows.label!r} was taken from the module before thunder.jit or inside unsharded(...), and a sharded "
            f"one has its place now: take parameters from model.parameters() afterwards"
        )


def replace_param(old: torch.nn.Parameter, bucket: Bucket, index: int) -> weakref.ref[torch.nn.Parameter]:
    """Let ``bucket.params[index]`` take the place of ``old``, with its attributes and hooks; free the memory of ``old``.

    The module still has ``old``: ``ModuleParameters`` changes that.

    Returns:
        A reference to ``old``.
    """
    new = bucket.params[index]
    new.__dict__.update({key: value for key, value in old.__dict__.items() if key != "_thunder_device"})
    take_hooks(old, new)
    if not old.is_meta:
        old.data = old.new_empty(0)
    mark_replaced(old, bucket, index)
    return weakref.ref(old)


def mark_replaced(old: torch.nn.Parameter, bucket: Bucket, index: int) -> None:
    """Let optimizers replace ``old`` by ``bucket.params[index]``, and make reading the gradient of ``old`` an error."""
    setattr(old, _REPLACED, bucket.rows[index])
    if type(old) is torch.nn.Parameter:
        old.__class__ = ReplacedParameter


def replaced_by(param: torch.Tensor) -> torch.nn.Parameter | None:
    """Return the sharded parameter that has replaced ``param``; ``None`` if there is none, or if its model is gone."""
    rows: Rows | None = getattr(param, _REPLACED, None)
    place = None if rows is None else rows.place
    return None if place is None else place[0].params[place[1]]


def replace_in_optimizers_of(replaced: Iterable[weakref.ref[torch.nn.Parameter]]) -> None:
    """Let optimizers that were made before ``thunder.jit`` train the sharded parameters.

    They are looked for among all objects of the process if one of the replaced parameters is still alive. (Objects in
    the permanent generation, after ``gc.freeze()``, are not found; their replaced parameters raise errors.)
    """
    if any(reference() is not None for reference in replaced):
        for optimizer in [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]:
            replace_in_optimizer(optimizer)


def replace_in_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer train the sharded parameters in place of those that they have replaced."""
    for group in getattr(optimizer, "param_groups", ()):
        for number, old in enumerate(group["params"]):
            new = replaced_by(old)
            if new is not None:
                group["params"][number] = new
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)
                    forget_state(optimizer)
