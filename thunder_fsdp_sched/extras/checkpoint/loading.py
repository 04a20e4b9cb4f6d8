"""Load from a checkpoint or from whole files: compare, read into separate memory, and change the model only at the end."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from thunder.core.module import ThunderModule
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...errors import coded_error
from ...ranks.process_groups import ProcessGroupRef
from ...sharding.sharded_module import find_jitted
from ..state_dicts.jitted import rows_by_name
from .on_all_ranks import run_on_all_ranks


class Reader(Protocol):
    """What reads a source.

    Attributes:
        contents: what is known of each value, by its name: of a tensor, its shape and dtype.
    """

    @property
    def contents(self) -> Mapping[str, Any]: ...

    def load(self, values: dict[str, Any]) -> dict[str, Any]:
        """Read tensors in place, and other values in place of ``None``, by their names; no collective."""


class Loading:
    """Values that are being loaded from a source.

    Args:
        path: the source, for messages.

    Attributes:
        reader: what reads the source.
        memory: where to read, by the names of the source.
        casts: the entries whose dtype differs: name, dtype in the source, dtype in memory.
    """

    def __init__(self, path: Path, reader: Reader) -> None:
        self.memory: dict[str, Any] = {}
        self.casts: list[tuple[str, torch.dtype, torch.dtype]] = []
        self.reader, self._path = reader, path
        self._lacking: list[str] = []
        self._targets: list[tuple[torch.Tensor, str]] = []

    def fit_model(
        self, model: ThunderModule, names: Mapping[str, str], known: Collection[str], *, strict: bool
    ) -> None:
        """Provide memory for the model's values.

        Args:
            names: names in the source, by those in a state dict. Any name of a tied parameter will do.
            known: names that the model has.
            strict: refuse unknown and missing names; otherwise these values stay.

        Raises:
            ValueError: the source has other names or shapes.
        """
        _, sharded = find_jitted(model)
        faults = [f"{name!r} is unknown" for name in names if strict and name not in known]
        for name, value in rows_by_name(model).items():
            there = next((names[alias] for alias in sharded.names_of(name) if alias in names), None)
            if there is None:
                self._lacking.append(name)
                continue
            found = self.reader.contents[there]
            if not isinstance(found, TensorStorageMetadata):
                faults.append(f"{name!r} is no tensor there")
            elif found.size != value.shape:
                faults.append(f"{name!r} has shape {tuple(found.size)} there, {tuple(value.shape)} in the model")
            elif found.properties.dtype != value.dtype:
                self.casts.append((name, found.properties.dtype, value.dtype))
            self.memory[there] = torch.empty_like(value)
            self._targets.append((value, there))
        faults += [f"{name!r} is missing" for name in self._lacking if strict]
        if faults:
            raise coded_error(
                ValueError, "state-dict.does-not-fit-model", source=self._path, faults=_first(faults, "; ", " and ")
            )

    def finish(self, group: ProcessGroupRef, what: str) -> None:
        """Read all values on all ranks, warn of what does not fit exactly, and change the model; a collective.

        Raises:
            CheckpointError: on all ranks, if one of them cannot read its values. Nothing is changed then.
        """
        run_on_all_ranks(group, what, lambda: self.reader.load(self.memory))
        if self.casts and group.rank == 0:
            lines = [f"{name} from {there} to {here}".replace(" torch.", " ") for name, there, here in self.casts]
            warnings.warn(f"{what} casts what {self._path} holds: {_first(lines, '; ', '; and ')}", stacklevel=3)
        if self._lacking and group.rank == 0:
            names = _first([repr(name) for name in self._lacking], ", ", " and ")
            warnings.warn(f"{self._path} holds no {names}, which keep their values (strict=False)", stacklevel=3)
        with torch.no_grad():
            for value, name in self._targets:
                value.copy_(self.memory[name])


def _first(texts: Sequence[str], between: str, before_more: str) -> str:
    return between.join(texts[:8]) + (f"{before_more}{len(texts) - 8} more" if len(texts) > 8 else "")
