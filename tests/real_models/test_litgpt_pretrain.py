"""LitGPT's ``extensions/thunder/pretrain.py``, shortened, with the changes that ``docs/fabric.md`` shows."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

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


SMALL = {"block_size": LENGTH, "n_layer": 2, "n_embd": 16, "n_head": 2, "padded_vocab_size": 64}
OPTIMIZER = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2, "eps": 1e-3}}


def _batch(rank: int, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(64, (2, LENGTH + 1), generator=torch.Generator().manual_seed(10 * iteration + rank))
    return tokens[:, :LENGTH].contiguous(), tokens[:, 1:].contiguous()


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
    from litgpt import GPT, Config
    from litgpt.pretrain import initialize_weights
    from litgpt.utils import instantiate_torch_optimizer, num_parameters

    strategy = FSDPSchedStrategy(sharding_strategy="ZERO3", bucketing_strategy="BLOCK", state_dict_type="full")
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision="32-true")
    fabric.launch()
    fabric.seed_everything(42, verbose=False)
    config = Config.from_name("tiny-llama-1.1b", **SMALL, n_query_groups=1, intermediate_size=32)

    with fabric.init_module(empty_init=True):
        model = GPT(config)
    initialize_weights(fabric, model, n_layer=config.n_layer, n_embd=config.n_embd)
    size = num_parameters(model)
    model = fabric.setup(model)
    assert num_parameters(model) == size, "the shards must have the sizes of whole parameters"
    reference = GPT(config)
    reference.load_state_dict(full_state_dict(model))
    std = reference.transformer.h[0].attn.proj.weight.std().item()
    assert 0.5 < std * config.n_embd**0.5 * config.n_layer < 1.5, "LitGPT's own initialization must have run"
    model._register_backward_hook = lambda *_: None
    optimizer = fabric.setup_optimizers(instantiate_torch_optimizer(OPTIMIZER, model.parameters()))
    theirs = instantiate_torch_optimizer(OPTIMIZER, reference.parameters())
    for iteration in range(1, STEPS * MICRO_BATCHES + 1):
        is_accumulating = iteration % MICRO_BATCHES != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = _forward_and_loss(model, *_batch(rank, iteration))
            fabric.backward(loss / MICRO_BATCHES)
        expected = _forward_and_loss(reference, *_batch(rank, iteration))
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
            for name, value in full_state_dict(model).items():
                torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-5)
    fabric.save(out_dir / "lit_model.pth", {"model": model, "optimizer": optimizer, "iter_num": iteration})
    GPT(config).load_state_dict(torch.load(out_dir / "lit_model.pth")["model"])
    model.eval()
    args = _batch(rank, 0)
    with torch.no_grad():
        torch.testing.assert_close(_forward_and_loss(model, *args), _forward_and_loss(reference.eval(), *args))
    with pytest.raises(TypeError, check=coded("module.jitted-module-inside-jit")):  # what LitGPT's jit=False does
        thunder.jit(_forward_and_loss)(model, *args)
