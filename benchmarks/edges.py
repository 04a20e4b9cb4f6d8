"""Compute on a virtual clock how well steps with an optimizer hide communication, with and without ``overlap_step``.

    python benchmarks/edges.py                                   # 8 ranks, 16 blocks, an optimizer of 5 % of the step
    python benchmarks/edges.py --blocks 8 --communication 0.6 1

The demo's GPT is compiled as rank 0 of ``--ranks``. Its traces are simulated with the simulator of ``tfs.planning``, step
after step, with an optimizer in between, of whose time each bucket has a share by its bytes. "Communication" is that of a
step, as a share of compute without the optimizer. The figures are the time of a step divided by the longer of (compute +
optimizer) and communication; 1 is perfect overlap. Nothing is measured, so they are the same in each run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from thunder_fsdp_sched import CompiledTraces
from thunder_fsdp_sched.extras.planning.cost import AnalyticCost
from thunder_fsdp_sched.extras.planning.simulate import _Streams
from thunder_fsdp_sched.extras.planning.timeline import Interval
from thunder_fsdp_sched.extras.step_memory.rows import StepRows
from thunder_fsdp_sched.extras.testing import compile_on_fake_ranks
from thunder_fsdp_sched.extras.training.overlap_step import StepPiece, in_order
from thunder_fsdp_sched.ir.effects import Effects, Issue, Wait, effects
from thunder_fsdp_sched.ir.inspection import is_statement
from thunder_fsdp_sched.runtime.bucket import Bucket

import harness
import torch
from byte_gpt import GPT
from thunder.core.trace import TraceCtx

SYSTEMS = ("without overlap_step", "overlap_step", "gather_early=True")
STEPS = 4


class Cost(AnalyticCost):
    """The costs of a cluster whose links are slower by a factor."""

    factor = 1.0

    def collective_seconds(self, issue: Issue) -> float:
        return self.factor * super().collective_seconds(issue)


class Steps(_Streams):
    """Steps of forward, backward and optimizer, one after the other.

    Args:
        system: one of :data:`SYSTEMS`.
        optimizer: the seconds of the optimizer's step.
    """

    def __init__(self, compiled: CompiledTraces, cost: Cost, system: str, optimizer: float) -> None:
        super().__init__(cost, False)
        assert compiled.forward is not None and compiled.backward is not None
        self.rows = StepRows(compiled.forward, compiled.backward)
        self.optimizer = optimizer
        self.is_late, self.is_early = system != SYSTEMS[0], system == SYSTEMS[2]
        forward, backward = _statements(compiled.forward), _statements(compiled.backward)
        last = max(position for position, e in enumerate(backward) if e.issues is not None and not e.issues.resident)
        self.last_waits = {e.waits.future for e in backward[last:] if e.waits is not None and e.issues is None}
        first_wait = next(position for position, e in enumerate(forward) if e.unshards)
        self.first = [e.issues for e in forward[:first_wait] if e.issues is not None]
        self.nbytes = {e.issues.bucket: e.issues.nbytes for e in backward if e.issues is not None and e.collects}
        self.late: list[Interval] = []
        self.early: dict[str, Interval | None] = {}

    def step(self) -> None:
        for row in self.rows.rows:
            self.run(row, row.position)
        self.early.clear()
        late = {flight.bucket: number for number, flight in enumerate(self.late)}
        gathers = list(self.first) if self.is_early else []
        pieces = [StepPiece(late.get(bucket.spec.name), bucket) for bucket in self.nbytes]
        written: list[Bucket | None] = []
        for part in in_order(pieces, {issue.bucket for issue in gathers}):
            for number in (piece.late for piece in part if piece.late is not None):
                self.compute = max(self.compute, self.late[number].end)
            self._update([piece.bucket for piece in part])
            written += [piece.bucket for piece in part]
            while gathers and gathers[0].bucket in written:
                issue = gathers.pop(0)
                self._issue(issue, ("", 0, 0))
                self.early[issue.future] = self.flights[issue.future]
        self.late.clear()

    def _update(self, buckets: Sequence[Bucket | None]) -> None:
        seconds = self.optimizer * sum(self.nbytes[bucket] for bucket in buckets) / sum(self.nbytes.values())
        self.compute = max(self.host, self.compute) + seconds
        self.compute_seconds += seconds
        if self.cost.synchronous:
            self.host = self.compute

    def _issue(self, issue: Issue, at: Any) -> float:
        if (flight := self.early.get(issue.future)) is None:
            return super()._issue(issue, at)
        self.flights[issue.future] = flight
        return max(self.host, self.compute)

    def _wait(self, wait: Wait, at: Any) -> Interval | None:
        if self.is_late and wait.future in self.last_waits:
            flight = self.flights[wait.future]
            assert flight is not None
            self.late.append(flight)
            return None
        return super()._wait(wait, at)


def _statements(trace: TraceCtx) -> list[Effects]:
    return [effects(bsym) for bsym in trace.bound_symbols if is_statement(bsym)]


def seconds_of(compiled: CompiledTraces, cost: Cost, system: str, optimizer: float) -> tuple[float, float, float]:
    """Return the seconds of a step among others, of its compute with the optimizer, and of its communication."""
    steps = Steps(compiled, cost, system, optimizer)
    totals = []
    for _ in range(STEPS):
        steps.step()
        [communication] = steps.communication_seconds.values()
        totals.append((max(steps.compute, steps.host), steps.compute_seconds, communication))
    step, compute, communication = (after - before for before, after in zip(*totals[-2:], strict=True))
    return step, compute, communication


def main(arguments: argparse.Namespace) -> None:
    def make() -> tuple[Any, Any]:
        with torch.device("meta"):
            model = GPT(blocks=arguments.blocks, width=256, heads=4, length=64)
            tokens = torch.zeros(8, 64, dtype=torch.long)
        return model, (tokens, tokens)

    cost = Cost("cpu-2core")
    figures: dict[str, dict[str, float]] = {}
    for strategy in ("zero2", "zero3"):
        [compiled] = compile_on_fake_ranks(make, arguments.ranks, sharding_strategy=strategy)
        for system in SYSTEMS:
            row = figures[f"{strategy}, {system}"] = {}
            for share in arguments.communication:
                cost.factor = 1.0
                _, compute, communication = seconds_of(compiled, cost, SYSTEMS[0], 0.0)
                cost.factor = share * compute / communication
                step, _, _ = seconds_of(compiled, cost, SYSTEMS[0], 0.0)
                step, *limits = seconds_of(compiled, cost, system, arguments.optimizer * step)
                row[str(share)] = step / max(limits)
    columns: harness.Columns = {f"communication {s}": (str(s), ".3f") for s in arguments.communication}
    print(
        f"{arguments.ranks} ranks, {arguments.blocks} blocks, an optimizer of {arguments.optimizer:.0%} of the step\n"
    )
    print(harness.table(figures, columns))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--optimizer", type=float, default=0.05, help="its share of the time of a step without it")
    parser.add_argument("--communication", type=float, nargs="+", default=[0.5, 0.7, 0.9, 1.0, 1.2])
    main(parser.parse_args())
