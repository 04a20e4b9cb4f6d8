"""Models of Hugging Face: lookasides with which Thunder traces them, errors instead of saving rows, and accelerate.

[Note: Tracing models of transformers]
transformers 5 decorates ``forward`` of its models to collect intermediate outputs on request. The decorator stores the
outputs in a variable of its own class (``CompileableContextVar``), which is a ``ContextVar``, or a plain attribute if
something is compiled. Thunder reports that it compiles, and then refuses to trace the assignment. The lookasides, which
exist only in the compile data of the sharded module, make the assignment do nothing if no output is requested.

Two things cannot be traced: collecting intermediate outputs, and caches of keys and values, which are objects that
forward changes. They are refused with errors that say what to change.
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

from ..errors import coded_error
from ..runtime.row_dtensor import DTENSORS


def transformers_lookasides() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the replacements of functions of transformers while Thunder traces; none if it is not imported."""
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
        raise coded_error(ValueError, "huggingface.hooks-not-compilable", outputs=", ".join(sorted(collected)))


def _refuse_cache(*_: Any, **__: Any) -> NoReturn:
    raise coded_error(ValueError, "huggingface.cache-not-compilable")


def prepare(module: torch.nn.Module, compile_data: Any) -> None:
    """Let Thunder trace a module that transformers has made, or parts of it, and refuse to save its rows."""
    compile_data.executor_lookasides |= transformers_lookasides()
    _refuse_save_pretrained(module)


def _refuse_save_pretrained(module: torch.nn.Module) -> None:
    """Make ``save_pretrained`` of ``module`` and its submodules an error, unless it is given whole values.

    Their own method would save the result of ``state_dict``, of which each rank has only some rows. The attributes of
    these objects hide the method; the classes stay as they are.
    """
    for submodule in module.modules():
        if callable(getattr(type(submodule), "save_pretrained", None)):
            submodule.__dict__["save_pretrained"] = partial(_save_whole_values, weakref.ref(submodule))


def _save_whole_values(reference: weakref.ref[Any], *args: Any, state_dict: Any = None, **options: Any) -> Any:
    module: Any = reference()
    if not state_dict or any(isinstance(value, DTENSORS) for value in state_dict.values()):
        raise coded_error(RuntimeError, "huggingface.parameters-are-sharded", module=type(module).__name__)
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
        raise coded_error(ValueError, "huggingface.accelerate-shards-too", distribution=kind)
    if state.mixed_precision != "no":
        raise coded_error(ValueError, "huggingface.accelerate-mixed-precision")
    if state.dynamo_plugin is not None and state.dynamo_plugin.backend.value != "NO":
        raise coded_error(ValueError, "huggingface.accelerate-dynamo-backend")
    return True
