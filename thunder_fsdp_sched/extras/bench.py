"""Steps of a user's own model, measured beside PyTorch's FSDP2 and DDP.

[Note: A system that fails]
Each system communicates over a process group of its own. Over another one, the ranks agree on the outcome of each of
its calls. A rank on which it fails leaves the system's group first, so that ranks that wait there fail, too. With NCCL
the host waits for the device only after the ranks have agreed. Then all ranks drop the system, and measure the others.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import truediv
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from ..errors import coded_error
from ..private_distributed import leave
from ..sizes import human_bytes
from .bench_systems import SYSTEMS, Setup, bytes_of, loss_of
from .reports.exposed import exposed_communication
from .reports.texts import milliseconds, plain_table

PROFILED = 3
"""The number of steps of each system that are profiled after the rounds on GPUs, for their exposed communication."""

TOLERANCE, LOW_TOLERANCE = 1e-3, 2e-2
"""Tolerances of losses, relative or absolute: for models in float32 or float64, and in lower precision."""

Seconds = Callable[[], float]
"""A function that waits for the device and returns a duration."""


class Disagreement(Exception):
    """The systems do not compute the same."""


@dataclass
class System:
    """A system and its measurements, on the rank that needs most.

    Attributes:
        error: the reason of its failure; empty if it has not failed.
        loss: the loss of the last step on this rank.
        first_seconds: from applying it to the module until the first step has finished.
        seconds: seconds of a step, in each round.
        exposed_seconds: the exposed communication of each profiled step.
        peak_bytes: memory at the peak of a step: on CUDA the allocator's; on a CPU that of our traces, as predicted.
        sent_bytes: bytes that a rank sends in a step by our schedule.
    """

    name: str
    setup: Setup
    control: Any
    error: str = ""
    loss: torch.Tensor | None = None
    first_seconds: float = math.nan
    seconds: list[float] = field(default_factory=list)
    exposed_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    sent_bytes: int | None = None
    _group: Any = None
    _state: Any = None

    def start(self) -> None:
        """Apply the system to a new module and take two steps: the first one compiles, the second one is like the others."""
        gc.collect()
        base = torch.cuda.memory_allocated() if (on_gpu := self.setup.device.type == "cuda") else 0
        self._group = dist.new_group()
        gather(None, self.control)  # a rank that fails at once would close connections that others are still making
        self.first_seconds = sum(self.run(self._first_step))
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if self.run(self.steps) and on_gpu:
            self.peak_bytes = max(gather(torch.cuda.max_memory_allocated() - base, self.control))

    def run(self, work: Callable[[], Seconds]) -> list[float]:
        """Return the largest result of all ranks in a list, which is empty if the system fails on any rank, or has failed.

        See [Note: A system that fails].
        """
        if self.error:
            return []
        failure = None
        try:
            result = work()
        except Exception as error:
            is_explained = isinstance(error, ValueError)
            text = ("" if is_explained else f"{type(error).__name__}: ") + " ".join(str(error).split())[:400]
            failure = time.time(), dist.get_rank(), text, "" if is_explained else traceback.format_exc()
        if failure is not None:
            self._drop()
        if failures := [f for f in gather(failure, self.control) if f is not None]:
            self._drop()
            _, rank, text, stack = min(failures)  # others may have failed because this rank has
            if rank == dist.get_rank():
                print(stack, end="", file=sys.stderr)
            on_all = [f[2] for f in failures] == [text] * dist.get_world_size()
            self.error = text if on_all else f"rank {rank}: {text}"
            return []
        return [max(gather(result(), self.control))]

    def steps(self, count: int = 1) -> Seconds:
        """Issue steps."""
        module, optimizer, args, kwargs = self._state
        start = _now(self.setup.device)
        for _ in range(count):
            loss = loss_of(module(*args, **kwargs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        self.loss = loss.detach()
        return partial(_between, start, _now(self.setup.device))

    def profiled(self) -> Seconds:
        """Take a step under torch's profiler; return its exposed communication, or NaN if nothing was recorded."""
        with torch.profiler.profile() as profiler:
            self.steps()()
        try:
            [exposed] = exposed_communication(profiler).by_rank.values()
        except ValueError:
            exposed = math.nan
        return lambda: exposed

    def _first_step(self) -> Seconds:
        module, args, kwargs = self.setup.make()
        start = _now(self.setup.device)
        applied, transform = SYSTEMS[self.name](module, self._group, self.setup)
        trained = [p for p in applied.parameters() if p.requires_grad]
        self._state = applied, torch.optim.AdamW(trained, lr=1e-3), args, kwargs
        self.steps()
        end = _now(self.setup.device)
        if transform is not None:
            self.sent_bytes, predicted = bytes_of(transform.compiled[-1])
            self.peak_bytes = predicted if self.setup.device.type == "cpu" else None
        return partial(_between, start, end)

    def _drop(self) -> None:
        self._state, group, self._group = None, self._group, None
        gc.collect()
        if group is not None:
            leave(group, self.setup.device)


def _now(device: torch.device) -> Any:
    """Return the time; on a GPU an event of its current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def gather(value: Any, control: Any) -> list[Any]:
    """Return the values of all ranks, any objects."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=control)
    return values


def measure(
    names: Sequence[str], setup: Setup, *, rounds: int, steps: int, show: Callable[[str], object]
) -> list[System]:
    """Measure systems in turns, on all ranks of the default process group, which get the same figures.

    Args:
        steps: number of steps that a system takes in each round.
        show: a function that is called with a description of each phase.

    Raises:
        Disagreement: the losses of the systems differ after the first step.
        ValueError: there is no such factory, or it returns something else, on some rank.
    """
    control = dist.new_group(backend="gloo")
    show("making the model")
    made = System("", setup, control)
    made.run(lambda: partial(len, setup.make()))
    if made.error:
        raise ValueError(made.error)
    systems = [System(name, setup, control) for name in names]
    for system in systems:
        show(f"{system.name}: first step")
        system.start()
    _check_losses([system for system in systems if not system.error], setup, control)
    gc.collect()
    gc.freeze()  # a full collection takes up to a second with Thunder's traces
    for turn in range(rounds + PROFILED * (setup.device.type == "cuda")):
        show(f"round {turn + 1} of {rounds}" if turn < rounds else "profiling")
        for offset in range(len(systems)):
            system = systems[(turn * (len(systems) // 2 + 1) + offset) % len(systems)]
            if turn < rounds:
                system.seconds += [seconds / steps for seconds in system.run(partial(system.steps, steps))]
            else:
                system.exposed_seconds += system.run(system.profiled)
    gc.unfreeze()
    return systems


def _check_losses(systems: Sequence[System], setup: Setup, control: Any) -> None:
    """Raise an error on all ranks if the losses of systems differ on some rank."""
    by_rank = gather({system.name: float(system.loss) for system in systems if system.loss is not None}, control)
    parameters = systems[0]._state[0].parameters() if systems else ()
    is_low = setup.policy is not None or any(p.dtype.itemsize < 4 for p in parameters)
    tolerance = LOW_TOLERANCE if is_low else TOLERANCE
    for rank, losses in enumerate(by_rank):
        middle = statistics.median_low(losses.values() or [0.0])
        differ = [n for n, x in losses.items() if not math.isclose(x, middle, rel_tol=tolerance, abs_tol=tolerance)]
        if differ:
            shown = ", ".join(f"{name} {loss:.6g}" for name, loss in losses.items())
            raise coded_error(
                Disagreement,
                "bench.systems-differ",
                rank=rank,
                losses=shown,
                tolerance=tolerance,
                systems=", ".join(differ),
            )


def bench_table(systems: Sequence[System], model: str, rounds: int, steps: int) -> Table:
    """Return the table of measurements."""
    setup = systems[0].setup
    on_gpu, threads = setup.device.type == "cuda", torch.get_num_threads()
    device = (
        torch.cuda.get_device_name(setup.device) if on_gpu else f"CPU, {threads} thread{'s' * (threads > 1)} a rank"
    )
    title = f"{model}: torch {torch.__version__}, {device}, {dist.get_world_size()} ranks, {dist.get_backend()}"
    reference = next((s for s in systems if s.name.startswith("FSDP2") and not s.error), None)
    of_reference = f"of {reference.name}" if reference else "of FSDP2"
    columns = ["", "step ms", of_reference, *["exposed ms"] * on_gpu, "peak memory", "sent", "first s"]
    table = plain_table(title, columns, ())
    for column in table.columns:  # in a narrow terminal, headers continue on the next line
        column.no_wrap = column is table.columns[0]
    table.columns[0].min_width = max(len(system.name) for system in systems)
    if any(system.error for system in systems):
        table.add_column("failed", overflow="fold")
    for system in systems:
        if system.error:
            table.add_row(system.name, *[""] * (len(columns) - 1), system.error)
            continue
        [step] = milliseconds(statistics.median(system.seconds))
        recorded = [seconds for seconds in system.exposed_seconds if not math.isnan(seconds)]
        exposed = milliseconds(statistics.median(recorded)) if recorded else [""] * on_gpu
        others = reference.seconds if reference else []
        ratio = [f"{statistics.median(map(truediv, system.seconds, others)):.2f}"] if others else [""]
        sizes = ["" if n is None else human_bytes(n) for n in (system.peak_bytes, system.sent_bytes)]
        table.add_row(system.name, step, *ratio, *exposed, *sizes, f"{system.first_seconds:.1f}")
    what = (
        f" Exposed: the time in which collectives ran and compute did not, median of {PROFILED} profiled steps."
        * on_gpu
    )
    peak = "the allocator's" if on_gpu else "predicted from our traces; unknown for other systems"
    turns = f"{rounds} round{'s' * (rounds > 1)} of {steps} step{'s' * (steps > 1)}"
    table.caption = (
        f"Medians of {turns} (forward, backward, AdamW) on the slowest rank.{what} Peak memory: {peak}. Sent: bytes that a "
        f"rank sends by our schedule; not counted for other systems. First: seconds until the first step had finished."
    )
    return table
