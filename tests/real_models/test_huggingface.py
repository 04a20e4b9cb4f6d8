"""Hugging Face's transformers, PEFT, accelerate and Trainer with sharded models, on two gloo ranks (``make models``)."""

from __future__ import annotations

import copy
from typing import Any

from thunder_fsdp_sched import eager, fsdp

import pytest
import thunder
import torch
from ranks import Ranks
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed (make models)")

VOCAB, LENGTH = 64, 8


def _llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            **options,
        )
    )


def _tokens(seed: int) -> torch.Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def _shard(model: nn.Module) -> Any:
    return thunder.jit(model, transforms=[fsdp()])


def _refuse_and_generate(rank: int, world_size: int) -> None:
    model = _llama()
    reference = copy.deepcopy(model)
    sharded, tokens = _shard(model), _tokens(rank)
    with pytest.raises(ValueError, match=r"cache of keys and values.*use_cache=False"):
        sharded(tokens)
    for name in ("hidden_states", "attentions"):
        with pytest.raises(ValueError, match=rf"asked for {name}, .*eager"):
            sharded(tokens, use_cache=False, **{f"output_{name}": True})
    with pytest.raises(ValueError, match="cache of keys and values"):
        from transformers import DynamicCache

        sharded(tokens, use_cache=False, past_key_values=DynamicCache())
    # The decorators of forward, with padding, labels, and hooks that an earlier request has installed.
    reference(tokens, output_hidden_states=True)
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens, "use_cache": False}
    ours, theirs = sharded(**batch), reference(**batch)
    assert type(ours) is type(theirs) and ours.keys() == theirs.keys()
    torch.testing.assert_close(ours.loss, theirs.loss)
    torch.testing.assert_close(ours.logits, theirs.logits)
    greedy = {"max_new_tokens": 3 + rank, "do_sample": False}
    with eager(sharded) as module:
        generated = module.generate(tokens, synced_gpus=True, **greedy)
    torch.testing.assert_close(generated, reference.generate(tokens, **greedy), rtol=0, atol=0)


def test_what_cannot_be_compiled_is_refused_and_works_in_eager(ranks: Ranks) -> None:
    ranks.run(_refuse_and_generate)
