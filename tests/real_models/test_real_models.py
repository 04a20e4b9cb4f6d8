"""Real models on gloo ranks: three AdamW steps, compared with the unsharded model and with FSDP2.

``make models`` installs the libraries. Without them only ``own_models`` run. ``-rP`` shows seconds and differences.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from thunder_fsdp_sched import fsdp, full_state_dict

import pytest
import thunder
import torch
from memory_count import compare, count_on_fake_ranks
from profiles import LONG_ONLY
from ranks import Ranks
from reference import Twins
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from .models import MODELS, UNTRACEABLE, RealModel


class _WithFSDP2(Twins):
    """A sharded model, its unsharded copy, and a copy that FSDP2 shards at the same blocks."""

    def __init__(self, rank: int, world_size: int, case: RealModel, strategy: str) -> None:
        model = case.make().double()
        model.inputs = None
        self.case = case
        self.peer = copy.deepcopy(model)
        _fully_shard(self.peer, init_device_mesh("cpu", (world_size,)), reshard_after_forward=strategy == "zero3")
        super().__init__(rank, world_size, model, sharding_strategy=strategy)
        # Adam divides by the size of the gradient. A gradient that consists of rounding errors, such as that of the bias of
        # attention's keys, would move a parameter as far as any other in a random direction. This eps prevents that.
        self.models = (self.sharded, self.reference, self.peer)
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4) for model in self.models]
        self.largest: dict[str, float] = defaultdict(float)
        self.compared_with = "unsharded"

    def step(self, step: int) -> None:
        batch = self.case.batch(torch.Generator().manual_seed(1000 * step + self.rank))
        losses = [self.case.loss(model(**batch), batch) for model in self.models]
        for loss in losses:
            loss.backward()
        self._compare_peer({"loss": losses[0].detach()}, {"loss": losses[2].detach()})
        self.close(losses[0], losses[1], "loss")
        grads = {name: param.grad for name, param in self.peer.named_parameters(remove_duplicate=False)}
        self._compare_peer(
            {f"gradient of {name}": grad for name, grad in self.gathered_grads().items()},
            {f"gradient of {name}": grad for name, grad in grads.items()},
        )
        self.update()
        self._compare_peer(full_state_dict(self.sharded), self.peer.state_dict())

    def _compare_peer(self, ours: dict[str, torch.Tensor | None], theirs: dict[str, torch.Tensor | None]) -> None:
        self.compared_with = "FSDP2"
        for name, value in ours.items():
            expected = theirs[name]
            assert (value is None) == (expected is None), f"{name}: {value}, FSDP2 has {expected}"
            if value is not None:
                self.close(value, expected.full_tensor() if isinstance(expected, DTensor) else expected, name)
        self.compared_with = "unsharded"

    def close(self, ours: Any, theirs: Any, what: str) -> None:
        if isinstance(ours, torch.Tensor) and ours.numel():
            difference = (ours.detach() - theirs.detach()).abs().max().item()
            self.largest[self.compared_with] = max(self.largest[self.compared_with], difference)
        super().close(ours, theirs, f"{what} beside {self.compared_with}")


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child
        else:
            yield from _blocks(child)


def _fully_shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    for block in _blocks(model):
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def _train(rank: int, world_size: int, name: str, strategy: str) -> dict[str, float]:
    compared = _WithFSDP2(rank, world_size, MODELS[name], strategy)
    before = {name: param.detach().clone() for name, param in compared.reference.named_parameters()}
    start = time.process_time()
    compared.step(0)
    seconds = time.process_time() - start
    compared.step(1)
    compared.step(2)
    assert len(compared.transform.compiled) == 1
    moved = max((param - before[name]).abs().max().item() for name, param in compared.reference.named_parameters())
    assert moved > 1e-3, f"no parameter has moved by more than {moved}: nothing was compared"
    return {"CPU seconds of the first step": seconds, "moved": moved, **compared.largest}


def _skip_without_library(case: RealModel) -> None:
    if case.library is not None and find_spec(case.library) is None:
        pytest.skip(f"{case.library} is not installed (make models)")


_LONG_ONLY = {("dlrm", "zero2"), ("resnet", "memory")}


def _case(*case: str) -> Any:
    return pytest.param(*case, marks=[LONG_ONLY] if case in _LONG_ONLY else [])


@pytest.mark.parametrize(
    ("name", "strategy"), [_case(name, strategy) for name, case in MODELS.items() for strategy in case.strategies]
)
def test_real_models_train_like_unsharded_and_like_fsdp2(ranks: Ranks, name: str, strategy: str) -> None:
    _skip_without_library(MODELS[name])
    results = ranks.run(_train, name, strategy, timeout=500)
    print(name, strategy, *(f"{what} {max(r[what] for r in results):.2g}" for what in results[0]), sep=", ")


@pytest.mark.parametrize(("name", "_"), [_case(name, "memory") for name in MODELS])
def test_predicted_memory_of_real_models_is_counted_at_every_position(name: str, _: str) -> None:
    case = MODELS[name]
    _skip_without_library(case)
    batch = case.batch(torch.Generator().manual_seed(0))
    compiled, memory, tracker = count_on_fake_ranks(case.make().double(), fsdp, batch=batch)["step"]
    count = compare(memory, compiled, tracker)
    print(f"{name}: {len(count.wrong)} of {len(tracker.bytes_at)} positions differ, peak {count.counted:,} bytes")
    assert not count.wrong, str(count)
    bounded = {unknown.name: unknown.nbytes for unknown in memory.unknowns if unknown.nbytes is not None}
    assert bounded.keys() <= {"torch.nn.functional.embedding_bag", "embedding_bag", "embedding_bag_vjp"}, bounded
    assert set(bounded.values()) <= {8}, bounded


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_plain_thunder_does_not_trace_untraceable_models(name: str) -> None:
    """If this fails, Thunder traces the model now."""
    case, error = UNTRACEABLE[name]
    _skip_without_library(case)
    model = thunder.jit(case.make())
    with pytest.raises(Exception, match=error):
        model(**case.batch(torch.Generator().manual_seed(0)))
