"""Measure the host time of the plugin at run time: per bucket, of agreement, and of optimizers on DTensors.

    python benchmarks/overhead.py                                 # everything
    python benchmarks/overhead.py --only steps                    # a minute
    python benchmarks/overhead.py --only dtensors --parameters 300 3000

* Steps: rank 0 of 8 trains a model of tiny blocks with Thunder, with this project, without a compiler, and with FSDP2. The
  collectives of torch's fake process group do nothing, so only the host time of their callers remains. (With real gloo
  ranks, most of the time would be spent waiting for another process.) The systems take turns, with a few steps of each in
  every round. Each is compared with the same compiler without sharding. The time of the collectives' own calls is
  subtracted; it is measured separately, in the same rounds with the same tensors. A second table shows the time inside the
  calls that gather and reduce, from separate steps.
* Agreement: two real gloo ranks exchange tokens, as each trace that communicates does. The host time of a round is the time
  to post it, and to settle it after the other rank's token has arrived. A step has two rounds.
* DTensors: processor time on the host in one process, on one thread, beside plain tensors of the same rows: a backward that
  returns the reduced gradients of each bucket, as compiled traces do, and autograd's accumulation; and a step of AdamW
  on the parameters, on plain tensors, and on DTensors of torch.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import thunder_fsdp_sched
from thunder_fsdp_sched.ir.symbols import fsdp_all_gather, fsdp_reduce_scatter, fsdp_wait_grads, fsdp_wait_params
from thunder_fsdp_sched.private_distributed import all_gather, reduce_scatter
from thunder_fsdp_sched.ranks.compare_programs import AgreedProgram, Computation
from thunder_fsdp_sched.ranks.joint_control import JointControl, open_channel
from thunder_fsdp_sched.ranks.process_groups import ProcessGroupRef
from thunder_fsdp_sched.runtime.row_dtensor import RowDTensor, local_rows
from thunder_fsdp_sched.runtime.trace_start import TraceStart

import harness
import thunder
import torch
import torch.distributed as dist
from harness import matching, medians, ratio, say, seconds_of, table
from systems import Emulation, Make, Shape, System, fsdp2, ours, unsharded, unsharded_eager
from local_ranks import Loopback
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard

WORLD_SIZE = 8
LAYERS = 6  # of a block: each has two parameters
STEPS = 10  # of one system in a round
CALLS = 200  # of one collective in a round
WIDTH = 64  # rows and columns of each DTensor


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--blocks", type=int, default=6, help="of the model of steps")
    parser.add_argument("--parameters", type=int, nargs="+", default=[300], help="parameters of the models of dtensors")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        agree(arguments.rounds * STEPS)
        return
    for name, part in matching(PARTS, arguments.only).items():
        say(f"measuring: {name}")
        part(arguments)


def show_steps(found: Mapping[str, Any], blocks: int) -> None:
    print(f"microseconds of a step: {blocks} blocks of {2 * LAYERS} parameters, fake group of {WORLD_SIZE}\n")
    keys = ("step", "unsharded", "difference", "gathers", "reductions", "own_calls", "beyond", "each")
    print(table(found, {key.replace("_", " "): (key, ".0f") for key in keys}))
    print("\nBeyond: the difference without the collectives' own calls. Each: for one collective.")
    for kind in ("gather", "reduce"):
        print(f"\nmicroseconds of one {kind}, within the calls that issue it and wait for it\n")
        of_kind = {name: of_one[kind] for name, of_one in found.items() if kind in of_one}
        print(table(of_kind, {key: (key, ".1f") for key in ("issue", "wait", "own call", "beyond")}))


def steps(arguments: argparse.Namespace) -> None:
    """Measure the host time of steps, of their gathers and reductions, and of the collectives alone."""
    harness.join_fake_ranks(WORLD_SIZE)
    shape = _TinyShape(arguments.blocks)
    systems = {n: _Stepping(make(n, shape, Emulation(shape, real=True))) for n, make in SYSTEMS.items()}
    own_calls = _own_calls(systems["ours zero3"].transform.sharded.buckets[0])
    runs: dict[str, Callable[[], float]] = {name: partial(seconds_of, c, calls=CALLS) for name, c in own_calls.items()}
    runs |= {name: partial(_median_step, system) for name, system in systems.items()}
    seconds = harness.in_turns(runs, arguments.rounds, collect=False)
    _stop_collecting()
    inside = {n: [s.inside() for _ in range(arguments.rounds)] for n, s in systems.items() if "zero" in n}
    micro = medians(seconds, unit=1e-6)
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
    harness.save(arguments, "steps", figures=result)
    dist.destroy_process_group()


def _median_step(system: _Stepping) -> float:
    return statistics.median(system.step() for _ in range(STEPS))


def agreement(arguments: argparse.Namespace) -> None:
    """Measure the host time of a round on the control channel."""
    with Loopback(2) as ranks:
        command = [sys.executable, "-W", "ignore", __file__, "--only", "agreement", "--rounds", str(arguments.rounds)]
        print(ranks.run(command)[0], end="")


def agree(rounds: int) -> None:
    """Measure rounds of agreement on a rank; rank 0 prints them."""
    harness.join_ranks(pin=False)  # a thread beside the host's sends and receives
    world_group = ProcessGroupRef.of(dist.distributed_c10d._get_default_group())
    control = JointControl(open_channel(world_group, "agreement"), world_group, "model", "the model")
    run = TraceStart(control, "forward_0", AgreedProgram(1, True, True, True), "forward", Computation(), 0)
    seconds: dict[str, list[float]] = defaultdict(list)
    _stop_collecting()
    for _ in range(rounds):
        run.post()
        run.settle()  # so that both ranks start together
        for name, call in (("post", run.post), ("settle", run.settle)):
            on_processor = time.thread_time()
            seconds[name].append(seconds_of(call))
            seconds[f"{name}, processor"].append(time.thread_time() - on_processor)
            time.sleep(0.002)

    seconds["blocking"] = [seconds_of(lambda: (run.post(), run.settle())) for _ in range(rounds)]
    if dist.get_rank() == 0:
        tenths = {name: statistics.quantiles(of_one, n=10) for name, of_one in seconds.items()}
        micro = {name: {"tenth": t[0] * 1e6, "median": t[4] * 1e6} for name, t in tenths.items()}
        print("\nmicroseconds of a round of agreement, 2 gloo ranks\n")
        print(table(micro, {"median": ("median", ".1f"), "10th percentile": ("tenth", ".1f")}))
    dist.barrier()
    dist.destroy_process_group()


class _Blocks(nn.Module):
    """Blocks of linear layers that are so small that a step takes only host time."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS))) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


class _TinyShape(Shape):
    def model(self) -> Any:
        torch.manual_seed(0)
        return _Blocks(self.blocks)


SYSTEMS: dict[str, Make] = {
    "Thunder": unsharded,
    "ours zero2": partial(ours, sharding_strategy="zero2"),
    "ours zero3": ours,
    "ours zero3, blocks as leaves": partial(ours, leaf_modules=("blocks.*",)),
    "eager": unsharded_eager,
    "FSDP2 zero2": partial(fsdp2, reshard=False),
    "FSDP2 zero3": partial(fsdp2, reshard=True),
}


class _Stepping:
    """A system whose steps can be timed."""

    def __init__(self, system: System) -> None:
        self.module, self.transform = system.module, system.transform
        self.parameters = list(self.module.parameters())
        self.x = torch.ones(8, 8)
        for _ in range(3):
            self.step()

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
        "gather": lambda: all_gather(whole, own, group).wait(),
        "reduce": lambda: reduce_scatter(own, whole, dist.ReduceOp.AVG, group).wait(),
    }


def _stop_collecting() -> None:
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would fall into some step


def _median(of: list[dict[str, float]], key: str) -> float:
    return statistics.median(one[key] for one in of)


def dtensors(arguments: argparse.Namespace) -> None:
    """Measure backward and AdamW on rows, on plain tensors and on DTensors of torch."""
    torch.set_num_threads(1)
    harness.join_alone("gloo")
    for parameters in arguments.parameters:
        figures = _of_dtensors(parameters, arguments.rounds)
        print(f"\n{parameters} parameters of {WIDTH} x {WIDTH}: microseconds a parameter and step\n")
        names = ("rows", "plain", "DTensor", "rows / plain", "rows / DTensor")
        print(table(figures, {name: (name, ".2f") for name in names}))
    dist.destroy_process_group()


def _of_dtensors(parameters: int, rounds: int) -> dict[str, dict[str, float]]:
    layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(parameters))
    jitted = thunder.jit(layers, transforms=[transform := thunder_fsdp_sched.fsdp()])
    rows = list(jitted.parameters())
    plain = _plain_copies(rows)
    mesh = rows[0].device_mesh
    of_torch = [torch.nn.Parameter(DTensor.from_local(p.detach(), mesh, [Shard(0)])) for p in _plain_copies(rows)]
    buckets = transform.sharded.buckets

    def grads() -> list[torch.Tensor]:
        return [grad for bucket in buckets for grad in bucket.sharded_grads(torch.zeros_like(bucket.shard))]

    def plain_grads() -> list[torch.Tensor]:
        with mock.patch.object(RowDTensor, "of_spec", lambda local, spec: local):
            return grads()

    compared = {"backward": {"rows": _accumulating(rows, grads), "plain": _accumulating(plain, plain_grads)}}
    for kernel in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        steps = {}
        for name, params in (("rows", rows), ("plain", plain), ("DTensor", of_torch)):
            for param in params:
                param.grad = torch.ones_like(param)
            steps[name] = torch.optim.AdamW(params, **kernel).step
        compared[f"AdamW({kernel})"] = steps
    figures = {}
    for what, functions in compared.items():
        runs = {name: partial(seconds_of, function, clock=time.process_time) for name, function in functions.items()}
        for run in runs.values():
            run()
        seconds = harness.in_turns(runs, rounds, collect=False)
        figures[what] = medians(seconds, unit=1e-6 * parameters)
        for name in seconds.keys() - {"rows"}:
            figures[what][f"rows / {name}"] = ratio(seconds["rows"], seconds[name])
    return figures


def _plain_copies(dtensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return parameters that lie in memory as the rows of ``dtensors`` do, side by side in copies of their buffers."""
    buffers: dict[int, torch.Tensor] = {}
    copies = []
    for rows in map(local_rows, dtensors):
        storage = rows.untyped_storage()
        if storage.data_ptr() not in buffers:
            buffers[storage.data_ptr()] = torch.empty(0).set_(storage.clone())
        buffer = buffers[storage.data_ptr()]
        copies.append(torch.nn.Parameter(buffer.as_strided(rows.shape, rows.stride(), rows.storage_offset())))
    return copies


def _accumulating(params: Sequence[torch.Tensor], grads: Callable[[], Sequence[torch.Tensor]]) -> Callable[[], None]:
    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *params: torch.Tensor) -> torch.Tensor:
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return tuple(grads())

    def run() -> None:
        for param in params:
            param.grad = None
        Step.apply(*params).backward()

    return run


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {"steps": steps, "agreement": agreement, "dtensors": dtensors}


if __name__ == "__main__":
    main()
