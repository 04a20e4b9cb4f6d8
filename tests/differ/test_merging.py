"""Random programs: their merged order is one that every rank can follow, and it keeps what programs agree on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.extras.ranks_differ import merging
from thunder_fsdp_sched.extras.ranks_differ.merging import ALL_REDUCE, GATHER, REDUCE, Key, Own, Placed, Step
from thunder_fsdp_sched.ranks.messages import Action

import pytest
from executor import GLOO, NCCL, execute
from internals import find_fault

Arrows = Mapping[Key, set[Key]]


def bucket(name: str) -> tuple[str, str, tuple[()]]:
    return name, "", ()


def gather(name: str) -> Key:
    return GATHER, bucket(name), 0


def reduction(name: str) -> Key:
    return REDUCE, bucket(name), 0


def program_of(own: Sequence[Own]) -> list[Step]:
    """Return the program of a trace. At each position, issues precede waits; only an all-reduce waits for its reduction."""
    reduced_across = {o.key[1:] for o in own if o.key[0] == ALL_REDUCE}
    events: list[tuple[int, int, Step]] = []
    for o in own:
        if o.key[0] == ALL_REDUCE:
            events.append((o.planned, 0, Step((REDUCE, *o.key[1:]), True)))
        events.append((o.planned, 0, Step(o.key, False)))
        if o.key[0] != REDUCE or o.key[1:] not in reduced_across:
            events.append((o.waited, 1, Step(o.key, True)))
    return [step for *_, step in sorted(events, key=lambda event: event[:2])]


def issued(program: Sequence[Step]) -> list[Key]:
    return [step.key for step in program if not step.waits]


def needed_by(program: Sequence[Step]) -> dict[Key, set[Key]]:
    """Return for each collective those that its data depend on."""
    needed: dict[Key, set[Key]] = {}
    waited: set[Key] = set()
    for key, waits in program:
        kind, of_bucket, number = key
        if waits:
            waited.add(key)
        else:
            needed[key] = {(kind, of_bucket, earlier) for earlier in range(number)}
            needed[key] |= {k for k in waited if k[0] == GATHER} if kind == REDUCE else set()
            needed[key] |= {(REDUCE, of_bucket, number)} if kind == ALL_REDUCE else set()
    return needed


def reachable(programs: Sequence[Sequence[Key]]) -> Arrows:
    """Return for each collective those that follow it along arrows from each collective of a program to the next."""
    following: dict[Key, set[Key]] = defaultdict(set)
    for keys in programs:
        for before, after in pairwise(keys):
            following[before].add(after)
    found: dict[Key, set[Key]] = defaultdict(set)
    for key in {key for keys in programs for key in keys}:
        stack = [key]
        while stack:
            new = following.get(stack.pop(), set()) - found[key]
            found[key] |= new
            stack += new
    return found


class Case:
    """Ranks, each with one of a few random traces: with or without backward, on one group or several, sorted or not."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size = rng.choice([2, 2, 3, 4, 4, 6, 8])
        self.groups = rng.choice(["one", "one", "two for reductions", *["hybrid", "experts"] * (self.size % 2 == 0)])
        self.length = rng.randint(2, 30)
        names = [f"b{n}" for n in range(rng.randint(1, 9))]
        as_scheduled = rng.random() < 0.5
        self.traces = [self._trace(names, as_scheduled) for _ in range(rng.randint(1, min(self.size, 5)))]
        if rng.random() < 0.2:
            self.traces[-1] = []  # ranks without a batch
        self.trace_of = [rng.randrange(len(self.traces)) for _ in range(self.size)]  # some traces are of earlier steps
        self.programs = [program_of(trace) for trace in self.traces]

    @cached_property
    def order(self) -> list[Key]:
        return merging.merge(self.programs)

    @cached_property
    def at(self) -> dict[Key, int]:
        return {key: position for position, key in enumerate(self.order)}

    def own(self, rank: int) -> list[Own]:
        return self.traces[self.trace_of[rank]]

    def group(self, rank: int, key: Key) -> tuple[str, tuple[int, ...]]:
        """Return the name and the members of the group that runs a collective on ``rank``."""
        half = self.size // 2
        of_half = tuple(range(rank // half * half, rank // half * half + half))
        if self.groups == "hybrid" and key[0] == ALL_REDUCE:
            return f"replicas {rank % half}", (rank % half, rank % half + half)
        if self.groups == "hybrid":
            return f"shards {rank // half}", of_half
        if self.groups == "experts" and int(key[1][0][1:]) % 2:
            return f"experts {rank // half}", of_half
        if self.groups == "two for reductions" and key[0] == REDUCE:
            return "reductions", tuple(range(self.size))
        return "all", tuple(range(self.size))

    @cached_property
    def takes_part(self) -> list[set[Key]]:
        """For each rank the collectives that some member of its group needs."""
        keys = [{o.key for o in self.own(rank)} for rank in range(self.size)]
        return [
            {key for key in self.order if any(key in keys[member] for member in self.group(rank, key)[1])}
            for rank in range(self.size)
        ]

    @cached_property
    def placed(self) -> list[list[Placed]]:
        return [
            merging.place(self.order, self.own(rank), takes_part, self.length)
            for rank, takes_part in enumerate(self.takes_part)
        ]

    @cached_property
    def merged(self) -> list[list[Action]]:
        """The program of each rank along the merged order, with waits anywhere from the issue to the last position."""
        merged = []
        for rank, placed in enumerate(self.placed):
            events: list[tuple[float, Action]] = []
            number = {p.key: n for n, p in enumerate(placed)}
            for n, p in enumerate(placed):
                issue = Action(str(p.key), *self.group(rank, p.key), False, n)
                events.append((n, issue))
                last = max(m for m, later in enumerate(placed) if m == n or later.issue <= p.wait)
                events.append((self.rng.randint(n, last) + 0.5, issue._replace(waits=True)))
                of = number.get((REDUCE, *p.key[1:]))  # unless only ranks of another shard group have gradients
                if p.key[0] == ALL_REDUCE and of is not None:
                    events.append((n - 0.1, Action("", *self.group(rank, placed[of].key), True, of)))
            merged.append([action for _, action in sorted(events, key=lambda event: event[0])])
        return merged

    def _trace(self, names: Sequence[str], as_scheduled: bool) -> list[Own]:
        rng, length = self.rng, self.length
        chosen = [name for name in names if rng.random() < 0.7]
        if rng.random() < 0.4:
            rng.shuffle(chosen)
        backward, prefetch = rng.random() < 0.6, rng.randint(0, 3)
        consumers = sorted(rng.sample(range(length), min(len(chosen), length)))
        own = []
        for n, (name, consumer) in enumerate(zip(chosen, consumers, strict=False)):
            if rng.random() < 0.85:
                planned = consumers[max(0, n - prefetch)] if as_scheduled else rng.randint(0, consumer)
                own.append(Own(gather(name), planned, consumer, consumer))
                if rng.random() < 0.1 and consumer + 2 < length:
                    again = rng.randint(consumer + 1, length - 1)
                    own.append(Own((GATHER, bucket(name), 1), rng.randint(consumer, again), again, again))
            if backward and rng.random() < 0.8:
                ready = min(length, consumer + 1 + rng.randint(0, 3))
                waited = rng.randint(ready, length)
                own.append(Own(reduction(name), ready, waited, ready))
                if self.groups == "hybrid":
                    own[-1] = Own(reduction(name), ready, waited, ready)
                    own.append(Own((ALL_REDUCE, bucket(name), 0), waited, length, ready))
        shuffled = {o.key: 0.0 if as_scheduled else rng.random() for o in own}
        own.sort(key=lambda o: (o.planned, [GATHER, REDUCE, ALL_REDUCE].index(o.key[0]), shuffled[o.key]))
        number: dict[Any, int] = defaultdict(int)
        for n, o in enumerate(own):
            kind, of, _ = o.key
            own[n] = o._replace(key=(kind, of, number[kind, of]))
            number[kind, of] += 1
        return own


def each_collective_is_there_once(case: Case) -> None:
    assert sorted(case.order) == sorted({key for program in case.programs for key in issued(program)})


def all_ranks_compute_one_order(case: Case) -> None:
    """Ranks may have met the programs in another order, or some twice."""
    for _ in range(2):
        shuffled = [*case.programs, case.rng.choice(case.programs)]
        case.rng.shuffle(shuffled)
        assert merging.merge(shuffled) == case.order


def programs_keep_the_order_of_what_is_not_on_a_circle(case: Case) -> None:
    programs = [issued(program) for program in case.programs]
    after = reachable(programs)
    for keys in programs:
        for n, before in enumerate(keys):
            for key in keys[n + 1 :]:
                assert case.at[before] < case.at[key] or before in after[key], (before, key)


def each_kind_keeps_its_order_if_programs_agree_on_it(case: Case) -> None:
    for gathers in (True, False):
        programs = [[key for key in issued(program) if (key[0] == GATHER) is gathers] for program in case.programs]
        after = reachable(programs)
        if not any(key in after[key] for key in [*after]):
            for keys in programs:
                assert keys == sorted(keys, key=case.at.__getitem__)


def data_precede_what_depends_on_them(case: Case) -> None:
    for program in case.programs:
        for key, needed in needed_by(program).items():
            assert all(case.at[before] < case.at[key] for before in needed), key


def ranks_follow_the_order_and_serve_only_what_others_need(case: Case) -> None:
    for rank, placed in enumerate(case.placed):
        own = {o.key: o for o in case.own(rank)}
        assert [p.key for p in placed] == [key for key in case.order if key in case.takes_part[rank]]
        assert {p.key for p in placed if not p.served} == own.keys()
        assert [p.issue for p in placed] == sorted(p.issue for p in placed)
        late = 0  # where the last reduction that precedes a collective has its last gradient
        for p in placed:
            assert 0 <= p.issue <= p.wait <= case.length
            if not p.served:
                o = own[p.key]
                late = max(late, o.limit if o.key[0] != GATHER else 0)
                assert p.issue <= o.limit if o.key[0] == GATHER else p.issue >= o.limit
                assert p.issue <= max(o.planned, late) or o.key[0] != GATHER  # nothing else delays a gather
                assert p.wait == max(o.waited, p.issue)


def alone_a_rank_does_what_it_planned(case: Case) -> None:
    for trace, program in zip(case.traces, case.programs, strict=True):
        placed = merging.place(merging.merge([program]), trace, {o.key for o in trace}, case.length)
        assert placed == [Placed(o.key, o.planned, o.waited, False) for o in trace]


def the_proof_finds_no_fault(case: Case) -> None:
    assert find_fault(dict(enumerate(case.merged))) == ""


def executions_end(case: Case) -> None:
    programs = dict(enumerate(case.merged))
    for backend in (GLOO, NCCL):
        assert execute(programs, backend, seed=case.size) == ""


PROPERTIES = [
    each_collective_is_there_once,
    all_ranks_compute_one_order,
    programs_keep_the_order_of_what_is_not_on_a_circle,
    each_kind_keeps_its_order_if_programs_agree_on_it,
    data_precede_what_depends_on_them,
    ranks_follow_the_order_and_serve_only_what_others_need,
    alone_a_rank_does_what_it_planned,
    the_proof_finds_no_fault,
    executions_end,
]


@pytest.mark.parametrize("number", [600, pytest.param(20_000, marks=pytest.mark.long)])
def test_random_programs(number: int) -> None:
    knots = 0
    for seed in range(number):
        case = Case(seed)
        for has in PROPERTIES:
            try:
                has(case)
            except AssertionError as error:
                raise AssertionError(f"{has.__name__}: Case({seed})") from error
        after = reachable([issued(program) for program in case.programs])
        knots += any(key in after[key] for key in case.order)
    assert knots > number / 5  # else there is little to merge


def steps(text: str) -> list[Step]:
    """Return the steps of ``"g1 g2 w1 r1"``: gathers, waits for gathers, and reductions of buckets."""
    keys = [(word[0], gather(word[1:]) if word[0] in "gw" else reduction(word[1:])) for word in text.split()]
    return [Step(key, kind == "w") for kind, key in keys]


EXAMPLES = {
    # Neither program orders a gather of the other: they alternate by share.
    "two towers": (["ga1 ga2 ga3", "gb1 gb2 gb3"], "ga1 gb1 ga2 gb2 ga3 gb3"),
    "a short tower": (["ga1 ga2 ga3 ga4", "gb1 gb2"], "ga1 gb1 ga2 ga3 gb2 ga4"),
    "no batch": (["g1 w1 r1", ""], "g1 r1"),
    # A block is skipped, which shifts the prefetched gather of 1 against the reduction of 3.
    "a gather and a reduction cross": (["g3 w3 g1 r3 w1 r1", "g3 g2 w3 r3 g1 w2 r2 w1 r1"], "g3 g2 g1 r3 r2 r1"),
    # r3 needs g2 in the first program, so it cannot be first although it would overtake fewer.
    "data come first": (["g1 g2 w1 w2 r3", "g1 w1 r3 g2 w2", "g1 w1 r3 g2 w2 g4"], "g1 g2 r3 g4"),
    # Each gather is the first of some program, and the gathers between them are those of lowest share.
    "opposite orders": (["g1 g2 g3 g4", "g4 g3 g2 g1"], "g1 g4 g2 g3"),
    # The circle of 2 and 3 is a knot. 1 precedes it and 4 follows it, as in both programs.
    "a knot in the middle": (["g1 g2 g3 g4", "g1 g3 g2 g4"], "g1 g2 g3 g4"),
    # b is in no program with a knot, and does not have to wait until the knot is placed.
    "a knot beside a tower": (["g1 g2 g3 g4", "g1 g3 g2 g4", "gb1 gb2"], "g1 gb1 g2 g3 gb2 g4"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_merged_order(name: str) -> None:
    programs, order = EXAMPLES[name]
    assert merging.merge(map(steps, programs)) == [step.key for step in steps(order)]


def test_gathers_move_ahead_of_what_the_order_puts_behind_them() -> None:
    """The order alternates between the ends, and the rank uses 4 last: it gathers 4 with 2, and delays none."""
    own = [Own(gather(str(n)), n - 1, n, n) for n in (1, 2, 3, 4)]
    order = [gather("1"), gather("4"), gather("2"), reduction("5"), gather("3")]
    assert merging.place(order, own, {*order}, 5) == [
        Placed(gather("1"), 0, 1, False),
        Placed(gather("4"), 1, 4, False),
        Placed(gather("2"), 1, 2, False),
        Placed(reduction("5"), 1, 5, True),
        Placed(gather("3"), 2, 3, False),
    ]


def test_the_order_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    """Each rank is a process with its own seed, by which sets are ordered."""
    script = tmp_path / "script.py"
    source = Path(merging.__file__).read_text()
    script.write_text(f"{source}\nprint(merge([[Step(k, False) for k in keys] for keys in {_knotted()!r}]))")
    outputs = {
        subprocess.run(
            [sys.executable, script],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1


def _knotted() -> list[list[Key]]:
    rng = random.Random(0)
    keys = [gather(str(n)) for n in range(12)]
    return [rng.sample(keys[start : start + 6], 6) for start in (0, 0, 6, 6, 3)]
