"""Correct traces with one error each, and the message with which ``verify`` must refuse them.

``agreement/test_agreement`` tests what a single rank cannot detect, such as an order that differs between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from thunder_fsdp_sched import CompiledTraces, Sharding, VerificationError, testing

import pytest
import torch
from coded import coded
from internals import (
    args_of,
    assign_slots,
    effects,
    fsdp_all_gather,
    fsdp_wait_grads,
    fsdp_wait_params,
    outs_of,
    sort_communication,
    verify,
)
from models import Chain
from spoiled import swap, swap_returned
from synthetic_traces import FakeProcessGroup, chain
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from torch import nn

GATHER, REDUCE, GRAD = "fsdp_all_gather", "fsdp_reduce_scatter", "fsdp_matmul_into"
PARAMS, GUARD = "fsdp_wait_params", "fsdp_params_unchanged"
RELEASE, SECONDARY = "fsdp_release", "fsdp_copy_secondary_shard"


def blocks() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Chain(lambda index: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), count=5), (torch.ones(2, 4),)


OPTIONS: dict[str, dict[str, Any]] = {
    "zero3": {"prefetch": 2},
    "zero2": {"sharding_strategy": "zero2"},
    "released": {"sharding_strategy": Sharding(release=True), "prefetch": 0},
    "kept+released": {"sharding_strategy": Sharding("zero2", release=True)},
    "secondary": {"sharding_strategy": Sharding(secondary_ranks=2), "bucketing_strategy": "layer"},
    "hook": {"all_reduce_hook": lambda name, gradients: None},
}


@cache
def compiled(options: str) -> CompiledTraces:
    world_size = 4 if options == "secondary" else 2
    return testing.compile_on_fake_ranks(blocks, world_size, **OPTIONS[options])[0]


class Step:
    """The traces of a step without ``del`` statements, of which one is to be broken.

    Attributes:
        bsyms: the bound symbols of that trace.
    """

    def __init__(self, options: str, half: str = "forward") -> None:
        if options == "chain":
            traces = [assign_slots(sort_communication(chain(4), prefetch=2))]
        else:
            traces = [compiled(options).forward, compiled(options).backward]
        self.original = None
        if options != "chain":
            halves = compiled(options).forward_before, compiled(options).backward_before
            self.original = halves[half == "backward"]
        copies = []
        for trace in traces[: 1 + (half == "backward")]:
            copies.append(from_trace(trace))
            copies[-1].bound_symbols = [b for b in trace.bound_symbols if b.sym.id is not PrimIDs.DEL]
        self.forward, self.trace = copies[0], copies[-1]
        self.bsyms = self.trace.bound_symbols

    def all(self, name: str) -> list[int]:
        return [i for i, b in enumerate(self.bsyms) if b.sym.name == name]

    def at(self, name: str, which: int = 0) -> int:
        """Return the position of one of the bound symbols with that name."""
        return self.all(name)[which]

    def get(self, name: str, which: int = 0) -> BoundSymbol:
        return self.bsyms[self.at(name, which)]

    def reader(self, position: int) -> int:
        """Return the position of the first bound symbol that reads what the one at ``position`` returns."""
        outs = set(outs_of(self.bsyms[position]))
        return next(i for i in range(position + 1, len(self.bsyms)) if not outs.isdisjoint(args_of(self.bsyms[i])))

    def weight(self, which: int = 0) -> TensorProxy:
        return next(p for p in self.bsyms[self.at(PARAMS, which)].output if p.ndim == 2)

    def change(
        self, position: int, args: dict[int, Any] | None = None, sym: Symbol | None = None, **kwargs: Any
    ) -> None:
        bsym = self.bsyms[position]
        new = tuple((args or {}).get(i, arg) for i, arg in enumerate(bsym.args))
        self.bsyms[position] = bsym.from_bsym(sym=sym or bsym.sym, args=new, kwargs={**bsym.kwargs, **kwargs})

    def insert(self, position: int, symbol: Any, *args: Any, **kwargs: Any) -> Any:
        """Insert a bound symbol, and return its result."""
        with tracectx(self.trace):
            out = TensorProxy(like=args[0]) if symbol is prims.neg else symbol.meta(*args, **kwargs)
            self.bsyms.insert(position, symbol.bind(*args, **kwargs, output=out))
        return out

    def repeat(self, position: int, after: int | None = None, **changes: Any) -> None:
        """Insert a copy of the bound symbol at ``position`` after it, or after another one."""
        self.bsyms.insert((position if after is None else after) + 1, self.bsyms[position].from_bsym(**changes))

    def read(self, position: int, value: TensorProxy) -> None:
        self.insert(position, prims.neg, value)

    def view(self, position: int, value: TensorProxy) -> TensorProxy:
        return self.insert(position, prims.transpose, value, (1, 0))

    def move(self, position: int, to: int) -> None:
        self.bsyms.insert(to, self.bsyms.pop(position))

    def use_slot(self, reduction: int, slot: Any) -> None:
        """Let a reduction and the gradients in place use another slot."""
        grads = args_of(self.bsyms[reduction])
        for position, bsym in enumerate(self.bsyms):
            if position == reduction or (effects(bsym).fills is not None and bsym.output.name in grads):
                self.change(position, {1: slot})

    def slot(self, name: str, which: int = 0) -> Any:
        return self.bsyms[self.at(name, which)].args[1]

    def return_(self, value: TensorProxy) -> None:
        outputs, *saved = self.bsyms[-1].args
        changed = {**outputs, "output": value} if isinstance(outputs, dict) else (*outputs, value)
        self.bsyms[-1] = self.bsyms[-1].from_bsym(args=(changed, *saved))

    def save(self, value: TensorProxy) -> None:
        outputs, (tensors, others) = self.bsyms[-1].args
        self.bsyms[-1] = self.bsyms[-1].from_bsym(args=(outputs, ((*tensors, value), others)))

    def verify(self) -> None:
        forward = None if self.trace is self.forward else self.forward
        verify(self.trace, forward=forward, original=self.original)


def delete_early(step: Step) -> None:
    step.bsyms.insert(step.at(PARAMS) + 1, prims.python_del.bind(step.weight(), output=None))


def read_a_view_late(step: Step) -> None:
    step.read(-1, step.view(step.at(PARAMS) + 2, step.view(step.at(PARAMS) + 1, step.weight())))


def fuse_a_view(step: Step) -> None:
    wait, view = step.at(PARAMS), step.view(step.at(PARAMS) + 1, step.weight())
    bsym = step.bsyms[wait + 1]
    fusion = Symbol("fused0", lambda w: None, is_fusion=True)
    step.bsyms[wait + 1] = fusion.bind(step.weight(), output=(view,), subsymbols=(bsym,))
    step.read(-1, view)


def communicate(step: Step, position: int, *, inside: bool = False) -> None:
    value = step.get(GATHER, -1).flat_proxy_args[0]
    step.read(position, value)
    foreign = step.bsyms[position].from_bsym(args=(value, FakeProcessGroup()))
    if inside:
        foreign = Symbol("all_reduce_and_add", lambda w: None).bind(value, output=foreign.output, subsymbols=(foreign,))
    step.bsyms[position] = foreign


def saved_weight(step: Step) -> tuple[int, int, TensorProxy]:
    """Return the positions of the second gradient in place and of its parameter's last read, and that parameter."""
    write = step.at(GRAD, 1)
    forward = (b for b in step.forward.bound_symbols if b.sym.name == PARAMS)
    weight = next(b.output[0] for b in forward if b.args[0] is step.bsyms[write].args[0])
    return write, max(i for i, b in enumerate(step.bsyms) if weight.name in args_of(b)), weight


def gradient_over_parameter(step: Step) -> tuple[int, TensorProxy]:
    """Return the position of a gradient that takes the place of its parameter, and the parameter."""
    for grad in step.all(GRAD):
        bucket, slot, index, *_ = step.bsyms[grad].args
        waits = [b for b in step.bsyms[:grad] if b.sym.name == PARAMS and b.args[0] is bucket]
        issues = [b for b in step.bsyms[:grad] if b.sym.name == GATHER and b.args[:2] == (bucket, slot)]
        if waits and issues:
            return grad, waits[0].output[index]
    raise AssertionError("no gradient is in the place of its parameter")


def write_over_operand(step: Step) -> None:
    """Compute a gradient from the parameter whose place it takes."""
    grad, parameter = gradient_over_parameter(step)
    step.change(grad, {3: parameter})


def gather_over_window(step: Step) -> None:
    """Gather the first bucket into the private slot of the second, which may be there from an earlier micro-batch."""
    first, second = step.all(GATHER)[:2]
    step.change(first, {1: step.slot(GATHER, 1)}, window=None)
    step.move(step.at(PARAMS), second)


def guard_late(step: Step) -> None:
    write, read, _ = saved_weight(step)
    step.move(next(i for i in step.all(GUARD) if step.bsyms[i].args[0] is step.bsyms[write].args[0]), read)


def free_early(step: Step, *, before: bool) -> None:
    """Free the slot of a reduction before its wait, or before the reduction itself."""
    reduction = step.at(REDUCE)
    step.move(step.at(RELEASE), reduction if before else reduction + 1)


def free_in_forward(step: Step, options: str, position: int) -> None:
    release = next(b for b in compiled(options).backward.bound_symbols if b.sym.name == RELEASE)
    step.bsyms.insert(position, release)


def return_unreduced(step: Step) -> None:
    grad = step.at(GRAD)
    step.change(step.reader(grad), {2 + step.bsyms[grad].args[2]: None})


def expect_left(step: Step) -> None:
    """Let the last gather expect its bucket in the slot of the first one."""
    step.change(step.at(GATHER, -1), {1: step.slot(GATHER)}, resident=True)


Mutation = Callable[[Step], Any]

ANY = ("chain forward", "zero3 forward", "zero3 backward")
FW, BW, KEPT = ("chain forward", "zero3 forward"), ("zero3 backward",), ("zero2 backward",)
RELEASED, SHARDS = ("released backward", "kept+released backward"), ("secondary forward", "secondary backward")

_OVERWRITTEN, _UNDEFINED, _MOVED = "has overwritten for bucket", "which nothing before it defines", "moved across it"
_PLACE, _OPERANDS = "but it is the gradient of", "other operands than when it was made"
_IN_FLIGHT, _NO_GUARD = "before the wait for bucket", "before the guard of bucket"
_OWN, _EXPECTS = r"but expects fsdp_\w+ of its own", "expects the parameters of .*"
_LOST = r"\S+, which bound symbol \d+ of forward has overwritten"

# Traces on which the mutations are tried, and each mutation with words of its message by name.
MUTATIONS: dict[tuple[str, ...], dict[str, tuple[Mutation, str]]] = {
    ANY: {
        # Definitions, issues and waits
        "a wait is missing": (lambda s: s.bsyms.pop(s.at(PARAMS)), _UNDEFINED),
        "a wait stands twice": (lambda s: s.bsyms.insert(s.at(PARAMS) + 1, s.get(PARAMS)), "in the trace twice"),
        "an issue stands twice": (lambda s: s.bsyms.insert(s.at(PARAMS), s.get(GATHER)), "in the trace twice"),
        "a value is defined twice": (lambda s: s.repeat(s.reader(s.at(PARAMS))), "has defined"),
        "a wait is repeated": (lambda s: s.repeat(s.at(PARAMS)), "waits a second time for"),
        "a gather is never waited for": (
            lambda s: s.insert(-1, fsdp_all_gather, *s.get(GATHER).args),
            "is never waited",
        ),
        "a wait is for another bucket": (lambda s: s.change(s.at(PARAMS), {0: s.get(PARAMS, 1).args[0]}), _OWN),
        "parameters are waited for as gradients": (lambda s: s.change(s.at(PARAMS), sym=fsdp_wait_grads), _OWN),
        # Order
        "others communicate after a gather": (lambda s: communicate(s, s.at(GATHER) + 1), _MOVED),
        "a composite communicates": (lambda s: communicate(s, s.at(GATHER) + 1, inside=True), _MOVED),
        "a value is read after `del`": (delete_early, _UNDEFINED),
        # Slots
        "a gather has no slot": (lambda s: s.change(s.at(GATHER), {1: None}), "has no slot"),
        "a view of a view is read after reuse": (read_a_view_late, _OVERWRITTEN),
        "a view out of a fusion is read after reuse": (fuse_a_view, _OVERWRITTEN),
        # Buckets that forward leaves for backward
        "a gather reuses a shared slot in a window": (lambda s: s.change(s.at(GATHER), window="open"), "does not keep"),
    },
    FW: {
        # Order
        "two gathers are exchanged": (lambda s: s.move(s.at(GATHER, 1), s.at(GATHER)), "whose first consumer is later"),
        # Slots
        "a slot in flight is written": (lambda s: s.change(s.at(GATHER, 1), {1: s.slot(GATHER)}), _IN_FLIGHT),
        "a parameter is returned": (lambda s: s.return_(s.weight(-1)), r"returns '\w+', which is stored in"),
    },
    ("zero2 forward",): {
        "another bucket is gathered over one that a window has left": (gather_over_window, f"{_EXPECTS} in own_{_LOST}")
    },
    ("zero3 forward",): {"a parameter is saved": (lambda s: s.save(s.weight(-1)), r"saves '\w+', which is stored in")},
    ("zero3 forward", "zero3 backward", "zero2 forward", "secondary forward"): {
        "shards are swapped": (lambda s: swap(s.bsyms, GATHER), _OPERANDS)
    },
    ("zero3 backward", "zero2 backward"): {
        "returned gradients are swapped": (lambda s: swap_returned(s.bsyms), _OPERANDS)
    },
    BW: {
        # Order
        "others communicate before a reduction": (lambda s: communicate(s, s.at(REDUCE, -1)), _MOVED),
        # Gradients in place
        "a gradient is written over the parameter that its operator reads": (write_over_operand, "while it reads"),
        "a gradient is elsewhere in the slot": (
            lambda s: s.change(s.at(GRAD), {2: 0 if s.get(GRAD).args[2] else 1}),
            f"{_PLACE}|{_OVERWRITTEN}",
        ),
        "a gradient has a wrong index": (lambda s: s.change(s.at(GRAD), {2: 9}), "has no parameter 9"),
        "a gradient is of another bucket": (lambda s: s.change(s.at(GRAD), {0: s.get(GRAD, 1).args[0]}), _PLACE),
        "a gradient has no slot": (lambda s: s.change(s.at(GRAD), {1: None}), "has no slot"),
        "nothing reduces a gradient": (return_unreduced, "which nothing reduces"),
        "a gradient in place is read": (lambda s: s.read(s.at(GRAD) + 1, s.get(GRAD).output), "before its reduction"),
        # Buckets that forward leaves for backward
        "a bucket is expected where another one has been gathered": (expect_left, f"{_EXPECTS}.* has overwritten"),
    },
    KEPT: {
        "a guard is missing": (lambda s: s.bsyms.pop(s.at(GUARD, 1)), _NO_GUARD),
        "a guard is after the first read": (guard_late, _NO_GUARD),
        "a bucket is guarded again": (
            lambda s: s.repeat(s.at(GUARD), s.at(GRAD), args=s.get(GRAD).args[:1]),
            _OVERWRITTEN + "|before the wait for",
        ),
        "a saved parameter is read where its gradient is": (
            lambda s: s.read(saved_weight(s)[0] + 1, saved_weight(s)[2]),
            _OVERWRITTEN,
        ),
        "gradients are in the private slot of another bucket": (
            lambda s: s.use_slot(s.at(REDUCE), s.slot(REDUCE, 1)),
            "but it belongs to bucket",
        ),
        "a saved parameter is returned": (lambda s: s.return_(saved_weight(s)[2]), _OVERWRITTEN),
    },
    RELEASED: {
        "a slot is freed before its wait": (lambda s: free_early(s, before=False), r"frees \S+ before the wait"),
        "a slot is freed before its reduction": (lambda s: free_early(s, before=True), "has freed"),
    },
    ("released forward",): {
        "parameters are freed early": (lambda s: free_in_forward(s, "released", s.at(PARAMS) + 1), "has freed")
    },
    ("kept+released forward",): {
        "a kept bucket is freed": (lambda s: free_in_forward(s, "kept+released", -1), "which backward reads")
    },
    SHARDS[:1]: {
        "another shard is copied": (
            lambda s: s.change(s.at(SECONDARY, 1), {0: s.get(SECONDARY).args[0]}),
            "not .'params'",
        ),
        "parameters whose shard is copied are swapped": (lambda s: swap(s.bsyms, SECONDARY), "which holds"),
        "a shard is not copied": (lambda s: s.bsyms.pop(s.at(SECONDARY)), _UNDEFINED),
    },
    SHARDS[1:]: {
        "a gather sends another bucket's shard": (
            lambda s: s.change(s.at(GATHER, -1), secondary=s.get(GATHER, -2).kwargs["secondary"]),
            r"holds \('secondary'|nothing before it defines",
        )
    },
    ("hook backward",): {
        "a hook is not called": (
            lambda s: s.change(s.at("fsdp_wait_grads"), hook=None),
            "all_reduce_hook None, expected",
        )
    },
}


@pytest.mark.parametrize("trace", [*ANY, *KEPT, *RELEASED, *SHARDS, "zero2 forward", "hook backward"])
def test_correct_traces_pass(trace: str) -> None:
    Step(*trace.split()).verify()


@pytest.mark.parametrize(
    ("trace", "mutate", "message"),
    [
        pytest.param(trace, mutate, message, id=f"{name}, {trace}")
        for traces, mutations in MUTATIONS.items()
        for name, (mutate, message) in mutations.items()
        for trace in traces
    ],
)
def test_a_broken_trace_is_refused(trace: str, mutate: Mutation, message: str) -> None:
    step = Step(*trace.split())
    mutate(step)
    with pytest.raises(
        VerificationError, match=rf"(bound symbol \d+ of (forward|backward): .*|^a statement has )({message})"
    ):
        step.verify()


def test_backward_may_expect_only_buckets_that_its_forward_left() -> None:
    step = Step("zero3", "backward")
    slot = step.slot(GATHER)
    step.change(step.at(GATHER), {1: slot.arena.slot(slot.arena.nbytes, slot.nbytes)})
    verify(step.trace)  # nothing is known about forward
    with pytest.raises(VerificationError, check=coded("proof.invalid-bound-symbol", "where forward did not leave it")):
        step.verify()


def test_gradients_over_kept_parameters_need_their_forward() -> None:
    refusal = coded("proof.invalid-bound-symbol", "own_", "without a guard of bucket")
    with pytest.raises(VerificationError, check=refusal):
        verify(Step("zero2", "backward").trace)


@pytest.mark.parametrize("is_view", [False, True])
def test_backward_may_use_a_name_of_forward_again(is_view: bool) -> None:
    forward, step = Step("zero3"), Step("zero3", "backward")
    old = forward.view(forward.at(PARAMS) + 1, forward.weight()) if is_view else forward.weight()
    step.forward = forward.forward
    computed = next(b.output for b in step.bsyms if b.sym.name == "mul")
    with tracectx(TraceCtx()):
        new = computed.replace_name(old.name)
    step.trace.bound_symbols[:] = [b.from_bsym_swap_proxies({variableify(computed): new}) for b in step.bsyms]
    step.original = None
    step.verify()


def test_a_view_that_forward_has_saved_is_followed() -> None:
    step = Step("zero2", "backward")
    _, _, weight = saved_weight(step)
    forward = Step("zero2")
    wait = next(i for i, b in enumerate(forward.bsyms) if weight.name in outs_of(b))
    view = forward.view(wait + 1, weight)
    step.forward = forward.forward
    unpack = next(i for i, b in enumerate(step.bsyms) if weight.name in outs_of(b))
    step.bsyms[unpack] = step.bsyms[unpack].from_bsym(output=[*step.bsyms[unpack].output, view])
    step.original = None  # it unpacks no view
    step.verify()
    step.read(-1, view)
    with pytest.raises(VerificationError, match=_OVERWRITTEN):
        step.verify()


def test_a_pinned_schedule_must_keep_the_limit_of_gathers_in_flight() -> None:
    pinned = compiled("zero3").schedule
    assert pinned.forward.gathers_in_flight == 3
    refusal = coded("proof.invalid-bound-symbol", "gathers bucket '", "max_gathers_in_flight=2")
    with pytest.raises(VerificationError, check=refusal):
        testing.compile_on_fake_ranks(blocks, 2, schedule=pinned, max_gathers_in_flight=2)


def test_a_bucket_that_backward_has_gathered_itself_is_not_one_that_forward_has_left() -> None:
    step = Step("zero3", "backward")
    gather = step.bsyms[next(i for i in step.all(GATHER) if not effects(step.bsyms[i]).issues.resident)]
    wait = next(i for i in step.all(PARAMS) if step.bsyms[i].args[0] is gather.args[0])
    future = step.insert(wait + 1, fsdp_all_gather, *gather.args, resident=True)
    step.insert(wait + 2, fsdp_wait_params, gather.args[0], future)
    with pytest.raises(VerificationError, check=coded("proof.invalid-bound-symbol", "where forward did not leave it")):
        verify(step.trace, forward=step.forward)
