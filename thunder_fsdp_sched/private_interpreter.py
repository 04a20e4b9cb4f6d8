"""Private names of Thunder's interpreter and of ``nn.Module``'s hooks, each used in one function only.

``docs/private_api.md`` lists them, with what to do when one disappears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import thunder
import torch
from thunder.core.interpreter import INTERPRETER_CALLBACKS, InterpreterCompileCtx, _interpret_call
from thunder.core.jit_ext import register_general_jit_lookaside
from torch.nn.modules import module as torch_modules

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def find_hooks(modules: Iterable[torch.nn.Module]) -> list[tuple[int, Any]]:
    """Return the hooks that calls of these modules, and of any module, run: each with the number that torch gave it.

    No other call that adds a hook gets the same number.
    """
    found: list[tuple[int, Any]] = []
    for hooks in _global_hooks():
        found += hooks.items()
    for module in modules:
        for name in _HOOKS:
            if hooks := getattr(module, name):
                found += hooks.items()
    return found


def find_backward_hooks(module: torch.nn.Module) -> list[str | None]:
    """Return the names of the submodules with backward hooks, full or not; ``None`` among them for hooks of all modules."""
    found: list[str | None] = [None] if any(_global_hooks()[2:]) else []
    return found + [n for n, m in module.named_modules() if m._backward_hooks or m._backward_pre_hooks]


def has_old_backward_hooks(module: torch.nn.Module) -> bool:
    """Return whether ``module`` has hooks of ``register_backward_hook``, which a full one has replaced."""
    return bool(module._backward_hooks) and module._is_full_backward_hook is False


def _global_hooks() -> list[dict[int, Any]]:
    return [getattr(torch_modules, "_global" + name) for name in _HOOKS]


def is_hooked(module: torch.nn.Module) -> bool:
    """Return whether a call of ``module`` does more than to call its ``forward``."""
    return module._compiled_call_impl is not None or bool(find_hooks([module]))


def call_interpreted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let Thunder's interpreter call ``function`` with wrapped arguments; return the wrapped result, or its signal."""
    return _interpret_call(function, *args, **kwargs)


def call_module_as_torch(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Interpret what ``nn.Module.__call__`` does, with hooks."""
    return call_interpreted(_wrapped_call_impl, module, *args, **kwargs)


def _wrapped_call_impl(module: Any, *args: Any, **kwargs: Any) -> Any:
    if module._compiled_call_impl is not None:
        return module._compiled_call_impl(*args, **kwargs)
    return module._call_impl(*args, **kwargs)


def look_aside_module_calls(lookaside: Callable[..., Any]) -> None:
    """Let Thunder's interpreter call ``lookaside(module, ...)``, with wrapped values, wherever a module is called."""
    register_general_jit_lookaside(torch.nn.Module._wrapped_call_impl)(lookaside)


def observed_by(context: Any, observer: Any) -> Any:
    """Return an interpreter context that passes what happens in ``context`` through ``observer``.

    Args:
        context: Thunder's ``InterpreterCompileCtx``.
        observer: has ``interpret(interpret, inst, **state)``, ``look_aside(look_aside, function, *args, **kwargs)`` and
            ``wrap(wrap, value)``, which call their first argument to do what ``context`` does.
    """
    wrap = context._callbacks[INTERPRETER_CALLBACKS.WRAP_CALLBACK]
    return InterpreterCompileCtx(
        opcode_interpreter=partial(observer.interpret, context._opcode_interpreter),
        fn_lookaside=partial(observer.look_aside, context._fn_lookaside),
        callbacks={**context._callbacks, INTERPRETER_CALLBACKS.WRAP_CALLBACK: partial(observer.wrap, wrap)},
        with_provenance_tracking=True,
    )


def checks_of(context: Any) -> list[Any]:
    """Return the list of ``(check, proxy, *expected)`` that Thunder's tracing writes to the prologue in the end."""
    return context._constraints


@contextmanager
def added_checks(context: Any) -> Iterator[list[Any]]:
    """Let Thunder's tracing add checks to a new list instead of :func:`checks_of`.

    It compares each with all in the list, so that the checks of all tensors of a model take quadratic time.
    """
    earlier, context._constraints = context._constraints, []
    try:
        yield context._constraints
    finally:
        context._constraints = earlier


def cache_info() -> dict[str, Any]:
    """Return the state of torch that the prologues of the compilation check: default dtype, autocast, and so on."""
    return dict(thunder._get_cache_info())


def renames_of(context: Any) -> dict[Any, Any]:
    """Return the proxies that Thunder's tracing replaces in the end by proxies named like the user's variables."""
    return context._proxy_swapmap


def has_been_modified(context: Any) -> bool:
    """Return whether the program has assigned an attribute or a buffer of its inputs."""
    return bool(context._additional_outputs)


def uses_grad_mode(function: Any) -> bool:
    """Return whether this builtin function of torch reads or changes the grad mode."""
    return function in (torch.is_grad_enabled, torch.is_inference_mode_enabled, torch._C._set_grad_enabled)
