"""Optimizers of torch and of users on sharded parameters, beside an unsharded run: each case is a row of data.

Gradients are set directly, so nothing is traced.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from coded import coded
from internals import RowDTensor
from models import Model
from ranks import on_ranks
from recorded import Recorded
from scenario import Run
from test_optimizers import Matrices
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils._pytree import tree_leaves, tree_map

Make = Callable[[Any], Optimizer]


class _Own(Optimizer):
    """An optimizer of a user, which updates one parameter after the other."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group["lr"])


class ScalarState(_Own):
    """An optimizer with a number of state for each parameter, that of the whole parameter."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        power = grad.pow(2).sum()
        state["power"] = 0.9 * state.get("power", power) + 0.1 * power
        param.sub_(grad / (state["power"].sqrt() + 1e-3), alpha=lr)


class NestedState(_Own):
    """An optimizer whose state contains dictionaries and lists."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["slow"] = {"value": param.clone(), "steps": 0}
            state["history"] = [torch.zeros_like(param), torch.zeros_like(param)]
        state["history"] = [state["history"][1], grad.clone()]
        state["slow"]["steps"] += 1
        state["slow"]["value"].lerp_(param, 0.5)
        param.sub_(state["history"][0] + state["history"][1], alpha=lr)
        param.copy_(state["slow"]["value"] + param).mul_(0.5)


class Derived(AdamW):
    """A class derived from AdamW that changes gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.ndim > 1:
                    param.grad = param.grad - param.grad.mean()
        return super().step(closure)


TORCH: dict[str, tuple[type[Optimizer], dict[str, Any], tuple[str, ...]]] = {
    "ASGD": (ASGD, {"lr": 0.1, "weight_decay": 0.1}, ("foreach",)),
    "Adadelta": (Adadelta, {"lr": 0.5}, ("foreach",)),
    "Adagrad": (Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}, ("foreach", "fused")),
    "Adam": (Adam, {"lr": 0.1, "amsgrad": True}, ("foreach", "fused")),
    "AdamW": (AdamW, {"lr": 0.1, "maximize": True}, ("foreach", "fused")),
    "AdamW, lr tensor": (AdamW, {"lr": torch.tensor(0.1)}, ("fused",)),
    "Adamax": (Adamax, {"lr": 0.1}, ("foreach",)),
    "NAdam": (NAdam, {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1}, ("foreach",)),
    "RAdam": (RAdam, {"lr": 0.1}, ("foreach",)),
    "RMSprop": (RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}, ("foreach",)),
    "SGD": (SGD, {"lr": 0.1}, ("foreach", "fused")),
    "SGD, momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, ("foreach", "fused")),
}

OWN: dict[str, Make] = {"scalar": ScalarState, "nested": NestedState, "derived": Derived}


def _optimizers() -> Iterator[tuple[str, Make]]:
    for name, (cls, options, kernels) in TORCH.items():
        for kernel in ("plain", *kernels):
            chosen = {"foreach": False} if kernel == "plain" else {kernel: True}
            yield (f"{name}, {kernel}", partial(cls, **options, **chosen))
    yield from OWN.items()


def _halve_lr(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def _scale_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad = param.grad.clamp(-0.5, 0.5) * 3


def _clear_momentum(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Clear the momentum after each second step, which a hook of the state sees."""
    assert optimizer.state and args[0] is optimizer
    for state in optimizer.state.values():
        state["calls"] = state.get("calls", 0) + 1
        for key, value in state.items():
            if key.startswith("exp_avg") and state["calls"] % 2 == 0:
                value.zero_()


def _add_group(optimizer: Optimizer) -> None:
    last = optimizer.param_groups[0]["params"].pop()
    optimizer.state.pop(last, None)
    optimizer.add_param_group({"params": [last], "lr": 0.03})


def _freeze(optimizer: Optimizer, frozen: bool = True) -> None:
    for param in optimizer.param_groups[0]["params"][:2]:
        param.requires_grad_(not frozen)
        param.grad = None if frozen else param.grad


def _reload(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _shard_another(optimizer: Optimizer) -> None:
    torch.manual_seed(3)
    Run(Matrices())


def _schedule(optimizer: Optimizer) -> None:
    """Let schedulers change options before the steps after the first."""
    schedulers = (
        OneCycleLR(optimizer, 0.2, total_steps=8, cycle_momentum=not isinstance(optimizer, _Own)),
        CosineAnnealingLR(optimizer, 8),
    )
    steps = itertools.count()

    def advance(*args: Any) -> None:
        for scheduler in schedulers if next(steps) else ():
            scheduler.step()

    optimizer.register_step_post_hook(advance)


ACTIONS: dict[str, dict[int, Callable[[Optimizer], Any]]] = {
    "hook of lr": {0: lambda optimizer: optimizer.register_step_pre_hook(_halve_lr)},
    "hook of gradients": {0: lambda optimizer: optimizer.register_step_pre_hook(_scale_gradients)},
    "hook after": {0: lambda optimizer: optimizer.register_step_post_hook(_clear_momentum)},
    "new group": {1: _add_group},
    "frozen": {1: _freeze, 3: partial(_freeze, frozen=False)},
    "reloaded": {2: _reload},
    "another model": {1: _shard_another},
    "schedulers": {0: _schedule},
}
"""Changes to an optimizer, each keyed by the number of the step that it precedes."""


def _run(make: Make, *, exact: bool = True, **options: Any) -> Run:
    """Return a sharded and an unsharded model with one optimizer each."""
    torch.manual_seed(0)
    return Run(Matrices(), optimizer=make, tolerance=0 if exact else 1e-5, **options)


def _step(run: Run, step: int, **without: Any) -> None:
    run.gradients(step, **without)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _check_states(run: Run, expected: Optimizer | None = None) -> None:
    """Compare the optimizers' state dicts: values, names, options."""
    ours, theirs = (optimizer.state_dict() for optimizer in (run.optimizers[0], expected or run.optimizers[1]))
    assert ours["state"].keys() == theirs["state"].keys()
    assert repr(ours["param_groups"]) == repr(theirs["param_groups"])
    whole = tree_map(lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t, ours["state"])
    for number, state in theirs["state"].items():
        assert state.keys() == whole[number].keys()
        for mine, other in zip(tree_leaves(whole[number]), tree_leaves(state), strict=True):
            torch.testing.assert_close(mine, other, msg=lambda text, n=number: f"state of {n}: {text}")


@on_ranks()
def test_each_optimizer_trains_shards_as_it_trains_the_unsharded_model() -> None:
    failures, run = {}, _run(SAVED["SGD"])
    for name, make in _optimizers():
        is_disturbed = name in ("AdamW, foreach", "AdamW, fused", "SGD, momentum, plain", "scalar")
        for action, by_step in (ACTIONS if is_disturbed else {"none": {}}).items():
            try:
                # Sums, and the elements that fused kernels do not vectorize, round otherwise.
                run.tolerance = 0 if name not in OWN and "fused" not in name else 1e-5
                run.make_optimizer = make
                run.reset()
                for step in range(4):
                    for optimizer in run.optimizers if step in by_step else ():
                        by_step[step](optimizer)
                    _step(run, step)
                run.gradients(4)
                with Recorded() as recorded:
                    run.optimizers[0].step()
                on_rows = [func for func, leaves in recorded.calls if any(isinstance(x, RowDTensor) for x in leaves)]
                assert bool(on_rows) == (name in OWN or "hook" in action or action == "schedulers"), on_rows
                recorded.calls.clear()
                run.optimizers[1].step()
                for optimizer in run.optimizers if name not in OWN else ():
                    assert optimizer.step(lambda: run.gradients(5) or 0.5) == 0.5
                run.compare_parameters()
                _check_states(run)
            except Exception as error:
                failures[f"{name} / {action}"] = f"{type(error).__name__}: {str(error)[:300]}"
    assert not failures, failures


@on_ranks(2)
def test_a_step_on_plain_rows_leaves_what_a_step_of_the_unsharded_model_leaves() -> None:
    kernels = ({"foreach": False}, {"foreach": True}, {"fused": True})
    for make in (*(partial(AdamW, lr=0.1, **kernel) for kernel in kernels), partial(SGD, lr=0.1, momentum=0.9)):
        run = _run(make, exact="fused" not in make.keywords)
        run.gradients(0)
        for optimizer in run.optimizers:
            group = optimizer.param_groups[0]
            lr, group["lr"] = group["lr"], "none"
            with pytest.raises(TypeError):
                optimizer.step()
            group["lr"] = lr
        _check_states(run)  # state that the failed step has made
        param = run.optimizers[0].param_groups[0]["params"][0]
        penalty = param.pow(2).sum()
        gradient = weakref.ref(param.grad.to_local())
        _step(run, 1)
        assert gradient() is None  # freed by zero_grad
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.backward()
        run.compare_parameters()
        _check_states(run)


class Complex(Model):
    """Complex parameters, of which optimizers update the real and the imaginary parts. It is not called."""

    def __init__(self, *, has_scalar: bool) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.randn(7, 3, dtype=torch.complex64))
        self.vector = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.real = torch.nn.Parameter(torch.randn(3, 2))
        if has_scalar:
            self.scalar = torch.nn.Parameter(torch.tensor(1 + 2j))


@on_ranks()
def test_complex_parameters_and_rprop_train_like_unsharded_ones() -> None:
    torch.manual_seed(0)
    failures, makes = {}, [(cls, options) for cls, options, kernels in TORCH.values() if "foreach" in kernels]
    for has_scalar in (True, False):
        run = Run(Complex(has_scalar=has_scalar), optimizer=SAVED["SGD"], tolerance=1e-6)
        for cls, options in makes if has_scalar else [(Rprop, {"lr": 0.1})]:
            for foreach in (False, True):
                try:
                    run.make_optimizer = partial(cls, **options, foreach=foreach)
                    run.reset()
                    for step in range(3):
                        _step(run, step)
                    run.compare_parameters()
                    _check_states(run)
                except Exception as error:
                    failures[cls.__name__, foreach] = f"{type(error).__name__}: {str(error)[:300]}"
    assert not failures, failures
    run = _run(partial(Rprop, lr=0.1))
    run.gradients(0)
    with pytest.raises(ValueError, check=coded("optimizer.scalar-parameter-on-one-rank", "Rprop", "scale")):
        run.optimizers[0].step()


SAVED: dict[str, Make] = {
    "AdamW": lambda params: AdamW(params, lr=0.1, foreach=True),
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9),
    **OWN,
}


def _run_to_save(name: str, *, steps: int, group: Any = None) -> Run:
    run = _run(SAVED[name], exact=name not in OWN, ranks=group)
    for step in range(steps):
        # torch's functions make state of each parameter, whether it has a gradient or not.
        _step(run, step, without=())
    return run


@on_ranks(4)
def test_state_of_each_shape_is_saved_and_loaded_on_any_number_of_ranks(rank: int, tmp_path: Path) -> None:
    saving, loading = 3, 2
    groups = {size: dist.new_group(list(range(size))) for size in (loading, saving)}
    for name in SAVED if rank < saving else ():
        run = _run_to_save(name, steps=2, group=groups[saving])
        tfs.save_checkpoint(run.model, tmp_path / name, run.optimizers[0])
        state = get_optimizer_state_dict(run.model, run.optimizers[0])
        dcp.save(state, checkpoint_id=tmp_path / f"{name} dcp", process_group=groups[saving])
    dist.barrier()
    for name in SAVED if rank < loading else ():
        expected = _run_to_save(name, steps=3, group=groups[loading])
        for by in ("ours", "dcp"):
            run = _run_to_save(name, steps=0, group=groups[loading])
            tfs.load_checkpoint(run.model, tmp_path / name, run.optimizers[:1] if by == "ours" else [])
            if by == "dcp":
                state = get_optimizer_state_dict(run.model, run.optimizers[0])
                dcp.load(state, checkpoint_id=tmp_path / f"{name} dcp", process_group=groups[loading])
                set_optimizer_state_dict(run.model, run.optimizers[0], state)
            run.gradients(2, without=())
            run.optimizers[0].step()
            run.unsharded = expected.unsharded
            run.compare_parameters()
            _check_states(run, expected.optimizers[1])


@on_ranks(2)
def test_state_that_was_loaded_and_not_stepped_is_saved_whole(tmp_path: Path) -> None:
    run = _run_to_save("AdamW", steps=1)
    tfs.save_checkpoint(run.model, tmp_path / "ours", run.optimizers[0])
    other = _run_to_save("AdamW", steps=0)
    tfs.load_checkpoint(other.model, tmp_path / "ours", other.optimizers[0])
    _check_states(other, run.optimizers[1])
    dcp.save(get_optimizer_state_dict(other.model, other.optimizers[0]), checkpoint_id=tmp_path / "theirs")
    sizes = dcp.FileSystemReader(tmp_path / "theirs").read_metadata().state_dict_metadata
    for name, param in run.reference.named_parameters():
        if param.requires_grad:
            assert sizes[f"state.{name}.exp_avg"].size == param.shape, name
