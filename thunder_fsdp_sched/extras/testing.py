"""Assertions about the order of communication, for pytest. They only read traces, so they need neither GPUs nor ranks.

Each accepts a jitted module after a call (its last compiled forward and backward), an ``fsdp`` transform, a
:class:`CompiledTraces`, or one trace. Traces may come from real ranks, or, for any world size, from
:func:`compile_on_fake_ranks` in one process. A failure shows the lines of the trace around the fault.
``schedule_snapshot`` pins a whole schedule in a file.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..api import fsdp
from ..compiled_traces import CompiledTraces
from ..errors import coded_error
from ..ir.analysis import Analysis
from ..ir.effects import effects
from ..ir.inspection import args_of, outs_of, statement, statements
from ..ir.read_schedule import schedule_of
from ..ir.schedule import StepSchedule
from ..ir.statements import read_statements
from ..sizes import parse_bytes
from ..transform import FSDPTransform, find_transform
from ..transforms.sort_communication import issue_points
from .planning.dry_run import compile_as_rank
from .planning.models import Made
from .step_memory.symbol_costs import costs

Subject = Any
"""A jitted module, an fsdp transform, compiled traces, or one trace."""

__all__ = [
    "assert_buckets_in_flight_at_most",
    "assert_bytes_in_flight_at_most",
    "assert_gathered_buckets_at_most",
    "assert_gathers_in_consumer_order",
    "assert_no_parameter_copies",
    "assert_peak_memory_at_most",
    "assert_prefetch_distance",
    "assert_reductions_right_after_last_gradient",
    "assert_unsharded_bytes_at_most",
    "assert_waits_right_before_first_consumer",
    "assert_same_schedule_on_all_ranks",
    "compile_on_fake_ranks",
    "gathers",
    "reductions",
    "statements",
    "step_schedule",
]


def compiled_traces(subject: Subject) -> CompiledTraces:
    """Return the last compiled traces of a subject, which must not be a single trace."""
    if isinstance(subject, CompiledTraces):
        return subject
    if isinstance(subject, TraceCtx):
        raise coded_error(TypeError, "trace.single-trace-given")
    transform = subject if isinstance(subject, FSDPTransform) else find_transform(subject)
    if not transform.compiled:
        raise coded_error(ValueError, "trace.jitted-module-not-yet-called")
    return transform.compiled[-1]


def _traces(subject: Subject) -> Sequence[TraceCtx]:
    return [subject] if isinstance(subject, TraceCtx) else compiled_traces(subject).traces


def step_schedule(subject: Subject) -> StepSchedule:
    """Return the forward and backward schedule of a subject, which must not be a single trace."""
    return compiled_traces(subject).schedule


def _on_every_trace(check: Callable[..., None]) -> Callable[..., None]:
    """Extend a check of one trace to any subject, of which it checks forward and backward."""

    @functools.wraps(check)
    def checked(subject: Subject, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        for trace in _traces(subject):
            check(trace, *args, **kwargs)

    return checked


@dataclass(frozen=True)
class Gather:
    """The schedule positions of one gather; the consumers are ``None`` if nothing reads it."""

    bucket: str
    nbytes: int
    issue: int
    wait: int
    first_consumer: int | None
    last_consumer: int | None


@dataclass(frozen=True)
class Reduction:
    """The schedule positions of one reduction; ``last_gradient`` is -1 if its gradients are inputs."""

    bucket: str
    last_gradient: int
    issue: int
    wait: int


def gathers(trace: TraceCtx) -> list[Gather]:
    """Return all gathers of the trace, in issue order. Reading a view of a parameter counts as reading it."""
    live = Analysis(statements(trace))
    found = []
    for position, e in enumerate(live.effects):
        if (issue := e.issues) is not None and issue.gathers:
            name = issue.bucket.spec.name if issue.bucket is not None else ""
            wait = _wait_for(issue.future, live)
            params = [value.name for value in live.outs[wait]]
            first = live.first_read(params)
            last = None if first is None else live.last_use(params)
            found.append(Gather(name, issue.nbytes, position, wait, first, last))
    return found


def reductions(trace: TraceCtx) -> list[Reduction]:
    """Return all reductions of the trace, in issue order."""
    live = Analysis(statements(trace))
    found = []
    for position, e in enumerate(live.effects):
        if e.collects and e.issues is not None and e.bucket is not None:
            last_gradient = live.defined(value.name for value in live.args[position])
            found.append(Reduction(e.bucket.spec.name, last_gradient, position, _wait_for(e.issues.future, live)))
    return found


def _wait_for(future: str, live: Analysis) -> int:
    """Return the position of the wait for a collective; of a reduction across replicas, of its last wait."""
    for position, e in enumerate(live.effects):
        if e.waits is not None and e.waits.future == future:
            return position if e.issues is None else _wait_for(e.issues.future, live)
    raise AssertionError(f"nothing waits for {future}")


@_on_every_trace
def assert_waits_right_before_first_consumer(trace: TraceCtx) -> None:
    """Assert that only gathers and other waits of the same consumer are between a wait and its first consumer.

    With ``max_gathers_in_flight``, a gather is issued after the wait that makes room for it.
    """
    bsyms = statements(trace)
    for gather in gathers(trace):
        consumer = gather.first_consumer or 0
        read = set(args_of(bsyms[consumer]))
        between = [bsym for bsym in bsyms[gather.wait + 1 : consumer] if not effects(bsym).is_gather]
        if any(not effects(bsym).unshards or read.isdisjoint(outs_of(bsym)) for bsym in between):
            _fail(
                trace,
                f"the wait for bucket {gather.bucket!r} at {gather.wait} does not stand right before its first consumer at "
                f"{consumer}",
                gather.wait,
                consumer,
            )


@_on_every_trace
def assert_gathers_in_consumer_order(trace: TraceCtx) -> None:
    """Assert that all-gathers are issued in the order of their first consumers."""
    for before, gather in itertools.pairwise(gathers(trace)):
        if _first(gather) < _first(before):
            _fail(
                trace,
                f"bucket {gather.bucket!r} is first read at {gather.first_consumer}, before bucket {before.bucket!r} "
                f"({before.first_consumer}), but gathered after it",
                before.issue,
                gather.issue,
            )


@_on_every_trace
def assert_prefetch_distance(trace: TraceCtx, prefetch: int) -> None:
    """Assert that every gather is issued ``prefetch`` steps ahead of its wait, fewer only at the start of the trace.

    Buckets with the same first consumer form one prefetch step. A large bucket may also be issued ahead of small steps:
    see :func:`~thunder_fsdp_sched.transforms.sort_communication.issue_points`.
    """
    found = sorted((g for g in gathers(trace) if g.first_consumer is not None), key=_first)
    steps = [list(of_step) for _, of_step in itertools.groupby(found, key=_first)]
    points = issue_points([sum(g.nbytes for g in of_step) for of_step in steps], prefetch)
    waits = [min(g.wait for g in of_step) for of_step in steps]
    for number, of_step in enumerate(steps):
        expected = number - points[number]
        for gather in of_step:
            ahead = sum(gather.issue < wait for wait in waits[:number])
            if ahead != expected:
                message = f"bucket {gather.bucket!r} is gathered {ahead} steps ahead of its wait, expected {expected}"
                _fail(trace, message, gather.issue, gather.wait)


@_on_every_trace
def assert_gathered_buckets_at_most(trace: TraceCtx, buckets: int) -> None:
    """Assert that at no position more than ``buckets`` buckets are in flight, or unsharded and yet to be read."""
    _at_most(trace, buckets, "buckets are unsharded", _last_consumer)


@_on_every_trace
def assert_unsharded_bytes_at_most(trace: TraceCtx, nbytes: int | str) -> None:
    """Assert that at no position more than ``nbytes`` of buckets are in flight, or unsharded and yet to be read.

    Args:
        nbytes: bytes, or a string such as ``"70GiB"``.
    """
    _at_most(trace, nbytes, "bytes are unsharded", _last_consumer)


@_on_every_trace
def assert_buckets_in_flight_at_most(trace: TraceCtx, buckets: int) -> None:
    """Assert that at no position more than ``buckets`` gathers are in flight."""
    _at_most(trace, buckets, "gathers are in flight", _before_wait)


@_on_every_trace
def assert_bytes_in_flight_at_most(trace: TraceCtx, nbytes: int | str) -> None:
    """Assert that at no position the gathers in flight have more than ``nbytes`` bytes together.

    Args:
        nbytes: bytes, or a string such as ``"70GiB"``.
    """
    _at_most(trace, nbytes, "bytes are in flight", _before_wait)


def _at_most(trace: TraceCtx, limit: int | str, what: str, end: Callable[[Gather], int]) -> None:
    """Raise an error if more gathers, or more bytes of them, exist at once, each from its issue to its ``end``."""
    found = gathers(trace)
    limit = parse_bytes("nbytes", limit) if isinstance(limit, str) else limit
    for gather in found:
        live = [g for g in found if g.issue <= gather.issue <= end(g)]
        amount = sum(g.nbytes for g in live) if what.startswith("bytes") else len(live)
        if amount > limit:
            _fail(trace, f"{amount:,} {what}: {[g.bucket for g in live]}, allowed {limit:,}", gather.issue)


def _last_consumer(gather: Gather) -> int:
    return gather.last_consumer or gather.wait


def _before_wait(gather: Gather) -> int:
    return gather.wait - 1


def assert_peak_memory_at_most(
    subject: Subject, limit: int | str, *, optimizer_state: int = 0, optimizer_step: int = 0
) -> None:
    """Assert that a step never needs more memory on this rank: shards, unsharded buckets, activations, and the rest.

    Args:
        limit: bytes, or a string such as ``"70GiB"``.
        optimizer_state: bytes of optimizer state on this rank.
        optimizer_step: bytes that ``optimizer.step`` allocates and frees.
    """
    __tracebackhide__ = True
    most = parse_bytes("limit", limit)
    memory = compiled_traces(subject).memory.with_optimizer_state(optimizer_state, optimizer_step)
    assert memory.peak.nbytes <= most, f"{memory.peak.nbytes - most:,} bytes more than the limit of {most:,}: {memory}"


@_on_every_trace
def assert_reductions_right_after_last_gradient(trace: TraceCtx) -> None:
    """Assert that only communication is between a bucket's last gradient and its reduce-scatter."""
    bsyms = statements(trace)
    for reduction in reductions(trace):
        for position in range(reduction.last_gradient + 1, reduction.issue):
            if not _communicates(bsyms[position]):
                _fail(
                    trace,
                    f"bucket {reduction.bucket!r} has its last gradient at {reduction.last_gradient}, but is reduced only "
                    f"at {reduction.issue}",
                    reduction.last_gradient,
                    reduction.issue,
                )


def _communicates(bsym: BoundSymbol) -> bool:
    """Return whether a bound symbol is communication of a bucket."""
    e = effects(bsym)
    return e.in_schedule and (e.issues is not None or e.waits is not None)


_COPIES = frozenset(
    {"cat", "clone", "contiguous", "copy_", "copy_with_setitem", "index_copy", "stack"}
    | {"pack", "pack_for_fsdp", "unpack", "unpack_for_fsdp", "update_bucket_view"}  # symbols of Thunder's own bucketing
)


@_on_every_trace
def assert_no_parameter_copies(trace: TraceCtx) -> None:
    """Assert that nothing packs shards before a gather or copies gathered parameters, also through views and fusions.

    A conversion to another dtype is not a copy, nor is compute on parameters.
    """
    parts = [(position, part) for position, bsym in enumerate(statements(trace)) for part in _parts(bsym)]
    live = Analysis([part for _, part in parts])
    of_bucket: dict[str, str] = {}
    for (position, part), e, args, outs in zip(parts, live.effects, live.args, live.outs, strict=True):
        if e.bucket is not None:
            unsharded = [out.name for out in outs] if e.unshards else []
            of_bucket.update(dict.fromkeys([*costs(part).shards, *unsharded], e.bucket.spec.name))
        sources = {root.name for arg in args for root in arg.roots} & of_bucket.keys()
        name = part.sym.name.removeprefix("torch_").removesuffix("_prim_impl")
        if name in _COPIES and sources:
            copied = sorted({of_bucket[source] for source in sources})
            _fail(trace, f"{part.sym.name} copies parameters of {copied}", position)


def _parts(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    """Return the subsymbols of ``bsym``, down to those without subsymbols, to conversions of dtype and to communication."""
    dtypes = {getattr(p, "dtype", None) for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)}
    if not bsym.subsymbols or (bsym.sym.name == "to" and len(dtypes) > 1) or effects(bsym).bucket is not None:
        yield bsym
        return
    for sub in bsym.subsymbols:
        yield from _parts(sub)


def compile_on_fake_ranks(
    make: Callable[[], Made],
    world_size: int,
    *,
    ranks: Iterable[int] = (0,),
    **options: Any,
) -> list[CompiledTraces]:
    """Compile a model as some ranks of a world of any size would, in this process; nothing is sent.

    ``transport="auto"`` chooses what these ranks would choose: that of gloo for parameters on the CPU, that of NCCL for
    those on GPUs and on the meta device, and with ``cluster`` that of the cluster's backend.

    Args:
        make: returns a fresh module and its inputs, the same for every rank.
        world_size: number of ranks.
        ranks: the ranks to compile as, one after the other.
        **options: options of :func:`thunder_fsdp_sched.fsdp`.

    Returns:
        The traces that each of ``ranks`` compiled for these inputs.

    Raises:
        RuntimeError: this process already has a default process group.
    """
    return [compile_as_rank(make, fsdp(**options), rank=rank, world_size=world_size).compiled[-1] for rank in ranks]


def assert_same_schedule_on_all_ranks(subject: Subject | Sequence[CompiledTraces]) -> None:
    """Assert that all ranks issue the same collectives in the same order.

    Args:
        subject: a jitted module on real ranks, which must all call this (a collective); or the result of
            :func:`compile_on_fake_ranks`.
    """
    if isinstance(subject, (list, tuple)):
        per_rank = [_collectives(one) for one in subject]
    else:
        per_rank = [[]] * dist.get_world_size()
        dist.all_gather_object(per_rank, _collectives(subject))
    for rank, lines in enumerate(per_rank):
        for number, (expected, line) in enumerate(itertools.zip_longest(per_rank[0], lines), start=1):
            assert line == expected, f"collective {number}: rank 0 issues {expected}, rank {rank} issues {line}"


def _collectives(subject: Subject) -> list[str]:
    return [line for trace in _traces(subject) for line in schedule_of(read_statements(trace)).collectives()]


def _first(gather: Gather) -> float:
    return float("inf") if gather.first_consumer is None else gather.first_consumer


def _fail(trace: TraceCtx, message: str, *positions: int) -> None:
    __tracebackhide__ = True
    bsyms = statements(trace)
    lines = []
    shown = {p + d for p in positions for d in (-2, -1, 0, 1, 2)}
    for position, bsym in enumerate(bsyms):
        if position in shown:
            mark = ">" if position in positions else " "
            reason = f"    ({bsym.header})" if bsym.header else ""
            lines.append(f"  {mark} {position:5d}  {statement(bsym)}{reason}")
        elif lines and lines[-1] != "    ...":
            lines.append("    ...")
    raise AssertionError("\n".join([message, *lines]))
