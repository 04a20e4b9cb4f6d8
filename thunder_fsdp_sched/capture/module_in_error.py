"""Name the module in whose forward an exception was raised while it was traced, and what to do instead."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import get_interpreterruntimectx

from ..ir.inspection import is_library
from .unsupported import remedy

_THIS_FOLDER = Path(__file__).parent


def name_in_error(module: torch.nn.Module) -> None:
    """Add a note to the exception: the module, the dtypes of its parameters, and the line; unless a module within it did.

    Thunder's messages name no module, and most lines of the traceback are the interpreter's.
    """
    error: Any = get_interpreterruntimectx().curexc
    if getattr(error, "__notes__", None):
        return
    root = get_compile_data().fn
    names = (f"module {path!r}" if path else "the module" for path, part in root.named_modules() if part is module)
    name = next(names, "a module that is not registered")
    dtypes = [f"{n} {str(p.dtype).removeprefix('torch.')}" for n, p in module.named_parameters(recurse=False)]
    files = [(line.filename, line.lineno) for line in traceback.extract_tb(error.__traceback__)]
    lines = [f"{file}:{number}" for file, number in files if Path(file).parent != _THIS_FOLDER and not is_library(file)]
    note = f"fsdp: while tracing {name}, {type(module).__name__}"
    note += f" ({', '.join(dtypes)})" * bool(dtypes) + "".join(f", at {line}" for line in lines[-1:])
    if instead := remedy(error):
        note += f". {instead}"
    getattr(error, "add_note", warnings.warn)(note)  # Python 3.10 has no notes
