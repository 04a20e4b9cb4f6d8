"""Models to plan and to measure: made by a factory, or given by name."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from ...errors import coded_error

Made = tuple[torch.nn.Module, tuple[Any, ...]]
"""A module and the positional arguments of a call."""


def module_and_inputs(make: Callable[[], Made]) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the module, its positional and its keyword arguments.

    Raises:
        ValueError: ``make`` returns something else.
    """
    made: Any = make()
    parts: tuple[Any, ...] = made if isinstance(made, tuple) else ()
    module, args, kwargs = (*parts, {})[:3] if len(parts) in (2, 3) else (None, (), {})
    if not isinstance(module, torch.nn.Module) or not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        factory = getattr(make, "__name__", "make")
        got = f"({', '.join(type(part).__name__ for part in parts)})" if parts else f"a {type(made).__name__}"
        raise coded_error(ValueError, "plan.factory-returns-wrong-values", factory=factory, got=got)
    return module, tuple(args), kwargs


def find_model(name: str, *, batch: int, length: int, dtype: torch.dtype) -> Callable[[], Made]:
    """Return a factory by name: ``module:factory``, a LitGPT configuration, or a Hugging Face model type.

    Weights are random and on the meta device; nothing is downloaded. A factory takes no arguments and returns
    ``(module, inputs)`` itself; the others are language models on ``batch`` sequences of ``length`` tokens.

    Raises:
        ValueError: there is no such name. The message lists the attempts and the extra that would be needed.
    """
    if ":" in name:
        return _imported(name)
    tried = []
    for find in (_litgpt, _hugging_face):
        try:
            build = find(name, length, dtype)
        except (ImportError, ValueError, KeyError) as error:
            tried.append(f"{find.__name__.strip('_')}: {error}")
            if isinstance(error, ImportError):
                tried[-1] += f" (pip install {error.name})"
            continue

        def make() -> Made:
            with torch.device("meta"):
                tokens = torch.zeros((batch, length), dtype=torch.int64)
                return _Loss(build()), (tokens, tokens.clone())  # noqa: B023  # the first model that is found

        return make
    raise coded_error(ValueError, "plan.unknown-model", name=name, tried="; ".join(tried))


def _imported(name: str) -> Callable[[], Made]:
    try:
        make = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise coded_error(ValueError, "plan.model-not-importable", name=name, error=error) from error
    if not callable(make):
        raise coded_error(ValueError, "plan.model-name-not-callable", name=name, type=type(make).__name__)
    return make


def _litgpt(name: str, length: int, dtype: torch.dtype) -> Callable[[], torch.nn.Module]:
    from litgpt import GPT, Config

    config = Config.from_name(name, block_size=length)
    return lambda: GPT(config).to(dtype)


def _hugging_face(name: str, length: int, dtype: torch.dtype) -> Callable[[], torch.nn.Module]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, use_cache=False)
    return lambda: AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


class _Loss(torch.nn.Module):
    """A language model with its loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        out = self.model(tokens)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
