"""LitGPT's ``extensions/thunder/pretrain.py``, shortened, with the changes that ``docs/fabric.md`` shows."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thunder_fsdp_sched import full_state_dict

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from ranks import launched, on_ranks
from torch import nn

pytestmark = pytest.mark.skipif(find_spec("litgpt") is None, reason="litgpt is not installed (make models)")

MICRO_BATCHES, STEPS, LENGTH = 2, 2, 8


def _batch(rank: int, iteration: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * iteration + rank)
    return torch.randint(64, (2, LENGTH + 1), generator=generator)


def _config() -> Any:
    from litgpt import Config

    small = {"block_size": LENGTH, "n_layer": 2, "n_embd": 16, "n_head": 2, "padded_vocab_size": 64}
    return Config.from_name("tiny-llama-1.1b", **small, n_query_groups=1, intermediate_size=32)


def _optimizer() -> dict[str, Any]:
    return {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2, "eps": 1e-3}}


def _forward_and_loss(model: nn.Module, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from litgpt.utils import chunked_cross_entropy

    logits = model(input_ids)
    return chunked_cross_entropy(logits, targets, chunk_size=0)


@on_ranks(timeout=500)
def test_litgpts_pretraining_with_thunder_trains_like_a_plain_loop(rank: int, world_size: int, tmp_path: Path) -> None:
    """Train, save and validate as LitGPT's script does, and compare with a plain loop."""
    with launched(rank, world_size):
        _pretrain(rank, world_size, tmp_path)


def _pretrain(rank: int, world_size: int, out_dir: Path) -> None:
    from thunder_fsdp_sched.fabric import FSDPSchedStrategy

    import lightning as L
    from litgpt import GPT
    from litgpt.pretrain import initialize_weights
    from litgpt.utils import instantiate_torch_optimizer, num_parameters

    strategy = FSDPSchedStrategy(sharding_strategy="ZERO3", bucketing_strategy="BLOCK", state_dict_type="full")
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision="32-true")
    fabric.launch()
    fabric.seed_everything(42, verbose=False)
    config = _config()

    def new_model() -> Any:
        with fabric.init_module(empty_init=True):
            model = GPT(config)
        initialize_weights(fabric, model, n_layer=config.n_layer, n_embd=config.n_embd)
        return model

    model = new_model()
    size = num_parameters(model)
    model = fabric.setup(model)
    assert num_parameters(model) == size, "the shards must have the sizes of whole parameters"
    reference = GPT(config)
    reference.load_state_dict(full_state_dict(model))
    std = reference.transformer.h[0].attn.proj.weight.std().item()
    assert 0.5 < std * config.n_embd**0.5 * config.n_layer < 1.5, "LitGPT's own initialization must have run"
    model._register_backward_hook = lambda *_: None
    optimizer = instantiate_torch_optimizer(_optimizer(), model.parameters())
    optimizer = fabric.setup_optimizers(optimizer)
    theirs = instantiate_torch_optimizer(_optimizer(), reference.parameters())
    state = {"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0}

    def train(steps: int) -> None:
        while state["step_count"] < steps:
            state["iter_num"] += 1
            data = _batch(rank, state["iter_num"])
            input_ids, targets = data[:, :LENGTH].contiguous().long(), data[:, 1:].contiguous().long()
            is_accumulating = state["iter_num"] % MICRO_BATCHES != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = _forward_and_loss(model, input_ids, targets)
                fabric.backward(loss / MICRO_BATCHES)
            expected = _forward_and_loss(reference, input_ids, targets)
            (expected / MICRO_BATCHES).backward()
            torch.testing.assert_close(loss, expected)
            if not is_accumulating:
                for param in reference.parameters():
                    dist.all_reduce(param.grad)
                    param.grad /= world_size
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
                torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
                assert norm > 0.5, "nothing was clipped"
                for one in (optimizer, theirs):
                    one.step()
                    one.zero_grad()
                state["step_count"] += 1
                for name, value in full_state_dict(model).items():
                    torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-5)

    train(STEPS)
    fabric.save(out_dir / "lit_model.pth", state)
    GPT(config).load_state_dict(torch.load(out_dir / "lit_model.pth")["model"])
    model.eval()
    with torch.no_grad():
        data = _batch(rank, 0)
        args = data[:, :LENGTH].contiguous().long(), data[:, 1:].contiguous().long()
        torch.testing.assert_close(_forward_and_loss(model, *args), _forward_and_loss(reference.eval(), *args))
    with pytest.raises(RuntimeError, check=coded("module.part-called-by-itself")):  # what LitGPT's jit=False does
        thunder.jit(_forward_and_loss)(model, *args)
