"""Measure the cost of asynchronous saves: the delay of a step, and the steps while files are written.

    python benchmarks/checkpoints.py           # each step leaves its core for 0.4 s, as it does while a GPU computes
    python benchmarks/checkpoints.py --python  # in these 0.4 s, Python runs and holds the interpreter lock
    python benchmarks/checkpoints.py --real    # steps that need both cores

Two ranks train linear layers with AdamW, ours with ``save_checkpoint_async`` and FSDP2 with ``dcp.async_save``. All
systems take turns: in every round, each copies its state once, runs undisturbed steps, saves, and runs steps until the
checkpoint is complete. Seconds are those of the slowest rank.

* Memcpy: the time to copy a rank's state into host memory that has been used before.
* Delay: the time until the call that saves returns, divided by the memcpy, and the same in processor seconds of the calling
  thread, which others on the machine do not change; of the first save, too, which allocates memory.
* Beside: the median step while files are written, divided by the median undisturbed step.
* Complete: the seconds from the call to the end of the save.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs

import harness
import thunder
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

STEPS = 5
"""Undisturbed steps in a round."""

COLUMNS: harness.Columns = {
    "memcpy s": ("memcpy", ".3f"),
    "delay": ("delay", ".2f"),
    "delay, processor": ("processor", ".2f"),
    "first delay": ("first", ".2f"),
    "step s": ("step", ".3f"),
    "beside": ("beside", ".2f"),
    "complete s": ("complete", ".1f"),
}


def main() -> None:
    parser = harness.rank_options(__doc__, compute=[0.4], blocks=12, width=2560, length=16, rounds=5, no_limit=True)
    parser.add_argument("--python", action="store_true", help="run Python for that long, in place of sleeping")
    harness.run_on_ranks(__file__, parser.parse_args(), measure)


def measure(arguments: argparse.Namespace) -> None:
    shared = [tempfile.mkdtemp(prefix="checkpoints-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    target = Path(shared[0]) / "checkpoint"
    group, seconds = dist.new_group(), arguments.compute[0]
    wait = partial(time.sleep, seconds)
    if arguments.python:
        wait = partial(_loop, int(10**7 * seconds / _seconds(partial(_loop, 10**7))[1]))
    of_fsdp2 = partial(_async_save, process_group=group)
    saves: dict[str, Callable[..., Any]] = {
        f"ours, {writer}": partial(tfs.save_checkpoint_async, writer=writer) for writer in ("thread", "process")
    }
    saves["FSDP2, async_save"] = of_fsdp2
    stager = DefaultStager(StagingOptions(False, False, False, False))
    saves["FSDP2, async_save, kept stager"] = partial(of_fsdp2, async_stager=stager)
    shared_memory = DefaultStager(StagingOptions(False, True, False, False))
    in_process = {"async_stager": shared_memory, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    saves["FSDP2, async_save, process"] = partial(of_fsdp2, **in_process)
    chosen = harness.matching(saves, arguments.only)
    systems = {n: _Run(partial(s, folder=target), arguments, wait, "FSDP2" in n) for n, s in chosen.items()}
    for round_ in range(arguments.rounds + 1):
        harness.say(f"round {round_} of {arguments.rounds}")
        for run in systems.values():
            if dist.get_rank() == 0:
                shutil.rmtree(target, ignore_errors=True)
            run.round()
    figures = {name: run.figures() for name, run in systems.items()}
    if dist.get_rank() == 0:
        shutil.rmtree(shared[0])
        state = next(iter(systems.values())).nbytes / 1e6
        how = "Python" if arguments.python else "sleep"
        print(f"{state:.0f} MB of state on each of {arguments.ranks} ranks, {seconds} s of {how} in each step\n")
        print(harness.table(figures, COLUMNS))
        harness.save(arguments, "checkpoints", figures=figures)


def _async_save(model: Any, folder: Path, optimizers: Any, **options: Any) -> Any:
    values, state = get_state_dict(model, optimizers)
    saving = dcp.async_save({"model": values, "optim": state}, checkpoint_id=folder, **options)
    return getattr(saving, "upload_completion", saving)


class _Run:
    """A model, how it is saved, and what was measured in each round."""

    def __init__(
        self, save: Callable[..., Any], arguments: argparse.Namespace, wait: Callable[[], None], fsdp2: bool
    ) -> None:
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            *(torch.nn.Linear(arguments.width, arguments.width) for _ in range(arguments.blocks))
        )
        for part in (*module, module) if fsdp2 else ():
            fully_shard(part)
        self.model = module if fsdp2 else thunder.jit(module, transforms=[tfs.fsdp()])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.save, self.wait = save, wait
        self.inputs = torch.ones(arguments.length, arguments.width)
        names = ("memcpy", "call", "processor_memcpy", "processor_call", "step", "beside", "complete")
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.steps(2)
        state = tree_leaves([*self.model.parameters(), list(self.optimizer.state.values())])
        self.state = [getattr(value, "_local_tensor", value) for value in state]
        self.nbytes = sum(value.nbytes for value in self.state)

    def steps(self, count: int, saving: Any = None) -> float:
        """Return the median seconds of steps; with ``saving``, of those until it is done on all ranks."""
        seconds = []
        while len(seconds) < count:
            started = time.perf_counter()
            self.model(self.inputs).sum().backward()
            self.wait()
            self.optimizer.step()
            self.optimizer.zero_grad()
            done = torch.tensor(saving is not None and saving.done(), dtype=torch.int32)
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            seconds.append(time.perf_counter() - started)
            if done:
                break
        return statistics.median(seconds)

    def round(self) -> None:
        copies = [torch.zeros_like(value) for value in self.state]
        copy = _seconds(partial(torch._foreach_copy_, copies, self.state))
        del copies
        dist.barrier()
        step = self.steps(STEPS)
        dist.barrier()
        called, savings = time.perf_counter(), list[Any]()
        call = _seconds(lambda: savings.append(self.save(self.model, optimizers=self.optimizer)))
        [saving] = savings
        beside = self.steps(10_000, saving)
        saving.result()
        complete = time.perf_counter() - called
        values = copy[0], call[0], copy[1], call[1], step, beside, complete
        measured = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(measured, op=dist.ReduceOp.MAX)
        for of_name, value in zip(self.seconds.values(), measured.tolist(), strict=True):
            of_name.append(value)

    def figures(self) -> dict[str, float]:
        """Return the medians over all rounds but the first, and what only the first shows."""
        later = {name: of_name[1:] for name, of_name in self.seconds.items()}
        medians = {name: statistics.median(later[name]) for name in ("memcpy", "step", "complete")}
        first = self.seconds["call"][0] / self.seconds["memcpy"][0]
        delay = harness.ratio(later["call"], later["memcpy"])
        beside = harness.ratio(later["beside"], later["step"])
        processor = harness.ratio(later["processor_call"], later["processor_memcpy"])
        return {**medians, "delay": delay, "processor": processor, "beside": beside, "first": first}


def _loop(count: int) -> None:
    for _ in range(count):
        pass


def _seconds(do: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a function takes, and the processor seconds of this thread."""
    started, used = time.perf_counter(), time.thread_time()
    do()
    return time.perf_counter() - started, time.thread_time() - used


if __name__ == "__main__":
    main()
