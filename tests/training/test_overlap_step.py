"""With ``overlap_step``, models train as without it, bit for bit, while the last reductions end within the step."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import CommPolicy
from thunder_fsdp_sched.extras.training.late_gradients import late_of

import pytest
import thunder
import torch
from coded import coded
from internals import InFlight
from models import Stack
from ranks import on_ranks
from scenario import Run, Scenario, do, each
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from virtual_gpu import guard
from virtual_gpu.world import Rank, run


def _late(model: Any) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients nobody has waited for."""
    return [p for p in model.parameters() if p.grad is not None and late_of(p.grad) is not None]


#
# Numbers: the second model of each run overlaps, and must have the bits of the first
#


def _overlap(run: Run, **options: Any) -> None:
    tfs.overlap_step(run.models[1], run.optimizers[1], **options)


def _step(run: Run, *, late: bool | None = True) -> None:
    """Step without reading gradients before."""
    assert late in (None, bool(_late(run.models[1]))) and not _late(run.models[0]), run.at
    for optimizer in run.optimizers:
        optimizer.step()
    assert not _late(run.models[1])
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    run.compare_parameters()


def _set_factor(run: Run) -> None:
    """Set another factor, which must not apply to reductions that have been issued."""
    for model in run.models:
        tfs.set_gradient_divide_factor(model, 3.0)
    run.unsharded = None


def _share(run: Run) -> None:
    """Let a parameter of another bucket have a late gradient."""
    for model in run.every:
        model.get_parameter("blocks.1.up.weight").grad = model.get_parameter("blocks.0.up.weight").grad


_last = do.micro_batch(1, no_sync=False)

HISTORY: list[Callable[[Run], Any]] = [
    *(_last, _step),
    *(_last, _last, partial(_step, late=False)),  # the second backward adds to gradients of the first
    *(do.micro_batch(2), _last, partial(_step, late=False)),  # the end of a window adds what has accumulated
    *(_last, _share, _step, _last, _set_factor, _step, _last, _step),
]
"""The world (``tests/world.py``) draws other histories."""


adamw = partial(torch.optim.AdamW, lr=0.01)
_bfloat16 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.bfloat16)

SCENARIOS = {
    "zero2, gradients freed": Scenario(
        lambda: Stack(2).double(),
        [partial(_overlap, free_gradients=True), *HISTORY],
        {"sharding_strategy": "zero2", "transport": "flat"},
        others=[{}],
    ),
    "reduced in bfloat16": Scenario(
        Stack,
        [_overlap, *(_last, _step) * 3],
        {"dtype": torch.float32, "mp_policy": _bfloat16, "gradient_divide_factor": 3.0},
        others=[{}],
        oracle=None,
        optimizer=adamw,
    ),
    "encoded, with feedback": Scenario(
        Stack,
        [_overlap, *(_last, _step) * 3],
        {"dtype": torch.float32, "comm_policy": CommPolicy("int8", "int8", block=8, error_feedback=True)},
        others=[{}],
        oracle=None,
    ),
}


@each(SCENARIOS)
def test_it_trains_to_the_same_bits(name: str) -> None:
    SCENARIOS[name].run()


AT_ONCE: dict[str, dict[str, Any]] = {
    "a hook that may communicate": {"all_reduce_hook": lambda name, grads: None},
    "shards on the CPU": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@on_ranks(2)
def test_what_cannot_be_late_is_waited_for_in_backward() -> None:
    for why, options in AT_ONCE.items():
        run = Run(Stack(1), others=[{}], oracle=None, dtype=torch.float32, **options)
        run.at = why
        _overlap(run)
        for _ in range(2):
            run.micro_batch(1, no_sync=False)
            _step(run, late=False)


#
# When it waits
#


def _trained(optimizer: Callable[..., torch.optim.Optimizer] = adamw, **options: Any) -> tuple[Any, Any, Any]:
    """Return a model whose optimizer overlaps, after a backward, and what runs another one."""
    torch.manual_seed(0)
    model = thunder.jit(Stack(4, width=8).double(), transforms=[tfs.fsdp(**options)])
    stepped = optimizer(list(model.parameters()))
    tfs.overlap_step(model, stepped)
    backward = lambda: model(torch.ones(3, 8, dtype=torch.float64)).sum().backward()  # noqa: E731
    backward()
    return model, stepped, backward


@contextlib.contextmanager
def _waits(before: Callable[[str], object]) -> Iterator[None]:
    """Call ``before`` with the name of each bucket whose reduction is waited for."""
    wait = InFlight.wait

    def watched(flight: InFlight) -> None:
        if flight.what == "reduce-scatter":
            before(flight.bucket.spec.name)
        wait(flight)

    with mock.patch.object(InFlight, "wait", watched):
        yield


@on_ranks(2)
def test_the_step_begins_before_the_last_reductions_have_ended() -> None:
    for strategy in ("zero2", "zero3"):
        model, optimizer, backward = _trained(sharding_strategy=strategy)
        optimizer.step()
        optimizer.zero_grad()
        backward()
        late = _late(model)
        before = {param: param.to_local().clone() for param in model.parameters() if param.to_local().numel()}
        stepped: list[int] = []

        def count(name: str, before: Any = before, stepped: Any = stepped) -> None:
            stepped.append(sum(not torch.equal(param.to_local(), old) for param, old in before.items()))

        with _waits(count):
            optimizer.step()
        arrived = before.keys() - set(late)
        assert stepped[0] == len(arrived) > 0 and sorted(set(stepped)) == stepped and stepped[-1] < len(before), stepped


def _pickled(grad: Any) -> Any:
    return pickle.loads(pickle.dumps(grad.to_local()))


READERS: dict[str, Callable[[Any], object]] = {
    "to_local": lambda grad: grad.to_local(),
    "full_tensor": lambda grad: grad.full_tensor(),
    "detached": lambda grad: grad.detach().to_local(),
    "data": lambda grad: grad.data.to_local(),
    "clone": lambda grad: grad.clone(),
    "norm": lambda grad: grad.norm(),
    "foreach": lambda grad: torch._foreach_norm([grad]),
    "add_": lambda grad: grad.add_(1),
    "zero_": lambda grad: grad.zero_(),
    "as an operand": lambda grad: torch.zeros_like(grad.detach()).add_(grad),
    "repr": repr,
    "deepcopy": copy.deepcopy,
    "pickle": _pickled,
    "chunks": lambda grad: grad.chunks(),
    "is_shared": lambda grad: grad.is_shared(),
}


@on_ranks(2)
def test_whoever_reads_a_gradient_waits() -> None:
    model, _, backward = _trained()
    expected = {param: param.grad.to_local().clone() for param in model.parameters()}
    for name, read in READERS.items():
        model.zero_grad()
        backward()
        param = _late(model)[0]
        late, others = late_of(param.grad), _late(model)
        waited: list[str] = []
        with _waits(waited.append):
            read(param.grad)
        assert late.has_arrived and len(waited) == 1 and late_of(param.grad) is None, name
        assert len(_late(model)) < len(others)  # those of the same reduction have arrived with it
        if name not in ("add_", "zero_"):
            assert torch.equal(param.grad.to_local(), expected[param]), name
    model.zero_grad()
    backward()
    assert _late(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert not _late(model)
    assert torch.equal(
        norm.full_tensor(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
    )


@on_ranks(2)
def test_threads_that_read_the_same_gradient_wait_once() -> None:
    model, _, backward = _trained(gradient_divide_factor=3.0)
    param = _late(model)[0]
    expected = param.grad.to_local().clone()
    model.zero_grad()
    backward()
    bucket = param.rows.in_bucket[0]
    [flight] = [flight for flight in bucket.arena.in_flight if flight.bucket is bucket]
    [reduction] = flight.works
    inside, may_end = threading.Event(), threading.Event()
    waits: list[int] = []

    class Slow:
        def wait(self) -> None:
            waits.append(1)
            inside.set()
            may_end.wait()

    reduction._flight = reduction._flight._replace(works=(*reduction._flight.works, Slow()))
    threads = [threading.Thread(target=param.grad.to_local) for _ in range(4)]
    threads[0].start()
    inside.wait()
    for thread in threads[1:]:
        thread.start()
    may_end.set()
    for thread in threads:
        thread.join()
    assert torch.equal(param.grad.to_local(), expected) and len(waits) == 1


@on_ranks(2)
def test_a_failed_reduction_is_raised_where_its_gradient_is_read() -> None:
    model, optimizer, backward = _trained()
    late = _late(model)
    read = late[0].grad.to_local

    def failing(flight: InFlight) -> None:
        raise flight.bucket.failure(flight.what, RuntimeError("the link is down"))

    with mock.patch.object(InFlight, "wait", failing):
        for reads in (read, read, optimizer.step):
            with pytest.raises(RuntimeError, check=coded("step.collective-failed", "the link is down")):
                reads()
    model.zero_grad()
    backward()
    optimizer.step()


#
# Memory, processes, and arguments
#


@on_ranks(2)
def test_a_gradient_is_freed_after_its_part_of_the_step() -> None:
    model, optimizer, _ = _trained()
    tfs.overlap_step(model, optimizer, free_gradients=True)
    alive: list[int] = []
    grads = [weakref.ref(p.grad) for p in model.parameters()]
    with _waits(lambda name: alive.append(sum(ref() is not None for ref in grads))):
        optimizer.step()
    assert alive == sorted(alive, reverse=True) and alive[0] < len(grads) and len(set(alive)) == len(alive), alive
    assert all(param.grad is None for param in model.parameters())


def _hooked(optimizer: Any, loss: Any) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.step()


STEPS: dict[str, Callable[[Any, Any], object]] = {
    "cut": lambda optimizer, loss: optimizer.step(),
    "with a closure": lambda optimizer, loss: optimizer.step(lambda: loss),
    "with a hook": _hooked,
}


@on_ranks(2)
def test_however_it_steps_no_gradient_is_left() -> None:
    for how, step in STEPS.items():
        model = thunder.jit(Stack(1), transforms=[tfs.fsdp()])
        other = torch.nn.Parameter(torch.ones(3))  # not sharded
        optimizer = torch.optim.AdamW([*model.parameters(), other])
        tfs.overlap_step(model, optimizer, free_gradients=True)
        before = other.detach().clone()
        loss = (model(torch.ones(2, 4)) * other).sum()
        loss.backward()
        step(optimizer, loss.detach())
        assert not torch.equal(other, before) and all(p.grad is None for p in (*model.parameters(), other)), how


@on_ranks(2)
def test_a_copy_of_the_optimizer_and_its_state_have_nothing_of_it() -> None:
    model, optimizer, backward = _trained()
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    assert vars(copied).keys() <= vars(adamw([torch.ones(1)])).keys() and not copied._optimizer_step_post_hooks
    loaded = pickle.loads(pickle.dumps(optimizer.state_dict()))
    assert loaded.keys() == {"state", "param_groups"}
    optimizer.load_state_dict(optimizer.state_dict())
    tfs.overlap_step(model, optimizer)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    model.zero_grad()
    backward()
    optimizer.step()
    assert _late(model) == []


@on_ranks(2)
def test_models_with_late_gradients_are_freed() -> None:
    model, optimizer, backward = _trained()
    [kept, *_] = (param.grad for param in _late(model))
    bucket = weakref.ref(model.first.weight.rows.in_bucket[0])
    del model, optimizer, backward
    gc.collect()
    assert bucket() is None
    with pytest.raises(RuntimeError, check=coded("gradient.model-gone-before-wait")):
        kept.to_local()


@on_ranks(2)
def test_a_forked_process_cannot_wait() -> None:
    model, *_ = _trained()
    param = _late(model)[0]
    if not (child := os.fork()):
        code = 1
        with contextlib.suppress(BaseException):
            try:
                param.grad.to_local()
            except RuntimeError as error:
                code = int(not coded("environment.process-group-older-than-fork")(error))
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert param.grad.to_local().isfinite().all()


@on_ranks()
def test_other_optimizers_are_refused() -> None:
    class Derived(torch.optim.SGD): ...

    model = thunder.jit(Stack(1), transforms=[tfs.fsdp()])
    for made in (Derived(model.parameters()), torch.optim.Adam(model.parameters(), differentiable=True)):
        with pytest.raises(ValueError, check=coded("optimizer.cannot-overlap", type(made).__name__)):
            tfs.overlap_step(model, made)
    other = torch.optim.SGD(Stack(1).parameters())
    with pytest.raises(ValueError, check=coded("optimizer.has-no-parameter-of-model", "SGD")):
        tfs.overlap_step(model, other)


#
# Streams
#


def _log_first(rank: Rank, model: Any, optimizer: Any, side: Any) -> None:
    """Read gradients on the side stream before any other."""
    _read(model, side)
    optimizer.step()


def _log_later(rank: Rank, model: Any, optimizer: Any, side: Any) -> None:
    """Read gradients on the side stream after the step has read them."""
    grads = [param.grad.detach() for param in model.parameters()]
    optimizer.step()
    _read(model, side, grads)


def _evaluate_before(rank: Rank, model: Any, optimizer: Any, side: Any) -> None:
    """Read gradients whose reductions the next user of their slots has waited for."""
    with torch.no_grad():
        model(torch.randn(4, 8, device=rank.device))
    _read(model, side)
    optimizer.step()


def _evaluate_beside(rank: Rank, model: Any, optimizer: Any, side: Any) -> None:
    """Let another stream than that of backward use the slots next."""
    with torch.cuda.stream(side), torch.no_grad():
        model(torch.randn(4, 8, device=rank.device))
    torch.cuda.current_stream().wait_stream(side)
    optimizer.step()


def _step_beside(rank: Rank, model: Any, optimizer: Any, side: Any) -> None:
    with torch.cuda.stream(side):
        optimizer.step()


def _read(model: Any, side: Any, grads: Any = None) -> None:
    with torch.cuda.stream(side):
        for grad in grads or [param.grad for param in model.parameters()]:
            grad.to_local().abs()


def _train_on_gpu(rank: Rank, act: Callable[[Rank, Any, Any, Any], None], options: dict[str, Any]) -> None:
    with torch.device(rank.device):
        module = Stack(3, width=8)
    model = thunder.jit(module, transforms=[tfs.fsdp(**options)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tfs.overlap_step(model, optimizer)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for _ in range(3):
        model(torch.randn(4, 8, device=rank.device)).sum().backward()
        side.wait_stream(main)
        grads = [param.grad for param in model.parameters()]
        act(rank, model, optimizer, side)
        for grad in grads:
            grad.to_local().record_stream(side)
        main.wait_stream(side)
        optimizer.zero_grad()


@pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")
@pytest.mark.parametrize("act", [_log_first, _log_later, _evaluate_before, _evaluate_beside, _step_beside])
@pytest.mark.parametrize("options", [{}, {"mp_policy": _bfloat16, "gradient_divide_factor": 3.0}], ids=["", "computed"])
def test_each_stream_that_reads_gradients_follows_their_reduction(act: Any, options: dict[str, Any]) -> None:
    result = run(_train_on_gpu, world_size=2, act=act, options=options)
    result.assert_clean()


def _step_as_captured(rank: Rank) -> bool:
    with torch.device(rank.device):
        module = Stack(1, width=8)
    model = thunder.jit(module, transforms=[tfs.fsdp()])
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)  # which needs a GPU
    tfs.overlap_step(model, optimizer, free_gradients=True)
    for _ in range(2):
        model(torch.randn(4, 8, device=rank.device)).sum().backward()
        optimizer.step()
    return all(param.grad is None for param in model.parameters())


@pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")
def test_a_capturable_step_has_all_gradients_and_leaves_none() -> None:
    result = run(_step_as_captured, world_size=2)
    result.assert_clean()
    assert result.values == [True, True]
