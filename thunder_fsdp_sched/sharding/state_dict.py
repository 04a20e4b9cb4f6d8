"""The state dict of a jitted module: see ``extras.state_dicts.jitted``, which is loaded when it is asked for."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from thunder.core.module import ThunderModule

from ..extensions import load
from .module_parameters import refuse_copies
from .sharded_module import ShardedModule

ORIGINAL = "_model."
"""The prefix of the original module's names in a jitted module."""


def install_state_dict(model: ThunderModule, sharded: ShardedModule) -> None:
    """Give ``model`` the state dict of its original module."""
    reference = weakref.ref(model)

    @functools.cache
    def state() -> Any:
        return load("extras.state_dicts.jitted:JittedState")(reference, sharded)

    def method(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(state(), name)(*args, **kwargs)

    model.state_dict = method("state_dict")
    model.original_state_dict = method("original_state_dict")
    model.load_state_dict = method("load_state_dict")
    model.load_original_state_dict = method("load_original_state_dict")
    model.set_buffer = method("set_buffer")
    model.register_load_state_dict_pre_hook(method("before_load"))
    model.register_load_state_dict_post_hook(method("after_load"))
    model.__reduce_ex__ = functools.partial(refuse_copies, "the jitted module")
    model._fqn_modifiers = _fqn_modifiers
    model._non_persistent_buffers_set = sharded.module._non_persistent_buffers_set  # torch lists the root's buffers


def _fqn_modifiers() -> dict[str, str]:
    """Tell ``torch.distributed.checkpoint.state_dict`` that the names in a state dict leave out the child ``_model``."""
    return {"": ORIGINAL.rstrip(".")}
