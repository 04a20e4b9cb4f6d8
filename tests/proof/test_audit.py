"""The audit of the first run: it catches wrong operator facts, which ``verify`` cannot detect, on all ranks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from thunder_fsdp_sched import Debug, ScheduleDisagreement, VerificationError, fsdp
from thunder_fsdp_sched.ir import operator_facts
from thunder_fsdp_sched.proof import audit

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from ranks import on_ranks
from thunder.core.symbol import BoundSymbol
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x)) @ self.b.weight.t()
        return x.square().sum()


def _jit(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    transform = fsdp(**options)
    return thunder.jit(Model(), transforms=[transform]), transform


def _audits(model: nn.Module) -> tuple[bool, bool]:
    """Return whether the cached forward and backward still contain the audit.

    Checks that the functions that run agree with the traces that Thunder shows.
    """
    found = []
    [entry] = thunder.compile_stats(model).interpreter_cache
    shown = (thunder.last_traces(model), thunder.last_backward_traces(model))
    for function, listed in zip((entry.computation_fn, entry.backward_fn), shown, strict=True):
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        in_function = "fsdp_audit" in function.__globals__
        assert in_function == any(b.sym.name == "fsdp_audit" for trace in listed for b in trace.bound_symbols)
        assert _statements("".join(inspect.getsourcelines(function)[0])) == _statements(listed[-1].python())
        found.append(in_function)
    return found[0], found[1]


def _statements(text: str) -> list[str]:
    """Return the lines of a function's body without comments."""
    lines = (line.partition("  #")[0] for line in text.splitlines() if line.startswith("  "))
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


@on_ranks()
def test_the_audit_is_removed_from_each_trace_after_its_first_run() -> None:
    for strategy in ("zero3", "zero2"):
        model, transform = _jit(sharding_strategy=strategy)
        x = torch.randn(3, 4)
        loss = model(x)
        assert _audits(model) == (False, True)  # each trace is audited in its own first run
        again = model(x)
        loss.backward()
        assert _audits(model) == (False, False)
        used = [p for p in model.parameters() if p.grad is not None]
        first = [p.grad.clone() for p in used]
        again.backward()  # when its forward ran, the backward was not audited yet
        torch.testing.assert_close([p.grad for p in used], [2 * g for g in first])
        [compiled] = transform.compiled
        for trace in (compiled.forward, compiled.backward):
            assert not any(b.sym.name == "fsdp_audit" for b in trace.bound_symbols)
    model, _ = _jit(debug=Debug(audit=False))
    model(x).backward()
    assert _audits(model) == (False, False)


@contextlib.contextmanager
def _hide_views(backward: bool) -> Iterator[None]:
    real_facts_of = operator_facts.facts_of

    def facts_of(bsym: BoundSymbol) -> Any:
        facts = real_facts_of(bsym)
        if bsym.sym.name == "permute" and backward == any(o.name.startswith("bw_") for o in bsym.flat_proxy_outs):
            return facts._replace(aliases={})
        return facts

    with mock.patch.object(operator_facts, "facts_of", facts_of):
        yield


def _audits_forward(model: nn.Module) -> bool:
    return any(b.sym.name == "fsdp_audit" for trace in thunder.last_traces(model) for b in trace.bound_symbols)


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks(lambda ranks: ranks)
def test_a_view_missing_from_the_facts_is_an_error_on_all_ranks(ranks: int) -> None:
    memory = "the shard" if ranks == 1 else "slot_"  # one rank's parameters are views of its shards
    wrong = coded("proof.wrong-operator-facts", f"lies in {memory}", "bucket 'b'", "permute")
    for backward in (False, True):
        model, _ = _jit()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        x = torch.randn(3, 4)
        with _hide_views(backward):
            if not backward:
                for _ in range(2):  # a failed run does not count as audited
                    with pytest.raises(VerificationError, check=wrong.naming("audit_forward")):
                        model(x)
                assert _audits_forward(model)
                continue
            loss = model(x)
        with pytest.raises(VerificationError, check=wrong.naming("audit_backward")):
            loss.backward()
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(VerificationError):
            model(x).backward()
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name])
        dist.barrier()


#
# Operators that write
#

change_argument: Any = None  # called by the operator below on its argument


def total(w: torch.Tensor) -> torch.Tensor:
    return w.sum()


def _total(w: torch.Tensor) -> torch.Tensor:
    assert w.data_ptr()  # which fake tensors do not have, so it cannot be observed
    if change_argument is not None:
        change_argument(w)
    return w.sum()


class WithOperator(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + total(self.b.weight.detach())


def _jit_with_unknown_operator() -> nn.Module:
    executor = thunder.extend.OperatorExecutor("spoiler")
    thunder.extend.register_executor(executor)
    operator = executor.register_operator(
        "spoiled_total", meta=lambda w: thunder.core.proxies.TensorProxy(like=w, shape=()), fn=_total, replaces=total
    )
    executor.register_implementation(operator, operator, grad_transform=lambda w: operator(w))  # no gradient
    torch.manual_seed(0)
    return thunder.jit(WithOperator(), transforms=[fsdp()], executors=[executor, *thunder.get_default_executors()])


def _fail(w: torch.Tensor) -> None:
    raise ArithmeticError("on purpose")


@on_ranks()
def test_operators_that_change_parameters_are_an_error_and_failed_runs_are_audited_again() -> None:
    global change_argument
    x = torch.randn(3, 4)
    try:
        change_argument = lambda w: w.data.add_(1)  # noqa: E731  (does not change the version: arguments of unknown operators are compared by value)
        with pytest.raises(
            VerificationError,
            check=coded("proof.wrong-operator-facts", "parameter 'b.weight' of bucket 'b'", "unknown operator"),
        ):
            _jit_with_unknown_operator()(x)
        change_argument = lambda w: w.add_(1)  # noqa: E731
        real_facts_of = operator_facts.facts_of

        def known(bsym: BoundSymbol) -> Any:
            return real_facts_of(bsym)._replace(known=True)

        with (
            mock.patch.object(audit, "facts_of", known),
            mock.patch.object(operator_facts, "facts_of", known),
            pytest.raises(
                VerificationError,
                check=coded("proof.wrong-operator-facts", "parameter 'b.weight'", "known not to write it"),
            ),
        ):
            _jit_with_unknown_operator()(x)

        change_argument = _fail
        model = _jit_with_unknown_operator()
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                model(x)
        assert _audits_forward(model)  # no run has finished yet
        change_argument = None
        model(x).backward()
        assert _audits(model) == (False, False)
    finally:
        change_argument = None


@on_ranks()
def test_an_error_that_the_audit_of_one_rank_finds_is_raised_on_all(rank: int) -> None:
    global change_argument
    x = torch.randn(3, 4)
    alone = torch.randn(3 + rank, 4)  # rank 1 compiles alone, and only its traces are audited
    model = _jit_with_unknown_operator()
    model(x).backward()
    used = [p for p in model.parameters() if p.grad is not None]
    grads = [p.grad.clone() for p in used]
    real_after = audit.Auditor.after

    def after(auditor: audit.Auditor, position: int, *outputs: torch.Tensor | None) -> None:
        real_after(auditor, position, *outputs)
        if auditor.name == "audit_backward":
            auditor._fail(position, "fails on purpose")

    def check_raised(run: Callable[[], Any], *names: str) -> None:
        own, theirs = coded("proof.wrong-operator-facts"), coded("ranks.actions-differ", "rank 1: the audit of a trace")
        expected = (own if rank else theirs).naming(*names)
        with pytest.raises(VerificationError if rank else ScheduleDisagreement, check=expected):
            run()

    try:
        change_argument = (lambda w: w.data.add_(1)) if rank else None
        check_raised(lambda: model(alone), "audit_forward", "parameter 'b.weight'")
        change_argument = None
        with mock.patch.object(audit.Auditor, "after", after):
            loss = model(alone)
            check_raised(loss.backward, "audit_backward", "on purpose")
    finally:
        change_argument = None
    assert all(torch.equal(p.grad, grad) for p, grad in zip(used, grads, strict=True))
    # No collective is missing, so the ranks can continue, and without an audit there is no further round.
    for batch in (alone, x, alone):
        model(batch).backward()
    channel = model._lc_transforms[-1].sharded.control.channel
    rounds = channel.rounds
    model(alone).backward()
    assert channel.rounds == rounds + 2
    # A backward under no_sync does not communicate, so rank 0 learns of the error in its next round.
    with model.no_sync():
        model(x).backward()
        loss = model(alone)
        with mock.patch.object(audit.Auditor, "after", after):
            check_raised(loss.backward if rank else lambda: (loss.backward(), model(x)), "on purpose")


def pair(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return w.sum(), w * 1


class WithPair(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + pair(self.b.weight.detach())[0]


@on_ranks()
def test_operators_may_return_none_in_place_of_a_tensor() -> None:
    """As CUDA's attention in bfloat16 does."""
    executor = thunder.extend.OperatorExecutor("sparing")
    thunder.extend.register_executor(executor)
    operator = executor.register_operator(
        "without_second",
        meta=lambda w: (thunder.core.proxies.TensorProxy(like=w, shape=()), thunder.core.proxies.TensorProxy(like=w)),
        fn=lambda w: (w.sum(), None),
        replaces=pair,
    )
    executor.register_implementation(operator, operator, grad_transform=lambda w: operator(w))  # no gradient
    torch.manual_seed(0)
    reference, x = WithPair(), torch.randn(3, 4)
    torch.manual_seed(0)
    executors = [executor, *thunder.get_default_executors()]
    model = thunder.jit(WithPair(), transforms=[fsdp()], executors=executors)
    torch.testing.assert_close(model(x), reference(x))
