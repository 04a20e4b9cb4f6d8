"""Dump everything that a redesign must not change: traces, schedules, slots, predicted bytes, plan numbers.

    make freeze                                                       # tests/freeze.json, which CI compares
    PYTHONPATH=.:examples python tests/freeze.py write FOLDER [REGEX]   # one text file for each case

Each case is a model and options, compiled as rank 0 of a fake process group, also under ``no_sync``. Names of values are
numbered in the order of their appearance, so dumps are equal up to names. To compare with another commit (``diff -r``),
write its dumps with ``PYTHONPATH`` set to its work tree and its examples.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as fs
from thunder_fsdp_sched.extras.planning.dry_run import fake_rank
from thunder_fsdp_sched.planning import AnalyticCost, cluster, simulate

import thunder
import torch
import torch.distributed as dist
from models import GPT, Checkpointed, Layer, Stack, ViewsOfParameters
from thunder.core.proxies import Proxy
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

DIGESTS = Path(__file__).with_suffix(".json")
LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
MIXED = MixedPrecisionPolicy(torch.float32, torch.float64)


@dataclass(frozen=True)
class Frozen:
    """A model and options.

    Attributes:
        world: the number of ranks.
        windows: whether the modes of a window (``no_sync``) are compiled, too.
        double: whether the model is in float64.
    """

    model: Callable[[], Any]
    options: dict[str, Any] | Callable[[], dict[str, Any]] = field(default_factory=dict)
    world: int = 2
    windows: bool = False
    double: bool = True


def _gpt() -> GPT:
    return GPT(blocks=2)


def _deep() -> GPT:
    return GPT(blocks=4, block=Layer)


def _mesh(*shape: int) -> Any:
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


FROZEN: dict[str, Frozen] = {
    "model_gpt_zero3": Frozen(_gpt, {"sharding_strategy": "zero3"}, windows=True),
    "model_views_of_parameters_zero2": Frozen(ViewsOfParameters, {"sharding_strategy": "zero2"}, windows=True),
    "model_checkpointed_zero3": Frozen(Checkpointed, {"sharding_strategy": "zero3"}, windows=True),
    "option_strategy_zero2": Frozen(_gpt, {"sharding_strategy": "zero2"}, windows=True),
    "option_prefetch_auto": Frozen(_deep, {"prefetch": "auto"}),
    "option_transport_all_to_all_zero3": Frozen(Stack, {"transport": "all_to_all", "mp_policy": MIXED}, windows=True),
    "option_accumulate_sharded_zero3": Frozen(
        Stack, {"accumulate": "sharded", "mp_policy": LOW}, windows=True, double=False
    ),
    "option_secondary": Frozen(_deep, {"sharding_strategy": fs.Sharding(secondary_ranks=2)}, world=4, windows=True),
    "option_hybrid": Frozen(Stack, lambda: {"ranks": _mesh(2, 2)}, world=4, windows=True),
    "option_offload": Frozen(
        Stack, {"offload_policy": CPUOffloadPolicy(pin_memory=False), "mp_policy": LOW}, double=False
    ),
}


def dump(case: Frozen) -> str:
    """Compile a case and return the text of all that must not change."""
    with fake_rank(0, case.world, on=cluster("h100-sxm")), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _dump(case)


def _dump(case: Frozen) -> str:
    torch.manual_seed(0)
    model = case.model()
    model = model.double() if case.double else model
    args = model.inputs(torch.Generator().manual_seed(1))
    if not case.double:
        args = tuple(a.float() if a.is_floating_point() else a for a in args)
    options = case.options() if callable(case.options) else dict(case.options)
    transform = fs.fsdp(**options)
    try:
        jitted = thunder.jit(model, transforms=[transform])
        inputs, _ = transform.cast_inputs(args, {})
        for no_sync in (False, True) if case.windows else (False,):
            with jitted.no_sync() if no_sync else contextlib.nullcontext():
                transform.sharded.compile(jitted, inputs, {})
        with torch.no_grad():
            jitted.eval()
            transform.sharded.compile(jitted, inputs, {})
        error = []
    except Exception as raised:  # an error is a result, too: of a limit that is too low, for example
        error = [f"{type(raised).__name__}: {raised}"]
    return "\n".join(itertools.chain(*map(_lines, transform.compiled), error))


def _lines(compiled: Any) -> Iterator[str]:
    settings = compiled.settings
    yield f"== no_sync={compiled.no_sync} prefetch={settings.prefetch} reductions={settings.reductions_in_flight}"
    for which, trace in (("forward", compiled.forward), ("backward", compiled.backward)):
        if trace is not None:
            yield f"-- {which}"
            yield from _statements(trace)
    if compiled.forward_schedule is None:
        return
    yield "-- schedule"
    for schedule in (compiled.forward_schedule, compiled.backward_schedule):
        if schedule is not None:
            yield from schedule.collectives()
    yield "-- memory"
    for name, memory in (
        ("step", compiled.memory),
        ("accumulated", compiled.predict_memory(accumulated=True)),
        ("cuda", compiled.predict_memory(device="cuda")),
    ):
        yield f"{name} fixed {sorted(memory.fixed.items())}"
        yield f"{name} totals {' '.join(map(str, memory.totals))}"
        yield f"{name} wasted {' '.join(map(str, memory.wasted))}"
    yield f"-- plan recomputed={len(settings.recomputed)} offloaded=0"
    timeline = simulate(compiled.forward, compiled.backward, AnalyticCost(cluster("h100-sxm")))
    yield f"{timeline.step_seconds:.9g} {timeline.exposed_seconds:.9g}"


def _statements(trace: Any) -> Iterator[str]:
    """Return the bound symbols of a trace with numbers for names, and the positions of their slots."""
    numbers: dict[str, str] = {}
    handles: dict[int, int] = {}
    for bsym in trace.bound_symbols:
        for proxy in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs):
            if isinstance(proxy, Proxy):
                numbers.setdefault(proxy.name, f"v{len(numbers)}")
        lines = [line.strip() for line in str(bsym).splitlines()]
        text = " ".join(line.removesuffix("\\") for line in lines if not line.startswith("#"))
        text = re.sub(r"\s+", " ", text)
        text = re.sub(r"[A-Za-z_]\w*", lambda found: numbers.get(found[0], found[0]), text)
        slots = [arg for arg in bsym.args if hasattr(arg, "arena") and hasattr(arg, "offset")]
        places = [f"{handles.setdefault(id(s.arena), len(handles))}:{s.offset}-{s.end}" for s in slots]
        yield re.sub(r"0x[0-9a-f]+", "0x", " @ ".join([text, *places]))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digests() -> dict[str, str]:
    """Return the digests of the cases that CI compares."""
    return {"versions": versions(), **{name: digest(dump(case)) for name, case in FROZEN.items()}}


def versions() -> str:
    """Return the versions on which the text of traces depends."""
    return f"torch {torch.__version__.partition('+')[0]}, thunder {thunder.__version__}"


def main(command: str, folder: str = "", regex: str = "") -> None:
    """Run the command line."""
    if command == "update":
        DIGESTS.write_text(json.dumps(digests(), indent=1) + "\n")
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, case in FROZEN.items():
        if re.search(regex, name):
            Path(folder, f"{name}.txt").write_text(dump(case))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # Thunder iterates over sets of names
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    main(*sys.argv[1:])
