"""Measure a real step on the ranks, bound symbol by bound symbol, for the simulator.

[Note: The measurement]
The compiled traces of the given inputs run with a clock reading before every bound symbol, and with one difference:
every collective is waited for right after it was issued, after a barrier. So bound symbols are timed without concurrent
communication, and collectives are timed alone, with data in the right slots and all ranks at the same position. The
host's cost of a collective (copying gradients, gloo's work in ``wait``) is timed separately from its time on the link.

Then the forward trace runs while collectives of each kind are running. The contention is the share of that time by
which its bound symbols take longer, because threads of gloo and of the kernel share the core, or on a GPU because NCCL
occupies SMs.

Each figure is the median over repetitions, then the mean over ranks. A collective's time on the link is the maximum
over ranks instead, because it finishes when its last rank has finished; a rank that finishes earlier waits at the next
one. So all ranks have the same profile.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx

from ..ir.effects import Issue, effects, sends
from ..ir.inspection import runs_nothing, with_bound_symbols
from ..planning.profiles import CollectiveTime, OpTime, Profile, computes, shapes_of, symbol_of
from ..runtime.autograd import as_backward_of_latest_forward
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, InFlight, Slot
from ..sharding.sharded_module import ShardedModule, find_jitted
from ..transform import find_transform


def measure(jitted: Any, *inputs: Any, repeats: int = 5, **kwargs: Any) -> Profile:
    """Measure one forward and backward of a jitted module; call it on all ranks with inputs of the same shapes.

    No gradient reaches ``.grad`` and no parameter changes. It runs the step about ``5 * repeats`` times.

    Args:
        jitted: the result of ``thunder.jit(model, transforms=[fsdp(...)])``.
        *inputs: the positional arguments of the call.
        **kwargs: its keyword arguments.
        repeats: number of measured runs of each kind; one more of each warms up.

    Returns:
        The same profile on every rank.

    Raises:
        TypeError: ``jitted`` is not sharded by :func:`thunder_fsdp_sched.fsdp`.
        RuntimeError: there are unreduced gradients of ``no_sync``, which measuring would consume.
    """
    transform = find_transform(jitted)
    jitted, sharded = find_jitted(jitted)
    buckets = sharded.buckets
    for bucket in buckets:
        if not bucket.accumulation.is_empty:
            raise RuntimeError(
                f"measure: bucket {bucket.spec.name!r} holds gradients of no_sync; run a step that reduces them first"
            )
    args, named = transform.cast_inputs(inputs, kwargs)
    entry, arguments = transform.sharded.compile(jitted, args, named)
    traces = [entry.computation_traces[-1], *(entry.backward_traces[-1:] if entry.backward_fn else ())]
    device = buckets[0].spec.device if buckets else torch.device("cpu")
    return _Measurement(traces, arguments, sharded, device, repeats).run(entry.computation_fn, entry.backward_fn)


_Load = Callable[[], InFlight]
"""A function that starts a collective."""

_MEAN, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


class _Measurement:
    def __init__(
        self, traces: Sequence[TraceCtx], arguments: Any, sharded: ShardedModule, device: torch.device, repeats: int
    ) -> None:
        self.traces = traces
        self.arguments = arguments
        self.group = sharded.world_group
        self.control = sharded.control
        self.device = device
        self.repeats = repeats
        self.clock = CudaClock(device) if device.type == "cuda" else Clock()

    def run(self, forward: Callable[..., Any], backward: Callable[..., Any] | None) -> Profile:
        step = [forward, *([backward] if backward else [])]
        whole = self._repeat(lambda: self._timed_step(step))
        probes = [self._probe(t, finish=True) for t in self.traces]
        alone = self._repeat(lambda: self._run_probes(probes))
        medians = _medians(alone)
        per_trace = []
        for probe in probes:
            per_trace.append(dict(zip(probe.labels, medians[: len(probe.labels)], strict=True)))
            medians = medians[len(probe.labels) :]
        names = ("forward", "backward")
        ops = {name: self._ops(t, m) for name, t, m in zip(names, self.traces, per_trace, strict=False)}
        collectives = [c for t, m in zip(self.traces, per_trace, strict=True) for c in self._collectives(t, m)]
        concurrent, gather_share, reduction_share = self._sharing(collectives)
        return Profile(
            world_size=self.group.size,
            device=str(self.device),
            synchronous=self.device.type != "cuda",
            forward=ops["forward"],
            backward=ops.get("backward", ()),
            collectives=tuple(collectives),
            contention=self._contention(collectives),
            concurrent=concurrent,
            gather_share=gather_share,
            reduction_share=reduction_share,
            step_seconds=self._over_ranks([statistics.median(whole)], _MAX)[0],
        )

    def _repeat(self, run: Callable[[], Any]) -> list[Any]:
        results = []
        for _ in range(self.repeats + 1):
            self._align()
            results.append(run())
        return results[1:]

    def _align(self) -> None:
        self.control.rendezvous("measure")
        self.clock.settle()

    def _timed_step(self, step: Sequence[Callable[..., Any]]) -> float:
        started = time.perf_counter()
        self._call(step)
        self.clock.settle()
        return time.perf_counter() - started

    def _call(self, step: Sequence[Callable[..., Any]]) -> None:
        """Run forward and, if there is one, backward, with gradients of ones."""
        result = step[0](*self.arguments)
        if len(step) == 1:
            return
        outputs, (saved_tensors, saved_other) = result
        gradients = [torch.ones_like(o) if isinstance(o, torch.Tensor) else None for o in outputs["flat_output"]]
        saved = [list(saved_tensors), saved_other]
        del result, outputs, saved_tensors
        with as_backward_of_latest_forward():
            step[1](saved, gradients)

    def _run_probes(self, probes: Sequence[_Probe]) -> list[tuple[float, float]]:
        self.clock.reads.clear()
        self._call([p.callable for p in probes])
        return self._durations(sum(len(p.labels) for p in probes))

    def _durations(self, count: int) -> list[tuple[float, float]]:
        durations = self.clock.durations()
        assert len(durations) == count, (len(durations), count)
        return durations

    def _ops(self, trace: TraceCtx, medians: dict[Any, tuple[float, float]]) -> tuple[OpTime, ...]:
        computing = [(i, b) for i, b in enumerate(trace.bound_symbols) if computes(b)]
        means = iter(self._over_ranks([x for i, _ in computing for x in medians[_OP, i]]))
        return tuple(OpTime(symbol_of(b), shapes_of(b), next(means), next(means)) for _, b in computing)

    def _collectives(self, trace: TraceCtx, medians: dict[Any, tuple[float, float]]) -> Iterator[CollectiveTime]:
        found = list(enumerate(trace.bound_symbols))
        issued = {issue.future: (i, issue) for i, b in found if (issue := sends(b)) is not None}
        waited = {e.waits.future: i for i, b in found if (e := effects(b)).waits is not None and e.issues is None}
        issues = [medians[_OP, i] for i, _ in issued.values()]
        # The reduce-scatter is waited for by the all-reduce across replicas, as part of it.
        waits = [medians[_OP, waited[future]] if future in waited else (0.0, 0.0) for future in issued]
        # Waiting for a gloo collective includes the work in its wait, which runs, and is timed, again later.
        wire = [max(sum(medians[_WIRE, i]) - sum(w), 0.0) for (i, _), w in zip(issued.values(), waits, strict=True)]
        times = [self._over_ranks(wire, _MAX)]
        times += [self._over_ranks([t[part] for t in kind]) for part in (1, 0) for kind in (issues, waits)]
        for (_, issue), *of_one in zip(issued.values(), *times, strict=True):
            assert issue.bucket is not None
            yield CollectiveTime(issue.kind, issue.bucket.spec.name, issue.nbytes, *of_one)

    def _contention(self, collectives: Sequence[CollectiveTime]) -> dict[str, float]:
        """Return for each kind of collective the share of time by which forward's bound symbols take longer meanwhile."""
        probe = self._probe(self.traces[0], finish=False)
        self._call([self._probe(self.traces[0], finish=True).callable])  # fills all slots with parameters
        alone = _medians(self._repeat(lambda: self._run_probe(probe, ())))
        busy = self._over_ranks([sum(map(sum, alone))])[0]  # the same on all ranks, which issue as many collectives
        shares = {}
        for largest in self._largest(collectives).values():
            count = max(1, min(math.ceil(busy / max(largest.wire, 1e-6)), 2**30 // largest.nbytes, 32))
            window = 0.9 * count * largest.wire
            loads = [self._load(largest) for _ in range(count)]
            runs = self._repeat(lambda loads=loads: self._run_probe(probe, loads))  # type: ignore[misc]
            found = statistics.median(_slowdown(run, alone, window) for run in runs)
            shares[largest.kind] = min(max(self._over_ranks([found])[0], 0.0), 0.9)
        return shares

    def _sharing(self, collectives: Sequence[CollectiveTime]) -> tuple[int, float, float]:
        """Return how many collectives run at once, and the link shares of a concurrent all-gather and reduction."""
        largest = self._largest(collectives)
        if len(largest) < 2:
            return 1, 1.0, 0.0
        gather, reduction = largest[True], largest[False]
        all_gather, reduce, other = self._load(gather), self._load(reduction), self._load(reduction)

        def first_of_two() -> float:
            return self._ends([reduce, other])[0]

        def gather_after_reduction() -> list[float]:
            return self._ends([all_gather, reduce], reverse=True)

        first = self._over_ranks([statistics.median(self._repeat(first_of_two))])[0]
        if first < 1.5 * reduction.wire:
            return 1, 1.0, 0.0
        ends = [statistics.median(of_one) for of_one in zip(*self._repeat(gather_after_reduction), strict=True)]
        gathered, reduced = self._over_ranks(ends)
        gather_share = min(gather.wire / gathered, 1.0)
        reduced_beside = reduction.wire - (reduced - gathered)
        return 2, gather_share, min(max(reduced_beside / gathered, 0.0), 1 - gather_share)

    def _ends(self, loads: Sequence[_Load], *, reverse: bool = False) -> list[float]:
        """Start collectives, optionally in reverse, wait for them in order, and return when each wait finished."""
        started = time.perf_counter()
        order = list(reversed(loads)) if reverse else list(loads)
        flights = [start() for start in order]
        ends = []
        for flight in reversed(flights) if reverse else flights:
            flight.wait()
            self.clock.settle()
            ends.append(time.perf_counter() - started)
        return ends

    def _largest(self, collectives: Sequence[CollectiveTime]) -> dict[bool, CollectiveTime]:
        """Return the gather (``True``) and the reduction in slots (``False``) that take longest."""
        ascending = sorted(collectives, key=lambda collective: collective.wire)
        return {issue.gathers: c for c in ascending if (issue := self._issue_of(c)).place is not None}

    def _issue_of(self, collective: CollectiveTime) -> Issue:
        issues = (sends(bsym) for trace in self.traces for bsym in trace.bound_symbols)
        of = collective.kind, collective.bucket
        return next(i for i in issues if i is not None and i.bucket is not None and (i.kind, i.bucket.spec.name) == of)

    def _load(self, collective: CollectiveTime) -> _Load:
        """Return a function that starts a collective of the traces in an unused slot."""
        issue = self._issue_of(collective)
        assert issue.place is not None
        bucket = issue.place.bucket
        slot = Arena(bucket.spec.device).slot(0, issue.place.nbytes)
        (slot.params if issue.gathers else slot.grads)[bucket].flat.zero_()
        return functools.partial(_start_all_gather if issue.gathers else _start_reduce_scatter, bucket, slot)

    def _run_probe(self, probe: _Probe, loads: Sequence[_Load]) -> list[tuple[float, float]]:
        flights = [start() for start in loads]
        self.clock.reads.clear()
        probe.callable(*self.arguments)
        durations = self._durations(len(probe.labels))
        for flight in flights:
            flight.wait()
        return durations

    def _probe(self, trace: TraceCtx, *, finish: bool) -> _Probe:
        return _Probe(trace, self.clock, self._align, finish=finish)

    def _over_ranks(self, values: Sequence[float], op: Any = _MEAN) -> list[float]:
        reduced = self.control.reduce("measure", values, op)
        return [value / (self.group.size if op is _MEAN else 1) for value in reduced]


class Clock:
    """A reader of the host's clock, for a CPU, where the host computes."""

    def __init__(self) -> None:
        self.reads: list[Any] = []

    def tick(self) -> None:
        """Read the clock between two bound symbols."""
        self.reads.append(time.perf_counter())

    def tick_at_once(self) -> None:
        """Read the clock after the issue of a collective that is running."""
        self.tick()

    def finish(self, flight: InFlight) -> None:
        flight.wait()

    def settle(self) -> None:
        """Wait until the device is idle."""

    def durations(self) -> list[tuple[float, float]]:
        """Return (host, device) seconds from each reading to the next; zero for the last."""
        return [*((0.0, after - before) for before, after in pairwise(self.reads)), (0.0, 0.0)]


class CudaClock(Clock):
    """A reader of the clocks of host and device. The device sleeps at each reading so that the host stays ahead of it,
    and its time for a bound symbol is that of the kernels only."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def tick(self) -> None:
        self._read(pause=True)

    def tick_at_once(self) -> None:
        self._read(pause=False)

    def _read(self, *, pause: bool) -> None:
        entered = time.perf_counter()
        end, start = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self.device)
        end.record(stream)
        if pause:
            with torch.cuda.stream(stream):  # the current device may be another
                torch.cuda._sleep(100_000)  # cycles, about 60 us
        start.record(stream)
        self.reads.append((entered, time.perf_counter(), end, start))

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def durations(self) -> list[tuple[float, float]]:
        self.settle()
        pairs = pairwise(self.reads)
        return [*((b[0] - a[1], a[3].elapsed_time(b[2]) / 1e3) for a, b in pairs), (0.0, 0.0)]


_OP, _WIRE, _BETWEEN = "op", "wire", "between"


class _Probe:
    """A trace that reads the clock before every bound symbol.

    Attributes:
        callable: runs it.
        labels: the meaning of the time from each reading to the next: the own work of a bound symbol (by its index in
            the trace) on host and device, its time on the link, or nothing of interest.
    """

    def __init__(self, trace: TraceCtx, clock: Clock, align: Callable[[], None], *, finish: bool) -> None:
        self.labels: list[tuple[str, int]] = []
        bsyms: list[BoundSymbol] = []

        def tick(label: tuple[str, int]) -> None:
            reading = clock.tick_at_once if label[0] == _WIRE else clock.tick
            bsyms.append(_hook(reading.__name__, reading).bind(output=None))
            self.labels.append(label)

        for index, bsym in enumerate(trace.bound_symbols):
            if bsym.sym.id is PrimIDs.RETURN:
                tick((_BETWEEN, index))
            if runs_nothing(bsym):
                bsyms.append(bsym)
                continue
            issue = effects(bsym).issues
            if issue is None or issue.bucket is None:
                tick((_OP, index))
                bsyms.append(bsym)
            elif finish:
                bsyms.append(_hook("fsdp_align", align).bind(output=None))
                tick((_OP, index))
                bsyms.append(bsym)
                tick((_WIRE, index))
                bsyms.append(_hook("fsdp_finish", clock.finish).bind(bsym.output, output=None))
                tick((_BETWEEN, index))
            else:
                tick((_OP, index))
                pretend = _hook("fsdp_pretend", _pretend)
                bsyms.append(bsym.from_bsym(sym=pretend, _call_ctx={"fsdp_pretend": _pretend}))
        self.callable = with_bound_symbols(trace, bsyms, "fsdp: measured").python_callable()


def _hook(name: str, call: Callable[..., Any]) -> Symbol:
    def attach(bsym: BoundSymbol) -> None:
        bsym._call_ctx = {name: call}

    return Symbol(name, lambda *_: None, is_prim=True, tags=[OpTags.DONT_DCE], _bind_postprocess=attach)


def _pretend(bucket: Bucket, slot: Any, *tensors: Any, **how: Any) -> InFlight:
    """A stand-in for a collective that finishes at once and leaves its slot unchanged."""
    if isinstance(slot, InFlight):  # the all-reduce across replicas
        return slot._replace(slot=None, works=[])
    return slot.arena.track(InFlight(bucket, "collective", slot, [], _empty_shard(bucket)))


def _start_all_gather(bucket: Bucket, slot: Slot) -> InFlight:
    is_secondary = bucket is not bucket.primary
    numel, dtype = bucket.spec.layout.shard_numel, bucket.spec.dtype
    sent = (
        torch.zeros(numel, dtype=dtype, device=bucket.spec.device)
        if is_secondary
        else bucket.source.shard(reuse_cast=True)
    )
    works = bucket.gather_into(slot.params[bucket], sent)
    return InFlight(bucket, "all-gather", None, works, sent=sent)


def _start_reduce_scatter(bucket: Bucket, slot: Slot) -> InFlight:
    reduced = _empty_shard(bucket)
    works = bucket.transport.reduce_scatter(bucket, slot.grads[bucket], reduced)
    return InFlight(bucket, "reduce-scatter", None, works, reduced)


def _empty_shard(bucket: Bucket) -> torch.Tensor:
    return torch.empty(bucket.shard.numel(), dtype=bucket.spec.reduce_dtype, device=bucket.spec.device)


def _medians(runs: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    return [
        (statistics.median(h for h, _ in times), statistics.median(d for _, d in times))
        for times in zip(*runs, strict=True)
    ]


def _slowdown(run: Sequence[tuple[float, float]], alone: Sequence[tuple[float, float]], window: float) -> float:
    """Return the share of the time that was lost in the first ``window`` seconds of a run."""
    passed = full_speed = 0.0
    for loaded, usual in zip(map(sum, run), map(sum, alone), strict=True):
        if passed + loaded > window:
            break
        passed += loaded
        full_speed += usual
    return 1 - full_speed / passed if passed else 0.0
