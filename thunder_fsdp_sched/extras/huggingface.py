"""Models of Hugging Face: lookasides with which Thunder traces them, refusals, and saving in their own format.

Importing this module imports neither transformers nor PEFT.

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
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from ..errors import coded_error
from ..ranks.control import control_of
from ..runtime.row_dtensor import DTENSORS
from ..sharding.sharded_module import find_jitted
from .checkpoint.on_all_ranks import run_on_all_ranks
from .state_dicts.entries import refuse_unshared
from .state_dicts.jitted import gather_entries


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
        raise coded_error(ValueError, "huggingface.hooks-not-compilable", outputs=", ".join(sorted(collected)))


def _refuse_cache(*_: Any, **__: Any) -> NoReturn:
    raise coded_error(ValueError, "huggingface.cache-not-compilable")


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


__all__ = ["save_pretrained"]


def save_pretrained(model: torch.nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """Save a sharded model with its own ``save_pretrained``, from the first rank; a collective.

    ``from_pretrained`` of transformers or PEFT loads the result, which has the exact values of the parameters. Parameters
    are gathered one by one. The first rank collects them in host memory: all that are saved, so only the adapters of a
    PEFT model.

    Cost, on any number of ranks: four exchanges, and a round of agreement and a gather for each bucket.

    Args:
        model: the jitted module, whose original module is a ``PreTrainedModel`` or a ``PeftModel``.
        folder: the folder to save into, on the first rank. As usual in transformers, existing files are overwritten.
        **options: the options of the model's ``save_pretrained``, such as ``max_shard_size``, equal on all ranks.

    Raises:
        TypeError: the model is not sharded or has no ``save_pretrained``, or ``state_dict`` or ``is_main_process`` is
            given.
        ValueError: ranks have different parameters under one name: see ``process_group_for``.
        CheckpointError: on all ranks, if the first rank cannot save.
    """
    jitted, sharded = find_jitted(model)
    module: Any = sharded.module
    if not callable(getattr(type(module), "save_pretrained", None)):
        raise coded_error(TypeError, "huggingface.no-save-pretrained", module=type(module).__name__)
    for option in ("state_dict", "is_main_process"):
        if option in options:
            raise coded_error(TypeError, "huggingface.option-set-by-save-pretrained", option=option)
    for bucket in sharded.buckets:
        refuse_unshared(bucket)
    sharded.check_initialized()
    group = sharded.world_group

    def find_entries() -> tuple[Mapping[str, torch.Tensor], list[str]]:
        entries: Mapping[str, torch.Tensor] = jitted.state_dict()
        return entries, list(_names_to_save(module, entries, options))

    entries, own_names = run_on_all_ranks(group, "save_pretrained", find_entries)
    # Those of the first rank: PEFT looks for some of them on the network.
    names = control_of(group).exchange("save_pretrained", own_names)[0]
    values = gather_entries({name: entries[name] for name in names}, sharded, keeps=group.rank == 0)

    def save() -> None:
        if group.rank == 0:
            type(module).save_pretrained(module, folder, state_dict=values, **options)

    run_on_all_ranks(group, "save_pretrained", save)


def _names_to_save(module: Any, entries: Mapping[str, torch.Tensor], options: Mapping[str, Any]) -> Iterable[str]:
    """Return the names of those entries that ``save_pretrained`` saves."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel):
        return entries
    stand_ins = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in entries.items()}
    names = {id(stand_in): name for name, stand_in in stand_ins.items()}
    found: dict[str, None] = {}
    for adapter in options.get("selected_adapters") or module.peft_config:
        saved = peft.get_peft_model_state_dict(
            module,
            state_dict=dict(stand_ins),
            adapter_name=adapter,
            save_embedding_layers=options.get("save_embedding_layers", "auto"),
        )
        if any(id(value) not in names for value in saved.values()):
            return entries  # the adapter computes values from others
        found |= dict.fromkeys(names[id(value)] for value in saved.values())
    return found
