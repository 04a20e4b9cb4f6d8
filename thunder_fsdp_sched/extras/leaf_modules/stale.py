"""Errors for state that both a leaf and traced code use.

A leaf reads and writes attributes of the modules when it runs. A trace reads them at its start, and its epilogue writes them
at its end. So traced code would read what a leaf has written in the call before, and a leaf what traced code has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.prims import PrimIDs

from ...capture.leaves import Leaves
from ...capture.paths import ATTRIBUTE, FUNCTION, Path, Paths
from ...capture.refusals import refusal
from ...ir.inspection import nested
from ...private_assignments import modified_members
from ...runtime.traced_inputs import value_at

_MEMBERS = ("__dict__", "_buffers")


def read_before_written(leaves: Leaves, module: torch.nn.Module) -> NotImplementedError | None:
    """Return the error for a call of a leaf of which traced code has changed an attribute or a buffer before."""
    parts = set(module.modules())
    for path in _changed():
        owner, name = _owner(path, leaves.model)
        if owner in parts:
            return refusal(
                f"forward changes {name!r} of the leaf module {leaves[module]!r} ({type(module).__name__}) before it calls "
                f"it. The trace would change it at its end, and the leaf would read the value of the call before",
                "Pass the value to the module as an argument, or assign it in the module itself",
            )
    return None


def written_before(path: str, name: str) -> NotImplementedError:
    """Return the error for traced code that reads an attribute which a leaf has assigned in this forward."""
    return refusal(
        f"forward reads {name!r}, which the leaf module {path!r} changes when it runs. The trace would read the value of "
        f"the call before",
        "Return it from the module",
    )


def _changed() -> Iterator[Path]:
    """Yield the paths of the attributes and buffers that traced code has changed so far."""
    context, paths = get_jit_ctx(), Paths()
    for provenance, name in modified_members(context):
        if (path := paths.of(provenance)) is not None:
            yield (*path, (ATTRIBUTE, name))
    for scope in context.computation_trace.scopes:
        for bsym in nested(scope or ()):
            if bsym.sym.id is PrimIDs.COPY_:
                history = getattr(bsym.args[1], "history", None)
                path = None if history is None else paths.of(history)
                if path is not None:
                    yield path


def _owner(path: Path, model: torch.nn.Module) -> tuple[Any, str]:
    """Return the object of which an attribute or a buffer is at ``path``, and its name; the path begins at the model."""
    *steps, (_, name) = path
    while steps[1:] and steps[-1][1] in _MEMBERS:
        steps.pop()
    try:
        return value_at({FUNCTION: model}, tuple(steps)), str(name)
    except Exception:  # the program has made it
        return None, str(name)
