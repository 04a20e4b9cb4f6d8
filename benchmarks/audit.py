"""Measure the processor time of the audit of first runs, which takes place once per pair of traces.

    python benchmarks/audit.py --blocks 2 8

The benchmark runs in one process, with a gloo group of one rank and the demo's GPT. The first step compiles both traces
and runs them with the audit. It times inserting the audit into the traces, compiling their text again without it, the checks
themselves, and finding the facts about operators, which passes read with or without an audit.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import thunder_fsdp_sched  # before thunder
from thunder_fsdp_sched import compilation
from thunder_fsdp_sched.demo.model import GPT
from thunder_fsdp_sched.ir import operator_facts
from thunder_fsdp_sched.transforms import audit

import thunder
import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 8], help="blocks of the models")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for blocks in arguments.blocks:
            measure(blocks)
    finally:
        dist.destroy_process_group()


def measure(blocks: int) -> None:
    spent: dict[str, float] = {}
    tokens = torch.randint(0, 256, (2, 16))
    model = GPT(blocks=blocks, width=32, heads=2, length=16)
    jitted = thunder.jit(model, transforms=[thunder_fsdp_sched.fsdp()])
    with contextlib.ExitStack() as stack:
        stack.enter_context(timed(compilation, "audited", spent, "insert"))
        stack.enter_context(timed(audit, "_exchange", spent, "exchange"))
        stack.enter_context(timed(audit.Auditor, "before", spent, "check"))
        stack.enter_context(timed(audit.Auditor, "after", spent, "check"))
        stack.enter_context(timed(operator_facts, "_facts_of", spent, "facts"))
        started = time.process_time()
        jitted(tokens, tokens).backward()
        total = time.process_time() - started
    observed = len(operator_facts.observe_call.__globals__["_cache"])
    audit_total = spent["insert"] + spent["exchange"] + spent["check"]
    parts = ", ".join(f"{what} {seconds:.3f} s" for what, seconds in spent.items())
    print(
        f"{blocks} blocks: first step {total:.2f} s of processor time; audit {audit_total:.3f} s "
        f"({audit_total / total:.1%}); {parts}; {observed} calls observed so far"
    )


@contextlib.contextmanager
def timed(owner: Any, name: str, spent: dict[str, float], what: str) -> Iterator[None]:
    """Add the processor time of the outermost calls of a function to ``spent[what]``."""
    function: Callable[..., Any] = getattr(owner, name)
    spent.setdefault(what, 0.0)
    depth = 0

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        started = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            depth -= 1
            if not depth:
                spent[what] += time.process_time() - started

    with mock.patch.object(owner, name, wrapper):
        yield


if __name__ == "__main__":
    main()
