"""Measure the host time of the plugin at run time: per bucket, and of agreement.

    python benchmarks/overhead.py                                 # everything
    python benchmarks/overhead.py --only steps                    # a minute

* Steps: rank 0 of 8 trains a model of tiny blocks with Thunder, with this project, without a compiler, and with FSDP2. The
  collectives of torch's fake process group do nothing, so only the host time of their callers remains. (With real gloo
  ranks, most of the time would be spent waiting for another process.) The systems take turns, with a few steps of each in
  every round. Each is compared with the same compiler without sharding. The time of the collectives' own calls is
  subtracted; it is measured separately, in the same rounds with the same tensors. A second table shows the time inside the
  calls that gather and reduce, from separate steps.
* Agreement: two real gloo ranks exchange tokens, as each trace that communicates does. The host time of a round is the time
  to post it, and to settle it after the other rank's token has arrived. A step has two rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched
from thunder_fsdp_sched.ir.symbols import fsdp_all_gather, fsdp_reduce_scatter, fsdp_wait_grads, fsdp_wait_params
from thunder_fsdp_sched.ranks.channel import open_channel
from thunder_fsdp_sched.ranks.compare_programs import AgreedProgram, Computation
from thunder_fsdp_sched.ranks.control import Control
from thunder_fsdp_sched.ranks.process_groups import ProcessGroupRef
from thunder_fsdp_sched.runtime.trace_start import TraceStart
from thunder_fsdp_sched.transports.flat import all_gather_flat, reduce_scatter_flat

import harness
import thunder
import torch
import torch.distributed as dist
from harness import table
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

WORLD_SIZE = 8
LAYERS = 6  # of a block: each has two parameters
STEPS = 10  # of one system in a round
CALLS = 200  # of one collective in a round


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--blocks", type=int, default=6, help="of the model")
    parser.add_argument("--rounds", type=int, default=15, help=f"of steps; agreement takes {STEPS} times as many")
    arguments = parser.parse_args()
    for part in arguments.only:
        harness.say(f"measuring: {part}")
        PARTS[part](arguments)


def show_steps(found: Mapping[str, Any], blocks: int) -> None:
    print(f"microseconds of a step: {blocks} blocks of {2 * LAYERS} parameters, fake group of {WORLD_SIZE}\n")
    keys = ("step", "unsharded", "difference", "gathers", "reductions", "own_calls", "beyond", "each")
    print(table(found, {key.replace("_", " "): (key, ".0f") for key in keys}))
    print("\nBeyond: the difference without the collectives' own calls. Each: for one collective.")
    for kind in ("gather", "reduce"):
        print(f"\nmicroseconds of one {kind}, within the calls that issue it and wait for it\n")
        of_kind = {name: of_one[kind] for name, of_one in found.items() if kind in of_one}
        print(table(of_kind, {key: (key, ".1f") for key in ("issue", "wait", "own call", "beyond")}))


def show_agreement(found: Mapping[str, Mapping[str, float]]) -> None:
    print("microseconds of a round of agreement, 2 gloo ranks\n")
    print(table(found, {"median": ("median", ".1f"), "10th percentile": ("tenth", ".1f")}))


def steps(arguments: argparse.Namespace) -> None:
    """Measure the host time of steps, of their gathers and reductions, and of the collectives alone."""
    harness.join_fake_ranks(WORLD_SIZE)
    systems = {name: _Stepping(make) for name, make in _systems(arguments.blocks).items()}
    bucket = systems["ours zero3"].transform.sharded.buckets[0]
    own_calls = _own_calls(bucket)
    seconds: dict[str, list[float]] = defaultdict(list)
    inside: dict[str, list[dict[str, float]]] = defaultdict(list)
    _stop_collecting()
    for _ in range(arguments.rounds):
        for name, call in own_calls.items():
            seconds[name].append(_time(call, CALLS))
        for name, system in systems.items():
            seconds[name].append(statistics.median(system.step() for _ in range(STEPS)))
        for name, system in systems.items():
            if "zero" in name:
                inside[name].append(system.inside())
    micro = {name: statistics.median(values) * 1e6 for name, values in seconds.items()}
    result: dict[str, dict[str, Any]] = {}
    for name in systems:
        result[name] = {"step": micro[name]}
        if "zero" not in name:
            continue
        twin = "eager" if "FSDP2" in name else "Thunder"
        counts = {kind: round(_median(inside[name], f"{kind}s")) for kind in ("gather", "reduce")}
        own = sum(counts[kind] * micro[kind] for kind in counts)
        difference = statistics.median(a - b for a, b in zip(seconds[name], seconds[twin], strict=True)) * 1e6
        result[name] |= {
            "unsharded": micro[twin],
            "difference": difference,
            "gathers": counts["gather"],
            "reductions": counts["reduce"],
            "own_calls": own,
            "beyond": difference - own,
            "each": (difference - own) / sum(counts.values()),
        }
        for kind in counts:
            issue, wait = (_median(inside[name], f"{kind} {what}") * 1e6 for what in ("issue", "wait"))
            result[name][kind] = {"issue": issue, "wait": wait, "own call": micro[kind]}
            result[name][kind]["beyond"] = issue + wait - micro[kind]
    show_steps(result, arguments.blocks)


def agreement(arguments: argparse.Namespace) -> None:
    """Measure the host time of a round on the control channel."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_agree, (Path(folder), arguments.rounds * STEPS), nprocs=2)
        show_agreement(json.loads((Path(folder) / "seconds").read_text()))


def _agree(rank: int, folder: Path, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    world_group = ProcessGroupRef.of(dist.distributed_c10d._get_default_group())
    control = Control(world_group, open_channel(world_group, "agreement"), "model", "the model")
    run = TraceStart(control, "forward_0", AgreedProgram(1, True, True, True), "forward", Computation(), 0)
    seconds: dict[str, list[float]] = defaultdict(list)
    _stop_collecting()
    for _ in range(rounds):
        run.post()
        run.settle()  # so that both ranks start together
        for name, call in (("post", run.post), ("settle", run.settle)):
            started, on_processor = time.perf_counter(), time.thread_time()
            call()
            seconds[f"{name}, processor"].append(time.thread_time() - on_processor)
            seconds[name].append(time.perf_counter() - started)
            time.sleep(0.002)

    def both() -> None:
        run.post()
        run.settle()

    for _ in range(rounds):
        seconds["blocking"].append(_time(both, 1))
    if rank == 0:
        tenths = {name: statistics.quantiles(of_one, n=10) for name, of_one in seconds.items()}
        micro = {name: {"tenth": t[0] * 1e6, "median": t[4] * 1e6} for name, t in tenths.items()}
        (folder / "seconds").write_text(json.dumps(micro))
    dist.barrier()
    dist.destroy_process_group()


def _systems(blocks: int) -> dict[str, Callable[[], Any]]:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return _Blocks(blocks)

    def ours(strategy: str, leaf_modules: tuple[str, ...] = ()) -> Any:
        transform = thunder_fsdp_sched.fsdp(sharding_strategy=strategy, leaf_modules=leaf_modules)
        return thunder.jit(model(), transforms=[transform])

    def fsdp2(reshard: bool) -> nn.Module:
        module = model()
        for part in (*module.blocks, module):
            fully_shard(part, reshard_after_forward=reshard)
        return module

    return {
        "Thunder": lambda: thunder.jit(model()),
        "ours zero2": lambda: ours("zero2"),
        "ours zero3": lambda: ours("zero3"),
        "ours zero3, blocks as leaves": lambda: ours("zero3", ("blocks.*",)),
        "eager": model,
        "FSDP2 zero2": lambda: fsdp2(False),
        "FSDP2 zero3": lambda: fsdp2(True),
    }


class _Blocks(nn.Module):
    """Blocks of linear layers that are so small that a step takes only host time."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS))) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


class _Stepping:
    """A system whose steps can be timed."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.module = make()
        self.parameters = list(self.module.parameters())
        self.x = torch.ones(8, 8)
        for _ in range(3):
            self.step()

    @property
    def transform(self) -> Any:
        return self.module._lc_transforms[0]

    def step(self) -> float:
        """Run one step; return the seconds of forward and backward."""
        started = time.perf_counter()
        self.module(self.x).backward()
        seconds = time.perf_counter() - started
        for parameter in self.parameters:
            parameter.grad = None
        return seconds

    def inside(self) -> dict[str, float]:
        """Run a few steps; return the collectives per step, and the seconds to issue one and to wait for it."""
        spent: dict[str, list[float]] = defaultdict(list)
        with _watch_ours(self.module, spent) if isinstance(self.module, thunder.ThunderModule) else _watch_fsdp2(spent):
            for _ in range(STEPS):
                self.step()
        result: dict[str, float] = {}
        for kind in ("gather", "reduce"):
            count = len(spent[f"{kind} issue"])
            result[f"{kind}s"] = count / STEPS
            for what in ("issue", "wait"):  # some of FSDP2's waits have nothing to do
                result[f"{kind} {what}"] = sum(spent[f"{kind} {what}"]) / count
        return result


def _timed(function: Callable[..., Any], spent: list[float], counts: Callable[..., bool]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not counts(*args):
            return function(*args, **kwargs)
        started = time.perf_counter()
        result = function(*args, **kwargs)
        spent.append(time.perf_counter() - started)
        return result

    return call


@contextmanager
def _watch_ours(module: Any, spent: dict[str, list[float]]) -> Iterator[None]:
    """Time our symbols in the compiled traces."""
    names = {
        fsdp_all_gather.name: "gather issue",
        fsdp_wait_params.name: "gather wait",
        fsdp_reduce_scatter.name: "reduce issue",
        fsdp_wait_grads.name: "reduce wait",
    }
    entry = thunder.compile_stats(module).interpreter_cache[-1]
    patches = []
    for function in (entry.computation_fn, entry.backward_fn):
        scope = _traced(function).__globals__
        patched = {n: _timed(scope[n], spent[k], lambda *_: True) for n, k in names.items() if n in scope}
        patches.append(mock.patch.dict(scope, patched))
    with patches[0], patches[1]:
        yield


def _traced(function: Any) -> Any:
    """Return the function that was compiled from a trace, without its wrappers."""
    while not function.__code__.co_filename.startswith("thunder."):
        function = function.__wrapped__
    return function


@contextmanager
def _watch_fsdp2(spent: dict[str, list[float]]) -> Iterator[None]:
    """Time the methods of FSDP2's parameter groups that gather and reduce, except for calls that have nothing to do."""
    methods = {
        "unshard": ("gather issue", lambda group, *_: group._all_gather_result is None and not group.is_unsharded),
        "wait_for_unshard": ("gather wait", lambda group: group._all_gather_result is not None),
        "post_backward": ("reduce issue", lambda *_: True),
        "finalize_backward": ("reduce wait", lambda *_: True),
    }
    patched = {n: _timed(getattr(FSDPParamGroup, n), spent[k], counts) for n, (k, counts) in methods.items()}
    with mock.patch.multiple(FSDPParamGroup, **patched):
        yield


def _own_calls(bucket: Any) -> dict[str, Callable[[], object]]:
    """Return functions that call the collectives of a bucket and wait for them, and do nothing else."""
    [segment] = bucket.spec.layout.segments
    own = bucket.shard.narrow(0, segment.shard_offset, segment.shard_numel)
    whole, group = torch.empty(WORLD_SIZE * segment.shard_numel), dist.group.WORLD
    return {
        "gather": lambda: all_gather_flat(whole, own, group=group, async_op=True).wait(),
        "reduce": lambda: reduce_scatter_flat(own, whole, op=dist.ReduceOp.AVG, group=group, async_op=True).wait(),
    }


def _stop_collecting() -> None:
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would fall into some step


def _time(call: Callable[[], object], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def _median(of: list[dict[str, float]], key: str) -> float:
    return statistics.median(one[key] for one in of)


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {"steps": steps, "agreement": agreement}


if __name__ == "__main__":
    main()
