"""Notes on exceptions that forward raises while it is traced: in which module, and what to do instead."""

from __future__ import annotations

import re
import traceback
import warnings
from pathlib import Path
from typing import Any

import thunder
import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import get_interpreterruntimectx

from ..errors import code_of
from .leaves import pattern_of
from .refusals import AS_TENSORS, is_of_program, refusal
from .unsupported import OWN_BACKWARD

_THUNDER = Path(thunder.__file__).parent
_BY_TEXT = (
    (
        r"'method_descriptor' object has no attribute '__module__'",
        "Thunder cannot trace methods of containers such as deque.append with a tensor. Use a list that forward itself has "
        "made, or a tuple",
    ),
    (
        r"casting a TensorProxy to a Python",
        f"What forward does would depend on a tensor's value; the outermost module may branch on what it computes from its "
        f"arguments alone. {AS_TENSORS}",
    ),
    (
        r"automatic registration for (tolist|numpy|nonzero|equal|is_nonzero|item|unique|masked_select)\b"
        r"|boolean advanced indexing|torch\.(allclose|nonzero|unique)\b|'?NoneType'?|value=None|_Unknown(Integer|Float)",
        f"The value or the shape of the result is known only when the trace runs. {AS_TENSORS}",
    ),
    (
        r"likely a subclassed named tuple",
        "Add methods to a dataclass instead, or make functions of them",
    ),
    (
        r"generator is not None",
        "Leave generator out and seed outside of forward, or draw outside of forward and pass the result as an argument",
    ),
    (
        r"^(needs_input_grad|mark_non_differentiable|set_materialize_grads|mark_dirty)$",
        f"Thunder traces autograd functions without this attribute of ctx. {OWN_BACKWARD}",
    ),
)
"""Patterns of the texts of errors, each with the advice for it."""


def name_in_error(module: torch.nn.Module, *, names_leaf: bool) -> None:
    """Add a note to the exception, unless an inner module has: the module, the dtypes of its parameters, and the line.

    Thunder's messages name no module, and most lines of the traceback are the interpreter's.

    Args:
        names_leaf: whether to say how the module could run as it is.
    """
    error: Any = get_interpreterruntimectx().curexc
    if getattr(error, "__notes__", None):
        return
    root = get_compile_data().fn
    names = (f"module {path!r}" if path else "the module" for path, part in root.named_modules() if part is module)
    name = next(names, "a module that is not registered")
    dtypes = [f"{n} {str(p.dtype).removeprefix('torch.')}" for n, p in module.named_parameters(recurse=False)]
    files = [(line.filename, line.lineno) for line in traceback.extract_tb(error.__traceback__)]
    lines = [f"{file}:{number}" for file, number in files if is_of_program(file)]
    note = f"fsdp: while tracing {name}, {type(module).__name__}"
    note += f" ({', '.join(dtypes)})" * bool(dtypes) + "".join(f", at {line}" for line in lines[-1:])
    if instead := _remedy(error):
        note += f". {instead}"
    if names_leaf and module is not root and _is_limit_of_tracing(error, files):
        path = next((path for path, part in root.named_modules() if part is module), type(module).__name__)
        note += f". To run it as it is, without tracing: fsdp(leaf_modules=({pattern_of(path)!r},))"
    getattr(error, "add_note", warnings.warn)(note)  # Python 3.10 has no notes


def internal_error(error: BaseException) -> BaseException:
    """Return the error for a program on which Thunder's interpreter itself fails, although Python may run it."""
    if code_of(error) is not None:
        return error  # one of this package
    lines = traceback.extract_tb(error.__traceback__)
    last = next((f"{line.filename}:{line.lineno}" for line in reversed(lines) if is_of_program(line.filename)), "")
    refused = refusal(
        f"Thunder's interpreter fails here ({type(error).__name__}: {error})",
        "Write the line in another way, or put it into a module of its own, which can run as it is",
        line=last,
    )
    refused.__cause__ = error
    return refused


def _remedy(error: BaseException) -> str:
    """Return what to do about an error of Thunder, as a sentence; "" if it is not known."""
    text = str(error)
    return next((instead for pattern, instead in _BY_TEXT if re.search(pattern, text)), "")


def _is_limit_of_tracing(error: BaseException, files: list[tuple[str, int | None]]) -> bool:
    """Return whether Thunder, rather than the user's program, has raised an error: the program may run without it."""
    return isinstance(error, NotImplementedError) or (bool(files) and Path(files[-1][0]).is_relative_to(_THUNDER))
