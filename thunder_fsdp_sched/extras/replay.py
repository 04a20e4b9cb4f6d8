"""Schedules in files, and traces that follow one (``schedule=``): communication is placed where the schedule has it."""

from __future__ import annotations

import dataclasses
import json
import types
import uuid
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..errors import coded_error
from ..extensions import load
from ..ir.effects import bucket_of, effects
from ..ir.inspection import statements, with_bound_symbols, without_token
from ..ir.read_schedule import compute_digest, is_communication
from ..ir.schedule import THEN_HOOK, Schedule, StepSchedule
from ..option_checks import is_a

_FORMAT = 2
"""The version of the files of schedules."""


class ScheduleMismatch(ValueError):
    """A pinned schedule does not fit the trace."""


def replay_schedule(trace: TraceCtx, *, schedule: Schedule) -> TraceCtx:
    """Reorder the communication of ``trace`` to match ``schedule``.

    Runs after ``write_grads_in_place`` and before ``assign_slots``, in place of ``sort_communication``, if a schedule is
    pinned with ``fsdp(schedule=...)``. Compute keeps its order. The pass does not judge the schedule; ``verify`` proves
    later that the result is right. Before::

        ft146 = fsdp_all_gather(bucket_blocks_0, None, t_blocks_0_weight, reuse_cast=False)  # 16,384 bytes float32
        (t109,) = fsdp_wait_params(bucket_blocks_0, ft146)
        t110 = torch.nn.functional.linear(x, t109, None)

    After, with a schedule that was saved with default options, it is the trace that ``sort_communication`` shows.
    After, with one that was saved with ``prefetch=0``::

        # prefetch: 0 ahead of its wait
        ft146 = fsdp_all_gather(bucket_blocks_0, None, t_blocks_0_weight, reuse_cast=False)  # 16,384 bytes float32
        # first consumer: t110 = linear
        (t109,) = fsdp_wait_params(bucket_blocks_0, ft146)
        t110 = torch.nn.functional.linear(x, t109, None)

    Raises:
        ScheduleMismatch: names the first line of the schedule that does not fit the trace.
    """
    compute: list[BoundSymbol] = []
    ours: dict[tuple[str, str], deque[BoundSymbol]] = defaultdict(deque)
    for bsym in statements(trace):
        if is_communication(bsym):
            bsym = without_token(bsym)
            ours[bsym.sym.name, bucket_of(bsym).spec.name].append(bsym)
        else:
            compute.append(bsym)
    out = _interleave(compute, ours, schedule)
    if compute_digest(compute) != schedule.compute:
        raise coded_error(
            ScheduleMismatch,
            "schedule.made-for-another-computation",
            schedule_count=schedule.statements - len(schedule),
            schedule_digest=schedule.compute,
            trace_count=len(compute),
            trace_digest=compute_digest(compute),
        )
    return with_bound_symbols(trace, out, "fsdp: replay schedule")


def _interleave(
    compute: Sequence[BoundSymbol], ours: dict[tuple[str, str], deque[BoundSymbol]], schedule: Schedule
) -> list[BoundSymbol]:
    out: list[BoundSymbol] = []
    rest = iter(compute)
    for number, op in enumerate(schedule, start=1):
        while len(out) < op.position and (bsym := next(rest, None)) is not None:
            out.append(bsym)
        known = ours[op.kind, op.bucket]
        if not known or len(out) != op.position:
            why = "the trace has no such op" if not known else f"the trace ends at {len(out)}"
            raise coded_error(ScheduleMismatch, "schedule.line-does-not-fit-trace", number=number, reason=why, op=op)
        bsym = known.popleft()
        issue = effects(bsym).issues
        if issue is not None and issue.nbytes != op.nbytes:
            raise coded_error(
                ScheduleMismatch, "schedule.line-has-other-bytes", number=number, nbytes=issue.nbytes, op=op
            )
        out.append(bsym.from_bsym(header=op.reason.partition(THEN_HOOK)[0]))
    left = [bsym for known in ours.values() for bsym in known]
    if left:
        raise coded_error(
            ScheduleMismatch, "schedule.lacks-op-of-bucket", op=left[0].sym.name, bucket=bucket_of(left[0]).spec.name
        )
    out.extend(rest)
    return out


def pinned_schedule(
    trace: TraceCtx, steps: Sequence[StepSchedule], forward: Schedule | None, *, no_sync: bool
) -> Schedule:
    """Return the pinned schedule of a trace: the one for the same compute, or else the first of the same mode.

    Args:
        steps: all pinned schedules.
        forward: the schedule of the forward trace, if this is the backward trace.

    Raises:
        ScheduleMismatch: there is none.
    """
    digest = forward.compute if forward is not None else compute_digest(statements(trace))
    pinned = [s for s in steps if s.no_sync is no_sync]
    fitting = [s for s in pinned if s.forward.compute == digest] or pinned
    if not fitting:
        raise coded_error(ScheduleMismatch, "schedule.lacks-no-sync-mode", no_sync=no_sync)
    schedule = fitting[0].backward if forward is not None else fitting[0].forward
    if schedule is None:
        raise coded_error(ScheduleMismatch, "schedule.lacks-backward")
    return schedule


def save_schedules(schedules: Iterable[StepSchedule], path: str | Path) -> None:
    """Write schedules, oldest first, as JSON that ``fsdp(schedule=path)`` replays.

    Ranks may write the same path at once: a reader finds the complete file of one of them.
    """
    content = {"format": _FORMAT, "steps": [dataclasses.asdict(s) for s in schedules]}
    path = Path(path).resolve()  # a link stays one
    partly_written = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    partly_written.write_text(json.dumps(content, indent=1) + "\n")
    partly_written.replace(path)


def load_schedules(path: str | Path) -> list[StepSchedule]:
    """Read a file written by :func:`save_schedules`.

    Raises:
        ValueError: the file was not written by :func:`save_schedules`, or is damaged; the message names the first fault.
    """
    for extra in ("extras.no_sync", "extras.replicas"):  # whose symbols a schedule may have
        load(extra)
    try:
        content = json.loads(Path(path).read_text())
        if (found := content.pop("format", None) if isinstance(content, dict) else None) != _FORMAT:
            raise coded_error(ValueError, "schedule.unsupported-format", got=found, expected=_FORMAT)
        if content.keys() != {"steps"}:
            raise coded_error(ValueError, "schedule.file-without-steps", got=", ".join(content) or "nothing")
        return list(_read(content["steps"], tuple[StepSchedule, ...], "steps"))
    except RecursionError:
        raise coded_error(ValueError, "schedule.file-nested-too-deeply", path=path) from None
    except ValueError as error:  # JSONDecodeError is one
        raise coded_error(ValueError, "schedule.file-not-valid", path=path, error=error) from error


def _read(value: Any, annotation: Any, at: str) -> Any:
    """Return the Python value of the JSON value at a path of the file, by the types of the dataclasses' fields."""
    options = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if value is None and types.NoneType in options:
        return None
    of = options[0]
    fields = get_type_hints(of) if dataclasses.is_dataclass(of) else None
    expected: Any = list if get_origin(of) is tuple else dict if fields is not None else of
    if type(value) is not expected:  # isinstance accepts a bool as an int
        names = expected.__name__ + " or null" * (types.NoneType in options)
        raise coded_error(
            ValueError, "schedule.field-of-wrong-type", place=at, expected=names, type=type(value).__name__
        )
    if expected is list:
        return tuple([_read(each, get_args(of)[0], f"{at}[{number}]") for number, each in enumerate(value)])
    if fields is None:
        return value
    if unknown := sorted(value.keys() - fields.keys()):
        raise coded_error(ValueError, "schedule.unknown-field", place=at, field=unknown[0])
    if missing := [name for name in fields if name not in value]:
        raise coded_error(ValueError, "schedule.lacks-field", place=at, field=missing[0])
    return of(**{name: _read(value[name], type_, f"{at}.{name}") for name, type_ in fields.items()})


def check_schedule(name: str, schedule: object) -> tuple[StepSchedule, ...]:
    """Return the schedules that a user has given, or those of a file.

    Raises:
        TypeError: it is neither; the message begins with ``name``.
        ValueError: there is no such file, or it has no schedules.
    """
    given = (schedule,) if isinstance(schedule, StepSchedule) else schedule
    if isinstance(given, tuple) and given and all(isinstance(each, StepSchedule) for each in given):
        return given
    path = Path(is_a((str, Path), "a path to a saved schedule, a StepSchedule or None")(name, schedule))
    if not path.is_file():
        raise coded_error(ValueError, "schedule.file-not-found", name=name, path=str(path))
    return tuple(load_schedules(path))
