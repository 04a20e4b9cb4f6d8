"""Rounds, comparisons and ``thunder.jit`` keep their contracts: messages, hops and store requests by the number of ranks."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

from thunder_fsdp_sched import ScheduleDisagreement, fsdp
from thunder_fsdp_sched.ranks.all_gather import HostAllGather
from thunder_fsdp_sched.ranks.messages import Action
from thunder_fsdp_sched.ranks.new_groups import exchange_texts

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from internals import channel
from ranks import on_ranks
from simulated_ranks import NEVER, Backend, World
from torch import nn

DIFFERING = ("line 2:", "\n    rank 0: 0", "\n    rank 1: 1")


def _gather(world: World, rank: int, sizes: Sequence[int], *rounds: bytes) -> list[list[bytes]]:
    """Return what a rank gathers in rounds of one all-gather."""
    gather, backend, found = HostAllGather(rank, sizes), Backend(world), []
    for tag, own in enumerate(rounds, 1):
        gather.start(own, backend, tag)
        gather.finish(NEVER)
        found.append(gather.gathered())
    return found


def _tokens(world_size: int, differing: int) -> list[bytes]:
    return [channel.TOKEN.pack(1, 2, 3, -1, rank if rank < differing else 0) for rank in range(world_size)]


@pytest.mark.parametrize(
    "world_sizes", [range(1, 65), pytest.param((512,), marks=pytest.mark.long)], ids=["1 to 64", "512"]
)
def test_any_number_of_ranks_gather_the_same_in_a_logarithmic_number_of_hops(world_sizes: Sequence[int]) -> None:
    size = channel.TOKEN.size
    for world_size in world_sizes:
        world, hops = World(world_size, seed=world_size), math.ceil(math.log2(world_size))
        rounds = [_tokens(world_size, differing) for differing in (0, world_size)]
        found = world.run(lambda rank: _gather(world, rank, [size] * world_size, *(tokens[rank] for tokens in rounds)))  # noqa: B023
        assert found == [rounds] * world_size
        for rank in range(world_size):
            assert len(world.sent[rank]) == 2 * hops and sum(world.sent[rank]) == 2 * size * (world_size - 1)


@pytest.mark.parametrize("world_size", [2, 3, 8, 61])
def test_an_all_gather_sends_each_rank_s_bytes_once_to_each_other_rank(world_size: int) -> None:
    of_ranks = [b"names" * 1000 if rank == 1 else b"%d" % rank for rank in range(world_size)]
    world, sizes = World(world_size), [len(own) for own in of_ranks]
    assert world.run(lambda rank: _gather(world, rank, sizes, of_ranks[rank])) == [[of_ranks]] * world_size
    assert {len(sent) for sent in world.sent.values()} == {math.ceil(math.log2(world_size))}
    assert sum(map(sum, world.sent.values())) == (world_size - 1) * sum(sizes)
    for rank in range(world_size):  # it receives the large object once, whatever the number of ranks
        hops = HostAllGather(rank, sizes).hops
        assert sum(len(hop.received[0]) for hop in hops) == sum(sizes) - sizes[rank]


class _Interrupting(Backend):
    """Messages of a rank whose first send is interrupted after it."""

    interrupted = False

    def send(self, *args: Any) -> Any:
        work = super().send(*args)
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return work


@pytest.mark.parametrize("seed", range(20))
def test_all_gathers_do_not_mix_if_a_rank_is_ahead_or_an_interrupted_one_sends_twice(seed: int) -> None:
    world = World(3, seed=seed)

    def gather_twice(rank: int) -> list[list[bytes]]:
        gather, backend, found = HostAllGather(rank, [1] * 3), Backend(world), []
        for tag, own in enumerate((b"abc", b"ABC"), 1):
            is_interrupted = rank == 0 and tag == 1
            with pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext():
                gather.start(own[rank : rank + 1], _Interrupting(world) if is_interrupted else backend, tag)
            gather.finish(NEVER)
            found.append(gather.gathered())
        return found

    assert world.run(gather_twice) == [[[b"a", b"b", b"c"], [b"A", b"B", b"C"]]] * 3


def _is_left_alone(rank: int, backend: Any, sleep: Callable[[], Any]) -> str:
    """Return the error of a rank, of which the first does not come until the other has given up."""
    gather = HostAllGather(rank, [1, 1])
    if rank == 0:
        sleep()
    with pytest.raises(RuntimeError) as error:
        gather.start(b"x", backend, 1)
        gather.finish(timedelta(seconds=0.2 if rank else 3600))
    if rank == 1:
        gather.close()
        sleep()
    return "timed out" if "timed out" in str(error.value).lower() else "closed"


def test_messages_of_simulated_ranks_fail_as_those_of_gloo(workers: Any) -> None:
    world = World(2)
    simulated = world.run(lambda rank: _is_left_alone(rank, Backend(world), lambda: world.sleep(1)))
    assert workers(2).run(_is_left_alone_on_gloo) == simulated == ["closed", "timed out"]


def _is_left_alone_on_gloo(rank: int, world_size: int) -> str:
    return _is_left_alone(rank, dist.new_group()._get_backend(torch.device("cpu")), dist.barrier)


#
# The store
#


def _exchanged(texts: dict[int, str], world_size: int, patience: float) -> tuple[list[dict[int, str]], World]:
    world = World(world_size)

    def exchange(rank: int) -> dict[int, str]:
        return exchange_texts(world.store, "prefix", range(world_size), texts[rank], timedelta(seconds=patience))

    return world.run(exchange, ranks=list(texts)), world


@pytest.mark.parametrize("world_size", [1, 8, 64, pytest.param(512, marks=pytest.mark.long)])
def test_texts_cost_a_constant_number_of_requests_of_each_rank(world_size: int) -> None:
    for differing in {0, 1, world_size}:
        texts = {rank: f"text\n{rank if rank < differing else 'of all'}" for rank in range(world_size)}
        found, world = _exchanged(texts, world_size, 600)
        assert all(theirs == texts for theirs in found) and world.now == 0
        each, all_ranks = (7, 6 * world_size + 7) if differing == 0 else (8, 8 * world_size + 7)
        assert sum(world.requests.values()) <= all_ranks
        assert sum(count > each for count in world.requests.values()) <= 2  # the last to come, and the last to read
        assert world.store.num_keys() <= 1  # a key of HashStore itself


def test_texts_of_ranks_that_came_are_returned_if_others_did_not() -> None:
    texts = {rank: "odd" if rank % 2 else "even" for rank in range(8) if rank != 3}
    found, world = _exchanged(texts, 8, 3600)
    assert all(theirs == texts for theirs in found) and world.now == 3600
    assert max(world.requests.values()) <= 9


#
# The channel on simulated ranks
#


@pytest.mark.parametrize("seed", range(5))
def test_each_all_gather_has_a_tag_of_its_own_and_models_do_not_meet(seed: int) -> None:
    world = World(3, seed=seed)

    def agree(rank: int) -> None:
        control, other = world.control(), world.control()
        control.check_same("the same", ["a", "b"])
        assert control.exchange("anything", rank) == [0, 1, 2]
        with pytest.raises(ScheduleDisagreement, check=coded("ranks.ranks-disagree", *DIFFERING)):
            control.check_same("another", ["a", f"{rank}"])
        _meets((control, other)[rank % 2], "a call", "actions-differ", "ranks [0, 2]: a call", "rank 1: a call")
        control.rendezvous("a call")

    world.run(agree)
    for program in world.taken().values():
        numbers = [action.number for action in program if isinstance(action, Action) and not action.waits]
        # 3 rounds for lines that differ, since the digests are exchanged
        assert len(set(numbers)) == len(numbers) == 1 + 3 + (1 + 2 + 2) + 1 + 1


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def _meets(control: Any, text: str, code: str, *names: str) -> None:
    with pytest.raises(ScheduleDisagreement, check=coded(f"ranks.{code}", *names)):
        control.rendezvous(text)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_late_rank_is_named_and_raises_when_it_arrives(world_size: int) -> None:
    for late in range(world_size):
        world, came = World(world_size, seed=late, timeout=timedelta(hours=1)), list[int]()

        def meet(rank: int, late: int = late, world: World = world, came: list[int] = came) -> None:
            control, others = world.control(), [r for r in range(world_size) if r != late]
            control.rendezvous("a call")
            if rank == late:
                world.sleep(10_000)
                _meets(control, "another", "rank-absent")
                came.append(rank)
            else:
                _meets(control, "another", "rank-absent", f"rank {late} ", f"    {_named(others)}: another")
                world.wait_until(lambda: bool(came))
            # The channel is closed for this model. The next model gets another one.
            _meets(control, "more", "action-after-closed-channel", "more")
            world.control().rendezvous("more")

        world.run(meet)


def test_a_rank_that_does_not_shard_is_named() -> None:
    world = World(3, timeout=timedelta(seconds=2))

    def shard(rank: int) -> None:
        with pytest.raises(ScheduleDisagreement, check=coded("ranks.missing-at-jit", "rank 1 ", "2 s", f"rank {rank}")):
            world.control()

    world.run(shard, ranks=[0, 2])


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_learn_at_once_that_one_is_gone(world_size: int) -> None:
    """Of four, each rank exchanges no message with one of the others. The timeout is longer than an hour."""
    for gone in range(world_size):
        world = World(world_size, seed=gone, timeout=timedelta(hours=1))
        others = [rank for rank in range(world_size) if rank != gone]

        def meet(rank: int, gone: int = gone, world: World = world, others: Sequence[int] = others) -> None:
            control = world.control()
            for _ in range(2):
                control.rendezvous("a round")
            if rank == gone:
                _leave(world, control)
            else:
                came = f"    {_named(others)}: another of ", f"\n    rank {gone}: stopped"
                _meets(control, "another", "rank-absent", f"rank {gone} ", "connection was closed:", *came)
            assert world.now < 10
            if rank == gone:  # it was never posted, so no collective counts as surplus
                world.sleep(5)
                late = mock.Mock(**{"describe.return_value": "another"})
                with pytest.raises(ScheduleDisagreement):
                    control.channel.post(channel.TOKEN.pack(0, 0, 0, 0, 0), late)
                late.cancel.assert_not_called()

        world.run(meet)


def _leave(world: World, control: Any) -> None:
    """Close the connections of this rank, as when its process ends."""
    control.channel._tokens._backend = Backend(world, control.channel.group.process_group.number)
    control.channel._tokens.close()


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_fail_in_a_round_and_in_a_collective_do_not_blame_each_other(seed: int, settled: bool) -> None:
    """Rank 1 is gone while ranks 0 and 2 are in a round, and rank 3 in the collective before or after it."""
    world, posted = World(4, seed=seed, timeout=timedelta(hours=1)), list[int]()

    def meet(rank: int) -> None:
        control = world.control()
        opened = control.channel
        if rank != 1:
            control.begin("a round")
        posted.append(rank)
        world.wait_until(
            lambda: len(posted) == 4
        )  # otherwise rank 1 might be gone before the others have posted theirs
        if rank == 1:
            _leave(world, control)
        elif rank == 3:
            opened.pending, opened.rounds = None, opened.rounds + settled
            report = opened.explain("rank 3: the all-gather failed: a connection was closed\nand why")
            assert re.search(r"rank 0: a round .*\n    rank 2: a round .*\n    rank 1 reported nothing", report)
        else:
            came = "rank 1 ", "    ranks [0, 2]: a round ", "\n    rank 3: the all-gather failed: "
            with pytest.raises(ScheduleDisagreement, check=coded("ranks.rank-absent", *came)):
                opened.settle()

    world.run(meet)


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
        control = model._lc_transforms[-1].sharded.control
        assert counted(lambda: control.check_same("the same", ["a", "b"])) == {"post": 1}
        with pytest.raises(ScheduleDisagreement, check=coded("ranks.ranks-disagree", *DIFFERING)):
            counted(lambda: control.check_same("another", ["a", f"{rank}"]))
        assert counts == {"post": 1, "gather": 2, "broadcast_object_list": 2}
