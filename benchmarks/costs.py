"""Measure what single features cost: the audit, checksums of checkpoints, DTensor parameters, formats, ranks that differ.

    python benchmarks/costs.py audit
    python benchmarks/costs.py checksums --runs 7
    python benchmarks/costs.py dtensors --parameters 300 3000
    python benchmarks/costs.py formats
    python benchmarks/costs.py differing --rounds 30

* Audit: processor seconds of a first step, in one process with a gloo group of one rank and the demo's GPT. The first step
  compiles both traces and runs them with the audit. Parts of it: inserting the audit into the traces, exchanging their texts
  for those without it, the checks themselves, and finding the facts about operators, which passes read with or without an
  audit.
* Checksums: seconds of the slower of two gloo ranks, and processor seconds of both, to save and to load 200 MB of parameters
  with checksums and without, in turns; medians over the runs. Files are in the page cache when they are loaded.
* DTensors: processor time on the host in one process, on one thread, beside plain tensors of the same rows: a backward that
  returns the reduced gradients of each bucket, as compiled traces do, and autograd's accumulation; and a step of AdamW
  on the parameters, on plain tensors, and on DTensors of torch.
* Formats: bytes of 16 MB of float32 on the wire, the norm of the rounding error of normal numbers divided by theirs, and GB
  of float32 that one thread encodes, decodes, or decodes for two ranks and averages in a second of processor time.
* Differing: a GPT of 8 blocks on two gloo ranks, and one of tiny layers. Alike ranks with ``ranks_may_differ``, beside the
  same without it, in turns: processor time of the host's thread in a step, and in its rounds; bits and collectives must be
  the same. Rank 0 without the odd blocks and rank 1 without
  the even ones, beside both with all blocks, which issue the same collectives. And processor seconds of what a combination
  of known programs takes when it is new: to exchange and build, beyond the same step later; and of that, the build.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs  # before thunder
from thunder_fsdp_sched import CommPolicy
from thunder_fsdp_sched import transform as transforms
from thunder_fsdp_sched.extras.low_precision.formats import FORMATS, Wire
from thunder_fsdp_sched.extras.ranks_differ import start
from thunder_fsdp_sched.ir import operator_facts
from thunder_fsdp_sched.proof import audit
from thunder_fsdp_sched.runtime.row_dtensor import RowDTensor, local_rows
from thunder_fsdp_sched.runtime.trace_start import TraceStart

import thunder
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import ratio, table
from byte_gpt import GPT
from torch.distributed.tensor import DTensor, Shard

MEGABYTES = 200  # of the parameters in checkpoints
NUMEL = 1 << 22  # elements to encode
WIDTH, ROUNDS = 64, 15  # rows and columns of each DTensor, and repetitions


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("audit")
    command.set_defaults(measure=measure_audit)
    command.add_argument("--blocks", type=int, nargs="+", default=[2, 8])
    command = commands.add_parser("checksums")
    command.set_defaults(measure=measure_checksums)
    command.add_argument("--runs", type=int, default=5)
    command = commands.add_parser("dtensors")
    command.set_defaults(measure=measure_dtensors)
    command.add_argument("--parameters", type=int, nargs="+", default=[300, 3000], help="parameters of the models")
    command = commands.add_parser("formats")
    command.set_defaults(measure=measure_formats)
    command = commands.add_parser("differing")
    command.set_defaults(measure=measure_differing)
    command.add_argument("--rounds", type=int, default=30)
    command.add_argument("--blocks", type=int, default=8, help="of the GPT, at most 8")
    arguments = parser.parse_args()
    arguments.measure(arguments)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A gloo group of one rank, with one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


#
# The audit
#


def measure_audit(arguments: argparse.Namespace) -> None:
    with one_rank():
        figures = {f"{blocks} blocks": audit_of(blocks) for blocks in arguments.blocks}
    kinds = {kind: (kind, ".3f") for of_one in figures.values() for kind in of_one}
    print(f"processor seconds of a first step\n\n{table(figures, kinds | {'share': ('share', '.1%')})}")


def audit_of(blocks: int) -> dict[str, float]:
    spent: dict[str, float] = {}
    tokens = torch.randint(0, 256, (2, 16))
    jitted = thunder.jit(GPT(blocks=blocks, width=32, heads=2, length=16), transforms=[tfs.fsdp()])
    with contextlib.ExitStack() as stack:
        for owner, name, what in (
            (transforms, "audited", "insert"),
            (audit.Auditor, "succeeded", "exchange"),
            (audit.Auditor, "before", "check"),
            (audit.Auditor, "after", "check"),
            (operator_facts, "_facts_of", "facts"),
        ):
            stack.enter_context(timed(owner, name, spent, what))
        started = time.process_time()
        jitted(tokens, tokens).backward()
        total = time.process_time() - started
    share = (spent["insert"] + spent["exchange"] + spent["check"]) / total
    return {"first step": total, **spent, "share": share}


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


#
# Checksums
#


def measure_checksums(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(save_and_load, args=(Path(folder), arguments.runs), nprocs=2)


def save_and_load(rank: int, folder: Path, runs: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)  # the same values on both ranks
    layers = [torch.nn.Linear(1000, 1000, bias=False) for _ in range(MEGABYTES // 4)]
    model = thunder.jit(torch.nn.Sequential(*layers), transforms=[tfs.fsdp()])
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def run(function: Callable[..., Any], *args: Any, **checksums: bool) -> None:
        dist.barrier()
        begun, begun_cpu = time.perf_counter(), time.process_time()
        function(*args, **checksums)
        slowest, cpu = torch.tensor(time.perf_counter() - begun), torch.tensor(time.process_time() - begun_cpu)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        [is_on] = checksums.values()
        how = "with" if is_on else "without"
        seconds[function.__name__][f"{how} checksums"].append(float(slowest))
        seconds[function.__name__][f"processor, {how}"].append(float(cpu))

    for number in range(runs):
        saved = folder / f"{number}-True"
        for is_on in (True, False):
            target = folder / f"{number}-{is_on}"
            run(tfs.save_checkpoint, model, target, checksums=is_on)
            run(tfs.save_safetensors, model, target / "whole", checksums=is_on)
        for is_on in (True, False):
            run(tfs.load_checkpoint, model, saved, verify_checksums=is_on)
            run(tfs.load_safetensors, model, saved / "whole", verify_checksums=is_on)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(saved)
            shutil.rmtree(folder / f"{number}-False")
        dist.barrier()
    if rank == 0:
        figures = {name: {how: statistics.median(found) for how, found in of.items()} for name, of in seconds.items()}
        columns = {how: (how, ".3f") for how in next(iter(figures.values()))}
        print(f"{MEGABYTES} MB of parameters on 2 ranks, median seconds of {runs} runs\n\n{table(figures, columns)}")
    dist.destroy_process_group()


#
# DTensors
#


def measure_dtensors(arguments: argparse.Namespace) -> None:
    with one_rank():
        for parameters in arguments.parameters:
            figures = dtensors(parameters)
            print(f"{parameters} parameters of {WIDTH} x {WIDTH}: microseconds a parameter and step\n")
            names = ("rows", "plain", "DTensor", "rows / plain", "rows / DTensor")
            print(table(figures, {name: (name, ".2f") for name in names}), end="\n\n")


def dtensors(parameters: int) -> dict[str, dict[str, float]]:
    layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(parameters))
    jitted = thunder.jit(layers, transforms=[transform := tfs.fsdp()])
    rows = list(jitted.parameters())
    plain = plain_copies(rows)
    mesh = rows[0].device_mesh
    of_torch = [torch.nn.Parameter(DTensor.from_local(p.detach(), mesh, [Shard(0)])) for p in plain_copies(rows)]
    buckets = transform.sharded.buckets

    def grads() -> list[torch.Tensor]:
        return [grad for bucket in buckets for grad in bucket.sharded_grads(torch.zeros_like(bucket.shard))]

    def plain_grads() -> list[torch.Tensor]:
        with mock.patch.object(RowDTensor, "of_spec", lambda local, spec: local):
            return grads()

    compared = {"backward": {"rows": backward(rows, grads), "plain": backward(plain, plain_grads)}}
    for kernel in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        steps = {}
        for name, params in (("rows", rows), ("plain", plain), ("DTensor", of_torch)):
            for param in params:
                param.grad = torch.ones_like(param)
            steps[name] = torch.optim.AdamW(params, **kernel).step
        compared[f"AdamW({kernel})"] = steps
    figures = {}
    for what, functions in compared.items():
        seconds = processor_seconds(functions)
        figures[what] = {name: statistics.median(s) / parameters * 1e6 for name, s in seconds.items()}
        for name in seconds.keys() - {"rows"}:
            figures[what][f"rows / {name}"] = ratio(seconds["rows"], seconds[name])
    return figures


def plain_copies(dtensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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


def backward(params: Sequence[torch.Tensor], grads: Callable[[], Sequence[torch.Tensor]]) -> Callable[[], None]:
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


def processor_seconds(functions: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return the processor seconds of each function in each round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS):
        for name, function in functions.items():
            started = time.process_time()
            function()
            times[name].append(time.process_time() - started)
    gc.enable()
    return times


#
# Formats on the wire
#


def measure_formats(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    figures = {}
    for name, form in FORMATS.items():
        wire = Wire.of([(NUMEL, form)], CommPolicy().block)
        whole, mean = torch.randn(1, NUMEL), torch.empty(1, NUMEL)
        sent, received = torch.empty(1, wire.nbytes, dtype=torch.uint8), torch.zeros(2, wire.nbytes, dtype=torch.uint8)
        decoded = torch.empty_like(whole)
        functions: dict[str, Callable[[], Any]] = {
            "encode": functools.partial(wire.encode, [whole], sent),
            "decode": functools.partial(wire.decode, sent, [decoded]),
            "decode and average": functools.partial(wire.decode_mean, received, [mean]),
        }
        rates = {what: 1e-9 * whole.nbytes / statistics.median(t) for what, t in processor_seconds(functions).items()}
        error = ((decoded - whole).norm() / whole.norm()).item()
        figures[name] = {"bytes": wire.nbytes / whole.nbytes, "error": error, **rates}
    columns = {"bytes": ("bytes", ".3f"), "error": ("error", ".2%")} | {what: (what, ".1f") for what in rates}
    print(f"bytes relative to float32, rounding error, and GB of float32 a second\n\n{table(figures, columns)}")


#
# Ranks that differ
#


class Skipping(GPT):
    """A GPT that runs the blocks whose digits are in ``way``."""

    def forward(self, tokens: torch.Tensor, way: str) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for digit in way:
            x = self.blocks[int(digit)](x)
        return self.head(self.norm(x)).square().mean()


class Tiny(torch.nn.Module):
    """Layers that are so small that a step takes only host time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        for digit in way:
            x = self.blocks[int(digit)](x)
        return x.sum()


def measure_differing(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_differ, (Path(folder), arguments.rounds, arguments.blocks), nprocs=2)


def _differ(rank: int, folder: Path, rounds: int, blocks: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(rank))
    figures = {}
    for name, make, batch in (
        ("GPT", lambda: Skipping(blocks=blocks, width=128, heads=4, length=64), tokens),
        ("tiny", Tiny, torch.ones(8, 8)),
    ):
        models = {}
        for differs in (False, True):
            torch.manual_seed(0)
            models[differs] = thunder.jit(make(), transforms=[tfs.fsdp(ranks_may_differ=differs)])
        figures[name] = _alike(
            models, batch, "01234567"[: len(models[True].blocks)], rounds * (10 if name == "tiny" else 1)
        )
        figures[name] |= _known_and_new(models[True], batch, rank, rounds)
    if rank == 0:
        columns = {key: (key, ".3g") for key in next(iter(figures.values()))}
        print(f"two gloo ranks, {rounds} rounds, medians; rank 0\n\n{table(figures, columns)}")
    dist.barrier()
    dist.destroy_process_group()


def _step(model: Any, batch: torch.Tensor, way: str) -> float:
    """Run a step; return the seconds of processor time."""
    model.zero_grad()
    dist.barrier()
    started = time.thread_time()
    model(batch, way).backward()
    return time.thread_time() - started


def _alike(models: dict[bool, Any], batch: torch.Tensor, way: str, rounds: int) -> dict[str, float]:
    seconds: dict[bool, list[float]] = {differs: [] for differs in models}
    issued = {}
    for differs, model in models.items():
        for _ in range(3):
            _step(model, batch, way)
        counts = model._lc_transforms[0].sharded.control.issue_counts
        before = counts.issued
        _step(model, batch, way)
        issued[differs] = counts.issued - before
    pairs = zip(*(model.parameters() for model in models.values()), strict=True)
    assert issued[False] == issued[True] and all(torch.equal(p.grad.to_local(), q.grad.to_local()) for p, q in pairs)
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        for differs in (bool(number % 2), not number % 2):
            seconds[differs].append(_step(models[differs], batch, way))
    spent: dict[bool, list[float]] = {differs: [] for differs in models}
    of_models = {differs: _starts(model) for differs, model in models.items()}
    for _ in range(20 * rounds):
        for differs, starts in of_models.items():
            spent[differs].append(sum(map(_round, starts)))
    more = statistics.median(a - b for a, b in zip(spent[True], spent[False], strict=True))
    return {
        "alike ms": 1e3 * statistics.median(seconds[True]),
        "of without": ratio(seconds[True], seconds[False]),
        "rounds us": 1e6 * statistics.median(spent[True]),
        "more us": 1e6 * more,
    }


def _starts(model: Any) -> list[TraceStart]:
    """Return the starts of the latest traces on the control channel."""
    compiled = model._lc_transforms[0].compiled[-1]
    bsyms = (*compiled.forward.bound_symbols, *compiled.backward.bound_symbols)
    return [bsym.args[0] for bsym in bsyms if bsym.sym.name == "fsdp_agree"]


def _round(of: TraceStart) -> float:
    """Announce a trace without running it; return the seconds of processor time."""
    started = time.thread_time()
    of.post()
    of.settled_or_merged() if isinstance(of, start.DifferingStart) else of.settle()
    seconds = time.thread_time() - started
    of.cancel()
    return seconds


def _known_and_new(model: Any, batch: torch.Tensor, rank: int, rounds: int) -> dict[str, float]:
    count = len(model.blocks)
    everything = "01234567"[:count]
    ways = everything[::2], everything[1::2]
    for way in ways:  # each rank knows both programs, and traces nothing later
        for _ in range(2):
            _step(model, batch, way)
    spent: dict[str, float] = {}
    gc.disable()
    with timed(start.Maker, "__call__", spent, "build"):
        new = _step(model, batch, ways[rank])
    gc.enable()
    times: dict[str, list[float]] = {"merged": [], "all": []}
    for _ in range(rounds):
        for what, way in (("merged", ways[rank]), ("all", everything)):
            times[what].append(_step(model, batch, way))
    merged = statistics.median(times["merged"])
    return {
        "merged ms": 1e3 * merged,
        "of all blocks": ratio(times["merged"], times["all"]),
        "new s": new - merged,
        "build s": spent["build"],
    }


if __name__ == "__main__":
    main()
