"""The work of ``python benchmarks/gpu.py first``: train a configuration, profile it, and describe the machine.

A step of training never waits for the host, and each case trains several times from the same parameters. If bits differ
between these runs, or from those of a run with ``CUDA_LAUNCH_BLOCKING=1``, there is a race, or a kernel is not
deterministic. The page lists the kernels that torch reports as nondeterministic.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from gpu_cases import CASES, REFERENCE, Case, Job, describe_error

__all__ = ["WORK", "Setup", "machine", "measured", "profile", "simulated", "train"]


class Setup:
    """The job, the rank and the device, which all cases of one process share."""

    def __init__(self, job: Job, rank: int) -> None:
        import torch
        from systems import Shape

        self.job, self.rank = job, rank
        self.device = torch.device("cpu")
        if job.device == "cuda":
            self.device = torch.device("cuda", 0 if job.one_device else rank)
            torch.cuda.set_device(self.device)
        self.shape = Shape(job.blocks, job.width, job.length, job.batch, device=str(self.device))

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def settle(self) -> None:
        """Wait until the device is idle."""
        import torch

        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def build(self, case: Case) -> tuple[Any, Any]:
        """Return the jitted module and its transform."""
        import thunder_fsdp_sched

        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        policy = None
        if case.precision != "float32":
            policy = MixedPrecisionPolicy(param_dtype=getattr(torch, case.precision), reduce_dtype=torch.float32)
        transform = thunder_fsdp_sched.fsdp(
            sharding_strategy=case.strategy,
            transport=case.transport,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy(pin_memory=self.is_cuda) if case.offload else None,
            device=self.device,
        )
        return self.jit(transforms=[transform]), transform

    def jit(self, **options: Any) -> Any:
        """Return the model, jitted."""
        import thunder
        from thunder.extend import FusionExecutor, get_default_executors

        if not self.job.fuse:
            options["executors"] = [e for e in get_default_executors() if not isinstance(e, FusionExecutor)]
        return thunder.jit(self.shape.model(), **options)


#
# Training
#


def train(setup: Setup, name: str) -> dict[str, Any]:
    """Train a case several times from the same parameters; return digests, times, and the distance from the unsharded model.

    Kernels must be deterministic, because otherwise digests cannot be compared. If torch has no deterministic kernel for an
    operator, the case continues with a nondeterministic one, and the record says so.
    """
    import torch

    loose = ""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would launch additional kernels
    try:
        record = _train(setup, name)
    except RuntimeError as error:
        loose = str(error).split("\n")[0]
        if "deterministic" not in loose:
            raise
        torch.use_deterministic_algorithms(True, warn_only=True)
        record = _train(setup, name)
    finally:
        torch.use_deterministic_algorithms(False)
    return {**record, "loose": loose}


def _train(setup: Setup, name: str) -> dict[str, Any]:
    from thunder_fsdp_sched import full_state_dict

    import torch

    job, references = setup.job, Path(setup.job.references)
    if name == REFERENCE:  # trained on the batches of all ranks
        module = setup.jit()
        tokens = torch.cat([setup.shape.tokens(rank) for rank in range(job.world_size)])
    else:
        module, _ = setup.build(CASES[name])
        tokens = setup.shape.tokens(setup.rank)
    state = module.state_dict if name == REFERENCE else partial(full_state_dict, module)
    before = _on_cpu(state())
    saved = [p.detach().clone() for p in module.parameters()]
    if setup.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    digests, seconds, losses, after = [], [], [], before
    for _ in range(job.repeats):
        with torch.no_grad():
            for param, value in zip(module.parameters(), saved, strict=True):
                param.copy_(value)
        losses, elapsed = _train_once(setup, module, tokens)
        seconds.append(elapsed / job.steps)
        after = _on_cpu(state())
        digests.append(_digest([*after.values(), torch.tensor(losses, dtype=torch.float64)]))
    record: dict[str, Any] = {
        "digests": digests,
        "losses": losses,
        "seconds": min(seconds),
        "finite": all(bool(torch.isfinite(value).all()) for value in after.values()),
    }
    if setup.is_cuda:
        record["peak"] = torch.cuda.max_memory_allocated()
    reference = references / f"{job.world_size}.pt"
    if name == REFERENCE:
        if setup.rank == 0:
            torch.save([before, after], reference)
        torch.distributed.barrier()  # the others read it
    elif reference.exists():
        start, end = torch.load(reference)
        record["started_alike"] = all(torch.equal(start[key], value) for key, value in before.items())
        record["difference"] = _distance(after, end) / _distance(start, end)
    return record


def _train_once(setup: Setup, module: Any, tokens: Any) -> tuple[list[float], float]:
    """Run a few steps without waiting for the device in between; return their losses and the total seconds."""
    import torch

    # Not AdamW: its first steps are the signs of gradients, and rounding would flip the signs of gradients near zero.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    setup.settle()
    started = time.perf_counter()
    losses = []
    for _ in range(setup.job.steps):
        loss = module(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    setup.settle()
    seconds = time.perf_counter() - started
    return [loss.item() for loss in losses], seconds


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}


def _digest(tensors: Iterable[Any]) -> str:
    import torch

    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def _distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Return the Euclidean distance between two states."""
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in b) ** 0.5


#
# Predicted and measured
#


def profile(setup: Setup, name: str) -> dict[str, Any]:
    """Profile one step of a case, and simulate it."""
    from thunder_fsdp_sched.reports.profiler import MeasuredCost, measure

    import torch.distributed as dist
    from gpu_trace import read
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    module, transform = setup.build(CASES[name])
    tokens = setup.shape.tokens(setup.rank)

    def step() -> None:
        module(tokens, tokens).backward()
        setup.settle()
        module.zero_grad(set_to_none=True)

    for _ in range(3):  # one compiles, one runs without the audit, one is for the caching allocator
        step()
    seconds = []
    for _ in range(5):
        dist.barrier()
        setup.settle()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * setup.is_cuda
    with profiling(activities=activities) as profiler:
        step()

    def observed() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return measured(read(json.loads(path.read_text()), setup.device.index))

    compiled = transform.compiled[-1]
    return {
        "seconds": statistics.median(seconds),
        "measured": _part(observed),
        "by preset": _part(lambda: simulated(compiled, _preset(setup))),
        "by profile": _part(lambda: simulated(compiled, MeasuredCost(measure(module, tokens, tokens, repeats=3)))),
    }


def _part(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of ``work``, or ``{"error": ...}``, so that the other parts of a record are kept."""
    try:
        return work()
    except Exception as error:
        return {"error": describe_error(error), "refused": isinstance(error, ValueError)}


def measured(activities: list[Any]) -> dict[str, Any]:
    """Return the figures of a step from the activities of a GPU.

    Raises:
        RuntimeError: there are no activities.
    """
    from gpu_trace import collectives, counts, exposed, idle, seconds_in, split

    if not activities:
        raise RuntimeError("the profiler saw nothing run on the GPU (CUPTI missing, or not permitted?)")
    compute, communication = split(activities)
    return {
        "order": [str(c) for c in collectives(communication)],
        "seconds": max(a.end for a in activities) - min(a.start for a in activities),
        "compute": seconds_in(compute),
        "communication": seconds_in(communication),
        "exposed": exposed(compute, communication),
        "idle": idle(activities),
        "streams": len({a.stream for a in activities}),
        **counts(compute, communication),
    }


def _preset(setup: Setup) -> Any:
    from thunder_fsdp_sched.planning.clusters import preset_of_gpu
    from thunder_fsdp_sched.planning.cost import AnalyticCost

    import torch

    chip = torch.cuda.get_device_name(setup.device) if setup.is_cuda else "a CPU"
    spec = preset_of_gpu(chip)
    if spec is None:
        raise ValueError(f"no preset is known for {chip}")
    return AnalyticCost(spec)


def simulated(compiled: Any, cost: Any) -> dict[str, Any]:
    """Simulate a step of a compiled pair of traces and return its figures."""
    from thunder_fsdp_sched.planning.simulate import simulate

    timeline = simulate(compiled.forward, compiled.backward, cost)
    return {
        "order": [f"{c.kind}({c.bucket})" for c in sorted(timeline.collectives, key=lambda c: (c.start, c.end))],
        "seconds": timeline.step_seconds,
        "compute": timeline.compute_seconds,
        "communication": sum(timeline.communication_seconds.values()),
        "exposed": timeline.exposed_seconds,
        "idle": timeline.idle_seconds,
    }


#
# The machine
#


def machine(setup: None, name: str) -> dict[str, Any]:
    """Return versions, chips and settings, each queried separately in case the driver fails at one of them."""
    import torch

    def run(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    def chip(index: int) -> str:
        found = torch.cuda.get_device_properties(index)
        return (
            f"{found.name}, compute capability {found.major}.{found.minor}, {found.total_memory / 2**30:.1f} GiB, "
            f"{found.multi_processor_count} multiprocessors"
        )

    def peers() -> str:
        count = torch.cuda.device_count()
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        reached = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        return f"{reached} of {len(pairs)} pairs of GPUs"

    def executors() -> str:
        import thunder_fsdp_sched  # before thunder  # noqa: F401

        import thunder

        return ", ".join(e.name for e in (*thunder.get_default_executors(), *thunder.get_always_executors()))

    switches = ("CUDA_", "NCCL_", "TORCH_NCCL", "TORCH_CUDA", "TORCH_SYMM", "PYTORCH_CUDA", "PYTORCH_ALLOC", "CUBLAS_")
    asked: dict[str, Callable[[], Any]] = {
        "thunder_fsdp_sched": lambda: importlib.metadata.version("thunder_fsdp_sched"),
        "commit": lambda: run("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "torch": lambda: f"{torch.__version__} (CUDA {torch.version.cuda}, HIP {torch.version.hip})",
        "lightning-thunder": lambda: importlib.metadata.version("lightning-thunder"),
        "python": platform.python_version,
        "system": lambda: f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores",
        "driver": lambda: run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0],
        "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())),
        "cuDNN": torch.backends.cudnn.version,
        "Triton": lambda: importlib.metadata.version("triton"),
        "executors": executors,
        "GPUs": lambda: [f"{i}: {chip(i)}" for i in range(torch.cuda.device_count())],
        "peer access": peers,
        "environment": lambda: {k: v for k, v in sorted(os.environ.items()) if k.startswith(switches)},
    }
    found = {}
    for key, ask in asked.items():
        try:
            found[key] = ask()
        except Exception as error:
            found[key] = f"unknown ({describe_error(error, lines=1).splitlines()[0]})"
    return {"machine": found}


WORK: dict[str, Callable[[Any, str], dict[str, Any]]] = {"machine": machine, "profile": profile, "train": train}
