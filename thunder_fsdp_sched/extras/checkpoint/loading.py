"""Load from a checkpoint or from whole files: compare, read into separate memory, and change the model only at the end."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from thunder.core.module import ThunderModule
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from ...errors import coded_error
from ...ranks.process_groups import ProcessGroupRef
from ...sharding.sharded_module import find_jitted
from ..state_dicts.jitted import rows_by_name
from .on_all_ranks import run_on_all_ranks


class Saved(str):
    """The name of a value in a source, as its placeholder."""


def tensor_metadata(tensor: torch.Tensor) -> TensorStorageMetadata:
    """Return the metadata of a tensor."""
    return TensorStorageMetadata(TensorProperties.create_from_tensor(tensor), tensor.size(), chunks=[])


class Reader(Protocol):
    """The reader of a source.

    Attributes:
        contents: the metadata of each value by its name in the source; ``TensorStorageMetadata`` for a tensor.
    """

    contents: Mapping[str, Any]

    def load(self, values: dict[str, Any]) -> dict[str, Any]:
        """Read tensors in place, and other values in place of ``None``, by their names; no collective."""


class Loading:
    """Values that are being loaded from a source.

    Attributes:
        memory: the memory into which values are read, by their names in the source.
        casts: entries whose dtype differs: name, dtype in the source, dtype in memory.
    """

    def __init__(self, path: Path, reader: Reader) -> None:
        self.reader = reader
        self.memory: dict[str, Any] = {}
        self.casts: list[tuple[str, torch.dtype, torch.dtype]] = []
        self._path = path
        self._lacking: list[str] = []
        self._targets: list[tuple[torch.Tensor, str]] = []

    def size_of(self, name: str) -> torch.Size | None:
        """Return the shape of a tensor; ``None`` for any other value."""
        found = self.reader.contents[name]
        return found.size if isinstance(found, TensorStorageMetadata) else None

    def blank(self, name: str) -> Any:
        """Return memory for a whole tensor; ``None`` for any other value."""
        size = self.size_of(name)
        return None if size is None else torch.empty(size, dtype=self.reader.contents[name].properties.dtype)

    def fit_model(self, model: ThunderModule, names: Mapping[str, str], *, strict: bool) -> None:
        """Provide memory for the model's values.

        Args:
            names: names in the source by names in a state dict. A tied parameter may have any of its names there.
            strict: refuse unknown and missing names. Otherwise the former are ignored, and the latter keep their values.

        Raises:
            ValueError: the source has other names or shapes.
        """
        _, sharded = find_jitted(model)
        values = rows_by_name(model)
        known = {alias for name in values for alias in sharded.names_of(name)}
        faults = [f"{name!r} is unknown" for name in names if strict and name not in known]
        for name, value in values.items():
            source = next((names[alias] for alias in sharded.names_of(name) if alias in names), None)
            if source is None:
                self._lacking.append(name)
                continue
            size = self.size_of(source)
            if size is None:
                faults.append(f"{name!r} is no tensor there")
            elif size != value.shape:
                faults.append(f"{name!r} has shape {tuple(size)} there, {tuple(value.shape)} in the model")
            elif (dtype := self.reader.contents[source].properties.dtype) != value.dtype:
                self.casts.append((name, dtype, value.dtype))
            self.memory[source] = torch.empty_like(value)
            self._targets.append((value, source))
        if strict:
            faults += [f"{name!r} is missing" for name in self._lacking]
        if faults:
            raise coded_error(
                ValueError, "state-dict.does-not-fit-model", source=self._path, faults=_first(faults, "; ", " and ")
            )

    def finish(self, group: ProcessGroupRef, what: str) -> None:
        """Read all values on all ranks, change the model, and warn of casts and of missing values; a collective.

        Raises:
            CheckpointError: on all ranks, if one of them cannot read its values. Nothing is changed then.
        """
        run_on_all_ranks(group, what, lambda: self.reader.load(self.memory))
        with torch.no_grad():  # before the warnings, which may be errors of one rank
            for value, source in self._targets:
                value.copy_(self.memory[source])
        if self.casts and group.rank == 0:
            lines = [f"{name} from {source} to {own}".replace(" torch.", " ") for name, source, own in self.casts]
            warnings.warn(f"{what} casts what {self._path} holds: {_first(lines, '; ', '; and ')}", stacklevel=3)
        if self._lacking and group.rank == 0:
            names = _first([repr(name) for name in self._lacking], ", ", " and ")
            warnings.warn(f"{self._path} holds no {names}, which keep their values (strict=False)", stacklevel=3)


def _first(texts: Sequence[str], separator: str, before_more: str) -> str:
    return separator.join(texts[:8]) + (f"{before_more}{len(texts) - 8} more" if len(texts) > 8 else "")
