"""The additional values of a checkpoint (``extra``): tensors, and plain values as ``torch.save`` writes them."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map_only

from ...errors import coded_error
from ...runtime.row_dtensor import local_rows
from .loading import Loading, Reader, Saved
from .storage import Paths, check_plain, nested

EXTRA = "extra"
"""The name under which ``extra`` is saved: ``values``, with an empty tensor in place of each tensor, and ``tensors``, which
are numbered."""


def encode(extra: dict[str, Any]) -> dict[str, Any]:
    """Return additional values as DCP saves them.

    Raises:
        ValueError: a value cannot be stored; the message has its location.
    """
    if odd := [name for name in extra if type(name) is not str]:
        raise coded_error(ValueError, "checkpoint.extra-name-not-text", name=odd[0])
    try:
        check_plain(extra, EXTRA)
        tensors = [leaf.detach() for leaf in tree_leaves(extra) if isinstance(leaf, torch.Tensor)]
        values = tree_map_only(torch.Tensor, lambda _: torch.empty(0, device="meta"), extra)
    except RecursionError:
        raise coded_error(ValueError, "checkpoint.extra-nested-too-deeply") from None
    # DCP saves a tuple as one value, and takes dictionaries apart.
    return {"values": (values,), "tensors": {str(number): tensor for number, tensor in enumerate(tensors)}}


def decode(paths: Paths, reader: Reader) -> dict[str, Any]:
    """Return the values that :func:`encode` received, with a :class:`Saved` in place of each tensor.

    Args:
        paths: the paths below :data:`EXTRA`. If :func:`encode` did not make them, the result is empty.
    """
    if (name := paths.get(("values",))) is None:
        return {}
    [values] = reader.load({name: None})[name]
    numbers = itertools.count()
    made = tree_map_only(torch.Tensor, lambda _: Saved(paths["tensors", str(next(numbers))]), values)
    if not isinstance(made, dict):
        raise coded_error(ValueError, "checkpoint.stored-extra-not-dictionary", got=type(made).__name__)
    return made


def facts_of(extra: dict[str, Any]) -> dict[str, str]:
    """Describe values, to compare ranks. The contents of sharded tensors are left out."""
    return {f"extra{keystr(path)}": _fact(value) for path, value in tree_leaves_with_path(extra)}


def _fact(value: Any) -> str:
    if isinstance(value, set):
        return repr(sorted(value, key=repr))
    if isinstance(value, torch.Tensor):
        if local_rows(value) is not value or value.layout is not torch.strided or value.is_meta:
            return "a tensor"
        data: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value)
    else:
        return repr(value)
    return f"{value.dtype}{list(value.shape)}, CRC-32 {zlib.crc32(data):08x}"


def fit(loading: Loading, wanted: Any, name: str, own: Mapping[str, Any], paths: Paths) -> Any:
    """Return a saved value, with memory in place of its tensors.

    Args:
        wanted: the structure that the caller expects; memory for tensors is like its tensors. DCP converts all keys to text
            and all dictionaries to one class, so for its values both are taken from ``wanted``.
        own: the values that :func:`save_checkpoint` saved.
        paths: the paths of the value, if ``dcp.save`` saved it.

    Raises:
        ValueError: a wanted value is missing, or has another structure.
    """

    def walk(wanted: Any, saved: Any, path: tuple[Any, ...]) -> Any:
        is_value = isinstance(saved, Saved)
        blank = loading.blank(saved) if is_value else None
        is_other = isinstance(wanted, torch.Tensor) is (blank is None)
        is_other |= path == (name,) and isinstance(wanted, dict) and not isinstance(saved, dict)
        if wanted is not None and is_other:
            kind = "tensor" if blank is not None else "value" if is_value else type(saved).__name__
            raise coded_error(
                ValueError, "checkpoint.extra-type-mismatch", entry=_text(path), saved=kind, got=type(wanted).__name__
            )
        if blank is not None:
            return loading.memory.setdefault(saved, _memory_like(wanted, blank, path))
        if is_value:
            return loading.reader.load({saved: None})[saved]
        if isinstance(saved, dict):
            given = wanted if isinstance(wanted, dict) else {}
            if name not in own:
                saved = _like(wanted, saved, path)
            if missing := [key for key in given if key not in saved]:
                raise coded_error(
                    ValueError, "checkpoint.extra-entry-not-saved", entry=_text(path), key=missing[0], found=list(saved)
                )
            for key, value in saved.items():
                saved[key] = walk(given.get(key), value, (*path, key))
        elif isinstance(saved, (list, tuple)):
            is_alike = isinstance(wanted, (list, tuple)) and len(wanted) == len(saved)
            each = wanted if is_alike else [None] * len(saved)
            return type(saved)(walk(w, v, (*path, i)) for i, (w, v) in enumerate(zip(each, saved, strict=True)))
        return saved

    saved = own[name] if name in own else nested({path: Saved(leaf) for path, leaf in paths.items()})
    return walk(wanted, saved, (name,))


def _like(wanted: Any, saved: dict[str, Any], path: tuple[Any, ...]) -> Any:
    """Return a dictionary that ``dcp.save`` saved with the class and the keys of the wanted one."""
    if not isinstance(wanted, dict):
        raise coded_error(
            ValueError, "checkpoint.extra-dictionary-expected", entry=_text(path), got=type(wanted).__name__
        )
    keys = {str(key): key for key in wanted}
    made = copy.copy(wanted)
    made.clear()
    for text, value in saved.items():
        if text not in keys and not any(isinstance(key, str) for key in wanted):
            raise coded_error(ValueError, "checkpoint.extra-entry-not-given", entry=_text((*path, text)))
        made[keys.get(text, text)] = value
    return made


def _memory_like(wanted: torch.Tensor | None, blank: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
    if wanted is None:
        return blank
    if wanted.shape != blank.shape:
        saved, got = tuple(blank.shape), tuple(wanted.shape)
        raise coded_error(ValueError, "checkpoint.extra-shape-mismatch", entry=_text(path), saved=saved, got=got)
    are_rows = local_rows(wanted) is not wanted
    return torch.empty_like(wanted.detach()) if are_rows else torch.empty_like(blank, device=wanted.device)


def _text(path: tuple[Any, ...]) -> str:
    return EXTRA + "".join(f"[{key!r}]" for key in path)
