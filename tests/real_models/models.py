"""Real models in small configurations of a few thousand parameters, with random weights.

The factories import the libraries: tests skip those that are not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .own_models import DLRM, DenseMoE, ResNet

Batch = dict[str, torch.Tensor]

VOCAB, LENGTH = 64, 8


@dataclass(frozen=True)
class RealModel:
    """A model, and how it is trained.

    Attributes:
        make: returns the module. It is trained in float64. Norms and softmax of some models cast to float32 internally;
            their inputs agree to 1e-15, so they nearly always round equally.
        batch: returns keyword arguments for its forward.
        loss: returns the loss, given the output of forward and the batch.
        library: the package that ``make`` needs.
        strategies: the values of ``sharding_strategy`` to test.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, Batch], torch.Tensor]
    library: str | None = None
    strategies: tuple[str, ...] = ("zero3",)


#
# Batches and losses
#


def _tokens(name: str) -> Callable[[torch.Generator], Batch]:
    return lambda generator: {name: torch.randint(VOCAB, (2, LENGTH), generator=generator)}


def _images(batch: int, size: int, name: str) -> Callable[[torch.Generator], Batch]:
    return lambda generator: {name: torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float64)}


def _clicks(generator: torch.Generator) -> Batch:
    model = DLRM()
    indices = [torch.randint(rows, (4, model.hots), generator=generator) for rows in model.rows]
    return {
        "dense": torch.randn(4, model.dense, generator=generator, dtype=torch.float64),
        "indices": torch.stack(indices, 1),
    }


def _logits(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


def _next_token(output: Any, batch: Batch) -> torch.Tensor:
    (tokens,) = batch.values()
    return F.cross_entropy(_logits(output)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _label(output: Any, batch: Batch) -> torch.Tensor:
    logits = _logits(output)
    return F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])


def _clicked(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.binary_cross_entropy(output, (batch["indices"].sum((1, 2)) % 2).double())


#
# Libraries
#


def _litgpt(name: str, **config: Any) -> RealModel:
    """Return a model that LitGPT knows by name, in a small configuration."""

    def make() -> nn.Module:
        litgpt = import_module("litgpt")
        small = {"block_size": 16, "n_layer": 2, "n_embd": 32, "n_head": 4, "padded_vocab_size": VOCAB}
        return litgpt.GPT(litgpt.Config.from_name(name, **small, intermediate_size=64, **config))

    return RealModel(make, _tokens("idx"), _next_token, "litgpt")


def _transformers(model: str, config: str, batch: Callable[[torch.Generator], Batch], **options: Any) -> RealModel:
    """Return a model of Hugging Face's transformers, given the names of its class and its configuration's class."""

    def make() -> nn.Module:
        transformers = import_module("transformers")
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return RealModel(make, batch, _next_token if "image_size" not in options else _label, "transformers")


_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
}
_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "use_cache": False}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

MODELS: dict[str, RealModel] = {
    "resnet": RealModel(ResNet, _images(4, 32, "images"), _label),
    "dlrm": RealModel(DLRM, _clicks, _clicked, strategies=("zero2", "zero3")),
    "dense_moe": RealModel(lambda: DenseMoE(VOCAB), _tokens("tokens"), _next_token),
    "litgpt_gpt_neox": _litgpt("pythia-14m"),
    "litgpt_llama_3": _litgpt("Llama-3-8B", n_query_groups=2),
    "litgpt_gemma": _litgpt("Gemma-2b", head_size=16, n_query_groups=1),
    "litgpt_gemma_2": _litgpt("Gemma-2-2b", head_size=16, n_query_groups=2),
    "transformers_llama": _transformers("LlamaForCausalLM", "LlamaConfig", _tokens("input_ids"), **_DECODER),
    "transformers_gpt2": _transformers("GPT2LMHeadModel", "GPT2Config", _tokens("input_ids"), **_GPT2, **_NO_DROPOUT),
    "transformers_qwen2": _transformers("Qwen2ForCausalLM", "Qwen2Config", _tokens("input_ids"), **_DECODER),
    "transformers_qwen3": _transformers(
        "Qwen3ForCausalLM", "Qwen3Config", _tokens("input_ids"), **_DECODER, head_dim=8
    ),
    "transformers_bert": _transformers(
        "BertForMaskedLM", "BertConfig", _tokens("input_ids"), vocab_size=VOCAB, max_position_embeddings=16, **_ENCODER
    ),
    "transformers_vit": _transformers(
        "ViTForImageClassification",
        "ViTConfig",
        _images(2, 8, "pixel_values"),
        image_size=8,
        patch_size=4,
        num_labels=5,
        **_ENCODER,
    ),
}

for _name in ("litgpt_llama_3", "transformers_gpt2"):
    MODELS[_name] = replace(MODELS[_name], strategies=("zero2", "zero3"))
