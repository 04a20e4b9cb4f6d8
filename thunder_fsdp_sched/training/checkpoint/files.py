"""Checkpoints on disk in the format of torch.distributed.checkpoint (DCP), saved and loaded completely or not at all.

[Note: All or nothing]
DCP first writes a file for every rank, and last the list of their contents, ``.metadata``. So a folder is a checkpoint
if that file exists. Each checkpoint has its own folder, which is claimed before it is written (see ``claim``). Before
reading data, loading compares the lists that the ranks see, and names and shapes with that list. It reads into separate
memory, verifies the data, and changes model and optimizers only after every rank has read everything.

[Note: What is trusted]
No code in a checkpoint is run. Its list is read by a restricted unpickler (see ``metadata``). Values other than
tensors, which DCP pickles, are read by ``torch.load(weights_only=True)``. ``extra`` is JSON and tensors (see
``extra``).
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from thunder.core.module import ThunderModule
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...agreement.channel import ranks_by_text
from ...agreement.control import control_of
from ...distributed.process_groups import ProcessGroupRef
from ...sharding.jitted_state import rows_by_name
from ...transform import find_jitted
from . import extra as extras
from .claim import METADATA, check_claim, claim, is_complete, release_claim
from .exchange import exchange
from .fitting import Cast, blank_optimizer_state, compare, optimizer_state_dicts, tell_casts
from .metadata import check_files, contents_of, read_metadata
from .optimizers import different_facts, kind_of, state_of
from .reading import CheckedReader, PlainPlanner, blank_values, check_plain
from .state_dict import get_model_state_dict, get_optimizer_state_dict, listed
from .writing import ClaimedWriter

__all__ = [
    "CheckpointError",
    "claim_on_all_ranks",
    "latest_checkpoint",
    "load_checkpoint",
    "refuse_different",
    "save_checkpoint",
    "run_on_all_ranks",
]

Result = TypeVar("Result")
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

_log = logging.getLogger(__name__)

_EXTRA = "extra"
"""The name under which ``extra`` is saved: ``json``, a text as bytes, and ``tensors``, keyed by name."""


class CheckpointError(RuntimeError):
    """The error that a checkpoint could not be saved or does not fit. Raised on every rank; nothing is changed."""


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: ThunderModule,
    optimizers: Optimizers = (),
    *,
    extra: dict[str, Any] | None = None,
    keys: tuple[str, str] = ("model", "optim"),
    checksums: bool = True,
) -> Path:
    """Save model and optimizers; each rank saves its rows. A collective.

    It is ``dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizers)})``
    with checks, checksums and ``extra``. FSDP2, and any other number of ranks, can load it.

    Args:
        folder: a folder without a checkpoint, on a disk that all ranks see. It is claimed first: if another run saves
            into it, one of the two gets an error, and no file is overwritten.
        optimizers: one or several; none saves only the model.
        extra: additional values by name, such as the number of the step and the state dicts of schedulers and data
            loaders: numbers, strings, bytes, tensors, NumPy arrays, ``None``, and lists, tuples and dictionaries of
            them. They must be equal on all ranks.
        keys: names under which model and optimizers are saved.
        checksums: save checksums, which are computed while data is written.

    Returns:
        The folder.

    Raises:
        CheckpointError: on all ranks, if any rank failed: the folder has a checkpoint, or another run saves into it;
            the disk is full; an optimizer has other parameters; optimizers, their options or ``extra`` differ between
            ranks; or ``extra`` has values that cannot be stored without pickle. The folder is then not a checkpoint,
            and other checkpoints are unchanged.
    """
    path, chosen = Path(folder), listed(optimizers)
    model, sharded = find_jitted(model)
    sharded.check_initialized()
    group = sharded.world_group

    def collect() -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
        _check_extra(extra)
        if is_complete(path, METADATA):
            raise ValueError(f"folder: {path} holds a checkpoint already; save each one into a folder of its own")
        state: dict[str, Any] = {keys[0]: get_model_state_dict(model)}
        if chosen:
            state[keys[1]] = get_optimizer_state_dict(model, chosen)
            check_plain(state[keys[1]], keys[1])
        if taken := state.keys() & (extra or {}).keys():
            raise ValueError(f"extra: the name {sorted(taken)[0]!r} is taken by the model or its optimizers (keys)")
        if _EXTRA in keys:
            raise ValueError(f"keys: the name {_EXTRA!r} is taken by extra")
        facts = kind_of(model, chosen) | state_of(model, chosen)
        if not extra:
            return state, {}, facts
        text, tensors = extras.encode(extra)
        state[_EXTRA] = {"json": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), "tensors": tensors}
        return state, extras.digests(extra), facts

    state, digests, facts = run_on_all_ranks(group, "save_checkpoint", collect)
    if different := different_facts(group, "save_checkpoint, optimizers", facts):
        raise CheckpointError(
            f"fsdp: optimizers differ between ranks, and those of one of them would be saved for all: {different}"
        )
    everyones = exchange(group, "save_checkpoint, extra", digests)
    if any(other != everyones[0] for other in everyones):
        names = [n for n in everyones[0] if any(other.get(n) != everyones[0][n] for other in everyones)]
        raise CheckpointError(
            f"fsdp: extra: {names[0] if names else 'its names'!r} differs between ranks, and one of them would be saved for "
            f"all: give what is equal on all ranks, or collect it (all_gather_object) before"
        )
    run = claim_on_all_ranks(group, path, METADATA)
    try:
        writer = ClaimedWriter(path, run, checksums=checksums)
        save(state, storage_writer=writer, process_group=control_of(group).process_group(group))
    except (Exception, CheckpointException) as error:
        complete = "; it is complete nevertheless, by this run or another" if is_complete(path, METADATA) else ""
        raise CheckpointError(f"fsdp: the checkpoint {path} was not saved: {_reason(error)}{complete}") from error
    finally:
        if group.rank == 0:
            release_claim(path, METADATA, run)
    return path


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: ThunderModule,
    optimizers: Optimizers = (),
    *,
    extra: dict[str, Any] | None = None,
    keys: tuple[str, str] = ("model", "optim"),
    strict: bool = True,
    verify_checksums: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint of :func:`save_checkpoint`, or of ``dcp.save`` with FSDP2's state dicts; a collective.

    The number of ranks, the strategy and the buckets may differ from those at saving. While reading, it needs as much
    additional memory as the model's shards. Entries of another dtype are cast, as by DCP, with a warning on the first
    rank.

    Args:
        folder: the checkpoint.
        optimizers: optimizers of the jitted module's parameters; none loads only the model.
        extra: names and structure of the additional values to load. Keys of dictionaries must be in the checkpoint;
            numbers and strings are placeholders.
        keys: names under which model and optimizers were saved.
        strict: raise an error if the checkpoint has parameters that the model does not have.
        verify_checksums: verify all data before anything is changed. Each rank verifies the chunks that it reads.

    Returns:
        The values of ``extra``, as they were saved.

    Raises:
        CheckpointError: on all ranks, if the folder is not a checkpoint; if the checkpoint does not fit (the message
            has the names and shapes); if it has the state of another kind of optimizer; if ranks passed different
            checkpoints; or if a file cannot be read or is damaged. Nothing is changed then.
    """
    path, chosen = Path(folder), listed(optimizers)
    model, sharded = find_jitted(model)
    group = sharded.world_group
    metadata, digest = run_on_all_ranks(group, "load_checkpoint", lambda: read_metadata(path))
    refuse_different(group, path, digest)
    reader = CheckedReader(path, metadata, verify=verify_checksums)
    if verify_checksums and not reader.has_checksums and group.rank == 0:
        _log.warning("%s has no checksums of its own: those of its archives are verified", path)
    casts: list[Cast] = []
    saved_extra = ""

    def prepare() -> dict[str, Any]:
        nonlocal saved_extra
        _check_extra(extra)
        contents = contents_of(metadata)
        names = dict.fromkeys(contents)
        if ("json",) in contents.get(_EXTRA, ()):  # otherwise saved by FSDP2, or by a version without `extra`
            try:
                saved_extra = reader.read_tensor(f"{_EXTRA}.json").numpy().tobytes().decode()
            except Exception as error:
                raise ValueError(f"the checkpoint {path} was not loaded, nothing is changed: {error}") from error
            del names[_EXTRA]
            names |= dict.fromkeys(json.loads(saved_extra))
        for name in [keys[0], *([keys[1]] if chosen else []), *(extra or {})]:
            if name not in names:
                raise ValueError(f"the checkpoint {path} holds no {name!r}, but {list(names)} (see keys, extra)")
        entries = get_model_state_dict(model)
        casts.extend(compare(contents[keys[0]], entries, strict=strict))
        target: dict[str, Any] = {keys[0]: {n: torch.empty_like(e) for n, e in entries.items()}}
        if chosen:
            target[keys[1]], more = blank_optimizer_state(contents[keys[1]], model, chosen)
            casts.extend(more)
        if saved_extra:
            tensors = {b[1]: found for b, found in contents[_EXTRA].items() if b[0] == "tensors"}
            targets = extras.tensor_targets(extra or {}, extras.decode(saved_extra, extras.TensorName), tensors)
            target[_EXTRA] = {"tensors": targets}
        else:
            target |= blank_values(extra or {}, metadata)
        return target

    target = run_on_all_ranks(group, "load_checkpoint", prepare)
    if different := different_facts(group, "load_checkpoint, optimizers", kind_of(model, chosen)):
        raise CheckpointError(f"fsdp: ranks load into different optimizers, nothing is changed: {different}")
    try:
        process_group = control_of(group).process_group(group)
        load(target, storage_reader=reader, planner=PlainPlanner(), process_group=process_group)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"fsdp: the checkpoint {path} was not loaded, nothing is changed: {_reason(error)}"
        ) from error

    def finish() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        states = optimizer_state_dicts(target[keys[1]], model, chosen) if chosen else []
        source = target
        if saved_extra:
            wanted = {name: value for name, value in json.loads(saved_extra).items() if name in (extra or {})}
            source = extras.decode(json.dumps(wanted), target[_EXTRA]["tensors"].__getitem__)
        return states, {name: source[name] for name in extra or {}}

    # Every rank has read everything, and nothing has been changed yet.
    states, rest = run_on_all_ranks(group, "load_checkpoint", finish)
    if casts and group.rank == 0:
        warnings.warn(f"load_checkpoint casts what {path} holds: {tell_casts(casts)}", stacklevel=2)
    with torch.no_grad():
        for name, value in rows_by_name(model).items():
            value.copy_(target[keys[0]][name])
    for optimizer, state in zip(chosen, states, strict=True):
        optimizer.load_state_dict(state)
    return rest


def _check_extra(extra: Any) -> None:
    if extra is not None and not isinstance(extra, dict):
        raise ValueError(f"extra: expected a dictionary of values by name, got a {type(extra).__name__}")


def claim_on_all_ranks(group: ProcessGroupRef, folder: Path, complete: str) -> str:
    """Claim a folder on the first rank, for all ranks; a collective.

    Returns:
        The run's id.

    Raises:
        CheckpointError: on all ranks, if the folder is complete, another run saves into it, or ranks passed other
            folders.
    """
    what = "claiming a folder"
    claimed = run_on_all_ranks(group, what, lambda: claim(folder, complete) if group.rank == 0 else "")
    [run, *_] = exchange(group, what, claimed)
    try:
        run_on_all_ranks(group, what, lambda: check_claim(folder, run))
    except CheckpointError:
        if group.rank == 0:
            release_claim(folder, complete, run)
        raise
    return run


def refuse_different(group: ProcessGroupRef, source: Path, digest: str) -> None:
    """Check that all ranks are about to load the same checkpoint; a collective.

    Raises:
        CheckpointError: on all ranks, if they differ; with the ranks of each checkpoint.
    """
    everyones = exchange(group, "comparing what to load", (digest, str(source)))
    paths = dict(zip(group.global_ranks, (path for _, path in everyones), strict=False))
    ranks_of = ranks_by_text(zip(group.global_ranks, (theirs for theirs, _ in everyones), strict=False))
    if len(ranks_of) > 1:
        parts = [f"ranks {ranks} {paths[ranks[0]]}" for ranks in ranks_of.values()]
        raise CheckpointError(f"fsdp: ranks load different checkpoints, nothing is changed: {'; '.join(parts)}")


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the subfolder of ``folder`` with the checkpoint that was completed last, if there is one.

    All ranks must see the same disk. Folders with an incomplete save do not count, nor do those whose list of contents
    is damaged or has files that are missing or truncated; a warning names the latter.
    """
    complete = [p.parent for p in Path(folder).glob(f"*/{METADATA}")]
    for path in sorted(complete, key=lambda p: ((p / METADATA).stat().st_mtime_ns, p.name), reverse=True):
        try:
            check_files(path, read_metadata(path)[0])
        except (OSError, ValueError) as error:
            warnings.warn(f"latest_checkpoint leaves out {path}: {error}", stacklevel=2)
        else:
            return path
    return None


def run_on_all_ranks(group: ProcessGroupRef, what: str, do: Callable[[], Result]) -> Result:
    """Run ``do`` on every rank of ``group``; if it fails on any, raise an error on all.

    Args:
        what: the name of the call, for messages.

    Raises:
        CheckpointError: with the message of each rank that failed.
    """
    result, message, cause = None, "", None
    try:
        result = do()
    except Exception as error:
        message, cause = str(error) or repr(error), error
    messages = exchange(group, what, message)
    ranks_of = ranks_by_text((r, text) for r, text in zip(group.global_ranks, messages, strict=False) if text)
    if ranks_of:
        parts = [f"{text} (on ranks {ranks})" if len(ranks) < group.size else text for text, ranks in ranks_of.items()]
        raise CheckpointError("fsdp: " + "; ".join(parts)) from cause
    return result  # type: ignore[return-value]  # no message: it is there


def _reason(error: BaseException) -> str:
    """Return the errors of all ranks, without tracebacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(f"rank {rank}: {type(e).__name__} {e}" for rank, (e, _) in error.failures.items())
