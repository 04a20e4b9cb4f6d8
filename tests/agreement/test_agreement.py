"""Ranks that shard, compile or run different things all raise ``ScheduleDisagreement`` with both sides. None hangs."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import ScheduleDisagreement, fsdp, full_state_dict
from thunder_fsdp_sched.ranks import channel
from thunder_fsdp_sched.testing import statements

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from internals import AGREEMENT, effects, shard_module
from models import Calling, Stack
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class TwoBranches(nn.Module):
    """A module that uses one of two buckets, depending on a flag."""

    def __init__(self, width: int = 4, right: int | None = None) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, right or width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, left: bool = True) -> torch.Tensor:
        if x.shape[0] == 3:
            left = not left
        return self.drop((self.left if left else self.right)(x)).sum()


def _jit(module: nn.Module, **options: Any) -> Any:
    """Shard over a new process group, whose ranks wait for each other no longer than a minute."""
    ranks = options.pop("ranks", tfs.Ranks())
    if isinstance(ranks, tfs.Ranks):
        ranks = replace(ranks, process_group=dist.new_group(timeout=timedelta(minutes=1)))
    return thunder.jit(module, transforms=[fsdp(ranks=ranks, **options)])


def _disagree(rank: int, per_rank: list[Callable[[], Any]], *expected: str) -> None:
    """Run another function on each rank and check that every rank's error describes all of them."""
    with pytest.raises(ScheduleDisagreement) as caught:
        per_rank[rank]()
    message = str(caught.value)
    for text in expected:
        assert re.search(text, message), f"{text!r} is not in {message}"


def _reordered(rank: int) -> nn.Module:
    module = TwoBranches()
    if rank == 1:
        module.left = module._modules.pop("left")
    return module


def _of_version(rank: int) -> None:
    with mock.patch.object(shard_module, "__version__", ("0.1", "9.9")[rank]):
        _jit(TwoBranches())


SHARDED: dict[str, tuple[Callable[[int], Any], str]] = {
    "another option": (
        lambda rank: _jit(TwoBranches(), bucketing_strategy=("block", "none")[rank]),
        r"rank 0: fsdp\(bucketing_strategy=block\)\n    rank 1: .*bucketing_strategy=none",
    ),
    "communicators on rank 1 alone": (
        lambda rank: _jit(TwoBranches(), ranks=tfs.Ranks(separate_reduce_scatter_group=rank == 1)),
        r"rank 0: fsdp\(ranks=.*separate_reduce_scatter_group=False\)\)\n    rank 1: .*separate_reduce_scatter_group=True\)",
    ),
    "another size": (
        lambda rank: _jit(TwoBranches(4 + 4 * rank)),
        r"rank 0: left\.weight: float32\[4, 4\] on cpu, .*\n    rank 1: left\.weight: float32\[8, 8",
    ),
    "another order": (lambda rank: _jit(_reordered(rank)), r"rank 0: left\.weight: .*\n    rank 1: right\.weight: "),
    "another version": (
        _of_version,
        r"line 1:\n    rank 0: thunder_fsdp_sched 0.*\n    rank 1: thunder_fsdp_sched 9\.9",
    ),
}


@pytest.mark.parametrize("case", SHARDED)
@on_ranks()
def test_ranks_that_shard_differently_raise_before_any_collective(rank: int, case: str) -> None:
    shard, message = SHARDED[case]
    _disagree(rank, [lambda: shard(rank)] * 2, message)


#
# Compiling
#


@on_ranks()
def test_the_error_of_different_compilations_shows_the_first_differing_line(rank: int) -> None:
    x, model = torch.ones(2, 4), _jit(TwoBranches(right=6))
    _disagree(
        rank,
        [lambda: model(x, rank == 0)] * 2,
        r"forward of a trace, line 1:\n    rank 0: fsdp_all_gather left .*\n    rank 1: fsdp_all_gather right",
        r"give fsdp\(ranks_may_differ=True\)",
    )
    # Each rank's order is valid by itself: rank 1 gathers further ahead, before reductions that rank 0 issues first.
    layers = _jit(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), bucketing_strategy="layer")
    transform = layers._lc_transforms[-1]
    transform.options = dataclasses.replace(transform.options, prefetch=rank)
    _disagree(
        rank,
        [lambda: layers(x)] * 2,
        r"backward of a trace, line 2:\n    rank 0: fsdp_reduce_scatter 3 .*\n    rank 1: fsdp_all_gather 2 .* resident",
    )
    # Rank 0 finds its trace in the cache.
    model(x, True).backward()
    _disagree(
        rank,
        [lambda: model(x, rank == 0)] * 2,
        r"rank 0: the forward for inputs float32\[2, 4\], True .*\n    rank 1: compiling the forward of a trace of module",
        r"give fsdp\(ranks_may_differ=True\)",
    )
    model(x, False).backward()


@on_ranks(4)
def test_different_computations_of_replicas_raise_on_all_ranks_unless_they_are_allowed(rank: int) -> None:
    x, activation = torch.ones(2, 4), torch.relu if rank else torch.tanh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _disagree(
        rank,
        [lambda: _jit(Stack(1, activation=activation), ranks=mesh)(x)] * 4,
        "forward of a trace: the collectives agree but the computations differ",
        r"line \d+:\n    rank 0: tanh\(%\d+\) -> %\d+: float32\n    rank 1: torch_relu",
        r"give fsdp\(ranks_may_differ=True\)",
    )
    allowed = _jit(Stack(1, activation=activation), ranks=mesh, ranks_may_differ=True)
    allowed(x).sum().backward()
    allowed(x).sum().backward()


#
# Running
#


@on_ranks()
def test_ranks_that_run_different_traces_raise_and_can_continue(rank: int, tmp_path: Path) -> None:
    """Compile all variants on all ranks, and then run different ones. No rank compiles any more."""
    model, linear = _jit(TwoBranches(right=6)), _jit(nn.Linear(4, 4))
    two, three = torch.ones(2, 4), torch.ones(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor = two, left: bool = True) -> None:
        torch.manual_seed(0)
        model(x, left).backward()

    def no_sync() -> None:
        with model.no_sync():
            step()

    def in_eval_mode(*, grad: bool = True) -> None:
        model.eval()
        try:
            with torch.set_grad_enabled(grad):
                model(two, True)
        finally:
            model.train()

    def run_eagerly() -> None:
        with tfs.eager(model) as eager_module:
            eager_module(two, True)

    evaluate, other_branch = partial(in_eval_mode, grad=False), partial(step, left=False)
    for variant in (step, other_branch, partial(step, three), no_sync, evaluate, in_eval_mode, run_eagerly):
        variant()
    linear(two).sum().backward()
    step()  # reduces the gradients of no_sync
    optimizer.zero_grad()
    step()
    before = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    step_text = (
        r"forward for inputs float32\[2, 4\], True \(gradients enabled, training\) of module \d+ \(TwoBranches\)"
    )
    # Buckets of different sizes: gloo would abort the process if they met in a collective.
    for other, expected in (
        (other_branch, r"the forward for inputs float32\[2, 4\], False \(gradients enabled"),
        (partial(step, three), r"the forward for inputs float32\[3, 4\], True \(gradients enabled"),
        (in_eval_mode, r"the forward for inputs float32\[2, 4\], True \(gradients enabled, evaluating\)"),
        (run_eagerly, r"gathering inside eager\(\.\.\.\) left of module"),
        (lambda: linear(two), r"the forward for inputs float32\[2, 4\] \(.*\) of module \d+ \(Linear\)"),
        (lambda: full_state_dict(model), r"the whole state dict left as .* of module"),
        (lambda: tfs.save_checkpoint(model, tmp_path / "never"), r"save_checkpoint of module"),
        (lambda: tfs.clip_grad_norm_(model, 1.0), r"clip_grad_norm_ with norm_type=2\.0 of module"),
        # The forwards of the ranks differ, or only the backwards do.
        (no_sync, r"the (for|back)ward [^\n]*no_sync"),
        (lambda: (evaluate(), step()), r".*(no gradients|forward)"),
    ):
        _disagree(rank, [step, other], "rank 0: the (forward|backward) for inputs", f"rank 1: {expected}")
    loss = model(two, True)
    forward = partial(model, two, True)
    _disagree(rank, [loss.backward, forward], "rank 0: the backward for inputs", f"rank 1: the {step_text}")
    assert not (tmp_path / "never" / ".metadata").exists()
    # Nothing was issued, so the ranks can continue.
    optimizer.zero_grad()
    step()
    assert all(torch.equal(param.grad, before[n]) for n, param in model.named_parameters() if param.grad is not None)


def _fail_at_gather(model: Any, position: int) -> None:
    """Run a forward that fails when it issues the gather of the bucket at ``position``."""
    buckets = model._lc_transforms[-1].sharded.buckets
    with mock.patch.object(buckets[position], "gather_into", side_effect=ArithmeticError("on demand")):
        with pytest.raises(ArithmeticError, match="on demand"):
            model(torch.ones(2, 4))


@on_ranks()
def test_ranks_that_an_exception_stopped_at_different_collectives_raise(rank: int) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    model = _jit(layers, bucketing_strategy="layer", prefetch=0)
    model(torch.ones(2, 4)).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    _fail_at_gather(model, 2)  # all ranks stop at the same gather
    model(torch.ones(2, 4)).sum().backward()  # so they can continue
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), grads, strict=True))
    # The ranks stop at different gathers. Only the first was issued on both.
    with mock.patch.object(model._lc_transforms[-1].sharded.buckets[1].transport, "all_gather", return_value=[]):
        _fail_at_gather(model, 1 + rank)
    _disagree(
        rank,
        [lambda: model(torch.ones(2, 4))] * 2,
        r"rank 0: .* .this rank has issued 2 collectives fewer than planned, for example after an exception.",
        r"rank 1: .* .this rank has issued 1 collectives fewer than planned, for example after an exception.",
    )


@on_ranks()
def test_a_thread_that_comes_while_another_waits_for_the_other_ranks_raises() -> None:
    model, errors = _jit(TwoBranches()), []
    loss = model(torch.ones(2, 4))

    def another_thread() -> None:  # with a backward: forwards wait for each other
        with pytest.raises(RuntimeError, check=coded("ranks.another-thread-waits", "TwoBranches", "forward")):
            loss.backward()
        errors.append(True)

    tokens = model._lc_transforms[-1].sharded.control.channel._tokens
    finish = tokens.finish

    def interrupted(timeout: timedelta) -> None:
        tokens.finish = finish
        thread = threading.Thread(target=another_thread)
        thread.start()
        thread.join()
        finish(timeout)

    tokens.finish = interrupted
    model(torch.ones(2, 4)).backward()
    assert errors == [True]


@on_ranks()
def test_traces_agree_before_their_first_collective() -> None:
    model = _jit(TwoBranches(), sharding_strategy="zero3")
    model(torch.ones(2, 4)).backward()
    compiled = model._lc_transforms[-1].compiled[-1]
    for trace in (compiled.forward, compiled.backward):
        names = [b.sym.name for b in trace.bound_symbols]
        agree, agreed = names.index("fsdp_agree"), names.index("fsdp_agreed")
        issues = [effects(b).issues for b in trace.bound_symbols]
        first = next(i for i, issue in enumerate(issues) if issue is not None and not issue.resident)
        assert agree < agreed < first, names
        assert not any(b.sym.name in AGREEMENT for b in statements(trace))
    assert "fsdp_agree(forward_0)\n" in str(compiled.forward)


#
# Computations: identical traces for inputs of equal shapes, else equal up to numbers derived from sizes
#

Forward = Callable[[Any, torch.Tensor], torch.Tensor]

DIFFERENT: dict[str, tuple[Forward, Forward]] = {
    "a constant": (lambda m, x: m.b(m.a(x)) * 0.5, lambda m, x: m.b(m.a(x)) * 2.0),
    "a dimension": (lambda m, x: torch.softmax(m.b(m.a(x)), 0), lambda m, x: torch.softmax(m.b(m.a(x)), 1)),
    "the order of two layers": (lambda m, x: m.b(m.a(x)), lambda m, x: m.a(m.b(x))),
    "the order of operands": (lambda m, x: torch.tanh(m.a(x) - m.b(x)), lambda m, x: torch.tanh(m.b(x) - m.a(x))),
    "the returned tensor": (lambda m, x: (m.a(x), m.b(x))[0] + 0, lambda m, x: (m.a(x), m.b(x))[1] + 0),
    "a number of the module": (lambda m, x: m.b(m.a(x)) * m.scale, lambda m, x: m.b(m.a(x)) * m.other_scale),
}


def _computes(forward: Forward) -> nn.Module:
    torch.manual_seed(0)
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    return Calling(lambda m, x: forward(m, x).square().mean(), **layers, scale=0.5, other_scale=0.25)


def _computing(forward: Forward, **options: Any) -> Any:
    # With one bucket, the collectives are the same whatever is computed.
    return _jit(_computes(forward), bucketing_strategy=10**6, **options)


@pytest.mark.parametrize("what", DIFFERENT)
@on_ranks()
def test_ranks_that_compile_different_computations_raise(rank: int, what: str) -> None:
    model = _computing(DIFFERENT[what][rank])
    expected = coded("ranks.ranks-disagree", "the collectives agree but the computations differ", "PYTHONHASHSEED=0")
    with mock.patch.object(channel, "hash", lambda text: rank, create=True):  # ranks are forked off one process
        with pytest.raises(ScheduleDisagreement, check=expected):
            model(torch.ones(3, 4))


@on_ranks()
def test_ranks_whose_cached_traces_differ_by_a_number_raise(rank: int) -> None:
    model, x = _computing(lambda m, x: m.b(m.a(x)) * m.scale), torch.ones(3, 4)
    for scale in (0.5, 2.0):
        model._model.scale = scale
        model(x).backward()
    model._model.scale = (0.5, 2.0)[rank]
    differ = coded("ranks.actions-differ", "Their traces differ in line", "0.5", "2.0")
    with pytest.raises(ScheduleDisagreement, check=differ):
        model(x)
    model._model.scale = 2.0
    model(x).backward()


def _other_shapes(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute with every kind of number that can derive from the size of an input."""
    rows = x.shape[0]
    positions = torch.arange(rows, dtype=x.dtype) / rows
    h = m.a(x).reshape(rows * 2, 2).reshape(x.shape) + positions[:, None]
    h = h[: rows // 2 + 1] * rows**-0.5
    return m.b(h).mean(0) * rows**0.5 - h.var(0)


@on_ranks()
def test_ranks_with_inputs_of_different_sizes_may_differ_by_numbers_derived_from_sizes(rank: int) -> None:
    model = _computing(_other_shapes)
    reference = _computes(_other_shapes)
    for step in range(5):
        rows = 3 + (rank + step) % 3  # so that ranks compile alone, compile together, and run cached traces
        x = torch.arange(4.0 * rows).reshape(rows, 4) / 10
        loss, expected = model(x), reference(x)
        assert torch.allclose(loss, expected)
        loss.backward()
    # Dimensions, and constants that derive from no size, are compared for all inputs.
    tenths: Forward = lambda m, x: m.b(m.a(x)) * (0.3, 0.7)[rank]  # noqa: E731
    thirds: Forward = lambda m, x: m.b(m.a(x)) * (2 / 3, 2 / 7)[rank]  # noqa: E731
    for forward in (DIFFERENT["a dimension"][rank], DIFFERENT["the order of two layers"][rank], tenths, thirds):
        with pytest.raises(ScheduleDisagreement, check=coded("ranks.ranks-disagree", "the computations differ")):
            _computing(forward)(torch.ones(3 + rank, 4))


@on_ranks(2)
def test_ranks_continue_after_a_rank_has_left_out_a_backward(rank: int) -> None:
    torch.manual_seed(0)
    model = thunder.jit(Stack(2), transforms=[fsdp(bucketing_strategy="layer")])
    inputs = torch.ones(2, 4)
    model(inputs).sum().backward()
    loss = model(inputs).sum()
    with pytest.raises(ScheduleDisagreement):
        if rank == 0:
            model(inputs)
        else:  # it computes with the buckets that forward has left before it hears of the other rank
            loss.backward()
    model(inputs).sum().backward()
