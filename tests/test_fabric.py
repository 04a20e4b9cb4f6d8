"""Lightning Fabric with ``FSDPSchedStrategy``, compared with the unsharded model."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs  # before thunder

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

STEPS, ACCUMULATED = 3, 2


def _installed() -> str | None:
    for name in ("lightning_fabric", "lightning"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            return name
    return None


PACKAGE = _installed()
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="neither lightning-fabric nor lightning is installed")


class Norm(nn.Module):
    """An RMS norm as LitGPT has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (t[:, None] for t in self.qkv.forward(self.norm.forward(x)).chunk(3, -1))
        q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
        return x + self.proj.forward(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class GPT(nn.Module):
    """A model with the traits of LitGPT's: a cache of positions in buffers that are not saved, and tied embeddings."""

    def __init__(self, width: int = 8, vocab: int = 13, length: int = 6) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.h = nn.ModuleList(Block(width) for _ in range(2))
        self.ln_f = Norm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        self.shape = (length, width)
        cos, sin = self.positions()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def positions(self, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        length, width = self.shape
        angles = torch.outer(torch.arange(length, device=device), 0.5 ** torch.arange(width, device=device))
        return angles.cos().to(torch.get_default_dtype()), angles.sin().to(torch.get_default_dtype())

    def reset_parameters(self) -> None:
        self.cos, self.sin = self.positions(self.cos.device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte.forward(tokens)
        for block in self.h:
            x = block(x, self.cos, self.sin)
        return self.lm_head.forward(self.ln_f.forward(x))

    def predict(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens).argmax(-1)


@contextlib.contextmanager
def launched(rank: int, world_size: int, precision: str = "32-true", **options: Any) -> Iterator[Any]:
    """Yield a ``Fabric`` in processes that have a process group, as under torchrun."""
    fabric_package = importlib.import_module(
        "lightning_fabric" if PACKAGE == "lightning_fabric" else "lightning.fabric"
    )
    strategy = importlib.import_module("thunder_fsdp_sched.fabric").FSDPSchedStrategy(**options)
    environment = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "localhost", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    with mock.patch.dict(os.environ, {key: str(value) for key, value in environment.items()}):
        fabric = fabric_package.Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision=precision)
        fabric.launch()
        yield fabric


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(13, (2, 6), generator=generator)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def mean_gradients(model: nn.Module, world_size: int) -> None:
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= world_size


def assert_same(model: Any, reference: nn.Module) -> None:
    whole = tfs.full_state_dict(model)
    assert whole.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def _train(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    with launched(rank, world_size, sharding_strategy="zero3") as fabric:
        model = GPT().double()
        reference = copy.deepcopy(model)
        early = torch.optim.AdamW(model.parameters(), lr=0.05)  # before fabric.setup
        model, optimizer = fabric.setup(model, early)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        theirs = torch.optim.AdamW(reference.parameters(), lr=0.05)
        clips = ({"max_norm": 0.1}, {"clip_val": 0.01}, {"max_norm": 0.2, "norm_type": float("inf")})
        for step in range(STEPS):
            for part in range(ACCUMULATED):
                with fabric.no_backward_sync(model, enabled=part < ACCUMULATED - 1):
                    loss = loss_of(model, rank, 10 * step + part)
                    expected = loss_of(reference, rank, 10 * step + part)
                    torch.testing.assert_close(loss, expected)
                    fabric.backward(loss)
                    expected.backward()
                    assert (part == ACCUMULATED - 1) == any(p.grad is not None for p in model.parameters()), part
            mean_gradients(reference, world_size)
            norm = fabric.clip_gradients(model, optimizer, **clips[step])
            params = list(reference.parameters())
            if "clip_val" in clips[step]:
                nn.utils.clip_grad_value_(params, clips[step]["clip_val"])
            else:
                expected_norm = nn.utils.clip_grad_norm_(
                    params, clips[step]["max_norm"], clips[step].get("norm_type", 2.0)
                )
                torch.testing.assert_close(norm, expected_norm)
                assert expected_norm > clips[step]["max_norm"], "nothing was clipped"
            optimizer.step()
            optimizer.zero_grad()
            theirs.step()
            theirs.zero_grad()
            assert_same(model, reference)
        _functions_take_the_wrapper(model, optimizer, reference)
        with pytest.raises(RuntimeError, match="only its forward is compiled"):
            model.mark_forward_method("predict")
            model.predict(torch.zeros(2, 6, dtype=torch.long))
        loss_of(model, rank, 0)  # goes on
        assert fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum") == 1
        fabric.barrier()


def _functions_take_the_wrapper(model: Any, optimizer: Any, reference: nn.Module) -> None:
    """Call this package's functions with what ``fabric.setup`` returns."""
    tokens = torch.zeros(2, 6, dtype=torch.long)
    with tfs.eager(model, reshard_after_forward=False) as module, torch.no_grad():
        torch.testing.assert_close(module(tokens), reference(tokens))
    assert tfs.get_model_state_dict(model).keys() == reference.state_dict().keys()
    names = {name for name, _ in reference.named_parameters()}
    assert tfs.get_optimizer_state_dict(model, optimizer)["state"].keys() == names
    tfs.discard_unreduced(model)
    loss_of(model, 0, 0).backward()
    assert tfs.clip_grad_norm_(model, 1.0) > 0
    optimizer.zero_grad()


def test_models_train_like_unsharded_with_accumulation_and_clipping(ranks: Ranks) -> None:
    ranks.run(_train)


def step_without_loss(model: Any, optimizer: Any) -> None:
    """Run a step with gradients that follow from the parameters, which needs no compiling."""
    for param in model.parameters():
        param.grad = param.detach() / 10
    optimizer.step()
    optimizer.zero_grad()


def assert_same_state(model: Any, optimizer: Any, reference: nn.Module, theirs: torch.optim.Optimizer) -> None:
    assert_same(model, reference)
    ours = tfs.get_optimizer_state_dict(model, optimizer)
    params = dict(reference.named_parameters())
    assert ours["state"].keys() == params.keys()
    for name, param in params.items():
        assert ours["state"][name]["step"] == theirs.state[param]["step"]
        for what in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours["state"][name][what].full_tensor(), theirs.state[param][what])
    assert ours["param_groups"][0]["lr"] == theirs.param_groups[0]["lr"]


class Counter:
    """An object with a state, such as a data loader that can resume."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def _fresh(fabric: Any) -> tuple[Any, Any]:
    """Return a model created on the meta device, and its optimizer; all differ from those of the test."""
    torch.manual_seed(1)
    with fabric.init_module(empty_init=True):
        model = GPT()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    module = fabric.setup_module(model.double())
    return module, fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=0.5))


def _save_and_load(rank: int, world_size: int, folder: Path) -> None:
    torch.manual_seed(0)
    with launched(rank, world_size) as fabric:
        original = GPT().double()
        reference = copy.deepcopy(original)
        model, optimizer = fabric.setup(original, torch.optim.AdamW(original.parameters(), lr=0.05))
        theirs = torch.optim.AdamW(reference.parameters(), lr=0.05)
        step_without_loss(model, optimizer)
        step_without_loss(reference, theirs)
        for kind in ("sharded", "full"):
            fabric.strategy.state_dict_type = kind
            path = folder / kind
            saved = {"model": model, "optimizer": optimizer, "iteration": 3, "loader": Counter(5), "name": "first"}
            fabric.save(path, saved | {"iteration": 2})
            fabric.save(path, saved)  # takes the place of the first
            assert path.is_dir() == (kind == "sharded")
            others = [p.name for p in folder.iterdir() if p.name not in ("sharded", "full")]
            assert not others, "files of the replaced checkpoint must not stay"
            new, new_optimizer = _fresh(fabric)
            state = {"model": new, "optimizer": new_optimizer, "iteration": 0, "loader": Counter(0)}
            assert fabric.load(path, state) == {"name": "first"}
            assert state["iteration"] == 3 and state["loader"].value == 5
            assert_same_state(new, new_optimizer, reference, theirs)
            with pytest.raises(KeyError, match="has no 'epoch'"):
                fabric.load(path, {"model": new, "epoch": 0})
            assert fabric.load(path, {"model": new, "epoch": 0}, strict=False)["iteration"] == 3
        _files_are_those_of_unsharded_runs(fabric, folder, reference, theirs)
        with pytest.raises(ValueError, match="expected one module in state"):
            fabric.save(folder / "nothing", {"optimizer": optimizer})
        with pytest.raises(tfs.CheckpointError, match="nothing cannot be read"):
            fabric.load(folder / "nothing", {"model": model})


def _files_are_those_of_unsharded_runs(
    fabric: Any, folder: Path, reference: nn.Module, theirs: torch.optim.Optimizer
) -> None:
    content = torch.load(folder / "full")
    assert content["model"]["wte.weight"].data_ptr() == content["model"]["lm_head.weight"].data_ptr()
    reference.load_state_dict(content["model"])
    assert content["optimizer"]["param_groups"][0]["params"] == [name for name, _ in reference.named_parameters()]
    if fabric.global_rank == 0:
        torch.save({"model": reference.state_dict(), "optimizer": theirs.state_dict()}, folder / "unsharded")
        torch.save(reference.state_dict(), folder / "raw")
    fabric.barrier()
    new, optimizer = _fresh(fabric)
    fabric.load(folder / "unsharded", {"model": new, "optimizer": optimizer})
    assert_same_state(new, optimizer, reference, theirs)
    new, _ = _fresh(fabric)
    fabric.load_raw(folder / "raw", new)
    assert_same(new, reference)
    fabric.save(folder / "some", {"model": new}, filter={"model": lambda name, value: name.startswith("h.1")})
    assert all(name.startswith("h.1") for name in torch.load(folder / "some")["model"])


def test_checkpoints_are_saved_and_loaded_as_folders_and_as_files(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_save_and_load, tmp_path)
