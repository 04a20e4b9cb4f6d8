"""Entries of the state dicts of a sharded module's own modules: ``state_dict()`` and ``load_state_dict(...)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import coded_error
from ...runtime.row_dtensor import RowDTensor
from ...sharding.module_parameters import Entry, ModuleParameters
from .entries import refuse_unshared, rows_from


def put_entries(params: ModuleParameters, own: Mapping[str, Entry], state_dict: dict[str, Any], prefix: str) -> None:
    """Replace plain rows of a module's own parameters in a state dict with entries that record which rows they hold."""
    for leaf, entry in own.items():
        if not params.is_whole(entry):
            bucket, index = entry.bucket, entry.index
            if entry.param is not entry.shard:
                params.check()
            if not params.is_gathering:
                refuse_unshared(bucket)
            state_dict[prefix + leaf] = RowDTensor.entry(bucket.shard_views[index], bucket.rows[index])


def shard_loaded_entries(
    params: ModuleParameters,
    below: Sequence[tuple[str, Entry]],
    state_dict: dict[str, Any],
    prefix: str,
    *,
    assigns: bool,
) -> None:
    """Replace loaded entries with this rank's rows, all of them before torch copies the first into its shard.

    Args:
        below: the names and entries of the parameters of a module and of those in it.
        assigns: whether ``load_state_dict(assign=True)`` was called.
    """
    if assigns and not params.has_whole:
        for name in state_dict:
            if name.startswith(prefix):
                raise coded_error(ValueError, "state-dict.assign-to-sharded-parameter", name=name)
    errors = []
    for name, entry in below:
        value = state_dict.get(prefix + name)
        try:
            if isinstance(value, torch.Tensor) and not params.is_whole(entry):
                rows = entry.bucket.rows[entry.index]
                state_dict[prefix + name] = RowDTensor.wrap(rows_from(rows, value), rows)
        except ValueError as error:
            errors.append(f"size mismatch for {prefix + name}: {error}")
    if errors:
        raise RuntimeError("Error(s) in loading state_dict:\n\t" + "\n\t".join(errors))
