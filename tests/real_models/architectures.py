"""Tiny configurations of architectures of transformers, LitGPT, timm and diffusers, with random weights.

They are made as a user makes them, but for their sizes, dropout and caches of keys and values.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, Any]

VOCAB, LENGTH = 64, 8

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
    values = output.values() if isinstance(output, dict) else output
    value = output if isinstance(output, torch.Tensor) else next(iter(values))
    return F.mse_loss(value, torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view(value.shape))


#
# Batches
#


class _Ints(NamedTuple):
    """Integers from ``least`` up to ``most``, which is not among them."""

    least: int
    most: int
    shape: tuple[int, ...] = (2, LENGTH)


_TOKENS, _CLASSES, _STEPS, _IMAGE = _Ints(3, VOCAB), _Ints(0, 5, (2,)), _Ints(0, 1000, (2,)), (2, 3, 8, 8)


def _random(mark: Any = (), **made: Any) -> Callable[[torch.Generator], Batch]:
    """Return what makes a batch of integers, of normal numbers by their shape, and of other values.

    Args:
        mark: where sequences have the last token of the vocabulary.
    """

    def value(spec: Any, generator: torch.Generator) -> Any:
        if isinstance(spec, _Ints):
            return torch.randint(spec.least, spec.most, spec.shape, generator=generator)
        return torch.randn(spec, generator=generator) if isinstance(spec, tuple) else spec

    def batch(generator: torch.Generator) -> Batch:
        values = {name: value(spec, generator) for name, spec in made.items()}
        if mark != ():
            values["input_ids"][:, mark] = VOCAB - 1
        return values

    return batch


def _pixels(size: int) -> Callable[[torch.Generator], Batch]:
    return _random(pixel_values=(2, 3, size, size), labels=_CLASSES)


_tokens = _random(input_ids=_TOKENS, labels=_TOKENS)
_speech = _random(input_features=(2, 8, 32), labels=_TOKENS)
_waves = _random(input_values=(2, 400), labels=_Ints(3, VOCAB, (2, 4)))
_UNMARKED = _Ints(3, VOCAB - 1)
# The last token is the end of a text, at which CLIP pools.
_clip_pairs = _random(mark=-1, input_ids=_UNMARKED, pixel_values=_IMAGE, return_loss=True)
# The first tokens stand for 4 patches of an image.
_llava = _random(mark=slice(4), input_ids=_UNMARKED, labels=_TOKENS, pixel_values=_IMAGE)
_noise = _random(sample=_IMAGE, timestep=_STEPS)
_conditioned = _random(sample=_IMAGE, timestep=_STEPS, encoder_hidden_states=(2, 4, 16))
_dit = _random(hidden_states=_IMAGE, timestep=_STEPS, class_labels=_CLASSES)
_texts = {"encoder_hidden_states": (1, 3, 16), "pooled_projections": (1, 16), "timestep": (1,)}
_flux = _random(hidden_states=(1, 4, 4), **_texts, img_ids=(4, 3), txt_ids=(3, 3))
_pairs = {"encoder_hidden_states": (2, 3, 16), "pooled_projections": (2, 16), "timestep": _STEPS}
_sd3 = _random(hidden_states=(2, 4, 8, 8), **_pairs)
_clicks = _random(dense=(4, 5), indices=_Ints(0, 17, (4, 3, 3)))


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


def _known(function: Callable[..., Any], sizes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return options, and those of some sizes of which a function takes arguments."""
    return {name: sizes[name] for name in sizes.keys() & inspect.signature(function).parameters.keys()} | options


def _transformers(model: str, batch: Callable[..., Batch] = _tokens, **options: Any) -> Architecture:
    """Return a model of transformers; options that are dictionaries are configurations of parts."""

    def make(library: Any, **options: Any) -> nn.Module:
        cls = getattr(library, model)
        return cls(_without_dropout(cls.config_class(**_known(cls.config_class, _SIZES, options))))

    return _architecture("transformers", make, batch, options)


def _mixing(model: str, *leaves: str, **options: Any) -> Architecture:
    """Return a model of transformers with layers that run as they are, in float32."""
    return _transformers(model, leaves=leaves, **FLOAT32, **options)


def _timm(name: str, batch: Callable[..., Batch], **options: Any) -> Architecture:
    return _architecture("timm", lambda library, **options: library.create_model(name, **options), batch, options)


def _diffusers(model: str, batch: Callable[..., Batch], **options: Any) -> Architecture:
    def make(library: Any, **options: Any) -> nn.Module:
        cls = getattr(library, model)
        return cls(**_known(cls.__init__, _DIFFUSION, options))

    return _architecture("diffusers", make, batch, options)


def _litgpt(name: str, **options: Any) -> Architecture:
    """Return a model that LitGPT knows by name."""

    def make(library: Any, **options: Any) -> nn.Module:
        small = {"block_size": 16, "n_layer": 2, "n_embd": 32, "n_head": 4, "padded_vocab_size": VOCAB}
        return library.GPT(library.Config.from_name(name, **small, intermediate_size=64, **options))

    return _architecture("litgpt", make, _random(idx=_TOKENS), {"tolerance": 1e-11, **options})


class DLRM(nn.Module):
    """A recommender: embedding tables of different sizes, two MLPs, and dot products of all pairs of features.

    Each categorical feature is a bag of indices whose rows are summed.
    """

    def __init__(self, rows: tuple[int, ...] = (3001, 500, 17), width: int = 8, dense: int = 5) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, width, mode="sum") for size in rows)
        self.bottom = nn.Sequential(nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        features = len(rows) + 1
        self.top = nn.Sequential(
            nn.Linear(width + features * (features - 1) // 2, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid()
        )
        pairs = torch.tril_indices(features, features, offset=-1)
        self.register_buffer("pairs", pairs[0] * features + pairs[1], persistent=False)

    def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        stacked = torch.stack([x, *(table(indices[:, i]) for i, table in enumerate(self.tables))], 1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, torch.index_select(dots, 1, self.pairs)], 1)).squeeze(1)


_BY_SIZE = {
    1: "n_groups mamba_n_groups n_shared_experts topk_group first_k_dense_replace attn_layer_offset expert_layer_offset",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_key_value_heads num_stages "
    "num_experts_per_tok n_group linear_num_key_heads attn_layer_period expert_layer_period",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads mamba_chunk_size "
    "chunk_size mamba_n_heads num_local_experts num_experts n_routed_experts qk_rope_head_dim qk_nope_head_dim "
    "linear_num_value_heads mamba_dt_rank patch_size",
    8: "head_dim d_kv num_mel_bins image_size mamba_d_state kv_lora_rank q_lora_rank v_head_dim linear_key_head_dim "
    "linear_value_head_dim state_size",
    16: "projection_dim max_source_positions max_target_positions mamba_d_head moe_intermediate_size embedding_size "
    "shared_expert_intermediate_size",
    32: "hidden_size n_embd d_model dim word_embed_proj_dim attention_hidden_size max_position_embeddings n_positions",
    64: "intermediate_size ffn_dim d_ff hidden_dim encoder_ffn_dim decoder_ffn_dim mamba_d_ssm vocab_size",
}
_SIZES = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
_SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_SIZES |= {"use_cache": False, "use_mamba_kernels": False}
"""Those that a configuration of transformers takes are its sizes."""

_DIFFUSION = {"sample_size": 8, "patch_size": 2, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
_DIFFUSION |= dict.fromkeys(("joint_attention_dim", "pooled_projection_dim", "caption_projection_dim"), 16)
_DIFFUSION |= {"block_out_channels": (8, 16), "layers_per_block": 1, "cross_attention_dim": 16}

_TEXT = {name: _SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
_TEXT |= {"num_attention_heads": 4, "max_position_embeddings": 32}
_VISION = {name: _SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "image_size")}
_VISION |= {"num_attention_heads": 4, "patch_size": 4}
_CLIP = {"text_config": {**_TEXT, "bos_token_id": 1, "eos_token_id": VOCAB - 1, "pad_token_id": 0}}
_CLIP |= {"vision_config": _VISION, "fsdp2": _NO_SCALARS}
_LLAVA = {"text_config": {"model_type": "llama", **_TEXT, "num_key_value_heads": 2, "use_cache": False}}
_LLAVA |= {"image_token_index": VOCAB - 1, "image_seq_length": 4, "vision_feature_layer": -2}
_LLAVA |= {"vision_config": {"model_type": "clip_vision_model", **_VISION, "projection_dim": 16}}
_EXPERTS = {"leaves": (_GROUPED,), **FLOAT32}
_WINDOW = {"sliding_window": 4}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_WAVES = {"conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
_WAVES |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2}
_TIMM_VIT = {"img_size": 8, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
_UNET = {"norm_num_groups": 4, "attention_head_dim": 4}

ARCHITECTURES: dict[str, Architecture] = {
    "dlrm": Architecture("torch", DLRM, _clicks, tolerance=1e-11),
    "litgpt_gpt_neox": _litgpt("pythia-14m"),
    "litgpt_llama_3": _litgpt("Llama-3-8B", n_query_groups=2),
    "litgpt_gemma": _litgpt("Gemma-2b", head_size=16, n_query_groups=1),
    "litgpt_gemma_2": _litgpt("Gemma-2-2b", head_size=16, n_query_groups=2),
    # Decoders.
    "bloom": _transformers("BloomForCausalLM"),
    "cohere": _transformers("CohereForCausalLM"),
    "falcon": _transformers("FalconForCausalLM"),
    "gemma": _transformers("GemmaForCausalLM"),
    "gemma2": _transformers("Gemma2ForCausalLM", **_WINDOW),
    "gemma3": _transformers("Gemma3ForCausalLM", **_WINDOW),
    "gpt2": _transformers("GPT2LMHeadModel"),
    "gpt_bigcode": _transformers("GPTBigCodeForCausalLM"),
    "gpt_neo": _transformers("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], window_size=4),
    "gpt_neox": _transformers("GPTNeoXForCausalLM"),
    "gptj": _transformers("GPTJForCausalLM", rotary_dim=4),
    "granite": _transformers("GraniteForCausalLM"),
    "llama": _transformers("LlamaForCausalLM"),
    "mistral": _transformers("MistralForCausalLM", **_WINDOW),
    "olmo2": _transformers("Olmo2ForCausalLM"),
    "opt": _transformers("OPTForCausalLM"),
    "phi": _transformers("PhiForCausalLM", num_key_value_heads=4),
    "phi3": _transformers("Phi3ForCausalLM"),
    "qwen2": _transformers("Qwen2ForCausalLM"),
    "qwen3": _transformers("Qwen3ForCausalLM"),
    "smollm3": _transformers("SmolLM3ForCausalLM"),
    "stablelm": _transformers("StableLmForCausalLM"),
    "starcoder2": _transformers("Starcoder2ForCausalLM"),
    # Mixtures of experts.
    "deepseek_v3": _transformers("DeepseekV3ForCausalLM", **_EXPERTS, num_key_value_heads=4),
    "gpt_oss": _transformers("GptOssForCausalLM", **_EXPERTS, **_WINDOW),
    "mixtral": _transformers("MixtralForCausalLM", **_EXPERTS),
    "qwen3_moe": _transformers("Qwen3MoeForCausalLM", **_EXPERTS),
    # State spaces, and mixtures of them with attention.
    "bamba": _mixing("BambaForCausalLM", "model.layers.*.mamba (BambaMixer)", attn_layer_indices=[1]),
    "falcon_h1": _mixing("FalconH1ForCausalLM", "model.layers.*.mamba (FalconH1Mixer)"),
    "jamba": _mixing("JambaForCausalLM", "model.layers.*.mamba (JambaMambaMixer)", _GROUPED),
    "mamba": _mixing("MambaForCausalLM", "backbone.layers.*.mixer (MambaMixer)"),
    "mamba2": _mixing("Mamba2ForCausalLM", "backbone.layers.*.mixer (Mamba2Mixer)", head_dim=16),
    "qwen3_next": _mixing(
        *("Qwen3NextForCausalLM", "model.layers.*.linear_attn (Qwen3NextGatedDeltaNet)", _GROUPED),
        layer_types=["linear_attention", "full_attention"],
    ),
    "rwkv": _transformers("RwkvForCausalLM", **FLOAT32),
    # Encoders.
    "albert": _transformers("AlbertForMaskedLM"),
    "bert": _transformers("BertForMaskedLM"),
    "deberta_v2": _transformers(
        *("DebertaV2ForMaskedLM", _tokens), relative_attention=True, pos_att_type=["p2c", "c2p"], **FLOAT32
    ),
    "distilbert": _transformers("DistilBertForMaskedLM"),
    "electra": _transformers("ElectraForMaskedLM"),
    "modernbert": _transformers("ModernBertForMaskedLM", cls_token_id=1, sep_token_id=2, local_attention=4),
    "roberta": _transformers("RobertaForMaskedLM", pad_token_id=1),
    # From one sequence to another.
    "bart": _transformers("BartForConditionalGeneration"),
    "t5": _transformers("T5ForConditionalGeneration", decoder_start_token_id=0),
    "whisper": _transformers("WhisperForConditionalGeneration", _speech),
    # Images, sounds, and texts with them.
    "clip": _transformers("CLIPModel", _clip_pairs, **_CLIP),
    "convnext": _transformers(
        "ConvNextForImageClassification", _pixels(32), hidden_sizes=[8, 16], depths=[1, 1], num_labels=5
    ),
    "dinov2": _transformers("Dinov2ForImageClassification", _pixels(8), num_labels=5),
    "llava": _transformers("LlavaForConditionalGeneration", _llava, **_LLAVA, leaves=("model (LlavaModel)",)),
    "siglip": _transformers("SiglipModel", _clip_pairs, **_CLIP),
    "swin": _transformers("SwinForImageClassification", _pixels(16), **_SWIN, num_labels=5),
    "vit": _transformers("ViTForImageClassification", _pixels(8), num_labels=5),
    "wav2vec2": _transformers("Wav2Vec2ForCTC", _waves, **_WAVES, fails="masked_select"),
    "timm_resnet18": _timm("resnet18", _random(x=(2, 3, 32, 32)), num_classes=5),
    "timm_vit": _timm("vit_tiny_patch16_224", _random(x=_IMAGE), **_TIMM_VIT, num_classes=5),
    "timm_convnext": _timm(
        "convnext_atto", _random(x=(2, 3, 32, 32)), depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=5
    ),
    # Diffusion.
    "dit": _diffusers(
        "DiTTransformer2DModel", _dit, in_channels=3, num_embeds_ada_norm=5, norm_num_groups=8, fsdp2=_OUTSIDE
    ),
    "flux": _diffusers(
        *("FluxTransformer2DModel", _flux), patch_size=1, in_channels=4, num_single_layers=1, axes_dims_rope=(2, 2, 4)
    ),
    "sd3": _diffusers("SD3Transformer2DModel", _sd3, in_channels=4, out_channels=4, pos_embed_max_size=8),
    "unet": _diffusers(
        *("UNet2DModel", _noise),
        **_UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "unet_conditioned": _diffusers(
        *("UNet2DConditionModel", _conditioned),
        **_UNET,
        in_channels=3,
        out_channels=3,
        num_attention_heads=None,
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
