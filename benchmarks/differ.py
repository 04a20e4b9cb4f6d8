"""Train models whose ranks differ with FSDP2, DDP and this package: what hangs, raises, or gives wrong numbers, and when.

    python benchmarks/differ.py                                  # all systems and scenarios on 2 gloo ranks, some minutes
    python benchmarks/differ.py --only 'towers|counts' --systems ours

The scenarios are the cases of ``tests/differ/differing_models.py``, in float64 with AdamW. Each runs in processes of its
own, and ends as programs of users do: all ranks gather the parameters, and meet in a barrier. The systems:

* FSDP2: ``fully_shard`` of each block and of the model; "unused" adds ``set_reduce_scatter_unused_params(True)``.
* DDP: "unused" adds ``find_unused_parameters=True``; "Join" adds ``with model.join()`` to that.
* ours: default options; "may differ" adds ``ranks_may_differ=True``, ``batches`` and ``without_batch``.

A cell says what happened, and the seconds from the first step until the slowest rank knew it:

* right: all parameters and losses of all ranks equal those of the unsharded model, up to ``TOLERANCE``.
* wrong: all ranks have ended without an error, with other parameters or losses.
* raises: a rank raised an error, and no rank had to wait for the group's timeout.
* dies: gloo aborted a process, because ranks had issued collectives of different sizes.
* hangs: a rank waited until the group's timeout, or made no progress for ``LIMIT`` seconds and was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs  # before thunder

import thunder
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/differ"))
from differing_models import CASES, Block, Case, optimizer_of

TOLERANCE = 1e-6
"""Largest difference of a parameter or a loss that counts as right."""

LIMIT = 60.0
"""Seconds without progress after which ranks are killed."""

TIMED_OUT = "Timed out waiting|Application timeout|did not come"
"""Matches errors that gloo, or a round of agreement, raises by the group's timeout."""

SEVERITY = ("hangs", "dies", "raises", "wrong", "right")
"""Outcomes of a rank. The first one that some rank has counts for all."""

SCENARIOS = {
    "alike": "all ranks alike",
    "branches": "another branch of the model",
    "layerdrop": "LayerDrop",
    "experts": "experts without tokens (top-1 routing)",
    "towers": "images on some ranks",
    "order": "another order of the blocks",
    "counts": "5 and 8 batches",
    "windows": "5 and 8 batches, windows of 2",
    "evaluation": "2 and 4 batches, evaluation",
}


def fsdp2(model: nn.Module, *, unused: bool = False) -> nn.Module:
    for module in model.modules():
        if isinstance(module, (Block, nn.Sequential)):
            fully_shard(module)
    fully_shard(model)
    if unused:
        model.set_reduce_scatter_unused_params(True)
    return model


def ddp(model: nn.Module, *, unused: bool = False) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=unused)


def ours(model: nn.Module, **options: Any) -> nn.Module:
    return thunder.jit(model, transforms=[tfs.fsdp(**options)])


def all_batches(model: nn.Module, loader: Iterable[Any]) -> Iterable[Any]:
    return loader


@dataclass(frozen=True)
class System:
    """A way to train on several ranks.

    Attributes:
        wrap: returns what trains in place of a model.
        around: returns the context of the training loop.
        batches: returns the batches of this rank, or ``None`` in place of one.
    """

    wrap: Callable[[nn.Module], nn.Module]
    around: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] = field(
        default=lambda model: contextlib.nullcontext()
    )
    batches: Callable[[nn.Module, Iterable[Any]], Iterable[Any]] = all_batches


SYSTEMS = {
    "FSDP2": System(fsdp2),
    "FSDP2, unused": System(partial(fsdp2, unused=True)),
    "DDP": System(ddp),
    "DDP, unused": System(partial(ddp, unused=True)),
    "DDP, Join": System(partial(ddp, unused=True), around=lambda model: model.join()),
    "ours": System(ours),
    "ours, may differ": System(
        partial(ours, ranks_may_differ=True), batches=lambda model, loader: tfs.batches(model, loader)
    ),
}


@contextlib.contextmanager
def micro_batch(model: nn.Module, *, last: bool) -> Any:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    with contextlib.nullcontext() if last or isinstance(model, FSDPModule) else model.no_sync():
        yield


def train(
    system: System, case: Case, rank: int, progress: Callable[[], None]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run all batches of a rank; return the whole parameters, and its losses."""
    model = system.wrap(case.model())
    optimizer = optimizer_of(model)
    losses = []
    with system.around(model), torch.set_grad_enabled(case.trains):
        for number, batch in enumerate(system.batches(model, case.batches(rank))):
            last = case.ends_step(number)
            with micro_batch(model, last=last):
                loss = tfs.without_batch(model) if batch is None else case.call(model, batch)
                if batch is not None:
                    losses.append(loss.detach())
                if case.trains:
                    loss.backward()
            if case.trains and last:
                optimizer.step()
                optimizer.zero_grad()
            progress()
    with torch.no_grad():
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    dist.barrier()
    return whole, losses


@dataclass
class Outcome:
    """The outcome of a rank, and its seconds. A rank that writes none counts as dead."""

    what: str = "dies"
    text: str = "the process was aborted"
    seconds: float = 0.0

    def take(self, seconds: float, *end: str) -> None:
        self.seconds = seconds
        if end:
            self.what, self.text = end


def work(name: str, scenario: str, rank: int, store: str, timeout: float, reports: Connection) -> None:
    """Run a cell on a rank. Send seconds after each batch, and at the end with what happened and a text."""
    torch.set_num_threads(1)
    case, ranks = CASES[scenario], {"rank": rank, "world_size": 2}
    unsharded = case.unsharded(2)
    dist.init_process_group("gloo", init_method=f"file://{store}", timeout=timedelta(seconds=timeout), **ranks)
    started = time.perf_counter()

    def report(*end: str) -> None:
        reports.send((time.perf_counter() - started, *end))

    report()
    try:
        found = train(SYSTEMS[name], case, rank, report)
        expected = list(unsharded.parameters.values()), torch.tensor(unsharded.losses[rank], dtype=torch.float64)
        pairs = [*zip(found[0], expected[0], strict=True), *zip(found[1], expected[1], strict=True)]
        worst = max((a - b).abs().max().item() for a, b in pairs)
        report(
            "right" if worst <= TOLERANCE else "wrong",
            f"differs by {worst:.1g}, {time.process_time():.1f} processor seconds",
        )
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        report("hangs" if re.search(TIMED_OUT, text) else "raises", " ".join(text.split()))


def cell(name: str, scenario: str, timeout: float) -> tuple[str, float, str]:
    """Run a scenario on 2 ranks; return what happened, seconds, and a text."""
    fork = multiprocessing.get_context("fork")  # the modules are imported already
    outcomes, pending, processes = [Outcome(), Outcome()], {}, []
    with tempfile.TemporaryDirectory() as folder:
        for rank, outcome in enumerate(outcomes):
            receiver, sender = fork.Pipe(duplex=False)
            processes.append(fork.Process(target=work, args=(name, scenario, rank, f"{folder}/store", timeout, sender)))
            processes[-1].start()
            sender.close()
            pending[receiver] = outcome
        while pending and (ready := wait(list(pending), LIMIT)):
            for receiver in ready:
                try:
                    pending[receiver].take(*receiver.recv())
                except EOFError:
                    pending.pop(receiver)
        for process in processes:
            process.kill()
            process.join()
    for outcome in pending.values():
        outcome.take(outcome.seconds + LIMIT, "hangs", "killed")
    worst = min(outcomes, key=lambda outcome: SEVERITY.index(outcome.what))
    return worst.what, max(outcome.seconds for outcome in outcomes), worst.text


def table(cells: Mapping[tuple[str, str], tuple[str, float, str]]) -> str:
    """Return a row for each scenario, a column for each system."""
    systems, scenarios = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    lines = [f"| | {' | '.join(systems)} |", "|---" * (len(systems) + 1) + "|"]
    for scenario in scenarios:
        found = (cells[system, scenario] for system in systems)
        lines.append(f"| {SCENARIOS[scenario]} | {' | '.join(f'{what}, {s:.1f}' for what, s, _ in found)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds of the group's timeout")
    parser.add_argument(
        "--only", metavar="REGEX", default="", help=f"only matching scenarios of {', '.join(SCENARIOS)}"
    )
    parser.add_argument("--systems", metavar="REGEX", default="", help="only matching systems")
    arguments = parser.parse_args()
    cells = {}
    for name in SYSTEMS:
        for scenario in SCENARIOS:
            if re.search(arguments.systems, name) and re.search(arguments.only, scenario):
                cells[name, scenario] = cell(name, scenario, arguments.timeout)
                what, seconds, text = cells[name, scenario]
                print(f"{name}: {scenario} {what} after {seconds:.1f} s: {text}", file=sys.stderr, flush=True)
    print(table(cells))


if __name__ == "__main__":
    main()
