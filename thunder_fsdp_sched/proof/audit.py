"""Audit the first run of each compiled trace: check that values share memory with slots exactly as planned.

[Note: The audit]
A slot is reused as soon as the last value that may alias it has been read, so the plan is only as good as its facts
about operators (``operator_facts``). The first run of a forward or backward trace therefore calls ``fsdp_audit``
after each bound symbol. It compares addresses and raises an error in three cases:

- An output is in a slot, or in a shard that takes the place of a slot, contrary to the plan.
- An unsharded parameter was modified in place. The audit compares versions, or bytes if the operator is unknown.
- An input is in memory where a parameter was stored before it was sharded. That is a view that was created earlier and
  kept in a closure or an object.

All ranks raise an error together, before backward returns a gradient, also if only one of them audits because it has
compiled a new shape alone. When a trace starts, each rank says whether it audits this run. If any rank does, errors wait
until the end of the trace, so that no rank misses a collective. There, in ``fsdp_audit_agreed``, the ranks tell each other
whether they have found one. Only a trace in which no rank communicates raises its error at once; the others get one in
their next round.

After a complete first run, Thunder's cache entry receives the trace without the audit, so later steps cost nothing. If
the run fails for any reason, the next run is audited again. The audit reads addresses and versions on the host and does
not wait for a device.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import coded_error
from ..ir.effects import SlotRegion, effects
from ..ir.inspection import UNPACKING, args_of, outs_of, statement, with_bound_symbols
from ..ir.operator_facts import Aliases, facts_of
from ..ir.registry import executor, register
from ..private_thunder import without_calls
from ..ranks.control import Control
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, Slot, span_in
from .machine import VerificationError

if TYPE_CHECKING:
    from ..runtime.trace_start import TraceStart


class PreShardStorages:
    """The storages of parameters before sharding. A view that outlives sharding keeps the values of that time.

    The references are weak. While one exists, no other storage has the same identity.
    """

    def __init__(self) -> None:
        self._names: dict[StorageWeakRef, str] = {}

    def add(self, name: str, param: torch.Tensor) -> None:
        """Record the storage of ``param``."""
        if not param.is_meta and param.numel():
            self._names[StorageWeakRef(param.untyped_storage())] = name

    def owner_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the parameter that was stored in the memory of ``tensor``, if any."""
        if tensor.is_meta or tensor.layout is not torch.strided:
            return None
        return self._names.get(StorageWeakRef(tensor.untyped_storage()))


class _Expected(NamedTuple):
    """The plan for one bound symbol.

    Attributes:
        bsym: the bound symbol.
        outs: names of the tensors that it defines.
        slots: for each of them, the slots that may contain it.
        read: the unsharded parameters that it can read.
        known: whether its writes are known.
    """

    bsym: BoundSymbol
    outs: tuple[TensorProxy, ...]
    slots: tuple[frozenset[Slot], ...]
    read: tuple[SlotRegion, ...]
    known: bool


class Auditor:
    """The plan of one trace, and the opaque argument of ``fsdp_audit``.

    Args:
        trace: the trace with slots.
        forward: for a backward trace, its forward trace, whose saved tensors may be in private slots.
        pre_shard_storage: the memory in which parameters were stored before sharding.
        stats: see :func:`audited`.
        control: agrees with the other ranks.
        start: of the trace on the control channel, if it has one.
    """

    def __init__(
        self,
        trace: TraceCtx,
        forward: TraceCtx | None,
        pre_shard_storage: PreShardStorages,
        stats: Iterable[Any],
        control: Control,
        start: TraceStart | None,
    ) -> None:
        self.name = "audit_forward" if forward is None else "audit_backward"
        self.done = False  # whether the trace has run once without an error
        self._control, self._start = control, start
        if start is not None:
            start.auditing.add(self)
        self.expected: dict[int, _Expected] = {}
        self.inputs = tuple(p for p in trace.args if isinstance(p, TensorProxy)) if forward is None else ()
        self._pre_shard_storage, self._stats = pre_shard_storage, weakref.WeakSet(stats)
        self._before: list[tuple[int, torch.Tensor | None]] = []
        self._aliases = Aliases()
        self._params: dict[str, SlotRegion] = {}  # and slots of gathers, by their futures
        self._issues: list[tuple[int, SlotRegion]] = []
        for bsym in forward.bound_symbols if forward is not None else ():
            self._follow(bsym, -1)
        for position, bsym in enumerate(trace.bound_symbols):
            self._follow(bsym, position)
            if bsym.sym.executor is not executor and bsym.sym.id not in _NO_OPERATORS:
                self._expect(bsym, position)
        slots = [region.slot for _, region in self._issues if region.slot is not None]
        self._arenas: tuple[Arena, ...] = tuple({slot.arena: None for slot in slots})
        self._wholes: defaultdict[Bucket, set[Slot]] = defaultdict(set)  # that are views of shards, with their slots
        for region in self._params.values():
            if region.slot is not None and region.bucket.is_whole_in(region.slot):
                self._wholes[region.bucket.base].add(region.slot)

    def __repr__(self) -> str:
        return self.name

    def _follow(self, bsym: BoundSymbol, position: int) -> None:
        effect = effects(bsym)
        if effect.issues is not None and effect.issues.region is not None:
            self._issues.append((position, effect.issues.region))
            if effect.issues.gathers:
                self._params[effect.issues.future] = effect.issues.region
        elif effect.unshards:
            assert effect.waits is not None
            region = self._params[effect.waits.future]
            self._params.update({name: region._replace(param=i) for i, name in enumerate(effect.in_place)})
        self._aliases.add(bsym)

    def _expect(self, bsym: BoundSymbol, position: int) -> None:
        defined = set(outs_of(bsym))
        tensors = (p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy) and p.name in defined)
        outs = tuple({p.name: p for p in tensors}.values())
        slots = tuple(frozenset(p.slot for p in self._roots(out.name) if p.slot is not None) for out in outs)
        read = tuple(dict.fromkeys(p for arg in args_of(bsym) for p in self._roots(arg)))
        if outs or read:
            self.expected[position] = _Expected(bsym, outs, slots, read, facts_of(bsym).known)

    def _roots(self, name: str) -> list[SlotRegion]:
        return [self._params[root] for root in sorted(self._aliases.roots(name)) if root in self._params]

    def check_inputs(self, *inputs: torch.Tensor) -> None:
        """Raise an error if an input of the trace is in memory where a parameter was stored before sharding.

        Raises:
            ValueError: names the input and the parameter.
        """
        for proxy, tensor in zip(self.inputs, inputs, strict=True):
            name = self._pre_shard_storage.owner_of(tensor)
            if name is not None:
                self._raise(coded_error(ValueError, "module.reads-old-view-of-parameter", view=proxy.name, name=name))

    def before(self, position: int) -> None:
        """Record the state of the parameters that the bound symbol at ``position`` is about to read."""
        expected = self.expected[position]
        tensors = map(_tensor_in, expected.read)
        self._before = [(tensor._version, None if expected.known else tensor.clone()) for tensor in tensors]

    def after(self, position: int, *outputs: torch.Tensor | None) -> None:
        """Compare the effect of the bound symbol at ``position`` with the plan.

        Args:
            outputs: what it returned for its tensors; ``None`` where it returned none, as some attention kernels do.

        Raises:
            VerificationError: it returned memory of a slot or changed a parameter, contrary to the plan.
        """
        expected, state, self._before = self.expected[position], self._before, []
        for proxy, output, slots in zip(expected.outs, outputs, expected.slots, strict=True):
            for arena in self._arenas:
                span = None if output is None else arena.span_of(output)
                if span is not None and not any(s.arena is arena and s.contains(span) for s in slots):
                    self._fail(position, _misplaced(proxy.name, self._content(position, arena, span), slots))
            bucket = None if output is None else next((b for b in self._wholes if span_in(b.shard, output)), None)
            if bucket is not None and slots.isdisjoint(self._wholes[bucket]):
                self._fail(position, _misplaced(proxy.name, f"the shard of bucket {bucket.spec.name!r}", slots))
        for param, (version, copy) in zip(expected.read, state, strict=True):
            tensor, spec = _tensor_in(param), param.bucket.spec
            if tensor._version != version or (copy is not None and not _same_bytes(tensor, copy)):
                assert param.param is not None
                what = "is known not to write it" if expected.known else "an unknown operator may not write it"
                self._fail(
                    position,
                    f"changes parameter {spec.params[param.param].name!r} of bucket {spec.name!r} in {param.slot} in "
                    f"place, but {what}",
                )

    def _content(self, position: int, arena: Arena, span: tuple[int, int]) -> str:
        where = "memory of slots that nothing was gathered into"
        for at, region in self._issues:
            if at <= position and region.slot is not None and region.slot.arena is arena:
                if region.slot.offset < span[1] and span[0] < region.slot.end:
                    where = f"{region.slot} of bucket {region.bucket.spec.name!r}"
        return where

    def _fail(self, position: int, what: str) -> None:
        self._raise(
            coded_error(
                VerificationError,
                "proof.wrong-operator-facts",
                trace=self.name,
                position=position,
                fault=what,
                statement=statement(self.expected[position].bsym),
            )
        )

    def _raise(self, error: Exception) -> None:
        """Raise an error, if there is a start at the end of the trace and on all ranks."""
        if self._start is None:
            with self._control.announcing_failure("the audit of a trace"):
                raise error
        self._start.audit_error = self._start.audit_error or error

    def succeeded(self) -> None:
        """Remove the audit from Thunder's cache entry of its trace, and from the program made of the last trace there."""
        self.done = True
        if self._start is not None:
            self._start.auditing.discard(self)
        kind = "backward" if self.name == "audit_backward" else "computation"
        for stats in self._stats:
            for number, entry in enumerate(stats.interpreter_cache):
                traces = getattr(entry, f"{kind}_traces")
                last = traces[-1].bound_symbols if traces else ()
                if any(bsym.sym is fsdp_audit and bsym.args[0] is self for bsym in last):
                    traces[:] = map(without_audit, traces)
                    program = without_calls(getattr(entry, f"{kind}_fn"), [fsdp_audit.name], [str(self)])
                    stats.interpreter_cache[number] = entry._replace(**{f"{kind}_fn": program})


def audited(
    trace: TraceCtx,
    *,
    forward: TraceCtx | None,
    pre_shard_storage: PreShardStorages,
    stats: Iterable[Any],
    control: Control,
    start: TraceStart | None,
) -> TraceCtx:
    """Return ``trace``, complete with ``del`` statements, with the audit of its first run.

    Args:
        forward: for a backward trace, its forward trace.
        pre_shard_storage: the memory in which parameters were stored before sharding.
        stats: Thunder's statistics of the jitted modules that may run the trace. After the first run, their cache
            receives the trace without the audit.
        control: agrees with the other ranks.
        start: of the trace on the control channel, if it has one.
    """
    auditor = Auditor(trace, forward, pre_shard_storage, stats, control, start)
    bsyms: list[BoundSymbol] = []

    def call(method: Callable[..., None], *arguments: Any) -> None:
        bsyms.append(fsdp_audit.bind(auditor, method.__name__, *arguments, output=None))

    inputs_checked = not auditor.inputs
    for position, bsym in enumerate(trace.bound_symbols):
        expected = auditor.expected.get(position)
        if not inputs_checked and bsym.sym.id not in _NO_OPERATORS:
            call(auditor.check_inputs, *auditor.inputs)
            inputs_checked = True
        if bsym.sym.id is PrimIDs.RETURN:
            call(auditor.succeeded)
        if expected is not None and expected.read:
            call(auditor.before, position)
        bsyms.append(bsym)
        if expected is not None:
            call(auditor.after, position, *expected.outs)
    return with_bound_symbols(trace, bsyms)


def without_audit(trace: TraceCtx) -> TraceCtx:
    """Return ``trace`` without the audit, the same object if it has none."""
    bsyms = [bsym for bsym in trace.bound_symbols if bsym.sym is not fsdp_audit]
    return trace if len(bsyms) == len(trace.bound_symbols) else with_bound_symbols(trace, bsyms)


def _audit(auditor: Auditor, method: str, *arguments: Any) -> None:
    if not auditor.done:
        getattr(auditor, method)(*arguments)


fsdp_audit = register("fsdp_audit", _audit)

_NO_OPERATORS = UNPACKING | {PrimIDs.COMMENT, PrimIDs.DEL, PrimIDs.RETURN}


def _tensor_in(region: SlotRegion) -> torch.Tensor:
    assert region.slot is not None and region.param is not None
    return region.slot.params[region.bucket].tensors[region.param]


def _misplaced(name: str, where: str, slots: frozenset[Slot]) -> str:
    expected = f"the plan says {', '.join(sorted(map(str, slots)))}" if slots else "the plan says it lies in none"
    return f"returns {name!r}, which lies in {where}; {expected}"


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
