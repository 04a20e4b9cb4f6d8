"""Rounds, comparisons and ``thunder.jit`` keep their contracts: messages, hops and store requests by the number of ranks."""

from __future__ import annotations

import contextlib
import math
import random
import re
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

from thunder_fsdp_sched import ScheduleDisagreement, fsdp
from thunder_fsdp_sched.private_distributed import host_backend
from thunder_fsdp_sched.ranks.all_gather import HostAllGather
from thunder_fsdp_sched.ranks.store_texts import exchange_texts

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from internals import ProcessGroupRef, channel, find_transform
from ranks import on_ranks
from torch import nn


class _Work:
    """A receive of :class:`_Network`, or a send, which has completed."""

    def __init__(self, messages: deque[torch.Tensor] | None = None, into: torch.Tensor | None = None) -> None:
        self.messages, self.into = messages, into

    def is_completed(self) -> bool:
        return self.messages is None

    def wait(self, timeout: timedelta) -> None:
        if not self.messages:
            raise RuntimeError("Timed out waiting for a message")
        self.into.copy_(self.messages.popleft())
        self.messages = None


class _Network:
    """Point-to-point messages of ``size`` ranks in one process; a wait for a message that was not sent fails."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.messages: dict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.sent: Counter[int] = Counter()  # messages of each rank
        self.bytes_sent: Counter[int] = Counter()

    def backend(self, rank: int) -> Any:
        def send(tensors: Sequence[torch.Tensor], target: int, tag: int) -> _Work:
            [tensor] = tensors
            self.messages[rank, target, tag].append(tensor.clone())
            self.sent[rank] += 1
            self.bytes_sent[rank] += tensor.numel()
            return _Work()

        def receive(tensors: Sequence[torch.Tensor], source: int, tag: int) -> _Work:
            return _Work(self.messages[source, rank, tag], tensors[0])

        return mock.Mock(send=send, recv=receive)


NO_TIME = timedelta()


def _finish_in_any_order(gathers: Sequence[HostAllGather], order: random.Random) -> None:
    """Let ranks continue in a random order, each as far as it gets, until all have finished."""
    waiting, received = list(gathers), -1
    while waiting:
        before, received = received, sum(gather._received for gather in gathers)
        assert received > before, "no rank gets further"
        order.shuffle(waiting)
        waiting = [gather for gather in waiting if not _finishes(gather)]


def _finishes(gather: HostAllGather) -> bool:
    with contextlib.suppress(RuntimeError):
        gather.finish(NO_TIME)
        return True
    return False


def _tokens(world_size: int, differing: int) -> list[bytes]:
    return [channel.TOKEN.pack(1, 2, 3, -1, rank if rank < differing else 0) for rank in range(world_size)]


@pytest.mark.parametrize(
    "world_sizes", [range(1, 65), pytest.param((512,), marks=pytest.mark.long)], ids=["1 to 64", "512"]
)
def test_any_number_of_ranks_gather_the_same_in_a_logarithmic_number_of_hops(world_sizes: Sequence[int]) -> None:
    order = random.Random(0)
    for world_size in world_sizes:
        network, hops = _Network(world_size), math.ceil(math.log2(world_size))
        gathers = [HostAllGather(rank, [channel.TOKEN.size] * world_size) for rank in range(world_size)]
        for number, differing in enumerate((0, world_size), 1):
            expected = _tokens(world_size, differing)
            network.sent.clear()
            network.bytes_sent.clear()
            for gather in order.sample(gathers, world_size):
                gather.start(expected[gather._rank], network.backend(gather._rank), number)
            _finish_in_any_order(gathers, order)
            assert all(len(gather.hops) == hops and gather.gathered() == expected for gather in gathers), world_size
            assert network.sent == Counter({rank: hops for rank in range(world_size) if hops})
            assert set(network.bytes_sent.values()) <= {channel.TOKEN.size * (world_size - 1)}


@pytest.mark.parametrize("world_size", [2, 3, 8, 61])
def test_an_all_gather_sends_each_rank_s_bytes_once_to_each_other_rank(world_size: int) -> None:
    order, large = random.Random(0), b"names" * 1000
    of_ranks = [large if rank == 1 else b"%d" % rank for rank in range(world_size)]
    network = _Network(world_size)
    gathers = [HostAllGather(rank, [len(own) for own in of_ranks]) for rank in range(world_size)]
    for gather in gathers:
        gather.start(of_ranks[gather._rank], network.backend(gather._rank), 1)
    _finish_in_any_order(gathers, order)
    assert all(gather.gathered() == of_ranks for gather in gathers)
    assert set(network.sent.values()) == {math.ceil(math.log2(world_size))}
    total = sum(map(len, of_ranks))
    assert sum(network.bytes_sent.values()) == (world_size - 1) * total
    for rank, gather in enumerate(gathers):  # it receives the large object once, whatever the number of ranks
        assert sum(len(hop.received[0]) for hop in gather.hops) == total - len(of_ranks[rank])


def test_all_gathers_do_not_mix_if_one_rank_is_ahead_or_an_interrupted_one_sends_twice() -> None:
    network = _Network(3)
    gathers = [HostAllGather(rank, [1] * 3) for rank in range(3)]
    backends = [network.backend(rank) for rank in range(3)]
    send = backends[0].send

    def interrupted(*args: Any) -> None:
        send(*args)
        raise KeyboardInterrupt

    for rank, own in enumerate((b"a", b"b", b"c")):
        with contextlib.nullcontext() if rank else pytest.raises(KeyboardInterrupt):
            with mock.patch.object(backends[0], "send", interrupted):
                gathers[rank].start(own, backends[rank], 1)
    with pytest.raises(RuntimeError, match="Timed out"):
        gathers[2].finish(NO_TIME)  # has sent what rank 0 needs, and not yet what rank 1 needs
    gathers[0].finish(NO_TIME)
    gathers[0].start(b"A", backends[0], 2)
    for gather in (gathers[1], gathers[2], gathers[1]):
        with contextlib.suppress(RuntimeError):
            gather.finish(NO_TIME)
    assert all(gather.gathered() == [b"a", b"b", b"c"] for gather in gathers[1:])
    for rank, own in ((1, b"B"), (2, b"C")):
        gathers[rank].start(own, backends[rank], 2)
    _finish_in_any_order(gathers, random.Random(0))
    assert all(gather.gathered() == [b"A", b"B", b"C"] for gather in gathers)


#
# The store
#


class _CountingStore:
    """A store that counts the requests of each rank, which are threads here."""

    def __init__(self) -> None:
        self.store, self.rank, self.requests = dist.HashStore(), threading.local(), Counter()

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            self.requests[self.rank.number] += 1
            return getattr(self.store, name)(*args)

        return request


def _exchanged(texts: dict[int, str], world_size: int, patience: float) -> tuple[list[dict[int, str]], _CountingStore]:
    store = _CountingStore()

    def exchange(rank: int) -> dict[int, str]:
        store.rank.number = rank
        return exchange_texts(store, "prefix", range(world_size), texts[rank], timedelta(seconds=patience))

    with mock.patch.object(dist, "get_rank", lambda: store.rank.number), ThreadPoolExecutor(world_size) as ranks:
        return list(ranks.map(exchange, texts)), store


@pytest.mark.parametrize("world_size", [1, 8, 64, pytest.param(512, marks=pytest.mark.long)])
def test_texts_cost_a_constant_number_of_requests_of_each_rank(world_size: int) -> None:
    for differing in {0, 1, world_size}:
        texts = {rank: f"text\n{rank if rank < differing else 'of all'}" for rank in range(world_size)}
        found, store = _exchanged(texts, world_size, 600)
        assert all(theirs == texts for theirs in found)
        each, all_ranks = (7, 6 * world_size + 7) if differing == 0 else (8, 8 * world_size + 7)
        assert sum(store.requests.values()) <= all_ranks
        assert sum(count > each for count in store.requests.values()) <= 2  # the last to come, and the last to read
        assert store.store.num_keys() <= 1  # a key of HashStore itself


def test_texts_of_ranks_that_came_are_returned_if_others_did_not() -> None:
    texts = {rank: "odd" if rank % 2 else "even" for rank in range(8) if rank != 3}
    found, store = _exchanged(texts, 8, 1)
    assert all(theirs == texts for theirs in found)
    assert max(store.requests.values()) <= 9


#
# Real ranks
#


@on_ranks()
def test_sharding_compiling_and_steps_keep_their_contracts(rank: int) -> None:
    """Ranks that agree only meet in rounds; if they do not agree, two of them broadcast their texts."""
    counts: Counter[str] = Counter()

    def counting(name: str, owner: Any = channel.Channel) -> Any:
        real = getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        return mock.patch.object(owner, name, count)

    def counted(what: Any) -> dict[str, int]:
        counts.clear()
        what()
        return dict(counts)

    x = torch.ones(3, 4)
    with counting("post"), counting("gather"), counting("broadcast_object_list", dist):
        jitted = partial(thunder.jit, nn.Linear(4, 4), transforms=[fsdp()])
        assert set(counted(jitted)) == {"post"}
        model = jitted()
        assert counted(lambda: model(x).sum().backward()) == {"post": 2 + 2 + 2}, "to compile, to run and to audit"
        assert counted(lambda: model(x).sum().backward()) == {"post": 2}
        control = find_transform(model).sharded.control
        assert counted(lambda: control.check_same("the same", ["a", "b"])) == {"post": 1}
        with pytest.raises(
            ScheduleDisagreement, check=coded("ranks.ranks-disagree", "line 2:\n    rank 0: 0\n    rank 1: 1")
        ):
            counted(lambda: control.check_same("another", ["a", f"{rank}"]))
        assert counts == {"post": 1, "gather": 2, "broadcast_object_list": 2}
    other = find_transform(thunder.jit(nn.Linear(4, 4), transforms=[fsdp()])).sharded.control
    with pytest.raises(ScheduleDisagreement, check=coded("ranks.actions-differ")) as caught:
        (control, other)[rank].rendezvous("a call")
    called = re.findall(r"rank \d: a call of module (\d+)", str(caught.value))
    assert len(called) == len(set(called)) == 2
    tags, start = [], HostAllGather.start

    def noting(self: HostAllGather, own: bytes, backend: Any, tag: int) -> None:
        tags.append(tag)
        start(self, own, backend, tag)

    with mock.patch.object(HostAllGather, "start", noting):
        for _ in range(3):
            control.exchange("anything", rank)
    assert len(set(tags)) == len(tags) == 9 and min(tags) > 0  # no message of a rank ahead counts as one of this round


@on_ranks(4)
def test_all_ranks_learn_at_once_that_one_is_gone(rank: int) -> None:
    """Rank 2 exchanges no message with rank 1. The timeout is longer than that of the test."""
    group = dist.new_group(timeout=timedelta(hours=1))
    opened = channel.open_channel(ProcessGroupRef.of(group), "gone")
    assert opened is not None
    for _ in range(2):
        opened.post(channel.TOKEN.pack(0, 0, 0, 0, 0), channel.RoundAction("a round"))
        opened.settle()
    dist.barrier()
    if rank == 1:
        opened._tokens._backend = host_backend(opened.group.process_group)
        opened._tokens.close()  # as when the process ends
    else:
        closed = "rank 1 did not come and a connection was closed"
        absent = coded("ranks.rank-absent", closed, "ranks [0, 2, 3]: another", "rank 1: stopped")
        with pytest.raises(ScheduleDisagreement, check=absent):
            opened.post(channel.TOKEN.pack(0, 0, 0, 0, 0), channel.RoundAction("another"))
            opened.settle()
    dist.barrier()
    if rank == 1:
        late = mock.Mock(**{"describe.return_value": "another"})
        with pytest.raises(ScheduleDisagreement, check=coded("ranks.rank-absent", "ranks [0, 1, 2, 3]: another")):
            opened.post(channel.TOKEN.pack(0, 0, 0, 0, 0), late)
        late.cancel.assert_not_called()  # it was never posted, so no collective counts as surplus


@pytest.mark.parametrize("settled", [pytest.param(False, marks=pytest.mark.long), True])
@on_ranks(4)
def test_ranks_that_fail_in_a_round_and_in_a_collective_do_not_blame_each_other(rank: int, settled: bool) -> None:
    """Rank 1 is gone while ranks 0 and 2 are in a round, and rank 3 in the collective before or after it."""
    group = dist.new_group(timeout=timedelta(hours=1))
    opened = channel.open_channel(ProcessGroupRef.of(group), f"gone {settled}")
    assert opened is not None
    if rank != 1:
        opened.post(channel.TOKEN.pack(0, 0, 0, 0, 0), channel.RoundAction("a round"))
    dist.barrier()  # otherwise rank 1 might be gone before the others have posted theirs
    if rank == 1:
        opened._tokens._backend = host_backend(opened.group.process_group)
        opened._tokens.close()  # as when the process ends
    elif rank == 3:
        opened.pending, opened.rounds = None, opened.rounds + settled
        report = opened.explain("rank 3: the all-gather failed: a connection was closed\nand why")
        assert "rank 0: a round\n    rank 2: a round\n    rank 1 reported nothing" in report
    else:
        closed = "rank 3: the all-gather failed: a connection was closed\n"
        absent = coded("ranks.rank-absent", "rank 1 did not come", "ranks [0, 2]: a round", closed)
        with pytest.raises(ScheduleDisagreement, check=absent):
            opened.settle()
    dist.barrier()
    if rank == 3:
        opened._tokens.close()
