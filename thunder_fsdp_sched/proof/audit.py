"""Audit the first run of each compiled trace: check that values share memory with slots exactly as planned.

[Note: The audit]
A slot is reused as soon as the last value that may alias it has been read, so the plan is only as good as its facts
about operators (``operator_facts``). In the first run of a forward or backward trace the auditor therefore stops the
program after each operator. It compares addresses and raises an error in three cases:

- An output is in a slot, or in a shard that takes the place of a slot, contrary to the plan.
- An unsharded parameter was modified in place. The audit compares versions, or bytes if the operator is unknown.
- An input is in memory where a parameter was stored before it was sharded. That is a view that was created earlier and
  kept in a closure or an object.

All ranks raise an error together, before backward returns a gradient, even if only one of them audits because it alone
has compiled a new shape. When a trace starts, each rank says whether it audits this run. If any rank does, errors wait
until the end of the trace, so that no rank misses a collective. There, in ``fsdp_audit_agreed``, the ranks tell each other
whether they have found one. Only a trace in which no rank communicates raises its error at once; the others get one in
their next round.

Neither the trace nor the program that Thunder has made of it is changed. Until a run has completed, calls of the
program run a copy that stops; after that its own code is back, so later steps cost nothing. The audit reads addresses
and versions on the host and does not wait for a device.
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import coded_error
from ..ir.effects import SlotRegion, effects
from ..ir.inspection import UNPACKING, args_of, defined_by, outs_of, statement
from ..ir.operator_facts import Aliases, facts_of
from ..ir.registry import executor
from ..private_thunder import definition_of, take_over
from ..ranks.control import Control
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, Slot, same_bytes, span_in
from .machine import VerificationError

RETURN = -1
"""The position at which a program stops before it returns."""

Steps = Generator[Any, None, Any]
"""A run of a program. Before a statement at which it stops it yields the position, after it the values; then it returns."""


def stepwise(program: Callable[..., Any], trace: TraceCtx, stops: Mapping[int, Sequence[str]]) -> Callable[..., Steps]:
    """Return a program that stops before and after some statements, and before its return; decorators are left out.

    Args:
        program: the program that Thunder has made of the trace; it stays as it is.
        stops: the names of the values to yield after the statement of a bound symbol, by its position.
    """
    function = definition_of(program)
    places = _places(trace, function.body)
    names = {places[position]: (position, values) for position, values in stops.items()}
    names[len(function.body) - 1] = RETURN, ()
    yields = "".join(
        f"yield {at}\nyield ({''.join(f'{name}, ' for name in values)})\n" for at, values in names.values()
    )
    parsed = iter(ast.parse(yields).body)
    around = dict(zip(names, zip(parsed, parsed, strict=True), strict=True))
    body: list[ast.stmt] = []
    for place, step in enumerate(function.body):
        if place in around:
            before, after = around[place]
            body += [before, step, after]
        else:
            body.append(step)
    function.body, function.decorator_list = body, []
    inner, defined = inspect.unwrap(program), dict[str, Any]()
    code = compile(ast.Module([function], []), inner.__code__.co_filename, "exec")
    exec(code, inner.__globals__, defined)
    steps: Callable[..., Steps] = defined[function.name]
    return steps


def _places(trace: TraceCtx, body: Sequence[ast.stmt]) -> list[int]:
    """Return the index of each bound symbol's statement, the last one if it prints several.

    That of a bound symbol without results follows the statement of the one before it.
    """
    stored: dict[str, int] = {}
    for place, step in enumerate(body):
        for target in step.targets if isinstance(step, ast.Assign) else ():
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    stored.setdefault(node.id, place)
    places, place = [], -1
    for bsym in trace.bound_symbols:
        if outs := outs_of(bsym):
            place = max(stored.get(name, place) for name in outs)
        elif bsym.sym.id not in UNPACKING and bsym.sym.id is not PrimIDs.COMMENT:
            place += 1
        places.append(place)
    return places


class _Start(Protocol):
    """The start of a trace on the control channel, as far as the audit uses it."""

    audit_error: Exception | None


class _Expected(NamedTuple):
    """The plan for one bound symbol.

    Attributes:
        position: the position of the bound symbol.
        bsym: the bound symbol.
        outs: names of the tensors that it defines.
        slots: for each of them, the slots that may contain it.
        read: the unsharded parameters that it can read.
        known: whether its writes are known.
    """

    position: int
    bsym: BoundSymbol
    outs: tuple[str, ...]
    slots: tuple[frozenset[Slot], ...]
    read: tuple[SlotRegion, ...]
    known: bool


class Auditor:
    """The audit of one trace, until a run has completed.

    Args:
        program: the program that Thunder has made of the trace.
        trace: the trace with slots.
        forward: for a backward trace, its forward trace, whose saved tensors may be in private slots.
        pre_shard_storage: the memory in which parameters were stored before sharding.
        control: the agreement with the other ranks.
        start: the start of the trace on the control channel, if it has one.
        pending: a set that contains this auditor until a run has completed.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        trace: TraceCtx,
        *,
        forward: TraceCtx | None,
        pre_shard_storage: PreShardStorages,
        control: Control,
        start: _Start | None,
        pending: set[object],
    ) -> None:
        self.name = "audit_forward" if forward is None else "audit_backward"
        self._control, self._start, self._pending = control, start, pending
        self._inputs = trace.args if forward is None else ()
        self._pre_shard_storage = pre_shard_storage
        self._aliases = Aliases()
        self._params: dict[str, SlotRegion] = {}  # and slots of gathers, by their futures
        self._issues: list[tuple[int, SlotRegion]] = []
        self._expected: dict[int, _Expected] = {}
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
        pending.add(self)
        self._steps = stepwise(program, trace, {position: e.outs for position, e in self._expected.items()})
        self._end = take_over(program, "fsdp_audit", self.run)

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
        outs = tuple(dict.fromkeys(p.name for p in defined_by(bsym) if isinstance(p, TensorProxy)))
        slots = tuple(frozenset(p.slot for p in self._roots(out) if p.slot is not None) for out in outs)
        read = tuple(dict.fromkeys(p for arg in args_of(bsym) for p in self._roots(arg)))
        if outs or read:
            self._expected[position] = _Expected(position, bsym, outs, slots, read, facts_of(bsym).known)

    def _roots(self, name: str) -> list[SlotRegion]:
        return [self._params[root] for root in sorted(self._aliases.roots(name)) if root in self._params]

    def run(self, *inputs: Any) -> Any:
        """Run the program with the audit. Once it has reached its return, later calls run it without.

        Raises:
            VerificationError: an operator returned memory of a slot or changed a parameter, contrary to the plan.
            ValueError: an input is in memory where a parameter was stored before sharding; names both.
        """
        self._check_inputs(inputs)
        steps = self._steps(*inputs)
        try:
            while (position := next(steps)) != RETURN:
                expected = self._expected[position]
                self._compare(expected, self._state(expected), next(steps))
            self._pending.discard(self)
            self._end()
            next(steps)
        except StopIteration as end:  # also if the program leaves the rest to another one
            return end.value

    def _check_inputs(self, inputs: Sequence[Any]) -> None:
        for proxy, value in zip(self._inputs, inputs, strict=False):
            name = self._pre_shard_storage.owner_of(value) if isinstance(proxy, TensorProxy) else None
            if name is not None:
                self._raise(coded_error(ValueError, "module.reads-old-view-of-parameter", view=proxy.name, name=name))

    def _state(self, expected: _Expected) -> list[tuple[int, torch.Tensor | None]]:
        """Return the state of the parameters that a bound symbol is about to read."""
        tensors = map(_tensor_in, expected.read)
        return [(tensor._version, None if expected.known else tensor.clone()) for tensor in tensors]

    def _compare(
        self, expected: _Expected, state: list[tuple[int, torch.Tensor | None]], outputs: Sequence[torch.Tensor | None]
    ) -> None:
        """Compare the effect of a bound symbol with the plan.

        Args:
            state: the state of the parameters before it.
            outputs: the tensors that it returned; ``None`` where it returned none, as some attention kernels do.
        """
        position = expected.position
        for name, output, slots in zip(expected.outs, outputs, expected.slots, strict=True):
            for arena in self._arenas:
                span = None if output is None else arena.span_of(output)
                if span is not None and not any(s.arena is arena and s.contains(span) for s in slots):
                    self._fail(expected, _misplaced(name, self._content(position, arena, span), slots))
            bucket = None if output is None else next((b for b in self._wholes if span_in(b.shard, output)), None)
            if bucket is not None and slots.isdisjoint(self._wholes[bucket]):
                self._fail(expected, _misplaced(name, f"the shard of bucket {bucket.spec.name!r}", slots))
        for param, (version, copy) in zip(expected.read, state, strict=True):
            tensor, spec = _tensor_in(param), param.bucket.spec
            if tensor._version != version or (copy is not None and not same_bytes(tensor, copy)):
                assert param.param is not None
                what = "is known not to write it" if expected.known else "an unknown operator may not write it"
                self._fail(
                    expected,
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

    def _fail(self, expected: _Expected, what: str) -> None:
        self._raise(
            coded_error(
                VerificationError,
                "proof.wrong-operator-facts",
                trace=self.name,
                position=expected.position,
                fault=what,
                statement=statement(expected.bsym),
            )
        )

    def _raise(self, error: Exception) -> None:
        """Raise an error at once, or at the end of the trace and on all ranks if there is a start."""
        if self._start is None:
            with self._control.announcing_failure("the audit of a trace"):
                raise error
        self._start.audit_error = self._start.audit_error or error


_NO_OPERATORS = UNPACKING | {PrimIDs.COMMENT, PrimIDs.DEL, PrimIDs.RETURN}


def _tensor_in(region: SlotRegion) -> torch.Tensor:
    assert region.slot is not None and region.param is not None
    return region.slot.params[region.bucket].tensors[region.param]


def _misplaced(name: str, where: str, slots: frozenset[Slot]) -> str:
    expected = f"the plan says {', '.join(sorted(map(str, slots)))}" if slots else "the plan says it lies in none"
    return f"returns {name!r}, which lies in {where}; {expected}"


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
