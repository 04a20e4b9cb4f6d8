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

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
from ..runtime.memory import Arena, InFlight
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


_MEAN, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX

_Durations = list[tuple[float, float]]
"""Seconds of the host and of the device from each reading of the clock to the next."""


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
        probes = [_Probe(trace, self.clock, self._align) for trace in self.traces]
        alone = _medians(self._repeat(lambda: self._read(probes)))
        times = dict(zip((label for probe in probes for label in probe.labels), alone, strict=True))
        ops = [self._ops(trace, times) for trace in self.traces]
        collectives = [c for trace in self.traces for c in self._collectives(trace, times)]
        return Profile(
            world_size=self.group.size,
            device=str(self.device),
            synchronous=self.device.type != "cuda",
            forward=ops[0],
            backward=ops[1] if backward else (),
            collectives=tuple(collective for _, collective in collectives),
            contention=self._contention(collectives),
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

    def _read(self, probes: Sequence[_Probe], loads: Sequence[Callable[[], InFlight]] = ()) -> _Durations:
        """Run probes while collectives are running, and return the times of all their labels."""
        flights = [start() for start in loads]
        self.clock.reads.clear()
        self._call([probe.callable for probe in probes])
        durations = self.clock.durations()
        for flight in flights:
            flight.wait()
        return durations

    def _ops(self, trace: TraceCtx, times: Mapping[_Label, tuple[float, float]]) -> tuple[OpTime, ...]:
        computing = [b for b in trace.bound_symbols if computes(b)]
        means = iter(self._over_ranks([x for b in computing for x in times[_OP, id(b)]]))
        return tuple(OpTime(symbol_of(b), shapes_of(b), next(means), next(means)) for b in computing)

    def _collectives(
        self, trace: TraceCtx, times: Mapping[_Label, tuple[float, float]]
    ) -> Iterator[tuple[Issue, CollectiveTime]]:
        issued = [(issue, b) for b in trace.bound_symbols if (issue := sends(b)) is not None]
        waited = {
            e.waits.future: b for b in trace.bound_symbols if (e := effects(b)).waits is not None and not e.issues
        }
        issues = [times[_OP, id(b)] for _, b in issued]
        # The reduce-scatter is waited for by the all-reduce across replicas, as part of it.
        waits = [times[_OP, id(waited[i.future])] if i.future in waited else (0.0, 0.0) for i, _ in issued]
        # Waiting for a gloo collective includes the work in its wait, which runs, and is timed, again later.
        wire = [max(sum(times[_WIRE, id(b)]) - sum(w), 0.0) for (_, b), w in zip(issued, waits, strict=True)]
        figures = [self._over_ranks(wire, _MAX)]
        figures += [self._over_ranks([t[part] for t in kind]) for part in (1, 0) for kind in (issues, waits)]
        for (issue, _), *of_one in zip(issued, *figures, strict=True):
            assert issue.bucket is not None
            yield issue, CollectiveTime(issue.kind, issue.bucket.spec.name, issue.nbytes, *of_one)

    def _contention(self, collectives: Sequence[tuple[Issue, CollectiveTime]]) -> dict[str, float]:
        """Return for each kind of collective the share of time by which forward's bound symbols take longer meanwhile."""
        probe = _Probe(self.traces[0], self.clock, None)
        self._call([_Probe(self.traces[0], self.clock, self._align).callable])  # fills all slots with parameters
        alone = _medians(self._repeat(lambda: self._read([probe])))
        busy = self._over_ranks([sum(map(sum, alone))])[0]  # the same on all ranks, which issue as many collectives
        ascending = sorted(collectives, key=lambda collective: collective[1].wire)
        largest = {issue.gathers: (issue, of_one) for issue, of_one in ascending if issue.place is not None}
        shares = {}
        for issue, of_one in largest.values():
            count = max(1, min(math.ceil(busy / max(of_one.wire, 1e-6)), 2**30 // of_one.nbytes, 32))
            window = 0.9 * count * of_one.wire
            loads = [_load(issue) for _ in range(count)]
            runs = self._repeat(lambda loads=loads: self._read([probe], loads))  # type: ignore[misc]
            found = statistics.median(_slowdown(run, alone, window) for run in runs)
            shares[of_one.kind] = min(max(self._over_ranks([found])[0], 0.0), 0.9)
        return shares

    def _over_ranks(self, values: Sequence[float], op: Any = _MEAN) -> list[float]:
        reduced = self.control.reduce("measure", values, op)
        return [value / (self.group.size if op is _MEAN else 1) for value in reduced]


class Clock:
    """A reader of the host's clock, for a CPU, where the host computes."""

    def __init__(self) -> None:
        self.reads: list[Any] = []

    def tick(self, pause: bool = True) -> None:
        """Read the clock between two bound symbols; without a pause while a collective is running."""
        self.reads.append(time.perf_counter())

    def settle(self) -> None:
        """Wait until the device is idle."""

    def durations(self) -> _Durations:
        """Return (host, device) seconds from each reading to the next; zero for the last."""
        return [*((0.0, after - before) for before, after in pairwise(self.reads)), (0.0, 0.0)]


class CudaClock(Clock):
    """A reader of the clocks of host and device. The device sleeps at each reading so that the host stays ahead of it,
    and its time for a bound symbol is that of the kernels only."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def tick(self, pause: bool = True) -> None:
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

    def durations(self) -> _Durations:
        self.settle()
        pairs = pairwise(self.reads)
        return [*((b[0] - a[1], a[3].elapsed_time(b[2]) / 1e3) for a, b in pairs), (0.0, 0.0)]


_OP, _WIRE, _BETWEEN = "op", "wire", "between"

_Label = tuple[str, int]
"""The meaning of the time from one reading to the next: the own work of a bound symbol, given by its id, on host and device;
its time on the link; or nothing of interest."""


class _Probe:
    """A trace that reads the clock before every bound symbol.

    Args:
        align: called before each collective, which is then waited for at once; ``None`` to pretend that each has finished.
    """

    def __init__(self, trace: TraceCtx, clock: Clock, align: Callable[[], None] | None) -> None:
        self.labels: list[_Label] = []
        bsyms: list[BoundSymbol] = []
        hooks = {kind: _hook(f"tick_{kind}", partial(clock.tick, kind != _WIRE)) for kind in (_OP, _WIRE, _BETWEEN)}

        def tick(kind: str) -> None:
            bsyms.append(hooks[kind].bind(output=None))
            self.labels.append((kind, id(bsym)))

        for bsym in trace.bound_symbols:
            if bsym.sym.id is PrimIDs.RETURN:
                tick(_BETWEEN)
            if runs_nothing(bsym):
                bsyms.append(bsym)
                continue
            issue = effects(bsym).issues
            if issue is None or issue.bucket is None:
                tick(_OP)
                bsyms.append(bsym)
            elif align is not None:
                bsyms.append(_hook("fsdp_align", align).bind(output=None))
                tick(_OP)
                bsyms.append(bsym)
                tick(_WIRE)
                bsyms.append(_hook("fsdp_finish", InFlight.wait).bind(bsym.output, output=None))
                tick(_BETWEEN)
            else:
                tick(_OP)
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


def _load(issue: Issue) -> Callable[[], InFlight]:
    """Return a function that starts a collective of the traces in an unused slot."""
    assert issue.place is not None
    bucket, spec = issue.place.bucket, issue.place.bucket.spec
    slot = Arena(spec.device).slot(0, issue.place.nbytes)
    unsharded = (slot.params if issue.gathers else slot.grads)[bucket]
    unsharded.flat.zero_()

    def gather() -> InFlight:
        numel, is_secondary = spec.layout.shard_numel, bucket is not bucket.primary
        zeros = torch.zeros(numel, dtype=spec.dtype, device=spec.device) if is_secondary else None
        sent = bucket.source.shard(reuse_cast=True) if zeros is None else zeros
        return InFlight(bucket, "all-gather", None, bucket.gather_into(unsharded, sent), sent=sent)

    def reduce() -> InFlight:
        reduced = _empty_shard(bucket)
        works = bucket.transport.reduce_scatter(bucket, unsharded, reduced)
        return InFlight(bucket, "reduce-scatter", None, works, reduced)

    return gather if issue.gathers else reduce


def _empty_shard(bucket: Bucket) -> torch.Tensor:
    return torch.empty(bucket.shard.numel(), dtype=bucket.spec.reduce_dtype, device=bucket.spec.device)


def _medians(runs: Sequence[_Durations]) -> _Durations:
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
