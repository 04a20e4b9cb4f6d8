"""Checkpoints on disk in the format of torch.distributed.checkpoint (DCP), saved and loaded completely or not at all.

[Note: All or nothing]
DCP writes a file for every rank, and then the list of their contents, ``.metadata``. So a folder is a checkpoint if
that file exists. Each checkpoint has its own folder (see [Note: Two runs, one folder] in ``folder``). Before reading
data, loading checks that all ranks see the same list, and compares names and shapes with it. It reads into separate
memory, verifies the data, and changes model and optimizers only after every rank has read everything.

[Note: What is trusted]
No code in a checkpoint is run. Its list is read by a restricted unpickler (see ``storage``). Tensors and all other values,
which DCP pickles, are read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from thunder.core.module import ThunderModule

from ...errors import coded_error
from ...ranks.process_groups import ProcessGroupRef
from ...sharding.sharded_module import find_jitted
from . import extra as extras
from .beside import Rounds, Saving, Write, finish_latest, save_beside, save_in_rounds, write_checkpoint
from .extra import EXTRA
from .folder import METADATA, SaveRun, path_of, refuse_complete
from .loading import Loading
from .on_all_ranks import (
    CheckpointError,
    digest_of,
    find_difference,
    refuse_different,
    run_on_all_ranks,
    share_on_all_ranks,
)
from .retention import check_keep, remove_old
from .staging import Staging, host_memory
from .state_dict import (
    describe_optimizers,
    fit_optimizers,
    get_model_state_dict,
    get_optimizer_state_dict,
    listed,
)
from .storage import CheckedReader, RunWriter, check_plain, paths_of, read_metadata

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

_log = logging.getLogger(__name__)


def save_checkpoint(
    model: ThunderModule,
    folder: str | os.PathLike[str],
    optimizers: Optimizers = (),
    *,
    extra: dict[str, Any] | None = None,
    keys: tuple[str, str] = ("model", "optim"),
    keep: int | None = None,
) -> Path:
    """Save model and optimizers; each rank saves its rows. A collective.

    It is ``dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizers)})``
    with checks, checksums and ``extra``. FSDP2, and any other number of ranks, can load it.

    Args:
        folder: a folder without a checkpoint, on a disk that all ranks see. If another run saves into it, one of the two
            gets an error, and no file is overwritten.
        optimizers: one or several; none saves only the model.
        extra: additional values by name, such as the number of the step and the state dicts of schedulers and data
            loaders: numbers, strings, bytes, tensors, NumPy arrays, ``None``, and lists, tuples and dictionaries of
            them. They must be equal on all ranks. DTensors, such as an average of the parameters, are saved by rows.
        keys: names under which model and optimizers are saved.
        keep: once this checkpoint is complete, keep the ``keep`` newest of its series, itself included, and remove the
            others. Its series are the complete checkpoints in the same folder whose names differ from its own in digits
            alone: ``step-200`` removes ``step-100``, but neither ``best`` nor ``other-run-step-100``. Newest means
            saved last. Links are left alone, as are checkpoints of other programs, of Fabric, and of versions of this
            package that did not record the order.

    Cost: three exchanges, and each rank sends two messages to the first rank, which answers them: the list of its rows,
    and the list of what it has written. The joint list has an entry for each parameter and for each cut between ranks
    in a bucket.

    Returns:
        The folder, whose checkpoint is complete.

    Raises:
        CheckpointError: on all ranks, if any rank failed: the folder has a checkpoint, or cannot be written, or another
            run saves into it; the disk is full; an optimizer has other parameters; optimizers, their options or ``extra``
            differ between ranks; ``extra`` has values that cannot be read without running code; or an earlier
            asynchronous save failed. The folder is then not a checkpoint, and other checkpoints are unchanged.
    """
    group, path, state = _collect(model, folder, optimizers, extra, keys, keep)
    return save_in_rounds(group, path, METADATA, state, _writing(path, keep))


def save_checkpoint_async(
    model: ThunderModule,
    folder: str | os.PathLike[str],
    optimizers: Optimizers = (),
    *,
    extra: dict[str, Any] | None = None,
    keys: tuple[str, str] = ("model", "optim"),
    keep: int | None = None,
    writer: Literal["process", "thread"] = "process",
) -> Saving:
    """Copy the state for :func:`save_checkpoint` to host memory, and write it while training continues; a collective.

    See [asynchronous saves](checkpoints.md#asynchronous-saves). Other arguments, errors and cost are those of
    :func:`save_checkpoint`.

    Args:
        writer: the writer of the data: a process of each rank at low priority (on Linux), or a thread.
    """

    def stage(state: dict[str, Any]) -> Staging:
        if writer not in ("process", "thread"):
            raise coded_error(ValueError, "checkpoint.unknown-writer", writer=writer)
        return Staging(state)

    group, path, staging = _collect(model, folder, optimizers, extra, keys, keep, stage)
    return save_beside(group, path, METADATA, staging, _writing(path, keep, writer))


def _collect(
    model: ThunderModule,
    folder: str | os.PathLike[str],
    optimizers: Optimizers,
    extra: dict[str, Any] | None,
    keys: tuple[str, str],
    keep: int | None,
    stage: Callable[[dict[str, Any]], Any] = lambda state: state,
) -> tuple[ProcessGroupRef, Path, Any]:
    """Return the ranks, the folder, and the result of ``stage`` for the values to save; compare the ranks."""
    model, sharded = find_jitted(model)
    group = sharded.world_group
    collected: list[Any] = []

    def collect() -> str:
        """Collect the folder, the values, and the facts that must be equal on all ranks; return a digest of these."""
        sharded.check_initialized()
        finish_latest()
        path, chosen = path_of(folder, "folder"), listed(optimizers)
        _check_extra(extra)
        check_keep(path, keep)
        refuse_complete(path, METADATA)
        state: dict[str, Any] = {keys[0]: get_model_state_dict(model)}
        if chosen:
            state[keys[1]] = get_optimizer_state_dict(model, chosen)
            check_plain(state[keys[1]], keys[1])
        if taken := state.keys() & (extra or {}).keys():
            raise coded_error(ValueError, "checkpoint.extra-name-taken", name=sorted(taken)[0])
        if EXTRA in keys:
            raise coded_error(ValueError, "checkpoint.reserved-key", name=EXTRA)
        facts = describe_optimizers(model, chosen, values=True)
        if extra:
            state[EXTRA] = extras.encode(extra)
            facts |= extras.facts_of(extra)
        collected[:] = path, stage(state), facts
        return digest_of(facts)

    digests = share_on_all_ranks(group, "save_checkpoint", collect)
    path, values, facts = collected
    if len(set(digests)) > 1:
        difference = find_difference(group, "save_checkpoint, what one rank saves for all", facts)
        raise coded_error(CheckpointError, "ranks.saved-values-differ", difference=difference)

    return group, path, values


def _writing(path: Path, keep: int | None, writer: str | None = None) -> Write:
    """Return the function that writes a checkpoint, asynchronously if there is a ``writer``."""

    def write(rounds: Rounds, run: SaveRun, state: dict[str, Any]) -> None:
        process = host_memory.writer() if writer == "process" else None
        is_staged = writer is not None
        write_checkpoint(rounds, state, RunWriter(run, process=process, is_staged=is_staged))
        if keep is not None and rounds.rank == 0:
            remove_old(path, keep)

    return write


def load_checkpoint(
    model: ThunderModule,
    folder: str | os.PathLike[str],
    optimizers: Optimizers = (),
    *,
    extra: dict[str, Any] | None = None,
    keys: tuple[str, str] = ("model", "optim"),
    strict: bool = True,
    verify_checksums: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint of :func:`save_checkpoint`, or of ``dcp.save`` with FSDP2's state dicts; a collective.

    The number of ranks, the strategy and the buckets may differ from those at saving. Error feedback (``comm_policy``)
    starts from zero. While reading, it needs as much additional memory as the model's shards. Entries of another dtype are
    cast, as by DCP, with a warning on the first rank.

    Cost: nine exchanges on any number of ranks; values are read, not sent. A DTensor that is sharded otherwise is gathered.

    Args:
        folder: the checkpoint.
        optimizers: optimizers of the jitted module's parameters; none loads only the model.
        extra: names and structure of the additional values to load. Keys of dictionaries must be in the checkpoint;
            numbers and strings are placeholders. For a DTensor, each rank loads its rows; for ``None``, whole tensors.
        keys: names under which model and optimizers were saved.
        strict: raise an error if the checkpoint has parameters that the model lacks, or lacks some that the model has.
            With ``False``, as in torch's ``load_state_dict``, the latter keep their values, and a warning names them.
        verify_checksums: verify all data before anything is changed. Each rank verifies the chunks that it reads.

    Returns:
        The values of ``extra``, as they were saved.

    Raises:
        CheckpointError: on all ranks, if the folder is not a checkpoint; if the checkpoint does not fit (the message
            has the names and shapes); if it has the state of another kind of optimizer; if ranks passed different
            checkpoints; or if a file cannot be read or is damaged. Nothing is changed then.
    """
    model, sharded = find_jitted(model)
    group = sharded.world_group

    def begin() -> tuple[Path, list[torch.optim.Optimizer]]:
        finish_latest()
        return path_of(folder, "folder"), listed(optimizers)

    path, chosen = run_on_all_ranks(group, "load_checkpoint", begin)
    metadata, digest = run_on_all_ranks(group, "load_checkpoint", lambda: read_metadata(path))
    refuse_different(group, path, digest)
    reader = CheckedReader(path, metadata, verify=verify_checksums)
    if verify_checksums and not reader.has_checksums and group.rank == 0:
        _log.warning("%s has no checksums of its own: those of its archives are verified", path)
    paths, loading = paths_of(metadata), Loading(path, reader)

    def prepare() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Provide memory for everything; return the argument of each optimizer's ``load_state_dict``, and ``extra``."""
        _check_extra(extra)
        own = extras.decode(paths.get(EXTRA, {}), reader)
        names = [*(name for name in paths if not own or name != EXTRA), *own]
        for name in [keys[0], *([keys[1]] if chosen else []), *(extra or {})]:
            if name not in names:
                raise coded_error(ValueError, "checkpoint.name-not-held", path=path, name=name, names=names)
        get_model_state_dict(model)  # refuses a model of which a checkpoint would keep only a part
        of_model = {".".join(map(str, below)): name for below, name in paths[keys[0]].items()}
        loading.fit_model(model, of_model, strict=strict)
        states = fit_optimizers(loading, paths[keys[1]], model, chosen) if chosen else []
        values = {n: extras.fit(loading, wanted, n, own, paths.get(n, {})) for n, wanted in (extra or {}).items()}
        return states, values

    states, values = run_on_all_ranks(group, "load_checkpoint", prepare)
    facts = describe_optimizers(model, chosen, values=False)
    if difference := find_difference(group, "load_checkpoint, optimizers", facts):
        raise coded_error(CheckpointError, "ranks.optimizers-differ", difference=difference)
    loading.finish(group, "load_checkpoint")
    for bucket in sharded.buckets:
        if "feedback" in vars(bucket):  # the rounding errors of earlier gradients
            bucket.feedback.lost.zero_()
    for optimizer, state in zip(chosen, states, strict=True):
        optimizer.load_state_dict(state)
    return values


def _check_extra(extra: Any) -> None:
    if extra is not None and not isinstance(extra, dict):
        raise coded_error(ValueError, "checkpoint.extra-not-dictionary", got=type(extra).__name__)
