"""Submodules and methods that FSDP2 lets users call by themselves: with gradients through the jitted model, else eagerly."""

from __future__ import annotations

import copy

from thunder_fsdp_sched import eager, fsdp

import pytest
import thunder
import torch
from models import Layer
from ranks import on_ranks
from scenario import loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method


class Encoder(nn.Module):
    """Two blocks; ``features`` is another way to run them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(8, torch.relu) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.blocks[0](x))


class TwoParts(nn.Module):
    """An encoder and a head. An argument of ``forward`` says what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, part: str = "all") -> torch.Tensor:
        if part == "encoder":
            return self.encoder(x)
        if part == "features":
            return self.encoder.features(x)
        return self.head.forward(self.encoder(x))


@on_ranks()
def test_parts_train_through_the_jitted_model_and_run_eagerly_as_in_fsdp2(rank: int, world_size: int) -> None:
    model = TwoParts()
    theirs = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world_size,))
    for block in theirs.encoder.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(theirs.encoder, mesh=mesh)
    register_fsdp_forward_method(theirs.encoder, "features")
    fully_shard(theirs, mesh=mesh)
    transform = fsdp(mesh=mesh)
    ours = thunder.jit(model, transforms=[transform])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    for step, part in enumerate(("all", "encoder", "features")):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        theirs_of = {"all": theirs, "encoder": theirs.encoder, "features": theirs.encoder.features}[part]
        for output in (ours(x, part), theirs_of(x)):
            loss_of(output).backward()
        expected = dict(theirs.named_parameters())
        for name, param in ours.named_parameters():
            assert (param.grad is None) == (expected[name].grad is None), (part, name)
            if param.grad is not None:
                assert torch.equal(param.grad.full_tensor(), expected[name].grad.full_tensor()), (part, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    gathered = [{op.bucket for op in c.schedule.forward.of("fsdp_all_gather")} for c in transform.compiled]
    blocks = {"encoder.blocks.0", "encoder.blocks.1"}
    assert gathered == [{*blocks, "head"}, blocks, {"encoder.blocks.0"}], "a part must gather only its own parameters"
    x = torch.randn(4, 8)
    with torch.no_grad(), eager(ours) as module:
        assert torch.equal(module.encoder(x), theirs.encoder(x))
        assert torch.equal(module.encoder.features(x), theirs.encoder.features(x))
    for owner in (ours, model):
        with pytest.raises(
            RuntimeError, match=r"encoder \(Encoder\).*called by itself.*argument that says.*eager\(model\)"
        ):
            owner.encoder(x)
        with pytest.raises(RuntimeError, match=r"encoder.blocks.0 \(Layer\).*called by itself"):
            owner.encoder.features(x)
