"""Choose leaf modules: those that the user has named, and those that turn out not to be traceable."""

from __future__ import annotations

import fnmatch
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from thunder.core.symbol import BoundSymbol

from ...capture.bound_symbols import ModuleCall
from ...capture.leaves import AUTO, Leaves, pattern_of
from ...errors import coded_error

Matcher = str | type | Callable[[str, torch.nn.Module], bool]


def find_leaves(model: torch.nn.Module, matchers: Sequence[Any]) -> Leaves:
    """Return the leaf modules of a model.

    Raises:
        ValueError: nothing matches, or the model itself does.
    """
    leaves = Leaves(model, automatic=AUTO in [m for m in matchers if isinstance(m, str)])
    for matcher in matchers:
        if not (isinstance(matcher, str) and matcher == AUTO):
            _add_matching(leaves, *(matcher if isinstance(matcher, tuple) else (matcher, None)))
    _remove_inner(leaves)
    return leaves


def _add_matching(leaves: Leaves, match: Matcher, output_like: Callable[..., Any] | None) -> None:
    paths = [(path, module) for path, module in leaves.model.named_modules() if _matches(match, path, module)]
    if not paths:
        raise coded_error(ValueError, "leaf.pattern-matches-nothing", pattern=match, model=type(leaves.model).__name__)
    for path, module in paths:
        if not path:
            raise coded_error(ValueError, "leaf.model-itself-as-leaf")
        leaves.setdefault(module, path)
        if output_like is not None:
            leaves.output_like[path] = output_like


def _matches(match: Matcher, path: str, module: torch.nn.Module) -> bool:
    if isinstance(match, str):
        return fnmatch.fnmatchcase(path, match) or match == type(module).__name__
    if isinstance(match, type):
        return isinstance(module, match)
    return bool(match(path, module))


def _remove_inner(leaves: Leaves) -> None:
    """Remove leaves within other leaves, which are called as parts of those."""
    parts = {part for leaf in leaves for part in leaf.modules() if part is not leaf}
    for module in [module for module in leaves if module in parts]:
        del leaves[module]


def note_operator(leaves: Leaves, bsym: BoundSymbol, error: BaseException) -> None:
    """Note the innermost module that has called an operator which a pass refuses."""
    paths = {part: path for path, part in leaves.model.named_modules()}
    called = (tag.module for tag in bsym.tags if isinstance(tag, ModuleCall))
    modules = [module for module in called if module is not None and paths.get(module)]
    if modules:
        leaves.obstacle = max(modules, key=lambda module: len(paths[module])), error


def add_obstacle(leaves: Leaves) -> bool:
    """Let the module at which the last trace has failed be a leaf, and those like it in other blocks.

    Returns whether there is one, so that tracing again makes sense.
    """
    obstacle, leaves.obstacle = leaves.obstacle, None
    if obstacle is None:
        return False
    module, error = obstacle
    paths = {part: path for path, part in leaves.model.named_modules()}
    pattern = pattern_of(paths[module])
    alike = [part for part, path in paths.items() if type(part) is type(module) and pattern_of(path) == pattern]
    leaves.update((part, paths[part]) for part in alike)
    _remove_inner(leaves)
    announce(
        leaves,
        type(module),
        f"{pattern} ({type(module).__name__}, {_source(module)}) is not traced, but runs as it is: {type(error).__name__}: "
        f"{error}. To confirm it, pass fsdp(leaf_modules=({pattern!r},))",
    )
    return True


def announce(leaves: Leaves, what: Any, text: str) -> None:
    """Warn once that a class of modules, or a function, runs as it is."""
    if what not in leaves.announced:
        leaves.announced.add(what)
        warnings.warn(f"fsdp: {text}; to get an error instead, pass leaf_modules=()", stacklevel=2)


def _source(module: torch.nn.Module) -> str:
    try:
        line = inspect.getsourcelines(type(module).forward)[1]
        return f"{inspect.getsourcefile(type(module))}:{line}"
    except (OSError, TypeError):
        return type(module).__module__
