"""Saving sharded models of Hugging Face's transformers and PEFT in their own format.

Importing this module imports neither of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import coded_error
from ..ranks.control import control_of
from ..sharding.sharded_module import find_jitted
from .checkpoint.on_all_ranks import run_on_all_ranks
from .state_dicts.entries import refuse_unshared
from .state_dicts.jitted import gather_entries

__all__ = ["save_pretrained"]


def save_pretrained(model: torch.nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """Save a sharded model with its own ``save_pretrained``, from the first rank; a collective.

    ``from_pretrained`` of transformers or PEFT loads the result, which has the exact values of the parameters. Parameters
    are gathered one by one. The first rank collects in host memory those that are saved, so only the adapters of a PEFT
    model.

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
