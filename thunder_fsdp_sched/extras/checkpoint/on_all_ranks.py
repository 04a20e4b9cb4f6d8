"""Run the steps of saving and loading on all ranks: an error on one rank is raised on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from ...errors import code_of, coded_error, with_code
from ...ranks.control import control_of
from ...ranks.messages import ranks_by_text
from ...ranks.process_groups import ProcessGroupRef
from .writer_process import hidden_reason

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """The error that a checkpoint could not be saved or does not fit. Raised on every rank; nothing is changed."""


def run_on_all_ranks(group: ProcessGroupRef, what: str, do: Callable[[], Result]) -> Result:
    """Run ``do`` on every rank of ``group``, and return this rank's result; if it fails on any, raise an error on all.

    Args:
        what: the name of the call, for messages.

    Raises:
        CheckpointError: with the message of each rank that failed.
    """
    results: list[Result] = []
    share_on_all_ranks(group, what, lambda: results.append(do()))
    return results[0]


def share_on_all_ranks(group: ProcessGroupRef, what: str, do: Callable[[], Result]) -> list[Result]:
    """Do the same, and return the results of all ranks, which must be small."""
    result, message, code, cause = None, "", None, None
    try:
        result = do()
    except Exception as error:
        message, code, cause = (reason_of(error) or repr(error)) + hidden_reason(error), code_of(error), error
    everyones = control_of(group).exchange(what, (message, code, result))
    messages = zip(group.global_ranks, (theirs for theirs, _, _ in everyones), strict=False)
    ranks_of = ranks_by_text((rank, text) for rank, text in messages if text)
    if ranks_of:
        parts = [f"{text} (on ranks {ranks})" if len(ranks) < group.size else text for text, ranks in ranks_of.items()]
        failure = coded_error(CheckpointError, "checkpoint.failed-on-ranks", failures="; ".join(parts))
        codes = [code for _, code, _ in everyones if code]
        raise (with_code(failure, codes[0]) if codes else failure) from cause
    return [theirs for _, _, theirs in everyones]


def reason_of(error: BaseException) -> str:
    """Format an error for inclusion in another error's message."""
    return str(error).removeprefix("fsdp: ")


def digest_of(facts: Mapping[str, str]) -> str:
    """Return a digest of descriptions and values."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def find_difference(group: ProcessGroupRef, what: str, facts: Mapping[str, str]) -> str:
    """Compare descriptions and values between ranks; a collective, of two rounds if they differ.

    Returns:
        The first difference, with the ranks of each value; empty if there is none.
    """
    exchange = control_of(group).exchange
    if len(set(exchange(what, digest_of(facts)))) == 1:
        return ""
    everyones = exchange(f"{what}, in full", facts)
    for name in dict.fromkeys(name for theirs in everyones for name in theirs):
        values_of = (theirs.get(name, "none") for theirs in everyones)
        ranks_of = ranks_by_text(zip(group.global_ranks, values_of, strict=False))
        if len(ranks_of) > 1:
            return f"{name}: " + "; ".join(f"{_short(value)} on ranks {ranks}" for value, ranks in ranks_of.items())
    return "their order"


def refuse_different(group: ProcessGroupRef, source: Path, digest: str) -> None:
    """Check that all ranks are about to load the same checkpoint; a collective.

    Raises:
        CheckpointError: on all ranks, if the digests differ; with the ranks of each checkpoint.
    """
    everyones = control_of(group).exchange("comparing what to load", (digest, str(source)))
    paths = dict(zip(group.global_ranks, (path for _, path in everyones), strict=False))
    ranks_of = ranks_by_text(zip(group.global_ranks, (theirs for theirs, _ in everyones), strict=False))
    if len(ranks_of) > 1:
        parts = [f"ranks {ranks} {paths[ranks[0]]}" for ranks in ranks_of.values()]
        raise coded_error(CheckpointError, "ranks.checkpoints-differ", differences="; ".join(parts))


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
