"""Dump everything that a redesign must not change: traces, schedules, slots, predicted bytes, plan numbers.

    python tests/freeze.py FOLDER    # one text file for each case, to compare with those of another commit
    python tests/freeze.py           # tests/freeze.json, which CI compares

Each case is a model and options, compiled as rank 0 of a fake process group, also under ``no_sync``. Names of values are
numbered in the order of their appearance, so dumps are equal up to names.
"""

from __future__ import annotations

import argparse
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
from thunder_fsdp_sched.planning.clusters import cluster
from thunder_fsdp_sched.planning.cost import AnalyticCost
from thunder_fsdp_sched.planning.simulate import simulate

import thunder
import torch
import torch.distributed as dist
from models import GPT, Checkpointed, Layer, Stack, ViewsOfParameters
from thunder.core.proxies import Proxy
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

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


CASES: dict[str, Frozen] = {
    "model_gpt_zero3": Frozen(_gpt, windows=True),
    "model_views_of_parameters_zero2": Frozen(ViewsOfParameters, {"sharding_strategy": "zero2"}, windows=True),
    "model_checkpointed_zero3": Frozen(Checkpointed, windows=True),
    "option_strategy_zero2": Frozen(_gpt, {"sharding_strategy": "zero2"}, windows=True),
    "option_prefetch_auto": Frozen(_deep, {"prefetch": "auto"}),
    "option_transport_all_to_all_zero3": Frozen(Stack, {"transport": "all_to_all", "mp_policy": MIXED}, windows=True),
    "option_release_bucket_zero3": Frozen(_deep, {"release": "bucket"}, windows=True),
    "option_accumulate_sharded_zero3": Frozen(
        Stack, {"accumulate": "sharded", "mp_policy": LOW}, double=False, windows=True
    ),
    "option_secondary": Frozen(_deep, {"reshard_after_forward": 2}, world=4, windows=True),
    "option_hybrid": Frozen(Stack, lambda: {"mesh": _mesh(2, 2)}, world=4, windows=True),
    "option_unsharded_bytes": Frozen(_deep, {"max_unsharded_bytes": 1 << 15}),
    "option_offload": Frozen(
        Stack, {"offload_policy": CPUOffloadPolicy(pin_memory=False), "mp_policy": LOW}, double=False
    ),
}
"""Models and options that meet each way to compile a step."""


def dump(case: Frozen) -> str:
    """Compile a case and return the text of all that must stay."""
    if dist.is_initialized():
        raise RuntimeError("needs a process without a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _dump(case)
    finally:
        dist.destroy_process_group()


def _dump(case: Frozen) -> str:
    torch.manual_seed(0)
    model = case.model()
    model = model.double() if case.double else model
    args = model.inputs(torch.Generator().manual_seed(1))
    if not case.double:
        args = tuple(a.float() if a.is_floating_point() else a for a in args)
    options = case.options() if callable(case.options) else dict(case.options)
    transform = fs.fsdp(**options)
    jitted = thunder.jit(model, transforms=[transform])
    inputs, _ = transform.cast_inputs(args, {})
    for no_sync in (False, True) if case.windows else (False,):
        with jitted.no_sync() if no_sync else contextlib.nullcontext():
            transform.sharded.compile(jitted, inputs, {})
    with torch.no_grad():
        jitted.eval()
        transform.sharded.compile(jitted, inputs, {})
    return "\n".join(itertools.chain(*(_lines(compiled) for compiled in transform.compiled)))


def _lines(compiled: Any) -> Iterator[str]:
    yield f"== no_sync={compiled.no_sync} prefetch={compiled.prefetch} reductions={compiled.reductions_in_flight}"
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
    yield f"-- plan recomputed={len(compiled.recomputed)} offloaded={len(compiled.offloaded)}"
    timeline = simulate(compiled.forward, compiled.backward, AnalyticCost(cluster("h100-sxm")))
    yield f"{timeline.step_seconds:.9g} {timeline.exposed_seconds:.9g}"


def _statements(trace: Any) -> Iterator[str]:
    """Return the bound symbols of a trace with numbers for names, and the places of their slots."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    folder = parser.parse_args().folder
    dumps = {name: dump(case) for name, case in CASES.items()}
    if folder is None:
        digests = {name: digest(text) for name, text in dumps.items()}
        DIGESTS.write_text(json.dumps({"versions": versions(), **digests}, indent=1) + "\n")
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in dumps.items():
        (folder / f"{name}.txt").write_text(text)


def versions() -> str:
    """Return the versions on which the text of traces depends."""
    return f"torch {torch.__version__.partition('+')[0]}, thunder {thunder.__version__}"


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # Thunder iterates over sets of names
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    main()
