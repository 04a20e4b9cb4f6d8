"""The real code of the agreement of ranks, with all ranks in this process: threads of which one runs at a time.

A rank runs until it waits for a message or a key of the store, or pauses (:meth:`World.pause`); the rank that continues
is drawn from a seed. Time is virtual: it advances only when no rank can continue, to the next timeout. So a rank that
comes an hour too late takes no time, and a seed repeats a failure. ``programs`` records which collectives ranks issue
and wait for, rounds of agreement included, in the form that ``executor`` runs in every order.

Only communication is replaced: gloo's point-to-point messages, the store, ``broadcast_object_list`` and the creation of
groups. ``test_rounds`` compares the messages with those of gloo.
"""

from __future__ import annotations

import pickle
import random
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

from thunder_fsdp_sched.ranks import all_gather
from thunder_fsdp_sched.ranks.all_gather import HostAllGather
from thunder_fsdp_sched.ranks.messages import Action

import torch
import torch.distributed as dist
from executor import ROUNDS, Program
from internals import ProcessGroupRef, channel, control, joint_control, open_control

NEVER = timedelta(days=1000)


def _now() -> bool:
    return True


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Stuck(AssertionError):
    """No rank can continue, and none waits for a timeout."""


class _Ended(BaseException):
    """Raised in the ranks that still wait when a run has ended."""


class _Ref(ProcessGroupRef):
    """A group of simulated ranks."""

    is_alive = True  # type: ignore[assignment]


class World:
    """Simulated ranks, and what connects them.

    Args:
        timeout: the time for which ranks wait for each other in a round.

    Attributes:
        now: the time in seconds.
        sent: the sizes of the messages that each rank has sent.
        requests: the number of requests that each rank has made of the store.
        programs: the collectives that each rank has issued and waited for.
    """

    def __init__(self, size: int, *, seed: int = 0, timeout: timedelta = timedelta(minutes=1)) -> None:
        self.size, self.timeout, self.now = size, timeout, 0.0
        self.sent: dict[int, list[int]] = defaultdict(list)
        self.requests: Counter[int] = Counter()
        self.programs: dict[int, list[Action | float]] = {rank: [] for rank in range(size)}
        self.store = _Store(self)
        self._rng = random.Random(seed)
        self._current = threading.local()
        self._messages: dict[tuple[int, int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._closed: set[tuple[int, int]] = set()  # the connections of groups, and the ranks that have closed theirs
        self._groups: list[Any] = []  # to which references are weak
        self._made: Counter[int] = Counter()  # how many groups each rank has made
        self._channels, self._numbers = _PerRank(self), _PerRank(self, open_control._numbers.default_factory)
        self._turns = [_taken_lock() for _ in range(size + 1)]  # the last is of the thread that runs the ranks
        self._until: dict[int, tuple[Callable[[], bool], float]] = {}  # of the ranks that have not finished
        self._has_ended = self._has_failed = False

    @property
    def rank(self) -> int:
        """The rank as which the calling thread runs."""
        return int(self._current.rank)

    #
    # Ranks
    #

    def run(self, function: Callable[[int], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """Call ``function(rank)`` as each rank and return the results; raise what a rank raises.

        Raises:
            Stuck: ranks wait for each other.
        """
        ranks = range(self.size) if ranks is None else ranks
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            self._current.rank = rank
            self._turns[rank].acquire()
            try:
                if not self._has_ended:
                    results[rank] = function(rank)
            except _Ended:
                pass
            except BaseException as error:
                errors.append(error)
                self._has_failed = True
            del self._until[rank]
            self._turns[self._next() if self._until else self.size].release()

        self._has_ended = self._has_failed = False
        self._until = {rank: (_now, 0.0) for rank in ranks}
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        with ExitStack() as stack:
            for owner, name, value in self._replacements():
                stack.enter_context(mock.patch.object(owner, name, value))
            self._turns[self._next()].release()
            self._turns[self.size].acquire()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if self._has_ended:
            raise Stuck(f"ranks {sorted(set(ranks) - results.keys())} wait for each other")
        return [results[rank] for rank in ranks]

    def _next(self) -> int:
        """Return a rank that can continue; if there is none, after the next timeout."""
        waiting = list(self._until)
        first = self._rng.randrange(len(waiting))
        for rank in waiting[first:] + waiting[:first]:
            if self._has_ended or self._until[rank][0]():
                return rank
        end, rank = min((end, rank) for rank, (_, end) in self._until.items())
        if self._has_failed or end >= NEVER.total_seconds():
            self._has_ended = True
        self.now = max(self.now, end)
        return rank

    def wait_until(self, condition: Callable[[], bool], timeout: timedelta = NEVER) -> bool:
        """Let other ranks run until a condition holds; return whether it did in time."""
        rank = self.rank
        self._until[rank] = condition, self.now + timeout.total_seconds()
        if (after := self._next()) != rank:
            self._turns[after].release()
            self._turns[rank].acquire()
        if self._has_ended:
            raise _Ended
        return condition()

    def pause(self) -> None:
        """Let other ranks run, if the seed says so."""
        self.wait_until(_now)

    def sleep(self, seconds: float) -> None:
        """Let time pass on this rank."""
        self.wait_until(lambda: False, timedelta(seconds=seconds))

    #
    # Groups
    #

    def group(self, description: str = "default_pg") -> ProcessGroupRef:
        """Return the group of all ranks, as the calling rank has it."""
        self._made[self.rank] += 1
        made = _Group(self, self._made[self.rank])
        self._groups.append(made)
        ranks = tuple(range(self.size))
        return _Ref(description, self.rank, ranks, "gloo", name=description, _process_group=weakref.ref(made))  # type: ignore[arg-type]

    def control(self, kind: str = "Model") -> control.Control:
        """Return the control of a model, as ``thunder.jit`` makes it; a collective."""
        return open_control.open_control(self.group(), kind, agreement="step")

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (all_gather, channel):
            yield module, "time", clock
        yield joint_control, "new_group", lambda ranks, parent, description, **options: self.group(description)
        yield channel, "host_backend", lambda group: Backend(self, group.number)
        yield joint_control, "timeout_of", lambda group: self.timeout
        yield joint_control, "let_belong", lambda group, parent: None
        yield joint_control, "_channels", self._channels
        yield open_control, "_numbers", self._numbers
        yield dist, "get_rank", lambda: self.rank
        yield dist, "broadcast_object_list", self._broadcast
        start, finish = HostAllGather.start, HostAllGather.finish

        def record_start(gather: HostAllGather, own: bytes, backend: Any, tag: int) -> None:
            self._record(Action("a round", ROUNDS, tuple(range(self.size)), False, -tag))
            start(gather, own, backend, tag)

        def record_finish(gather: HostAllGather, timeout: timedelta) -> None:
            self._record(Action("a round", ROUNDS, tuple(range(self.size)), True, -gather._tag))
            finish(gather, timeout)

        yield HostAllGather, "start", record_start
        yield HostAllGather, "finish", record_finish

    def _broadcast(self, values: list[Any], source: int, group: Any) -> None:
        number = self.store.count(f"broadcast/{self.rank}")
        if self.rank == source:
            self.store.set(f"broadcast {number}", pickle.dumps(values))
        self.store.wait([f"broadcast {number}"], self.timeout)
        values[:] = pickle.loads(self.store.get(f"broadcast {number}"))

    #
    # Programs
    #

    def _record(self, action: Action) -> None:
        self.programs[self.rank].append(action)

    def issue(self, line: str, group: str, ranks: tuple[int, ...]) -> int:
        """Record the issue of a collective by the calling rank, and return its number."""
        number = len(self.programs[self.rank])
        self._record(Action(line, group, ranks, False, number))
        return number

    def wait(self, number: int) -> None:
        """Record the wait for a collective."""
        issue = next(a for a in self.programs[self.rank] if isinstance(a, Action) and a.number == number)
        self._record(issue._replace(waits=True))

    def taken(self) -> dict[int, Program]:
        """Return the programs that ranks have recorded since the last call."""
        taken, self.programs = self.programs, {rank: [] for rank in range(self.size)}
        return dict(taken)


class _Group:
    """A process group: its store, and the number by which ranks connect."""

    def __init__(self, world: World, number: int) -> None:
        self._world, self.number = world, number

    def get_group_store(self) -> _Store:
        return self._world.store


class _Work:
    """A message to receive, or one that was sent, which has completed."""

    def __init__(self, backend: Backend, source: int, messages: deque[torch.Tensor] | None, into: torch.Tensor) -> None:
        self._backend, self._source, self._messages, self._into = backend, source, messages, into

    def is_completed(self) -> bool:
        return self._messages is None

    def wait(self, timeout: timedelta) -> None:
        messages, backend = self._messages, self._backend
        assert messages is not None, "gloo would wait for a second message"
        if not backend.world.wait_until(lambda: bool(messages) or backend.is_closed(self._source), timeout):
            backend.close()  # so does gloo
            raise RuntimeError(f"Timed out waiting {timeout} for recv operation to complete")
        if not messages:
            raise RuntimeError("Connection closed by peer")
        self._into.copy_(messages.popleft())
        self._messages = None


class Backend:
    """Point-to-point messages of the calling rank.

    Args:
        number: of the group, the same on all ranks.
    """

    def __init__(self, world: World, number: int = 0) -> None:
        self.world, self._rank, self._number = world, world.rank, number

    def is_closed(self, other: int) -> bool:
        return not self.world._closed.isdisjoint({(self._number, self._rank), (self._number, other)})

    def close(self) -> None:
        """Close the connections to all ranks, as when the process ends."""
        self.world._closed.add((self._number, self._rank))

    def send(self, tensors: Sequence[torch.Tensor], target: int, tag: int) -> _Work:
        [tensor] = tensors
        if self.is_closed(target):
            raise RuntimeError("Connection closed by peer")
        self.world._messages[self._number, self._rank, target, tag].append(tensor.clone())
        self.world.sent[self._rank].append(tensor.numel())
        self.world.pause()
        return _Work(self, target, None, tensor)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> _Work:
        [into] = tensors
        return _Work(self, source, self.world._messages[self._number, source, self._rank, tag], into)


class _Store:
    """A store whose waits let other ranks run. Each request may come before or after those of other ranks."""

    def __init__(self, world: World) -> None:
        self._world, self._store, self._counts = world, dist.HashStore(), Counter[str]()

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            self._world.requests[self._world.rank] += 1
            self._world.pause()
            return getattr(self._store, name)(*args)

        return request

    def count(self, key: str) -> int:
        """Return how often this was called with the key."""
        self._counts[key] += 1
        return self._counts[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._world.requests[self._world.rank] += 1
        if not self._world.wait_until(lambda: self._store.check(keys), timeout):
            raise RuntimeError(f"wait timeout after {timeout}")

    def num_keys(self) -> int:
        return self._store.num_keys()


class _PerRank(MutableMapping[Any, Any]):
    """A dictionary of the process, of which each rank has its own."""

    def __init__(self, world: World, default: Callable[[], Any] | None = None) -> None:
        self._world = world
        self._dicts: Any = defaultdict(lambda: {} if default is None else defaultdict(default))

    @property
    def _own(self) -> Any:
        return self._dicts[self._world.rank]

    def __getitem__(self, key: Any) -> Any:
        return self._own[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._own[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)
