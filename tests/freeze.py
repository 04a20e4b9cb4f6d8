"""Dump everything that a redesign must not change: traces, schedules, slots, predicted bytes, plan numbers.

    python tests/freeze.py write FOLDER [--random 300] [--only REGEX]   # one text file for each case
    python tests/freeze.py compare FOLDER OTHER                         # the first difference of each case
    python tests/freeze.py update                                       # tests/freeze.json, which CI compares

Each case is a model and options, compiled as rank 0 of a fake process group, also under ``no_sync``. Names of values are
numbered in the order of their appearance, so dumps are equal up to names. To compare with an older commit, run this file
with ``PYTHONPATH`` set to its work tree.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
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

import thunder
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from models import CASES, GPT, Layer, Stack
from random_models import RandomModel, cases, options_of
from thunder.core.proxies import Proxy
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

try:
    from thunder_fsdp_sched.planning.clusters import cluster
    from thunder_fsdp_sched.planning.cost import AnalyticCost
    from thunder_fsdp_sched.planning.simulate import simulate
except ImportError:  # at older commits
    from thunder_fsdp_sched.simulator.clusters import cluster
    from thunder_fsdp_sched.simulator.cost import AnalyticCost
    from thunder_fsdp_sched.simulator.simulate import simulate

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


OPTIONS: dict[str, Frozen] = {
    **{f"strategy_{name}": Frozen(_gpt, {"sharding_strategy": name}, windows=True) for name in ("zero2", "zero3")},
    **{f"bucketing_{name}": Frozen(Stack, {"bucketing_strategy": name}) for name in ("none", "layer", "block", 300)},
    **{f"prefetch_{n}": Frozen(_deep, {"prefetch": n}) for n in (0, 1, 2, 5, "auto")},
    **{
        f"transport_{name}_{strategy}": Frozen(
            Stack, {"transport": name, "sharding_strategy": strategy, "mp_policy": MIXED}, windows=True
        )
        for name in ("flat", "all_to_all", "coalesced", "all_reduce", "staged")
        for strategy in ("zero2", "zero3")
    },
    **{
        f"release_{when}_{strategy}": Frozen(_deep, {"release": when, "sharding_strategy": strategy}, windows=True)
        for when in ("step", "bucket")
        for strategy in ("zero2", "zero3")
    },
    **{
        f"accumulate_{how}_{strategy}": Frozen(
            Stack, {"accumulate": how, "sharding_strategy": strategy, "mp_policy": LOW}, windows=True, double=False
        )
        for how in ("sharded", "unsharded")
        for strategy in ("zero2", "zero3")
    },
    "low": Frozen(_gpt, {"mp_policy": LOW}, double=False),
    "offload": Frozen(Stack, {"offload_policy": CPUOffloadPolicy(pin_memory=False), "mp_policy": LOW}, double=False),
    "secondary": Frozen(_deep, {"reshard_after_forward": 2}, world=4, windows=True),
    "reshard_after_backward": Frozen(
        _deep, {"reshard_after_backward": True, "sharding_strategy": "zero2"}, windows=True
    ),
    "gathers_in_flight": Frozen(_deep, {"max_gathers_in_flight": 1, "prefetch": 3}),
    "unsharded_bytes": Frozen(_deep, {"max_unsharded_bytes": 1 << 15}),
    "separate_group": Frozen(Stack, {"separate_reduce_scatter_group": True}),
    "divide_factor": Frozen(Stack, {"gradient_divide_factor": 3.0}),
    "hybrid": Frozen(Stack, lambda: {"mesh": _mesh(2, 2)}, world=4, windows=True),
    "no_audit": Frozen(Stack, {"audit": False}),
    "no_repetition": Frozen(_gpt, {"trace_modules_once": False}),
    **{
        f"max_memory_{limit}": Frozen(_deep, {"max_memory": limit, "cluster": "h100-sxm"}, windows=True)
        for limit in (60_000, 86_000, 92_000, 110_000)
    },
    "max_memory_zero2": Frozen(_deep, {"max_memory": 104_000, "sharding_strategy": "zero2", "cluster": "a100-sxm"}),
}


def _mesh(*shape: int) -> Any:
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def all_cases(random: int) -> dict[str, Frozen]:
    """Return all test models with each strategy, each option on its own, and random models with random options."""
    found = {
        f"model_{name}_{strategy}": Frozen(model, {"sharding_strategy": strategy}, windows=True)
        for name, model in {"gpt": _gpt, "stack": Stack, **CASES}.items()
        for strategy in ("zero2", "zero3")
    }
    found |= {f"option_{name}": case for name, case in OPTIONS.items()}
    return found | dict(_random_cases(random))


def _random_cases(count: int) -> Iterator[tuple[str, Frozen]]:
    """Return random cases, the same ones whenever hypothesis is the same."""
    drawn: list[Any] = []

    @seed(0)
    @settings(
        max_examples=max(count, 1),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def draw(case: Any) -> None:
        drawn.append(case)

    if count:
        draw()
    for number, case in enumerate(drawn[:count]):
        world = 4 if case.secondary else 2
        options = functools.partial(_options_of, case, world)
        model = functools.partial(RandomModel, case.model)
        yield f"random_{number:03d}", Frozen(model, options, world, windows=number % 3 == 0, double=False)


def _options_of(case: Any, world: int) -> dict[str, Any]:
    return options_of(case, lambda: dist.new_group(range(world)), world)


SMALL = (
    "model_gpt_zero3",
    "model_views_of_parameters_zero2",
    "model_checkpointed_zero3",
    "option_strategy_zero2",
    "option_prefetch_auto",
    "option_transport_all_to_all_zero3",
    "option_release_bucket_zero3",
    "option_accumulate_sharded_zero3",
    "option_secondary",
    "option_hybrid",
    "option_unsharded_bytes",
    "option_offload",
)
"""The cases that CI compares."""


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
    if not case.double and not isinstance(model, RandomModel):
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
    except Exception as error:  # an error is a result, too: of a limit that is too low, for example
        text = f"{type(error).__name__}: {error}"
        return "\n".join(itertools.chain(*(_lines(compiled) for compiled in transform.compiled), [text]))
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


def _chosen(args: argparse.Namespace) -> dict[str, Frozen]:
    return {name: case for name, case in all_cases(args.random).items() if re.search(args.only, name)}


def _write(args: argparse.Namespace) -> None:
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, case in _chosen(args).items():
        (args.folder / f"{name}.txt").write_text(dump(case))
        gc.collect()


def _compare(args: argparse.Namespace) -> None:
    differing = 0
    for path in sorted(args.folder.glob("*.txt")):
        other = args.other / path.name
        if not other.exists():
            continue
        pairs = itertools.zip_longest(path.read_text().splitlines(), other.read_text().splitlines())
        found = [(number, a, b) for number, (a, b) in enumerate(pairs) if a != b]
        if found:
            differing += 1
            number, a, b = found[0]
            print(f"{path.stem}: {len(found)} lines, first {number}:\n  {str(a)[:300]}\n  {str(b)[:300]}")
    print(f"{differing} cases differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    write = commands.add_parser("write")
    write.add_argument("folder", type=Path)
    write.add_argument("--random", type=int, default=300)
    write.add_argument("--only", default="")
    write.set_defaults(run=_write)
    compare = commands.add_parser("compare")
    compare.add_argument("folder", type=Path)
    compare.add_argument("other", type=Path)
    compare.set_defaults(run=_compare)
    update = commands.add_parser("update")
    update.set_defaults(run=lambda args: DIGESTS.write_text(json.dumps(digests(), indent=1) + "\n"))
    args = parser.parse_args()
    args.run(args)


def digests() -> dict[str, str]:
    """Return the digests of the cases that CI compares."""
    known = all_cases(0)
    return {"versions": versions(), **{name: digest(dump(known[name])) for name in SMALL}}


def versions() -> str:
    """Return the versions on which the text of traces depends."""
    return f"torch {torch.__version__.partition('+')[0]}, thunder {thunder.__version__}"


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # Thunder iterates over sets of names
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    main()
