"""Tiny configurations of architectures of transformers, timm and diffusers, with random weights.

They are made as a user makes them, but for their sizes, dropout and caches of keys and values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .models import LENGTH, VOCAB

Batch = dict[str, Any]

_GROUPED = "transformers.grouped_mm_fallback"
_NO_SCALARS = "refuses parameters without dimensions"
_OUTSIDE = "fails: forward uses a parameter of a block outside of it"
FLOAT32 = {"dtype": torch.float32, "tolerance": 2e-4}
"""For models whose operators have no float64 kernels, or that cast to float32."""


@dataclass(frozen=True)
class Architecture:
    """How one architecture is trained.

    Attributes:
        library: the package that ``make`` needs.
        make: returns the module.
        batch: returns keyword arguments for its forward. Floating-point ones are cast to ``dtype``.
        leaves: what runs as it is, with nothing but ``fsdp()``: patterns of leaf modules with their classes, and operators.
        fails: why it does not train; empty if it does.
        fsdp2: why FSDP2 does not train it; empty if it does.
        dtype, tolerance: of what is compared with the unsharded model.
    """

    library: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    leaves: tuple[str, ...] = ()
    fails: str = ""
    fsdp2: str = ""
    dtype: torch.dtype = torch.float64
    tolerance: float = 2e-5  # many cast to float32 for the loss, norms or softmax


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss that a model returns if it was given labels, or one of the first tensor that it returns."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    value = (
        output
        if isinstance(output, torch.Tensor)
        else next(iter(output.values() if isinstance(output, dict) else output))
    )
    return F.mse_loss(value, torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view(value.shape))


#
# Batches
#


def _tokens(generator: torch.Generator, *shape: int, labels: bool = True) -> Batch:
    tokens = torch.randint(3, VOCAB, shape or (2, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens} if labels else {"input_ids": tokens}


def _sequence_to_sequence(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator)["input_ids"], "labels": _tokens(generator)["labels"]}


def _images(name: str, size: int, classes: int | None = 5, channels: int = 3) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        images = {name: torch.randn(2, channels, size, size, generator=generator)}
        if classes is None:
            return images
        return images | {"labels": torch.randint(classes, (2,), generator=generator)}

    return batch


def _speech(generator: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(2, 8, 32, generator=generator),
        "labels": torch.randint(3, VOCAB, (2, LENGTH), generator=generator),
    }


def _waves(generator: torch.Generator) -> Batch:
    return {
        "input_values": torch.randn(2, 400, generator=generator),
        "labels": torch.randint(3, VOCAB, (2, 4), generator=generator),
    }


def _pairs(generator: torch.Generator) -> Batch:
    tokens = torch.randint(3, VOCAB - 1, (2, LENGTH), generator=generator)
    tokens[:, -1] = VOCAB - 1  # the end of a text, at which CLIP pools
    return {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}


def _clip_pairs(generator: torch.Generator) -> Batch:
    return _pairs(generator) | {"return_loss": True}


def _llava(generator: torch.Generator) -> Batch:
    tokens = torch.randint(3, VOCAB - 1, (2, LENGTH), generator=generator)
    tokens[:, :4] = VOCAB - 1  # the tokens that stand for 4 patches of an image
    return {"input_ids": tokens, "labels": tokens, "pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}


def _noise(generator: torch.Generator) -> Batch:
    return {
        "sample": torch.randn(2, 3, 8, 8, generator=generator),
        "timestep": torch.randint(1000, (2,), generator=generator),
    }


def _conditioned(generator: torch.Generator) -> Batch:
    return _noise(generator) | {"encoder_hidden_states": torch.randn(2, 4, 16, generator=generator)}


def _dit(generator: torch.Generator) -> Batch:
    return {
        "hidden_states": torch.randn(2, 3, 8, 8, generator=generator),
        "timestep": torch.randint(1000, (2,), generator=generator),
        "class_labels": torch.randint(5, (2,), generator=generator),
    }


def _flux(generator: torch.Generator) -> Batch:
    positions = torch.zeros(4, 3)
    return {
        "hidden_states": torch.randn(1, 4, 4, generator=generator),
        "encoder_hidden_states": torch.randn(1, 3, 16, generator=generator),
        "pooled_projections": torch.randn(1, 16, generator=generator),
        "timestep": torch.rand(1, generator=generator),
        "img_ids": torch.randn(4, 3, generator=generator),
        "txt_ids": positions[:3],
    }


def _sd3(generator: torch.Generator) -> Batch:
    return {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(2, 3, 16, generator=generator),
        "pooled_projections": torch.randn(2, 16, generator=generator),
        "timestep": torch.randint(1000, (2,), generator=generator),
    }


#
# Libraries
#


_defined: list[torch.library.Library] = []


def _import(library: str) -> Any:
    """Import a library. Some import torchvision, whose kernels load only beside the build of torch that they are made for.

    Without them torchvision declares no operators, and its import fails at the first one that it describes to torch.
    """
    torchvision = find_spec("torchvision")
    if torchvision is not None and not _defined and "torchvision" not in sys.modules:
        try:
            for kernels in Path(str(torchvision.origin)).parent.glob("_C*.so"):
                torch.ops.load_library(kernels)
        except OSError:
            _defined.append(torch.library.Library("torchvision", "DEF"))
            for name in ("nms", "qnms"):
                _defined[0].define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    return import_module(library)


def _without_dropout(config: Any) -> Any:
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            _without_dropout(value)
    return config


def _architecture(library: str, make: Callable[..., nn.Module], batch: Any, options: dict[str, Any]) -> Architecture:
    """Return an architecture; ``make`` gets the library and those options that are no fields of :class:`Architecture`."""
    own = {name: options.pop(name) for name in [*options] if name in Architecture.__dataclass_fields__}
    return Architecture(library, lambda: make(_import(library), **options), batch, **own)


def _transformers(model: str, batch: Callable[..., Batch] = _tokens, **options: Any) -> Architecture:
    """Return a model of transformers; options that are dictionaries are configurations of parts."""

    def make(library: Any, **options: Any) -> nn.Module:
        cls = getattr(library, model)
        return cls(_without_dropout(cls.config_class(**options)))

    return _architecture("transformers", make, batch, options)


def _timm(name: str, batch: Callable[..., Batch], **options: Any) -> Architecture:
    return _architecture("timm", lambda library, **options: library.create_model(name, **options), batch, options)


def _diffusers(model: str, batch: Callable[..., Batch], **options: Any) -> Architecture:
    return _architecture("diffusers", lambda library, **options: getattr(library, model)(**options), batch, options)


_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENCODER = {**_SIZES, "intermediate_size": 64, "max_position_embeddings": 32}
_DECODER = {**_ENCODER, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {**_DECODER, "num_key_value_heads": 2}
_GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "use_cache": False}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
_STATE_SPACE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "use_cache": False, "pad_token_id": 0}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4}
_EXPERTS = {**_LLAMA, "num_experts_per_tok": 2}
_BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_TEXT = {**_ENCODER, "bos_token_id": 1, "eos_token_id": VOCAB - 1, "pad_token_id": 0}

ARCHITECTURES: dict[str, Architecture] = {
    # Decoders.
    "bloom": _transformers("BloomForCausalLM", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, use_cache=False),
    "cohere": _transformers("CohereForCausalLM", **_LLAMA),
    "falcon": _transformers("FalconForCausalLM", **_DECODER),
    "gemma": _transformers("GemmaForCausalLM", **_LLAMA, head_dim=8),
    "gemma2": _transformers("Gemma2ForCausalLM", **_LLAMA, head_dim=8, sliding_window=4),
    "gemma3": _transformers("Gemma3ForCausalLM", **_LLAMA, head_dim=8, sliding_window=4),
    "gpt2": _transformers("GPT2LMHeadModel", **_GPT),
    "gpt_bigcode": _transformers("GPTBigCodeForCausalLM", **_GPT),
    "gpt_neo": _transformers(
        "GPTNeoForCausalLM",
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=16,
        use_cache=False,
    ),
    "gpt_neox": _transformers("GPTNeoXForCausalLM", **_DECODER),
    "gptj": _transformers("GPTJForCausalLM", **_GPT, rotary_dim=4),
    "granite": _transformers("GraniteForCausalLM", **_LLAMA),
    "llama": _transformers("LlamaForCausalLM", **_LLAMA),
    "mistral": _transformers("MistralForCausalLM", **_LLAMA, sliding_window=4),
    "olmo2": _transformers("Olmo2ForCausalLM", **_LLAMA),
    "opt": _transformers("OPTForCausalLM", **{**_DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "phi": _transformers("PhiForCausalLM", **_DECODER),
    "phi3": _transformers("Phi3ForCausalLM", **_LLAMA),
    "qwen2": _transformers("Qwen2ForCausalLM", **_LLAMA),
    "qwen3": _transformers("Qwen3ForCausalLM", **_LLAMA, head_dim=8),
    "smollm3": _transformers("SmolLM3ForCausalLM", **_LLAMA),
    "stablelm": _transformers("StableLmForCausalLM", **_LLAMA),
    "starcoder2": _transformers("Starcoder2ForCausalLM", **_LLAMA),
    # Mixtures of experts.
    "deepseek_v3": _transformers(
        "DeepseekV3ForCausalLM",
        **_EXPERTS | {"num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        **FLOAT32,
        leaves=(_GROUPED,),
    ),
    "gpt_oss": _transformers(
        "GptOssForCausalLM",
        **_EXPERTS,
        num_local_experts=4,
        head_dim=8,
        sliding_window=4,
        **FLOAT32,
        leaves=(_GROUPED,),
    ),
    "mixtral": _transformers("MixtralForCausalLM", **_EXPERTS, num_local_experts=4, **FLOAT32, leaves=(_GROUPED,)),
    "qwen3_moe": _transformers(
        "Qwen3MoeForCausalLM",
        **_EXPERTS,
        num_experts=4,
        moe_intermediate_size=16,
        head_dim=8,
        **FLOAT32,
        leaves=(_GROUPED,),
    ),
    # State spaces, and mixtures of them with attention.
    "bamba": _transformers(
        "BambaForCausalLM",
        **_LLAMA,
        **_MAMBA2,
        attn_layer_indices=[1],
        **FLOAT32,
        leaves=("model.layers.*.mamba (BambaMixer)",),
    ),
    "falcon_h1": _transformers(
        "FalconH1ForCausalLM",
        **_LLAMA,
        **_MAMBA2,
        mamba_d_ssm=64,
        head_dim=8,
        **FLOAT32,
        leaves=("model.layers.*.mamba (FalconH1Mixer)",),
    ),
    "jamba": _transformers(
        "JambaForCausalLM",
        **_EXPERTS,
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        **FLOAT32,
        leaves=(
            "model.layers.*.mamba (JambaMambaMixer)",
            _GROUPED,
        ),
    ),
    "mamba": _transformers(
        "MambaForCausalLM",
        **_STATE_SPACE,
        state_size=4,
        **FLOAT32,
        leaves=("backbone.layers.*.mixer (MambaMixer)",),
    ),
    "mamba2": _transformers(
        "Mamba2ForCausalLM",
        **_STATE_SPACE,
        num_heads=4,
        head_dim=16,
        n_groups=1,
        state_size=8,
        chunk_size=4,
        **FLOAT32,
        leaves=("backbone.layers.*.mixer (Mamba2Mixer)",),
    ),
    "qwen3_next": _transformers(
        "Qwen3NextForCausalLM",
        **_EXPERTS,
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        **FLOAT32,
        leaves=(
            "model.layers.*.linear_attn (Qwen3NextGatedDeltaNet)",
            _GROUPED,
        ),
    ),
    "rwkv": _transformers("RwkvForCausalLM", **_STATE_SPACE, attention_hidden_size=32, **FLOAT32),
    # Encoders.
    "albert": _transformers("AlbertForMaskedLM", **_ENCODER, embedding_size=16),
    "bert": _transformers("BertForMaskedLM", **_ENCODER),
    "deberta_v2": _transformers(
        "DebertaV2ForMaskedLM",
        **_ENCODER,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        **FLOAT32,
    ),
    "distilbert": _transformers(
        "DistilBertForMaskedLM",
        vocab_size=VOCAB,
        dim=32,
        hidden_dim=64,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=32,
    ),
    "electra": _transformers("ElectraForMaskedLM", **_ENCODER, embedding_size=16),
    "modernbert": _transformers(
        "ModernBertForMaskedLM",
        **_DECODER | {"cls_token_id": 1, "sep_token_id": 2},
        local_attention=4,
    ),
    "roberta": _transformers("RobertaForMaskedLM", **_ENCODER, pad_token_id=1),
    # From one sequence to another.
    "bart": _transformers("BartForConditionalGeneration", _sequence_to_sequence, **_BART),
    "t5": _transformers(
        "T5ForConditionalGeneration",
        _sequence_to_sequence,
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
    ),
    "whisper": _transformers(
        "WhisperForConditionalGeneration",
        _speech,
        **{name: value for name, value in _BART.items() if name != "max_position_embeddings"},
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
    ),
    # Images, sounds, and texts with them.
    "clip": _transformers(
        "CLIPModel",
        _clip_pairs,
        text_config=_TEXT,
        vision_config=_VISION,
        projection_dim=16,
        fsdp2=_NO_SCALARS,
    ),
    "convnext": _transformers(
        "ConvNextForImageClassification",
        _images("pixel_values", 32),
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
        num_labels=5,
    ),
    "dinov2": _transformers(
        "Dinov2ForImageClassification",
        _images("pixel_values", 8),
        **{name: value for name, value in _VISION.items() if name != "intermediate_size"},
        num_labels=5,
    ),
    "llava": _transformers(
        "LlavaForConditionalGeneration",
        _llava,
        text_config={"model_type": "llama", **_LLAMA},
        vision_config={"model_type": "clip_vision_model", **_VISION, "projection_dim": 16},
        image_token_index=VOCAB - 1,
        image_seq_length=4,
        vision_feature_layer=-2,
        leaves=("model (LlavaModel)",),
    ),
    "siglip": _transformers("SiglipModel", _clip_pairs, text_config=_TEXT, vision_config=_VISION, fsdp2=_NO_SCALARS),
    "swin": _transformers(
        "SwinForImageClassification",
        _images("pixel_values", 16),
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=5,
    ),
    "vit": _transformers("ViTForImageClassification", _images("pixel_values", 8), **_VISION, num_labels=5),
    "wav2vec2": _transformers(
        "Wav2Vec2ForCTC",
        _waves,
        **_ENCODER,
        conv_dim=(16, 16),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        ctc_loss_reduction="mean",
        mask_time_length=2,
        fails="masked_select",
    ),
    "timm_resnet18": _timm("resnet18", _images("x", 32, None), num_classes=5),
    "timm_vit": _timm(
        "vit_tiny_patch16_224",
        _images("x", 8, None),
        img_size=8,
        patch_size=4,
        embed_dim=32,
        depth=2,
        num_heads=4,
        num_classes=5,
    ),
    "timm_convnext": _timm(
        "convnext_atto", _images("x", 32, None), depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=5
    ),
    # Diffusion.
    "dit": _diffusers(
        "DiTTransformer2DModel",
        _dit,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=5,
        norm_num_groups=8,
        fsdp2=_OUTSIDE,
    ),
    "flux": _diffusers(
        "FluxTransformer2DModel",
        _flux,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
    ),
    "sd3": _diffusers(
        "SD3Transformer2DModel",
        _sd3,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
    ),
    "unet": _diffusers(
        "UNet2DModel",
        _noise,
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "unet_conditioned": _diffusers(
        "UNet2DConditionModel",
        _conditioned,
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ),
}


def table() -> str:
    """Return the table of docs/models.md."""
    lines = ["| architecture | library | runs as it is | FSDP2 |", "|---|---|---|---|"]
    for name, case in ARCHITECTURES.items():
        leaves = f"**fails**: {case.fails}" if case.fails else ", ".join(f"`{leaf}`" for leaf in case.leaves)
        lines.append(f"| {name} | {case.library} | {leaves} | {case.fsdp2 or 'trains it'} |")
    return "\n".join(lines)
