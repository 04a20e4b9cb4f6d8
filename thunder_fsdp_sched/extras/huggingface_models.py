"""Models of Hugging Face: lookasides with which Thunder traces them, errors instead of saving rows, and accelerate.

[Note: Tracing models of transformers]
transformers 5 decorates ``forward`` of its models to collect intermediate outputs on request. The decorator stores what
it collects in a variable of its own class (``CompileableContextVar``), which is a ``ContextVar``, or a plain attribute if
something is compiled. Thunder says that it compiles, and then refuses to trace the assignment. The lookasides, which
exist only in the compile data of the sharded module, make the assignment do nothing if nothing is to be collected.

What cannot be traced is refused with an error that says what to change: collecting intermediate outputs, and caches of
keys and values, which are objects that forward changes.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from ..runtime.row_dtensor import DTENSORS


def transformers_lookasides() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return what replaces functions of transformers while Thunder traces; nothing if transformers is not imported."""
    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "CompileableContextVar", None)
    if collector is not None:
        found |= {collector.set: _refuse_collecting, collector.get: _nothing, collector.reset: _nothing}
    autocast = getattr(sys.modules.get("transformers.utils.generic"), "maybe_autocast", None)
    if autocast is not None:
        found[autocast] = _autocast_off_meta
    caches = sys.modules.get("transformers.cache_utils")
    base: Any = getattr(caches, "Cache", None)
    if base is not None:
        classes: list[Any] = [c for c in vars(caches).values() if inspect.isclass(c) and issubclass(c, base)]
        found |= dict.fromkeys((*classes, *(cls.update for cls in classes)), _refuse_cache)
    return found


def _nothing(*_: Any) -> None:
    return None


def _autocast_off_meta(device_type: str, enabled: bool = True, **options: Any) -> Any:
    """Do what ``maybe_autocast`` does, except on the meta device of plans, for which torch has no autocast."""
    if device_type == "meta" or not (enabled or torch.is_autocast_enabled(device_type)):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=enabled, **options)


def _refuse_collecting(_: Any, collected: Any) -> None:
    if collected:
        raise ValueError(
            f"fsdp: the model was asked for {', '.join(sorted(collected))}, which transformers collects by hooks that "
            f"cannot be compiled. Leave out output_hidden_states and output_attentions (arguments, or attributes of "
            f"model.config), or call the module that thunder_fsdp_sched.eager(model) returns"
        )


def _refuse_cache(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        "fsdp: the model was asked to use a cache of keys and values, which cannot be compiled. Pass use_cache=False, or "
        "set model.config.use_cache = False. To generate, call generate(...) of the module that "
        "thunder_fsdp_sched.eager(model) returns"
    )


def prepare(module: torch.nn.Module, compile_data: Any) -> None:
    """Let Thunder trace a module that transformers has made, or parts of it, and refuse to save its rows."""
    compile_data.executor_lookasides |= transformers_lookasides()
    _refuse_save_pretrained(module)


def _refuse_save_pretrained(module: torch.nn.Module) -> None:
    """Make ``save_pretrained`` of ``module`` and its submodules an error, unless it is given whole values.

    Their own method would save what ``state_dict`` returns, of which each rank has some rows. The attributes of these
    objects hide the method; the classes stay as they are.
    """
    for submodule in module.modules():
        if callable(getattr(type(submodule), "save_pretrained", None)):
            submodule.__dict__["save_pretrained"] = partial(_save_whole_values, weakref.ref(submodule))


def _save_whole_values(reference: weakref.ref[Any], *args: Any, state_dict: Any = None, **options: Any) -> Any:
    module: Any = reference()
    if not state_dict or any(isinstance(value, DTENSORS) for value in state_dict.values()):
        raise RuntimeError(
            f"save_pretrained: the parameters of this {type(module).__name__} are sharded. Call "
            f"thunder_fsdp_sched.extras.huggingface.save_pretrained(model, folder) with the jitted module, on all ranks"
        )
    return type(module).save_pretrained(module, *args, state_dict=state_dict, **options)


def is_prepared_for_accelerate() -> bool:
    """Return true, or raise an error if ``Accelerator.prepare`` would have to change the jitted model.

    accelerate would move the model, and wrap it in ``DistributedDataParallel``. It does nothing to models whose attribute
    ``_is_accelerate_prepared`` is true.

    Raises:
        ValueError: accelerate has options that would be lost.
    """
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.is_initialized():
        return True
    state = accelerate.AcceleratorState()
    kind = state.distributed_type.value
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise ValueError(
            f"accelerate: the model is sharded by fsdp(...) already, and the accelerator is configured for {kind}. Use "
            f"a configuration without it (MULTI_GPU, or MULTI_CPU)"
        )
    if state.mixed_precision != "no":
        raise ValueError(
            "accelerate: mixed_precision would wrap the compiled model's forward in autocast. Use "
            "Accelerator(mixed_precision='no') and fsdp(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)) (in "
            "TrainingArguments leave out bf16 and fp16)"
        )
    if state.dynamo_plugin is not None and state.dynamo_plugin.backend.value != "NO":
        raise ValueError(
            "accelerate: the model is compiled by Thunder already; use an Accelerator without dynamo_backend"
        )
    return True
