"""Accumulation windows: later micro-batches reuse gathered buckets, with the bits of gathering them again."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from thunder_fsdp_sched import discard_unreduced, fsdp, full_state_dict, unsharded
from thunder_fsdp_sched.ir.symbols import fsdp_all_gather, window_of
from thunder_fsdp_sched.planning.autotune import MemoryLimitError
from thunder_fsdp_sched.planning.clusters import cluster
from thunder_fsdp_sched.planning.cost import AnalyticCost
from thunder_fsdp_sched.planning.simulate import simulate
from thunder_fsdp_sched.runtime.accumulation import Accumulation
from thunder_fsdp_sched.runtime.bucket import Bucket

import pytest
import thunder
import torch
from memory_count import compare, count_on_fake_ranks
from models import GPT, Layer, Model, Stack
from profiles import LONG
from ranks import Ranks, on_ranks
from reference import Twins, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

WEIGHT = "blocks.0.up.weight"


@contextlib.contextmanager
def gathers() -> Iterator[Counter[str]]:
    """Count how often each bucket is sent."""
    sent: Counter[str] = Counter()
    real = Bucket.gather_into

    def count(bucket: Bucket, *args: Any) -> Any:
        sent[bucket.spec.name] += 1
        return real(bucket, *args)

    with mock.patch.object(Bucket, "gather_into", count):
        yield sent


class Pair:
    """A model whose micro-batches reuse gathered buckets, and a copy that gathers in each of them."""

    def __init__(self, rank: int, make: Callable[[], nn.Module], **options: Any) -> None:
        self.rank = rank
        self.models, self.transforms = [], []
        for again in (False, True):
            torch.manual_seed(0)
            module = make()
            self.inputs = module.inputs
            self.transforms.append(fsdp(reshard_after_backward=again, **options))
            self.models.append(thunder.jit(module, transforms=[self.transforms[-1]]))
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in self.models]
        self.names = [bucket.spec.name for bucket in self.transforms[0].sharded.buckets]

    def forward(self, seed: int, *, no_sync: bool) -> tuple[list[torch.Tensor], Counter[str]]:
        """Return the losses of both models, and how often the first model has sent each bucket."""
        losses, counts = [], []
        for model in self.models:
            inputs = self.inputs(torch.Generator().manual_seed(1000 * seed + self.rank))
            with model.no_sync() if no_sync else contextlib.nullcontext(), gathers() as sent:
                losses.append(loss_of(model(*inputs)))
            counts.append(sent)
        assert torch.equal(*losses), losses
        return losses, counts[0]

    def micro_batch(self, seed: int, *, no_sync: bool = True) -> Counter[str]:
        """Run forward and backward, and return how often both sent each bucket."""
        losses, sent = self.forward(seed, no_sync=no_sync)
        for model, loss in zip(self.models, losses, strict=True):
            with model.no_sync() if no_sync else contextlib.nullcontext(), gathers() as again:
                loss.backward()
            if model is self.models[0]:
                sent += again
        return sent

    def step(self) -> None:
        """Compare gradients, step both optimizers, and compare parameters."""
        ours, theirs = ([p.grad for p in model.parameters()] for model in self.models)
        assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(ours, theirs, strict=True))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        a, b = map(full_state_dict, self.models)
        assert all(torch.equal(a[name], b[name]) for name in a)

    def on_each(self, change: Callable[[Any], Any]) -> None:
        for model in self.models:
            change(model)


def _stack() -> nn.Module:
    return Stack(2).double()


def _reuse(rank: int, world_size: int, options: dict[str, Any]) -> None:
    if "mesh" in options:
        options = options | {"mesh": init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicas", "shards"))}
    pair = Pair(rank, partial(GPT, blocks=1, block=Layer) if "mp_policy" in options else _stack, **options)
    for window in range(2):
        first = pair.micro_batch(10 * window)
        later = [pair.micro_batch(10 * window + 1), pair.micro_batch(10 * window + 2, no_sync=False)]
        kept = {bucket.spec.name for bucket in pair.transforms[0].sharded.kept}
        assert kept and set(first) == set(pair.names) and all(first[name] == 1 for name in kept)
        assert not any(kept & sent.keys() for sent in later)
        pair.step()
    assert kept == set(pair.names) or options["sharding_strategy"] == "zero3"


@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"offload_policy": CPUOffloadPolicy()},
        {"accumulate": "sharded", "transport": "flat"},
        {"max_unsharded_bytes": 1 << 24, "sharding_strategy": "zero3"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_only_the_first_micro_batch_of_a_window_gathers(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.run(_reuse, {"sharding_strategy": "zero2", **options})


def test_only_the_first_micro_batch_gathers_with_replicas(four_ranks: Ranks) -> None:
    four_ranks.run(_reuse, {"sharding_strategy": "zero2", "mesh": (2, 2)})


def _change(model: Any, *, first_rank: int = 0, through: str = "parameter") -> None:
    """Change the rows that each rank from ``first_rank`` on has of the weight of the first block."""
    weight = dict(model.named_parameters())[WEIGHT]
    if torch.distributed.get_rank() < first_rank:
        return
    with torch.no_grad():
        {"parameter": weight, "data": weight.data, "local": weight.to_local(), "detached": weight.detach()}[
            through
        ].mul_(2)


def _change_whole(model: Any) -> None:
    with unsharded(model, "blocks.0"), torch.no_grad():
        dict(model.named_parameters())[WEIGHT].add_(1)


def _evaluate(pair: Pair) -> None:
    with torch.no_grad():
        pair.forward(7, no_sync=False)


@on_ranks(2)
def test_what_has_changed_is_gathered_again_on_all_ranks(rank: int) -> None:
    pair = Pair(rank, lambda: Stack(2).double(), sharding_strategy="zero2", bucketing_strategy="layer")
    each = Counter(pair.names)
    changed, _ = pair.transforms[0].sharded.locations[WEIGHT]

    def window(disturb: Callable[[], Any], expected: Counter[str]) -> None:
        assert pair.micro_batch(0) == each
        disturb()
        assert pair.micro_batch(1) == expected, disturb
        assert pair.micro_batch(2) == Counter()
        assert pair.micro_batch(3, no_sync=False) == Counter()
        pair.step()

    only = Counter([changed.spec.name])
    for through in ("parameter", "data", "local", "detached"):
        window(lambda: pair.on_each(partial(_change, through=through)), only)  # noqa: B023
    window(
        lambda: pair.on_each(partial(_change, first_rank=1)), only
    )  # rank 0 has changed nothing, and gathers with it
    window(lambda: pair.on_each(_change_whole), only)
    window(lambda: _evaluate(pair), each)
    window(lambda: pair.optimizers[0].step(), each)  # without gradients, but nobody looks at what it does
    states = [model.state_dict() for model in pair.models]
    window(lambda: [m.load_state_dict(state) for m, state in zip(pair.models, states, strict=True)], each)

    first, sent = pair.forward(4, no_sync=True)
    second, reused = pair.forward(5, no_sync=True)
    assert (sent, reused) == (each, Counter())
    for losses in (second, first):
        for model, loss in zip(pair.models, losses, strict=True):
            with model.no_sync(), gathers() as again:
                loss.backward()
            assert model is pair.models[1] or not again, "the second forward has changed nothing"
    pair.micro_batch(6, no_sync=False)
    pair.step()

    pair.micro_batch(8, no_sync=False)
    assert pair.micro_batch(9) == each, "nothing is left by a backward that reduces"
    assert pair.micro_batch(10, no_sync=False) == Counter()
    pair.step()


@on_ranks(2)
def test_a_window_goes_on_after_an_exception_in_forward(rank: int) -> None:
    pair = Pair(rank, lambda: Stack(2).double(), sharding_strategy="zero2")
    each = Counter(pair.names)
    pair.micro_batch(0)
    for model in pair.models:
        with model.no_sync(), mock.patch.object(torch, "tanh", side_effect=ZeroDivisionError):
            with pytest.raises(ZeroDivisionError):
                model(*pair.inputs(torch.Generator()))
    sent = pair.micro_batch(1)
    assert not sent - each
    assert pair.micro_batch(2, no_sync=False) == Counter()
    pair.step()


#
# Gradients reduced in each micro-batch
#


class _Halves(Model):
    """A model that uses one of two blocks, depending on a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        x = self.blocks[0](x) * self.scale if first else self.blocks[1](x)
        return x.tanh()


def _micro_batches(
    rank: int, make: Callable[[], nn.Module], windows: list[list[tuple[Any, ...]]], *, no_sync: bool, **options: Any
) -> tuple[list[torch.Tensor], Any]:
    """Train on windows of micro-batches. Return all gradients and the transform."""
    torch.manual_seed(0)
    transform = fsdp(**options)
    model = thunder.jit(make(), transforms=[transform])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number, window in enumerate(windows):
        for step, extra in enumerate(window):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(100 * number + 10 * step + rank)).double()
            last = step == len(window) - 1
            with model.no_sync() if no_sync and not last else contextlib.nullcontext():
                loss_of(model(x, *extra)).backward()
        found += [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found, transform


def _reduce_each_time(rank: int, world_size: int, bucketings: dict[str, tuple[str | int, ...]]) -> None:
    for strategy in ("zero2", "zero3"):
        options = {"sharding_strategy": strategy, "transport": "flat"}
        make = lambda: Stack(2, width=8).double()  # noqa: E731
        windows: list[list[tuple[Any, ...]]] = [[()] * 3, [()] * 3]
        expected, _ = _micro_batches(rank, make, windows, no_sync=False, **options)
        found, transform = _micro_batches(rank, make, windows, no_sync=True, accumulate="sharded", **options)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        [waiting] = [c for c in transform.compiled if c.no_sync]
        assert len(waiting.backward_schedule.of("fsdp_reduce_scatter")) == len(transform.plan)
        if strategy == "zero3":  # the sum of reduced gradients is not rounded to the dtype of reductions
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
            lower, _ = _micro_batches(rank, make, windows, no_sync=False, **options)
            found, _ = _micro_batches(rank, make, windows, no_sync=True, accumulate="sharded", **options)
            assert all(torch.equal(a, b) for a, b in zip(found, lower, strict=True))
            assert not any(torch.equal(a, b) for a, b in zip(lower, expected, strict=True) if a.numel())
        assert not waiting.backward_schedule.of("fsdp_accumulate_grads")

        # Micro-batches that use different parameters: the last one has no gradient of some of them.
        make = lambda: _Halves().double()  # noqa: E731
        for bucketing in bucketings[strategy]:
            options = {"sharding_strategy": strategy, "bucketing_strategy": bucketing, "transport": "flat"}
            windows = [[(True,), (False,), (True,)], [(True,), (True,), (False,)], [(False,), (True,)]]
            expected, _ = _micro_batches(rank, make, windows, no_sync=False, **options)
            found, _ = _micro_batches(rank, make, windows, no_sync=True, accumulate="sharded", **options)
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours is None) == (theirs is None) and (ours is None or torch.equal(ours, theirs))


def test_reducing_in_each_micro_batch_gives_the_bits_of_training_without_no_sync(ranks: Ranks) -> None:
    every = ("block", "none", 1 << 20)
    ranks.run(_reduce_each_time, {"zero2": every if LONG else ("block",), "zero3": every})


@on_ranks(4)
def test_a_window_reduces_across_replicas_once(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    calls: list[str] = []
    twins = Twins(
        rank,
        world_size,
        Stack(1).double(),
        mesh=mesh,
        accumulate="sharded",
        gradient_divide_factor=8.0,
        all_reduce_hook=lambda name, grads: calls.append(name),
    )
    for window in range(2):
        with twins.sharded.no_sync():
            twins.backward(3 * window)
            twins.backward(3 * window + 1)
        assert not calls
        twins.backward(3 * window + 2)
        assert sorted(calls) == sorted(bucket.spec.name for bucket in twins.transform.sharded.buckets)
        calls.clear()
        for param in twins.sharded.parameters():
            param.grad.mul_(2)  # by 8 instead of 4 ranks
        twins.update()
    [waiting] = [c for c in twins.transform.compiled if c.no_sync]
    assert waiting.backward_schedule.of("fsdp_reduce_scatter")
    assert not waiting.backward_schedule.of("fsdp_all_reduce")


@on_ranks(2)
def test_a_backward_that_fails_after_reducing_some_gradients_spoils_the_sum(rank: int, world_size: int) -> None:
    twins = Twins(rank, world_size, Stack(1).double(), accumulate="sharded")
    with twins.sharded.no_sync():
        twins.backward(0)
        loss = loss_of(twins.sharded(*twins.inputs(1)))
        calls = iter([None])
        real = Accumulation.add_reduced
        fail = mock.patch.object(Accumulation, "add_reduced", lambda *args: (next(calls), real(*args)))
        with fail, pytest.raises(StopIteration):  # in the second bucket
            loss.backward()
        with pytest.raises(RuntimeError, match="a backward under no_sync failed after it had added gradients"):
            twins.backward(1)
    discard_unreduced(twins.sharded)
    twins.reference.zero_grad()
    with twins.sharded.no_sync():
        twins.backward(2)
    twins.backward(3)
    twins.update()


@pytest.mark.parametrize(("strategy", "reduce_dtype"), [("zero2", None), ("zero3", None), ("zero3", torch.bfloat16)])
def test_memory_of_reduced_gradients_is_counted_at_every_position(
    strategy: str, reduce_dtype: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    ask = partial(fsdp, accumulate="sharded", sharding_strategy=strategy, mp_policy=policy)
    steps = count_on_fake_ranks(Stack(2).double(), ask, window=True)
    assert steps
    for name, (compiled, memory, tracker) in steps.items():
        assert not (count := compare(memory, compiled, tracker)).wrong, f"{name}\n{count}"


def test_a_later_micro_batch_is_simulated_without_the_gathers_that_it_reuses(fake_ranks: None) -> None:
    for again in (False, True):
        transform = fsdp(sharding_strategy="zero2", reshard_after_backward=again)
        model = thunder.jit(module := Stack(2), transforms=[transform])
        with model.no_sync():
            model(torch.randn(3, module.width)).sum()
        [compiled] = transform.compiled
        assert [window_of(b) for b in compiled.forward.bound_symbols if b.sym is fsdp_all_gather] == (
            [None if again else "open"] * len(transform.plan)
        )
        first, later = (
            simulate(compiled.forward, compiled.backward, AnalyticCost(cluster("h100-sxm")), in_window=in_window)
            for in_window in (False, True)
        )
        gathers = [{i.kind for i in timeline.intervals} & {"fsdp_all_gather"} for timeline in (first, later)]
        assert gathers == [{"fsdp_all_gather"}, {"fsdp_all_gather"} if again else set()]
        assert (later.step_seconds < first.step_seconds) is not again


def test_a_memory_limit_that_only_reduced_gradients_keep_makes_each_micro_batch_reduce(fake_ranks: None) -> None:
    def window(**options: Any) -> Any:
        torch.manual_seed(0)
        transform = fsdp(cluster="cpu-2core", **options)
        model = thunder.jit(Stack(4, width=64), transforms=[transform])
        x = torch.randn(2, 64)
        with model.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
        return transform.compiled

    def peak(first: Any, last: Any) -> int:
        steps = [one.predict_memory(accumulated=[first], others=[first, last]) for one in (first, last)]
        return max(memory.peak.nbytes for memory in steps)

    most = peak(*window())
    first, last = window(max_memory=most)
    assert first.backward_schedule.of("fsdp_accumulate_grads") and peak(first, last) <= most
    with pytest.raises(MemoryLimitError, match=r"max_memory: .* bytes are too few") as caught:
        window(max_memory=1, accumulate="unsharded")
    limit = caught.value.least_bytes - 1
    first, last = window(max_memory=limit)
    assert not first.backward_schedule.of("fsdp_accumulate_grads") and first.backward_schedule.of("fsdp_reduce_scatter")
    assert peak(first, last) <= limit


def test_the_predicted_bytes_of_a_window_in_lower_precision_are_enough(fake_ranks: None) -> None:
    def window(limit: int) -> Any:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        transform = fsdp(cluster="cpu-2core", accumulate="sharded", mp_policy=policy, max_memory=limit)
        model = thunder.jit(Stack(4, width=64), transforms=[transform])
        for context in (model.no_sync(), contextlib.nullcontext()):
            with context:
                model(torch.ones(2, 64)).sum().backward()
        return transform.compiled

    with pytest.raises(MemoryLimitError) as caught:
        window(1)
    limit = caught.value.least_bytes
    for one in (compiled := window(limit)):
        assert one.predict_memory(accumulated=[compiled[0]], others=compiled).peak.nbytes <= limit
