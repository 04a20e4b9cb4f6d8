"""Accumulation windows: later micro-batches reuse gathered buckets, with the bits of gathering them again."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from thunder_fsdp_sched import fsdp, full_state_dict, unsharded
from thunder_fsdp_sched.runtime.bucket import Bucket
from thunder_fsdp_sched.trace.symbols import fsdp_all_gather, window_of
from thunder_fsdp_sched.transforms import VerificationError, reuse_in_window, verify

import pytest
import thunder
import torch
from models import GPT, Stack
from ranks import Ranks
from reference import loss_of
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


def _reuse(rank: int, world_size: int, options: dict[str, Any]) -> None:
    if "mesh" in options:
        options = options | {"mesh": init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicas", "shards"))}
    pair = Pair(rank, partial(GPT, blocks=2), **options)
    each = Counter(pair.names)
    for window in range(2):
        assert pair.micro_batch(10 * window) == each
        assert pair.micro_batch(10 * window + 1) == Counter()
        assert pair.micro_batch(10 * window + 2, no_sync=False) == Counter()
        pair.step()


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "flat"},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"offload_policy": CPUOffloadPolicy()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_only_the_first_micro_batch_of_a_window_gathers(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.run(_reuse, options | {"sharding_strategy": "zero2"})


def test_only_the_first_micro_batch_gathers_with_replicas(four_ranks: Ranks) -> None:
    four_ranks.run(_reuse, {"sharding_strategy": "zero2", "mesh": (2, 2)})


def _change(model: Any, *, first_rank: int = 0, through: str = "parameter") -> None:
    """Change the rows that each rank from ``first_rank`` on has of the weight of the first block."""
    weight = dict(model.named_parameters())[WEIGHT]
    if torch.distributed.get_rank() < first_rank:
        return
    with torch.no_grad():
        {"parameter": weight, "data": weight.data, "local": weight.to_local(), "detached": weight.detach()}[through].mul_(2)


def _change_whole(model: Any) -> None:
    with unsharded(model, "blocks.0"), torch.no_grad():
        dict(model.named_parameters())[WEIGHT].add_(1)


def _evaluate(pair: Pair) -> None:
    with torch.no_grad():
        pair.forward(7, no_sync=False)


def _disturb(rank: int, world_size: int) -> None:
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
    window(lambda: pair.on_each(partial(_change, first_rank=1)), only)  # rank 0 has changed nothing, and gathers with it
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


def test_what_has_changed_is_gathered_again_on_all_ranks(ranks: Ranks) -> None:
    ranks.run(_disturb)


def _fail(rank: int, world_size: int) -> None:
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


def test_a_window_goes_on_after_an_exception_in_forward(ranks: Ranks) -> None:
    ranks.run(_fail)
