"""The blocks of the model that compute the values of a trace and hold its parameters."""

from __future__ import annotations

import itertools
import re

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from ...ir.inspection import args_of, defined_by, source_of
from ..step_memory.rows import StepRows


def blocks_of(step: StepRows) -> dict[str, str]:
    """Return the block of the model that computes each tensor of forward, by the tensor's name.

    A block has a path such as ``"blocks.3"``; a module outside of any block has its own name.
    A line of the model belongs to the block whose parameters it reads, and a line that reads none to the block whose
    parameters were read last. So the residual sum at the end of a block belongs to that block, and a norm to the block of
    its weight.
    """
    of_params: dict[str, str] = {}  # by the names of unsharded parameters in the trace
    found: dict[str, str] = {}
    last = ""
    computing: list[BoundSymbol] = []
    for row in step.rows[: step.rows_of_forward]:
        e = row.effects
        if e.unshards and e.bucket is not None:
            of_params.update({out: block_of(p.name) for out, p in zip(e.in_place, e.bucket.spec.params, strict=True)})
        elif not e.in_schedule:
            computing.append(row.bsym)
    for _, line in itertools.groupby(computing, key=lambda bsym: source_of(bsym).rpartition("/")[2]):
        bsyms = list(line)
        block = next((of_params[name] for bsym in bsyms for name in args_of(bsym) if name in of_params), last)
        if block and not last:  # values before the first read of a parameter belong to its block, too
            found = dict.fromkeys(found, block)
        last = block
        outs = [out for bsym in bsyms for out in defined_by(bsym) if isinstance(out, TensorProxy)]
        found.update({out.name: block for out in outs})
    return found


def block_of(parameter: str) -> str:
    """Return the path of the block that holds a parameter: up to the first number, else without the parameter's own name."""
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", parameter)
    return numbered.group() if numbered else parameter.rpartition(".")[0] or parameter
