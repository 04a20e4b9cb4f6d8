"""Shorter look-ups of the parameters, buffers and submodules of modules.

A module finds them in ``nn.Module.__getattr__``, which tests for up to six keys. Thunder interprets each test as a program
of its own, with about ten calls, and this would take up to half of the time of a compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from thunder.core.interpreter import WrappedValue, unwrap, wrap_const
from thunder.core.jit_ext import get_jit_ctx

from ..private_interpreter import has_been_modified
from ..private_lookups import attribute, item
from .paths import FUNCTION, Paths

_GETATTR = torch.nn.Module.__getattr__  # torch's, and not what a program may have put in its place
OF_MODULES = frozenset(vars(torch.nn.Module()))
"""The attributes that each module has: its parts, and its hooks."""

_KINDS = ("_parameters", "_buffers", "_modules")
"""The dictionaries of a module in which torch looks for a name, in this order."""


def look_aside(function: Any, args: tuple[Any, ...], paths: Paths) -> Callable[..., Any] | None:
    """Return what to call in place of ``nn.Module.__getattr__``, with the same result, provenance and checks.

    Args:
        function: the called function; only ``nn.Module.__getattr__`` is replaced.
        args: the wrapped arguments. Only members of the compiled module are found, until the program modifies something.
        paths: those of the compilation.
    """
    if function is not _GETATTR or len(args) != 2 or has_been_modified(get_jit_ctx()):
        return None
    path, name, attributes = paths.of(args[0].provenance), unwrap(args[1]), vars(unwrap(args[0]))
    if path is None or path[0] != FUNCTION or type(name) is not str:
        return None
    earlier = tuple(takewhile(lambda kind: name not in attributes.get(kind, (name,)), _KINDS))
    if earlier == _KINDS or (kind := _KINDS[len(earlier)]) not in attributes:
        return None
    return partial(_find, (*earlier, kind))


def _find(kinds: tuple[str, ...], module: WrappedValue, name: WrappedValue) -> Any:
    """Return the wrapped member, which is in the last of these dictionaries.

    All values of a dictionary are wrapped, as by Thunder's own test for a key, because it checks those that may change.
    """
    attributes = attribute(module, "__dict__")
    attributes.track_items()
    for kind in kinds:
        members = item(attributes, wrap_const(kind))
        members.track_items()
    return item(members, name)
