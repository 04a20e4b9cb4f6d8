"""Attributes that are set after ``thunder.jit``: forward reads them, as in eager mode.

[Note: Set attributes]
Forward reads attributes of the original module, but users set them on the jitted one. Thunder would read a number or a
string of the jitted module in the prologue, but of the original one in the trace, which also has all functions and buffers.
So at the start of a call, what was set on the jitted module moves to the original one, whose attributes the jitted module
shows as well. What the class of jitted modules has (``forward``, ``state_dict``) stays there, and so do private names that
the original module does not have: libraries store things under them, and delete them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from thunder.core.module import ThunderModule

from ..errors import coded_error


class SetAttributes:
    """The attributes of the jitted modules of one module: adding a transform makes another one."""

    def __init__(self) -> None:
        self._own: weakref.WeakKeyDictionary[ThunderModule, set[str]] = weakref.WeakKeyDictionary()

    def add(self, model: ThunderModule) -> None:
        """Take the attributes that ``model`` has now for its own, which stay there."""
        self._own[model] = vars(model).keys() | set()

    def move(self) -> None:
        """Let forward read what was set since the latest call; cheap enough for every call.

        Raises:
            RuntimeError: names a parameter, buffer or submodule, for which the module would have to be sharded again.
        """
        for model, own in self._own.items():
            _move(model, own)


def _move(model: ThunderModule, own: set[str]) -> None:
    module = model._model
    for kind, name in _registered(model) if len(model._modules) > 1 or model._parameters or model._buffers else ():
        raise coded_error(RuntimeError, "module.registered-on-jitted-module", role=kind, name=name)
    for name in () if vars(model).keys() <= own else vars(model).keys() - own:
        if hasattr(type(model), name) or (name.startswith("_") and not hasattr(module, name)):
            continue
        value = vars(model)[name]
        if name == "training" and value != module.training:
            raise coded_error(RuntimeError, "module.training-flags-differ", jitted=value, original=module.training)
        setattr(module, name, value)
        delattr(model, name)


def _registered(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what was registered in the jitted module itself, which has only the original one."""
    yield from (("submodule", name) for name in model._modules if name != "_model")
    yield from (("parameter", name) for name in model._parameters)
    yield from (("buffer", name) for name in model._buffers)
