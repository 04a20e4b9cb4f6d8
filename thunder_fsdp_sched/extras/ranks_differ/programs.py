"""The programs of ranks that differ, their exchange, and the resulting decision of each rank.

[Note: Ranks that differ]
A *program* is the communication of a trace: its issues and waits, in order. If all ranks run the same program, they run
their own traces, as without ``ranks_may_differ``. Otherwise each runs a *merged trace*: its own computation, and the
collectives of all programs in one order (see [Note: The merged order] in ``merging``). It takes part in the gathers of
other ranks without reading the parameters, and in their reductions with zeros.

The round at the start of a trace shows whether the ranks differ. A token contains the *kind* of the trace and the
history of the model, which must be the same (forward or backward, with gradients or not, ``no_sync``, training or not;
which optimizers have stepped and how often, what an exception has left out). It also contains the digest of the program
and a hash of the rank's *state*, which may differ even if programs do not. The digests and states of all ranks
determine an :class:`Outcome`. Every rank keeps it, so a known combination costs one look-up. For a new one the ranks
exchange programs and states, in two all-gathers, unless each has sent its program before and all states are empty.

The programs that were exchanged for one kind form a *registry*, which is the same on all ranks. A merged trace contains
the collectives of all of them. Each run decides which of these are really issued (:attr:`Outcome.active`), so k
programs cause at most k merged traces of each trace, for 2^k combinations. A token says whether its rank has the merged
trace for the latest registry. Unless all ranks have it, they meet after building the missing ones, so that a failure of
one rank raises an error on all.

A rank without a batch has an empty program, and runs a trace that only serves others: see ``batches``.

[Note: Gradients of ranks that differ]
A parameter has a gradient on all ranks if the backward of some rank gives it one, or if some rank has accumulated one under
``no_sync``. On ranks whose own backward does not return it, its rows are added to ``.grad`` at the end of backward
(``AccumulationOfAll.expected``, ``Accumulation.deferred``). The sum is divided by the number of all ranks that share
it, as in ``DistributedDataParallel(find_unused_parameters=True)``.

If there are unreduced gradients of a bucket that no program reduces, all ranks that share the bucket reduce them at the
end of backward. If a rank has lost a kept bucket, all ranks that share it gather it again before the trace starts.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from thunder.core.symbol import BoundSymbol
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...ir.inspection import is_library, source_of
from ...ir.statements import Statement
from ...ranks.compare_programs import do_groups_match
from ...ranks.control import Control, hash64
from ...ranks.deadlock import find_fault
from ...ranks.messages import Action
from ...runtime.bucket import Bucket
from ...runtime.row_dtensor import RowDTensor
from .follow_order import steps_at
from .merging import GATHER, REDUCE, BucketKey, Key, Step, merge

MOST_PROGRAMS = 256
"""The number of programs of one kind at which all ranks forget them, and exchange again those that they run."""


class Program(NamedTuple):
    """The collectives of a trace: its issues and waits, in order.

    Attributes:
        steps: its issues and waits.
        marks: for each issue, the number of its process group, in the order of their first use, and its marks.
        given: for each reduction the indices of the parameters that have gradients.
        idle: names of the buckets of which it reduces only unreduced gradients of ``no_sync``, and none of its own.
        communicates: whether operators of other packages communicate.
        sources: the first read of each gathered bucket: a line of user code or an operator; not part of the digest.
    """

    steps: tuple[Step, ...] = ()
    marks: tuple[tuple[int, str], ...] = ()
    given: tuple[tuple[Key, tuple[int, ...]], ...] = ()
    idle: tuple[str, ...] = ()
    communicates: bool = False
    sources: tuple[tuple[Key, str], ...] = ()

    @property
    def digest(self) -> int:
        """A hash, the same on all ranks that run it; process groups count by their order, not by their names."""
        return hash64(*self[:-1])

    @property
    def issues(self) -> list[Key]:
        """Its collectives, in order."""
        return [step.key for step in self.steps if not step.waits]

    @property
    def reduced(self) -> dict[str, frozenset[int]]:
        """For each bucket, by name, the indices of the parameters whose gradients the program reduces."""
        found: dict[str, frozenset[int]] = {}
        for (_, (name, *_), _), indices in self.given:
            found[name] = found.get(name, frozenset()).union(indices)
        return found

    def actions(self, groups: Sequence[tuple[str, tuple[int, ...]]]) -> list[Action]:
        """Return its issues and waits for the proof of ``ranks.deadlock``, with the process groups of a rank."""
        numbers = {key: number for number, key in enumerate(self.issues)}
        at = [(step, numbers[step.key]) for step in self.steps]
        return [Action(str(step.key), *groups[self.marks[n][0]], step.waits, n) for step, n in at]


def program_of(statements: Sequence[Statement]) -> tuple[Program, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Return the program of a scheduled trace, and the name and members of each process group that it uses."""
    steps, marks, given, sources = [], [], [], []
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    for statement, step in steps_at(statements):
        e, key = statement.effects, step.key
        steps.append(step)
        if step.waits:
            if statement.first_read is not None and e.unshards:
                sources.append((key, _place_of(statements[statement.first_read].bsym)))
            continue
        issue = statement.issue
        assert issue is not None and issue.group is not None and e.bucket is not None
        group = issue.group.name or issue.group.description, tuple(issue.group.global_ranks)
        marks.append((groups.setdefault(group, len(groups)), str(issue.marks)))
        if key[0] == REDUCE:
            given.append((key, tuple(i for i in range(len(e.bucket.params)) if i not in e.missing_gradients)))
    of_all = [statement.effects for statement in statements]
    idle = tuple(sorted(e.bucket.spec.name for e in of_all if e.runs is not None and e.bucket is not None))
    communicates = any(e.communicates for e in of_all)
    program = Program(tuple(steps), tuple(marks), tuple(given), idle, communicates, tuple(sources))
    return program, tuple(groups)


def _place_of(bsym: BoundSymbol) -> str:
    """Return the line of user code that made a bound symbol, such as ``at model.py:17``, or the name of its operator."""
    if bsym.source_filename is None or is_library(bsym.source_filename):
        return f"in {bsym.sym.name}"
    return f"at {os.path.basename(source_of(bsym))}"


class Left(NamedTuple):
    """The unreduced gradients of a bucket on a rank.

    Attributes:
        params: the indices of their parameters.
        used: the indices of those that are not only zeros.
        is_whole: whether they are unsharded and have to be reduced.
    """

    params: tuple[int, ...]
    used: tuple[int, ...]
    is_whole: bool


class RankState(NamedTuple):
    """The part of a token that may differ between ranks with one program.

    Attributes:
        unused: parameters that this rank has not used, whose gradients in its backward are zeros, by the name of their
            bucket.
        left: unreduced gradients, by the name of the bucket.
        lost: kept buckets that are no longer resident in backward, including aliases.
        is_partial: whether backward was called for some gradients only.
    """

    unused: tuple[tuple[str, tuple[int, ...]], ...] = ()
    left: tuple[tuple[str, Left], ...] = ()
    lost: tuple[BucketKey, ...] = ()
    is_partial: bool = False


class Report(NamedTuple):
    """The message of a rank to the others about a new combination.

    Attributes:
        program: its program, if the registry lacks it and this is the first rank that has it.
        groups: the process groups that it uses.
        ranks_of: the ranks that share each bucket that not all ranks share, by name.
    """

    program: Program | None
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    ranks_of: Mapping[str, tuple[int, ...]]
    state: RankState


class Outcome(NamedTuple):
    """The decision of one rank in a round.

    Attributes:
        merges: whether the merged traces run.
        is_alike: whether all ranks run one program, so that the bits of their tokens have the same meaning.
        active: the collectives in which it takes part, its own included.
        used: for each bucket, by name, the parameters that get a gradient.
        lost: the kept buckets to gather again, in the same order on all ranks.
        left: by name, the buckets that are reduced although no program does so, with whether gradients are unsharded.
        fault: the reason why ranks cannot go on, in one line; empty if they can.
    """

    merges: bool
    is_alike: bool
    active: frozenset[Key] = frozenset()
    used: Mapping[str, frozenset[int]] = {}
    lost: tuple[BucketKey, ...] = ()
    left: Mapping[str, bool] = {}
    fault: str = ""


class Registry:
    """The programs of one kind that all ranks have exchanged, the same on all of them.

    Attributes:
        order: the collectives of all programs in one order.
        version: the number of changes of that order.
        sources: for each gathered bucket, a rank that reads it, and where.
        reports: earlier reports, with an empty state, by rank and the digest of its program. A new combination of them
            needs no exchange.
        outcomes: the outcomes of combinations of programs and states, by their hashes.
        has_merged: whether merged traces have ever run. Until then tokens do not say whether a backward is for some
            gradients only, because finding it out takes longer than the rest of a token.
    """

    def __init__(self) -> None:
        self.version, self.has_merged = 0, False
        self.programs: dict[int, Program] = {}
        self.outcomes: dict[Any, Outcome] = {}
        self.reports: dict[tuple[int, int], Report] = {}
        self.order: list[Key] = []
        self.sources: dict[Key, str] = {}

    def forget_if_full(self) -> None:
        """Forget everything if there is too much, which happens in the same round on all ranks."""
        if len(self.programs) >= MOST_PROGRAMS or len(self.outcomes) >= 64 * MOST_PROGRAMS:
            self.programs, self.outcomes, self.sources, self.reports = {}, {}, {}, {}

    def add(self, programs: Mapping[int, Program]) -> None:
        """Add the programs that ranks have sent, by global rank."""
        for rank, program in programs.items():
            self.programs[program.digest] = program
            for key, source in program.sources:
                self.sources.setdefault(key, f"rank {rank} reads it {source}")
        order = merge([program.steps for program in self.programs.values()])
        self.version += order != self.order
        self.order = order


def find_outcome(programs: Mapping[int, Program], reports: Mapping[int, Report], buckets: Sequence[Bucket]) -> Outcome:
    """Return the decision of a rank if the ranks run these programs in these states.

    Args:
        programs: the programs by global rank; equal ones are one object.
        reports: the reports by global rank.
        buckets: the buckets of this rank.
    """
    ranks_of: dict[int, set[int]] = defaultdict(set)  # of each program, by its identity
    for rank, program in programs.items():
        ranks_of[id(program)].add(rank)
    distinct = {id(program): program for program in programs.values()}
    reduced = {known: program.reduced for known, program in distinct.items()}
    unused_of = {rank: dict(report.state.unused) for rank, report in reports.items()}
    left_of = {rank: dict(report.state.left) for rank, report in reports.items()}
    used: dict[str, frozenset[int]] = {}
    for bucket in buckets:
        name, found = bucket.spec.name, set[int]()
        for rank in bucket.ranks.all_ranks:
            found |= reduced[id(programs[rank])].get(name, frozenset()).difference(unused_of[rank].get(name, ()))
            found.update(left_of[rank][name].used if name in left_of[rank] else ())
        used[name] = frozenset(found)
    groups = {b.spec.name: ({*b.ranks.group.global_ranks}, {*b.ranks.all_ranks}) for b in buckets}
    told = {(rank, key) for rank, report in reports.items() for key in report.state.lost}
    lost = sorted({key for rank, key in told if key[0] in groups and rank in groups[key[0]][0]})
    merges = _must_merge(programs, reports, reduced, left_of)
    outcome = Outcome(merges, len(distinct) == 1, used=used, lost=tuple(lost))
    if not outcome.merges:
        return outcome
    for rank, program in programs.items():
        if program.communicates:
            return outcome._replace(
                fault=f"in the trace of rank {rank}, operators that are not of fsdp(...) communicate"
            )
        if reports[rank].state.is_partial:
            return outcome._replace(fault=f"on rank {rank}, backward was called for some gradients only")
    active = frozenset(
        key
        for known, program in distinct.items()
        for key in program.issues
        if key[1][0] in groups and ranks_of[known] & groups[key[1][0]][key[0] != GATHER]
    )
    is_reduced = {key[1][0] for key in active if key[0] == REDUCE}
    to_reduce: dict[str, bool] = {}
    for bucket in buckets:
        name = bucket.spec.name
        left_on = [left_of[rank][name] for rank in bucket.ranks.all_ranks if name in left_of[rank]]
        if left_on and name not in is_reduced:
            to_reduce[name] = any(left.is_whole for left in left_on)
    return outcome._replace(active=active, left=to_reduce)


def _must_merge(
    programs: Mapping[int, Program],
    reports: Mapping[int, Report],
    reduced: Mapping[int, Mapping[str, frozenset[int]]],
    left_of: Mapping[int, Mapping[str, Left]],
) -> bool:
    """Return whether the ranks must run merged traces; the result is the same on all ranks."""
    everyone = tuple(programs)
    for rank, program in programs.items():
        if left_of[rank].keys() - reduced[id(program)].keys() - {*program.idle}:
            return True  # such as ranks without a batch, whose own traces reduce nothing
    shared = {
        (name, reports[rank].ranks_of.get(name, everyone))
        for rank, program in programs.items()
        for name in (*reduced[id(program)], *left_of[rank])
    }
    for name, ranks in shared:
        if len({(reduced[id(programs[rank])].get(name), left_of[rank].get(name)) for rank in ranks}) > 1:
            return True
    groups = {r: [(name, hash64(ranks), len(ranks)) for name, ranks in reports[r].groups] for r in programs}
    if len({*map(id, programs.values())}) == 1 and do_groups_match(groups):
        return False
    return bool(find_fault({rank: program.actions(reports[rank].groups) for rank, program in programs.items()}))


class Differences:
    """The knowledge of the ranks that share one model about each other.

    Attributes:
        registries: the programs of each kind of trace.
        history: a number that depends on which optimizers have stepped the model, and how often.
        steps: the number of steps of optimizers; ``last_step`` says which parameters the last one has stepped.
    """

    def __init__(self) -> None:
        self.registries: dict[Any, Registry] = defaultdict(Registry)
        self.history = 0
        self.steps, self.last_step = 0, ""


_differences: weakref.WeakKeyDictionary[Control, Differences] = weakref.WeakKeyDictionary()
_stepped: weakref.WeakKeyDictionary[Any, tuple[int, dict[Control, tuple[int, str]]]] = weakref.WeakKeyDictionary()
"""By optimizer, the number of its parameters, and a hash and a text of the names of those that all ranks share."""


def differences_of(control: Control) -> Differences:
    """Return the knowledge of a model's ranks about each other."""
    return _differences.setdefault(control, Differences())


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Change the history of each model that an optimizer steps; the order of steps does not matter."""
    number = sum(len(group["params"]) for group in optimizer.param_groups)
    known, of_models = _stepped.get(optimizer, (-1, {}))
    if known != number:
        names: dict[Control, list[str]] = defaultdict(list)
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            found = param.rows.in_bucket if isinstance(param, RowDTensor) else None
            if found is not None and found[0].is_on_all_ranks and found[0].base.control is not None:
                names[found[0].base.control].append(param.rows.label)
        of_models = {c: (hash64(*sorted(n)), f"{n[0]} and {len(n) - 1} more") for c, n in names.items()}
        _stepped[optimizer] = number, of_models
    for control, (hashed, text) in of_models.items():
        differences = differences_of(control)
        differences.history = (differences.history + hashed) % (1 << 62)
        differences.steps, differences.last_step = differences.steps + 1, text


register_optimizer_step_post_hook(_count_step)
