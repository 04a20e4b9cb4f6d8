"""Try the package on GPUs for the first time, and print one page for an issue.

    python benchmarks/gpu.py first
    python benchmarks/gpu.py first --cases 'flat|coalesced' --save first       # fewer configurations; keep all output
    python benchmarks/gpu.py first --stand-in --cases 'zero3 flat$'          # test this program on a CPU, with gloo

Every case of :data:`OURS` and the unsharded model run in every setup of :func:`setups`, each in processes of its own, so one
that fails, crashes or hangs does not hide another. The page goes to standard output, progress to standard error. The exit
code is 0 if nothing failed (or there is no GPU), otherwise 1.

A step of training never waits for the host, and each case trains several times from the same parameters. If bits differ
between these runs, or from those of a run with ``CUDA_LAUNCH_BLOCKING=1``, where nothing overlaps, there is a race, or a
kernel is not deterministic: the page says if the unsharded model's bits vary, too. ``TORCH_CUDA_SANITIZER=1`` tracks
kernels by the addresses of their arguments; it does not know which stream NCCL uses, and does not track pinned memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import thunder_fsdp_sched
from thunder_fsdp_sched.extras.planning.clusters import preset_of_gpu
from thunder_fsdp_sched.extras.planning.cost import AnalyticCost
from thunder_fsdp_sched.extras.planning.recorded import read_recorded
from thunder_fsdp_sched.extras.planning.simulate import simulate
from thunder_fsdp_sched.extras.planning.timeline import Timeline
from thunder_fsdp_sched.extras.reports.exposed import calibrate
from thunder_fsdp_sched.transports import TRANSPORTS

import thunder
import torch
import torch.distributed as dist
from harness import Columns, show_nbytes, table
from systems import Shape
from local_ranks import share_gpu
from thunder.extend import FusionExecutor, get_default_executors
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.collect_env import get_pretty_env_info

# The case that the others are compared with.
REFERENCE = "unsharded"

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OFFLOAD = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())

# The options of ``fsdp`` in each case of this package.
OURS: dict[str, dict[str, Any]] = {f"zero3 {transport}": {"transport": transport} for transport in TRANSPORTS} | {
    "zero2 flat": {"sharding_strategy": "zero2", "transport": "flat"},
    "zero2 symmetric_memory": {"sharding_strategy": "zero2", "transport": "symmetric_memory"},
    "zero3 flat bfloat16": {"transport": "flat", "mp_policy": BFLOAT16},
    "zero3 coalesced bfloat16": {"transport": "coalesced", "mp_policy": BFLOAT16},
    "zero3 flat offload": {"transport": "flat", "offload_policy": OFFLOAD},
}

# Limit on the distance from the unsharded model after training, as a share of the distance that training moved that model.
# Rounding gives about 1e-6 and 1e-2; a missing or stale bucket 0.1 or more.
TOLERANCE, BFLOAT16_TOLERANCE = 1e-3, 0.1

# The model and the batch of a rank, and those for ``--stand-in``.
SHAPE, STAND_IN = Shape(blocks=4, width=1024, length=512, batch=4), Shape(blocks=0, width=64, length=8, batch=2)
# Training steps of each run.
STEPS = 4
# Seconds after which a case counts as hanging.
LIMIT = 300.0

# Figures of a profiled or simulated step besides its seconds.
PARTS = ("compute", "communication", "exposed", "idle")

# Verdicts that are not failures.
FINE = ("ok", "refused", "varies")

NO_GPU = f"skipped: no GPU here (torch {torch.__version__}, built for CUDA {torch.version.cuda})"


@dataclass(frozen=True)
class Setup:
    """How a case runs.

    Attributes:
        shares_device: whether all ranks use GPU 0.
        like: the name of the setup that must give the same bits, ``""`` for none.
        repeats: how often a case trains, each time from the same parameters; 0 to profile a step instead.
        without: a regular expression for the cases that do not run.
        fuse: whether Thunder uses its fusion executors, one of which compiles the loss with torch.compile; that refuses to
            run together with torch's sanitizer.
    """

    name: str
    meaning: str
    world_size: int = 1
    backend: str = "nccl"
    shares_device: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    like: str = ""
    repeats: int = 4
    without: str = "^$"
    fuse: bool = True


def setups(arguments: argparse.Namespace, device_count: int) -> list[Setup]:
    """Return the setups that ``--only`` matches, in the order in which they run."""
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    same = "the same with CUDA_LAUNCH_BLOCKING=1: the bits must be the same"
    # The sanitizer takes the stream that issues a gather of a copied shard for the stream that runs it. `coalesced` has not
    # run with gloo on a GPU.
    strict = {"environment": {"TORCH_CUDA_SANITIZER": "1"}, "without": "offload", "fuse": False}
    overlapping = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    shared = {"environment": overlapping, "without": "coalesced", "shares_device": True}
    made = [
        Setup("alone", "1 rank, NCCL; bits of repeated runs, and the distance from the unsharded model"),
        Setup("blocking", same, environment=blocking, like="alone", repeats=1),
        Setup("sanitizer", "with TORCH_CUDA_SANITIZER=1", repeats=1, **strict),
        Setup("shared", "2 ranks on one GPU, gloo", 2, "gloo", **shared),
        *(Setup(f"nccl {n}", f"{n} ranks on one GPU, NCCL", n, shares_device=True, repeats=2) for n in (2, 4)),
    ]
    if device_count > 1:
        made.append(Setup("ranks", "a rank on each GPU, NCCL", device_count))
        made.append(Setup("ranks, blocking", same, device_count, environment=blocking, like="ranks", repeats=1))
    made.append(Setup("profile", "a step under the profiler, compared with the simulator", device_count, repeats=0))
    if arguments.stand_in:  # torch's sanitizer needs CUDA for every operator
        made = [dataclasses.replace(s, backend="gloo", without="^$") for s in made if s.name != "sanitizer"]
    return [setup for setup in made if re.search(arguments.only, setup.name)]


def cases_of(setup: Setup, arguments: argparse.Namespace) -> list[str]:
    """Return the cases of a setup that ``--cases`` matches, the unsharded model first."""
    cases = [name for name in OURS if re.search(arguments.cases, name) and not re.search(setup.without, name)]
    return [REFERENCE, *cases] if setup.repeats else cases


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=("first",))
    parser.add_argument("--cases", metavar="REGEX", default="", help="only configurations whose names match")
    parser.add_argument("--only", metavar="REGEX", default="", help="only setups whose names match")
    parser.add_argument("--save", help="folder for the page, all records, and what the processes printed")
    parser.add_argument("--stand-in", action="store_true", help="gloo on the CPU: test this program, not a GPU")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.stand_in:
        print(NO_GPU)
        return 0
    chosen = setups(arguments, 1 if arguments.stand_in else torch.cuda.device_count())
    if not chosen or not any(re.search(arguments.cases, name) for name in OURS):
        parser.error(f"--only matches no setup, or --cases none of {', '.join(OURS)}")
    folder = Path(arguments.save or tempfile.mkdtemp(prefix="gpu-first-"))
    folder.mkdir(parents=True, exist_ok=True)
    found = {s.name: {case: run_case(s, case, arguments, folder) for case in cases_of(s, arguments)} for s in chosen}
    text, failures = page(chosen, found, is_stand_in=arguments.stand_in)
    (folder / "records.json").write_text(json.dumps(found, indent=1))
    (folder / "page.txt").write_text(text)
    print(text)
    print(f"everything that was printed: {folder}", file=sys.stderr)
    return 1 if failures else 0


#
# Processes
#


def run_case(setup: Setup, case: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a case on all ranks of a setup in new processes, with torchrun; return its record."""
    stem = str(folder / re.sub(r"\W+", "_", f"{setup.name}-{case}"))
    job = {"setup": dataclasses.asdict(setup), "case": case, "stem": stem, "stand_in": arguments.stand_in}
    paths = [Path(f"{stem}-{rank}.json") for rank in range(setup.world_size)]
    for path in paths:  # left by an earlier run in the same folder
        path.unlink(missing_ok=True)
    # Without a workspace of a fixed size, matrix products differ between runs.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", **os.environ, **setup.environment}
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(setup.world_size), __file__, "worker", json.dumps(job)]
    with open(f"{stem}.txt", "w") as output:  # workers end themselves after the limit
        code = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    record = merge([json.loads(p.read_text()) for p in paths if p.exists()], code, Path(f"{stem}.txt").read_text())
    print(f"{setup.name}: {case}: {record['status']}", file=sys.stderr, flush=True)
    return record


def merge(records: Sequence[dict[str, Any]], code: int, output: str) -> dict[str, Any]:
    """Return the record of a case from those of its ranks: the first that failed, or the end of the output if one died.

    Figures are those of the first rank; digests are those of all ranks, joined.
    """
    by_status = {record["status"]: record for record in reversed(records)}
    if "failed" in by_status:
        return by_status["failed"]
    if code or not records:
        lines = [line for line in output.splitlines() if line.strip()]
        starts = [i for i, line in enumerate(lines) if line.startswith(("Fatal Python error", "Timeout ("))]
        shown = lines[starts[0] :][:12] if starts else lines[-12:]
        return {"status": "failed", "error": "\n".join([f"the processes ended with exit code {code}", *shown])}
    merged = by_status.get("refused", records[0])
    if "digests" in merged:
        merged["digests"] = ["".join(parts) for parts in zip(*(r["digests"] for r in records), strict=True)]
    return merged


def work(job: Mapping[str, Any]) -> None:
    """Run one case as one rank, and write its record: its ``status`` is ``"ok"``, ``"refused"`` or ``"failed"``."""
    # Ends a hang with the stacks of all threads, even if another thread holds the interpreter.
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    rank = int(os.environ["RANK"])
    try:
        worker = Worker(job, rank)
        if worker.setup.shares_device and worker.setup.backend == "nccl":
            share_gpu(rank)
        # Ranks that wait for a dead rank report it before the limit.
        dist.init_process_group(worker.setup.backend, timeout=timedelta(seconds=LIMIT / 2))
        record = {"status": "ok", **(worker.train() if worker.setup.repeats else worker.profile())}
    except Exception as error:
        traceback.print_exc()
        record = {"status": "refused" if isinstance(error, ValueError) else "failed", "error": describe_error(error)}
    Path(f"{job['stem']}-{rank}.json").write_text(json.dumps(record))
    if record["status"] == "failed":  # CUDA may have lost its context
        sys.stderr.flush()
        os._exit(3)
    dist.barrier()
    dist.destroy_process_group()


def describe_error(error: BaseException) -> str:
    """Return the first lines of an error, and the innermost line of its traceback."""
    from_sanitizer = getattr(error, "errors", None)  # of torch.cuda._sanitizer: its text only counts them
    text = str(from_sanitizer[0]) if isinstance(from_sanitizer, list) and from_sanitizer else str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first = f"{type(error).__name__}: {text}".splitlines()[:4]
    return "\n".join([*first, f"  at {frame.filename}:{frame.lineno}, in {frame.name}"])


class Worker:
    """One rank of a case."""

    def __init__(self, job: Mapping[str, Any], rank: int) -> None:
        self.setup, self.case, self.rank = Setup(**job["setup"]), job["case"], rank
        self.trace = Path(f"{job['stem']}-{rank}-trace.json")
        self.references = self.trace.with_name(f"{self.setup.world_size}.pt")
        self.is_cuda = not job["stand_in"]
        self.device = torch.device("cpu")
        if self.is_cuda:
            self.device = torch.device("cuda", 0 if self.setup.shares_device else rank)
            torch.cuda.set_device(self.device)
        self.shape = dataclasses.replace(SHAPE if self.is_cuda else STAND_IN, device=str(self.device))

    def settle(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def build(self) -> tuple[Any, Any]:
        """Return the jitted module, and this package's transform or ``None``."""
        executors = [e for e in get_default_executors() if self.setup.fuse or not isinstance(e, FusionExecutor)]
        if self.case == REFERENCE:
            return thunder.jit(self.shape.model(), executors=executors), None
        transform = thunder_fsdp_sched.fsdp(init=thunder_fsdp_sched.Init(device=self.device), **OURS[self.case])
        return thunder.jit(self.shape.model(), transforms=[transform], executors=executors), transform

    def train(self) -> dict[str, Any]:
        """Train several times from the same parameters; return digests, times, and the distance from the reference.

        Where torch has no deterministic kernel, it warns, and digests may vary.
        """
        make_repeatable()
        module, transform = self.build()
        ranks = range(self.setup.world_size) if transform is None else [self.rank]  # the whole batch, or this rank's
        tokens = torch.cat([self.shape.tokens(rank) for rank in ranks])
        before = after = _state(module, transform)
        saved = [p.detach().clone() for p in module.parameters()]
        digests, seconds, losses = [], [], torch.empty(0)
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(self.setup.repeats):
            with torch.no_grad():
                for param, value in zip(module.parameters(), saved, strict=True):
                    param.copy_(value)
            # Not AdamW: its first steps are the signs of gradients, and rounding would flip those of gradients near zero.
            optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
            self.settle()
            started = time.perf_counter()
            losses = take_steps(module, optimizer, tokens)
            self.settle()
            seconds.append((time.perf_counter() - started) / STEPS)
            after = _state(module, transform)
            digests.append(_digest([after, losses.double().cpu()]))
        record = {"digests": digests, "losses": losses.tolist(), "seconds": min(seconds)}
        record["finite"] = bool(torch.isfinite(after).all())
        if self.is_cuda:
            record["peak"] = torch.cuda.max_memory_allocated()
        if transform is None and self.rank == 0:
            torch.save([before, after], self.references)
        if transform is not None and self.references.exists():
            start, end = torch.load(self.references)
            record["started_alike"] = torch.equal(start, before)
            record["distance"] = float(torch.dist(after, end) / torch.dist(start, end))
        return record

    def profile(self) -> dict[str, Any]:
        """Profile one step and simulate it, with the chip's preset, as it is and with the recorded speed."""
        module, transform = self.build()
        tokens = self.shape.tokens(self.rank)

        def step() -> None:
            module(tokens, tokens).backward()
            self.settle()
            module.zero_grad(set_to_none=True)

        for _ in range(3):  # one compiles, one runs without the audit, one is for the caching allocator
            step()
        with torch.profiler.profile() as profiler:
            step()
        profiler.export_chrome_trace(str(self.trace))
        recorded, compiled = read_recorded([self.trace]), transform.compiled[-1]
        timelines = {"measured": recorded[0].timeline}
        if self.is_cuda and (spec := preset_of_gpu(torch.cuda.get_device_name(self.device))) is not None:
            for name, machine in (("preset", spec), ("profile", calibrate(spec, compiled, recorded))):
                timelines[f"by {name}"] = simulate(compiled.forward, compiled.backward, AnalyticCost(machine))
        return {name: parts_of(timeline) for name, timeline in timelines.items()}


def parts_of(t: Timeline) -> dict[str, float]:
    """Return the seconds of a step and of its parts."""
    seconds = t.step_seconds, t.compute_seconds, t.communicating_seconds, t.exposed_seconds, t.idle_seconds
    return dict(zip(("seconds", *PARTS), seconds, strict=True))


def make_repeatable() -> None:
    """Let torch use deterministic kernels where it has some, and warn elsewhere."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would launch additional kernels


def take_steps(module: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    """Take some steps without waiting for the device; return their losses."""
    losses = []
    for _ in range(STEPS):
        loss = module(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def _state(module: Any, transform: Any) -> torch.Tensor:
    """Return all values of the unsharded state as one vector of float64, which holds those of all dtypes here."""
    state = module.state_dict() if transform is None else thunder_fsdp_sched.full_state_dict(module)
    return torch.cat([state[name].detach().cpu().double().flatten() for name in sorted(state)])


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


#
# The page
#


def verdict(setup: Setup, case: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the verdict on a case in a word or two, from the records of all cases in all setups."""
    record = found[setup.name].get(case, {"status": "-"})
    if record["status"] != "ok" or not setup.repeats:
        return record["status"].replace("failed", "FAILED")
    reference = [found.get(name, {}).get(REFERENCE, {}) for name in (setup.name, setup.like)]
    is_steady = len({digest for of in reference for digest in of.get("digests", ())}) <= 1
    expected = found.get(setup.like, {}).get(case, record).get("digests", record["digests"])
    tolerance = BFLOAT16_TOLERANCE if "bfloat16" in case else TOLERANCE
    faults = {
        "NOT FINITE": not record["finite"],
        "OTHER START": not record.get("started_alike", True),
        "WRONG": record.get("distance", 0.0) > tolerance,
        "NOT REPEATABLE" if is_steady else "varies": len(set(record["digests"])) > 1,
        "OTHER BITS" if is_steady else "varies ": record["digests"][0] not in expected,
    }
    return next((word.strip() for word, is_so in faults.items() if is_so), "ok")


def page(chosen: Sequence[Setup], found: Mapping[str, Mapping[str, Any]], *, is_stand_in: bool) -> tuple[str, int]:
    """Return the page, and the number of failed cases."""
    verdicts = {case: {s.name: verdict(s, case, found) for s in chosen} for case in (REFERENCE, *OURS)}
    verdicts = {case: of for case, of in verdicts.items() if set(of.values()) != {"-"}}
    tried = [word for of in verdicts.values() for word in of.values() if word != "-"]
    failures = sum(word not in FINE for word in tried)
    lines = ["thunder_fsdp_sched, first run on a GPU", *machine().splitlines()]
    lines += ["STAND-IN: all of it ran on the CPU, through gloo"] * is_stand_in
    lines += [f"model, and batch of a rank: {STAND_IN if is_stand_in else SHAPE}", ""]
    lines += [f"{failures} of {len(tried)} failed, {tried.count('refused')} were refused with a reason", ""]
    lines += [table(verdicts, {s.name: (s.name, "s") for s in chosen}), ""]
    lines += [f"{setup.name}: {setup.meaning}" for setup in chosen]
    columns: Columns = {"step s": ("seconds", ".4f"), "peak": ("peak", show_nbytes), "distance": ("distance", ".1e")}
    for setup in chosen:
        figures = {case: record for case, record in found[setup.name].items() if record["status"] == "ok"}
        if not setup.repeats:
            figures = {f"{c}, {part}": f for c, of in figures.items() for part, f in of.items() if part != "status"}
        if figures:
            lines += ["", f"{setup.name}:", "", table(figures, {**columns, **{part: (part, ".4f") for part in PARTS}})]
    errors: dict[str, list[str]] = defaultdict(list)
    for name, records in found.items():
        for case, record in records.items():
            word = verdicts[case][name]
            text = record.get("error") or f"{word}: losses {record.get('losses')}; bits {record.get('digests')}"
            if "error" in record or word not in FINE:
                errors[text].append(f"{name}: {case}")
    for text, where in errors.items():
        lines += ["", f"({'; '.join(where)})", *(f"  {line[:160]}" for line in text.splitlines())]
    return "\n".join(lines), failures


def machine() -> str:
    """Return versions, chips and settings."""
    switches = ("CUDA_", "NCCL_", "TORCH_NCCL", "TORCH_CUDA", "TORCH_SYMM", "PYTORCH_CUDA", "PYTORCH_ALLOC", "CUBLAS_")
    environment = {key: value for key, value in sorted(os.environ.items()) if key.startswith(switches)}
    executors = ", ".join(e.name for e in (*thunder.get_default_executors(), *thunder.get_always_executors()))
    versions = f"thunder_fsdp_sched {version('thunder_fsdp_sched')}, lightning-thunder {version('lightning-thunder')}"
    return f"{versions}\n{get_pretty_env_info()}\nexecutors: {executors}\nenvironment: {environment or 'nothing'}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
