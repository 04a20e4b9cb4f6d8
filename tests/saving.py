"""Models to save, and the values that a checkpoint must keep."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs

import pytest
import thunder
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from coded import coded, says
from models import Layer, Model
from scenario import loss_of, whole_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

METADATA = ".metadata"
"""The file that completes a checkpoint, as that of torch.distributed.checkpoint."""

INDEX = "model.safetensors.index.json"
"""The file that completes a whole model, as that of Hugging Face."""


class Everything(Model):
    """A model with every kind of parameter (root, 0-dim, uneven, frozen, tied) and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.mix = nn.Parameter(torch.randn(5, 4))
        self.register_buffer("offset", torch.randn(4))
        self.register_buffer("unsaved", torch.randn(4), persistent=False)
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(Layer(4) for _ in range(2))
        self.blocks[1].up.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + self.offset + self.unsaved
        for block in self.blocks:
            x = block.forward(x)
        return self.head.forward(self.norm(x)) + torch.tanh(x @ self.embedding.weight.t() @ self.mix)[:, :1]


class Holder(nn.Module):
    """A module that holds a model, as a user's training module may, beside a layer of its own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.own = net, nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def make(
    seed: int = 0, change: Callable[[nn.Module], Any] = lambda module: None, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    """Return a sharded model with every kind of parameter, and an optimizer with two parameter groups."""
    torch.manual_seed(seed)
    module = Everything().double()
    change(module)
    if isinstance(options.get("ranks"), tuple):
        options["ranks"] = init_device_mesh("cpu", options["ranks"], mesh_dim_names=("replicate", "shard"))
    model = thunder.jit(module, transforms=[tfs.fsdp(**options)])
    return model, optimizer_of(model)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [[p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]]
    return torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=0.01)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """Train with the same data on all ranks, because running statistics are saved from one rank."""
    for step in range(steps):
        loss_of(model(*Everything.inputs(model, torch.Generator().manual_seed(step), batch=4))).backward()
        optimizer.step()
        optimizer.zero_grad()


def small(value: float = 1.0, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return a small sharded model with all parameters equal to ``value``, and its optimizer, which has state."""
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
    model = thunder.jit(module, transforms=[tfs.fsdp(**options)])
    optimizer = update(model, torch.optim.AdamW(model.parameters(), lr=0.125))
    fill(model, value)
    return model, optimizer


def update(model: Any, optimizer: torch.optim.Optimizer, grad: float = 1.0) -> torch.optim.Optimizer:
    """Run one step of an optimizer with constant gradients."""
    for param in model.parameters():
        param.grad = torch.full_like(param, grad)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def fill(model: Any, value: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def contents(model: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return whole parameters and buffers, and an optimizer's state and options, in new memory."""
    values: dict[str, Any] = {name: value.clone() for name, value in tfs.full_state_dict(model).items()}
    if optimizer is not None:
        saved = tfs.get_optimizer_state_dict(model, optimizer)
        for name, state in saved["state"].items():
            values |= {f"{key} of {name}": whole_of(value) for key, value in state.items()}
        values |= {f"group {number}": group for number, group in enumerate(saved["param_groups"])}
    return values


def assert_equal(actual: dict[str, Any], expected: dict[str, Any], what: Any = "") -> None:
    """Compare values by name, bit for bit."""
    assert actual.keys() == expected.keys(), what
    for name, value in actual.items():
        if isinstance(value, torch.Tensor):
            message = lambda text, name=name: f"{what} {name}: {text}"  # noqa: E731
            torch.testing.assert_close(whole_of(value), whole_of(expected[name]), rtol=0, atol=0, msg=message)
        else:
            assert value == expected[name], (what, name)


def refused(expected: coded | says, model: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Assert that every rank raises, and that nothing is changed; return the message."""
    before = {name: tensor.clone() for name, tensor in _own_rows(model).items()}
    with pytest.raises(tfs.CheckpointError, check=expected) as caught:
        call(*args, **kwargs)
    for name, tensor in _own_rows(model).items():
        assert torch.equal(tensor, before[name]), name
    return str(caught.value)


def _own_rows(model: Any) -> dict[str, torch.Tensor]:
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: getattr(value, "_local_tensor", value) for name, value in values.items()}


def assert_intact(folder: Path) -> None:
    """Assert that the files of a checkpoint have all data that its list of contents names."""
    for info in dcp.FileSystemReader(folder).read_metadata().storage_data.values():
        assert (folder / info.relative_path).stat().st_size >= info.offset + info.length, info


@contextlib.contextmanager
def small_files(of: int, nbytes: int = 2048) -> Iterator[None]:
    """Let a process fail to write more than ``nbytes`` into a file, as on a full disk."""
    before = resource.prlimit(of, resource.RLIMIT_FSIZE, (nbytes, -1))
    try:
        yield
    finally:
        resource.prlimit(of, resource.RLIMIT_FSIZE, before)


def on_first(do: Callable[..., Any], *args: Any) -> None:
    """Call a function on the first rank, while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        do(*args)
    dist.barrier()
