"""The audit of the first run: it catches wrong operator facts, which ``verify`` cannot detect, on all ranks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

from thunder_fsdp_sched import Debug, VerificationError, fsdp
from thunder_fsdp_sched.ir import operator_facts
from thunder_fsdp_sched.proof import audit
from thunder_fsdp_sched.proof.audit import RETURN, stepwise

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from internals import outs_of
from ranks import on_ranks
from spoiled import changing, executors, fails_in_backward, raises_on_all, total
from thunder.core.proxies import TensorProxy
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


def _jit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return thunder.jit(Model(), transforms=[fsdp(**options)])


def _audits(model: nn.Module) -> tuple[bool, ...]:
    """Return whether the next run of the cached forward and backward is audited.

    Checks that, once its audit has ended, a program is the one that Thunder shows.
    """
    [entry] = thunder.compile_stats(model).interpreter_cache
    found = []
    for program, traces in (
        (entry.computation_fn, entry.computation_traces),
        (entry.backward_fn, entry.backward_traces),
    ):
        function = inspect.unwrap(program)
        found.append("fsdp_audit" in function.__globals__)
        if not found[-1]:
            assert _statements("".join(inspect.getsourcelines(function)[0])) == _statements(traces[-1].python())
    return tuple(found)


def _statements(text: str) -> list[str]:
    """Return the lines of a function's body without comments."""
    lines = (line.partition("  #")[0] for line in text.splitlines() if line.startswith("  "))
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


@on_ranks()
def test_the_audit_is_removed_from_each_trace_after_its_first_run() -> None:
    for strategy in ("zero3", "zero2"):
        model = _jit(sharding_strategy=strategy)
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
    model = _jit(debug=Debug(audit=False))
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


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks(lambda ranks: ranks)
def test_a_view_missing_from_the_facts_is_an_error_on_all_ranks(ranks: int) -> None:
    memory = "the shard" if ranks == 1 else "slot_"  # one rank's parameters are views of its shards
    wrong = coded("proof.wrong-operator-facts", f"lies in {memory}", "bucket 'b'", "permute")
    for backward in (False, True):
        model = _jit()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        x = torch.randn(3, 4)
        with _hide_views(backward):
            if not backward:
                for _ in range(2):  # a failed run does not count as audited
                    with pytest.raises(VerificationError, check=wrong.naming("audit_forward")):
                        model(x)
                assert _audits(model) == (True, True)
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


class WithOperator(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + total(self.b.weight.detach())


def _jit_with_unknown_operator() -> nn.Module:
    torch.manual_seed(0)
    return thunder.jit(WithOperator(), transforms=[fsdp()], executors=executors())


def _fail(w: torch.Tensor) -> None:
    raise ArithmeticError("on purpose")


@on_ranks()
def test_operators_that_change_parameters_are_an_error_and_failed_runs_are_audited_again() -> None:
    x = torch.randn(3, 4)
    wrong = coded("proof.wrong-operator-facts", "parameter 'b.weight' of bucket 'b'")
    # Without a new version: arguments of unknown operators are compared by value.
    with changing(lambda w: w.data.add_(1)), pytest.raises(VerificationError, check=wrong.naming("unknown operator")):
        _jit_with_unknown_operator()(x)
    real_facts_of = operator_facts.facts_of

    def known(bsym: BoundSymbol) -> Any:
        return real_facts_of(bsym)._replace(known=True)

    with (
        changing(lambda w: w.add_(1)),
        mock.patch.object(audit, "facts_of", known),
        mock.patch.object(operator_facts, "facts_of", known),
        pytest.raises(VerificationError, check=wrong.naming("known not to write it")),
    ):
        _jit_with_unknown_operator()(x)
    model = _jit_with_unknown_operator()
    for _ in range(2):
        with changing(_fail), pytest.raises(ArithmeticError):
            model(x)
    assert _audits(model) == (True, True)  # no run has finished yet
    model(x).backward()
    assert _audits(model) == (False, False)


@on_ranks()
def test_an_error_that_the_audit_of_one_rank_finds_is_raised_on_all(rank: int) -> None:
    x = torch.randn(3, 4)
    alone = torch.randn(3 + rank, 4)  # rank 1 compiles alone, and only its traces are audited
    model = _jit_with_unknown_operator()
    model(x).backward()
    used = [p for p in model.parameters() if p.grad is not None]
    grads = [p.grad.clone() for p in used]
    with changing((lambda w: w.data.add_(1)) if rank else None):
        raises_on_all(rank, lambda: model(alone), "audit_forward", "parameter 'b.weight'")
    with fails_in_backward():
        loss = model(alone)
        raises_on_all(rank, loss.backward, "audit_backward", "on purpose")
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
        with fails_in_backward():
            raises_on_all(rank, loss.backward if rank else lambda: (loss.backward(), model(x)), "on purpose")


def test_a_program_stops_around_the_statement_of_each_operator_also_of_one_that_returns_nothing() -> None:
    noted: list[torch.Tensor] = []
    executor = thunder.extend.OperatorExecutor("noting")
    note = executor.register_operator(
        "note", meta=lambda x: None, fn=noted.append, tags=[thunder.core.prims.OpTags.DONT_DCE]
    )
    executor.register_implementation(note, note)

    def function(x: torch.Tensor) -> torch.Tensor:
        note(x)
        y = x + 1
        note(y)
        note(x)
        return y * 2

    x = torch.zeros(2)
    jitted = thunder.jit(function, executors=[executor, *thunder.get_default_executors()])
    jitted(x)
    trace = thunder.last_traces(jitted)[-1]
    operators = {at: b for at, b in enumerate(trace.bound_symbols) if b.sym.name in ("note", "add", "mul")}
    steps = stepwise(trace.python_callable(), trace, {at: outs_of(bsym) for at, bsym in operators.items()})(x)
    noted.clear()
    for position, bsym in operators.items():
        assert next(steps) == position
        before = len(noted)
        assert len(next(steps)) == len(outs_of(bsym))
        assert len(noted) - before == (bsym.sym.name == "note")
    assert next(steps) == RETURN and [float(value[0]) for value in noted] == [0, 1, 0]
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert torch.equal(*end.value.value, torch.full((2,), 2.0))


def pair(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return w.sum(), w * 1


class WithPair(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + pair(self.b.weight.detach())[0]


@on_ranks()
def test_operators_may_return_none_in_place_of_a_tensor() -> None:
    """As CUDA's attention in bfloat16 does."""
    sparing = executors(pair, lambda w: (TensorProxy(like=w, shape=()), TensorProxy(like=w)), lambda w: (w.sum(), None))
    x, models = torch.randn(3, 4), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(WithPair())
    reference, model = models[0], thunder.jit(models[1], transforms=[fsdp()], executors=sparing)
    torch.testing.assert_close(model(x), reference(x))


def test_an_input_without_a_storage_is_no_view_of_a_parameter() -> None:
    assert audit.PreShardStorages().owner_of(torch.eye(2).to_sparse()) is None


#
# Merged traces of ranks that differ
#


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return (self.left(x) if left else self.right(x)).square().sum() + total(self.first.weight.detach())


def _jit_branches(**options: Any) -> Any:
    return thunder.jit(Branches(), transforms=[fsdp(ranks_may_differ=True)], **options)


def starts(model: Any) -> list[Any]:
    traces = [trace for compiled in model._lc_transforms[-1].compiled for trace in compiled.traces]
    return [b.args[0] for trace in traces for b in trace.bound_symbols if b.sym.name == "fsdp_agreed_or_merged"]


def audited_programs(model: Any) -> list[bool]:
    """Return for each merged trace whether the next run of its program is audited."""
    return [
        "fsdp_audit" in inspect.unwrap(start._merged.run).__globals__
        for start in starts(model)
        if start._merged is not None
    ]


def grads_of(model: Any) -> list[torch.Tensor]:
    return [p.grad.to_local().clone() for p in model.parameters()]


@on_ranks()
def test_the_first_run_of_a_merged_trace_is_audited_and_an_error_is_raised_on_all_ranks(rank: int) -> None:
    torch.manual_seed(0)
    model, x = _jit_branches(executors=executors()), torch.randn(3, 4)
    for left in (True, False):  # the own traces are right
        model(x, left).backward()
    model.zero_grad()
    with changing((lambda w: w.data.add_(1)) if rank else None):
        for _ in range(2):  # no run has been right
            raises_on_all(rank, lambda: model(x, rank == 0), "audit_forward", "parameter 'first.weight'")
    loss = model(x, rank == 0)
    with fails_in_backward(lies=rank == 1):
        raises_on_all(rank, loss.backward, "audit_backward", "on purpose")
    assert all(p.grad is None for p in model.parameters())
    model(x, rank == 0).backward()
    grads = grads_of(model)
    model.zero_grad()
    channel = model._lc_transforms[-1].sharded.control.channel
    model(x, rank == 0).backward()
    assert audited_programs(model) == [False, False]
    rounds = channel.rounds
    model(x, rank == 0).backward()
    assert channel.rounds == rounds + 2
    assert all(torch.equal(p, 2 * q) for p, q in zip(grads_of(model), grads, strict=True))
