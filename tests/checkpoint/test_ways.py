"""Every way to save and to load restores the same values, under other options and numbers of ranks, and training goes on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import thunder_fsdp_sched as tfs

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Layer
from ranks import on_ranks
from saving import Everything, assert_equal, contents, fill, make, optimizer_of, train, update
from scenario import whole_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Way(NamedTuple):
    """A function that saves a model and its optimizer, and one that loads its result or the folder that it has written."""

    save: Callable[[Any, Any, Path], Any]
    load: Callable[..., Any]
    holds_optimizer: bool = True
    is_for_other_ranks: bool = False


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": tfs.get_model_state_dict(model), "optim": tfs.get_optimizer_state_dict(model, optimizer)}


def _entries(model: Any) -> dict[str, Any]:
    return {name: entry for name, entry in model.state_dict().items() if hasattr(entry, "to_local")}


def _save_extra(model: Any, optimizer: Any, folder: Path) -> None:
    average = {name: entry * 2 for name, entry in _entries(model).items()}  # DTensors
    tfs.save_checkpoint(model, folder, optimizer, extra={"step": 2, "rng": torch.arange(3), "ema": average})


def _load_extra(model: Any, optimizer: Any, folder: Path, saved: Any) -> None:
    wanted = {"step": 0, "rng": None, "ema": {name: torch.empty_like(entry) for name, entry in _entries(model).items()}}
    rest = tfs.load_checkpoint(model, folder, optimizer, extra=wanted)
    assert rest["step"] == 2 and rest["rng"].tolist() == [0, 1, 2]
    assert_equal(rest["ema"], {name: entry * 2 for name, entry in _entries(model).items()})


def _dcp_beside(model: Any, optimizer: Any, folder: Path) -> None:
    before = copy.deepcopy(model.state_dict())
    saving = dcp.async_save(_state(model, optimizer), checkpoint_id=folder)
    fill(model, 0.0)
    saving.result()
    model.load_state_dict(before)


def _pickle(model: Any, optimizer: Any, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    torch.save([model.state_dict(), optimizer.state_dict()], folder / f"{dist.get_rank()}")


def _load_states(model: Any, optimizer: Any, folder: Path, saved: Any) -> None:
    states = torch.load(folder / f"{dist.get_rank()}", weights_only=False) if saved is None else saved
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])


def _torch_states(model: Any, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


def _load_torch_states(model: Any, optimizer: Any, folder: Path, saved: Any) -> None:
    state = _torch_states(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def _fabric(call: str, model: Any, optimizer: Any, folder: Path, saved: Any = None, **options: Any) -> None:
    getattr(fabric, call)(folder, {"model": model, "optimizer": optimizer}, **options)


# ruff: noqa: E731
full = lambda m, o, f: tfs.full_state_dict(m)
rows = lambda m, o, f, _: tfs.load_checkpoint(m, f, o)
whole = lambda m, o, f, _: tfs.load_safetensors(m, f)
in_place = lambda m, o, f, _: dcp.load({"model": m, "optim": o}, checkpoint_id=f)
save_torch_states = lambda m, o, f: dcp.save(_torch_states(m, o), checkpoint_id=f)
by_torch = lambda m, o, _, saved: set_model_state_dict(m, dict(saved), options=StateDictOptions(full_state_dict=True))
load_fabric = partial(_fabric, "load", strict=True, weights_only=None)
WAYS = {
    "checkpoint": Way(_save_extra, _load_extra, is_for_other_ranks=True),
    "beside": Way(lambda m, o, f: tfs.save_checkpoint_async(m, f, o), rows, is_for_other_ranks=True),
    "whole files": Way(lambda m, o, f: tfs.save_safetensors(m, f), whole, False, is_for_other_ranks=True),
    "whole files beside": Way(lambda m, o, f: tfs.save_safetensors_async(m, f), whole, False, is_for_other_ranks=True),
    "dcp": Way(lambda m, o, f: dcp.save(_state(m, o), checkpoint_id=f), rows, is_for_other_ranks=True),
    "dcp beside": Way(_dcp_beside, rows),
    "dcp of objects": Way(lambda m, o, f: dcp.save({"model": m, "optim": o}, checkpoint_id=f), in_place),
    "torch's states": Way(save_torch_states, _load_torch_states),
    "copies": Way(lambda m, o, _: copy.deepcopy([m.state_dict(), o.state_dict()]), _load_states),
    "pickles": Way(_pickle, _load_states),
    "whole": Way(full, lambda m, o, _, saved: m.load_original_state_dict(saved), False, is_for_other_ranks=True),
    "whole, by name": Way(full, lambda m, o, _, saved: m.load_state_dict(saved), False, is_for_other_ranks=True),
    "whole, by torch": Way(full, by_torch, False, is_for_other_ranks=True),
}
with contextlib.suppress(ImportError):
    fabric = import_module("thunder_fsdp_sched.extras.fabric.checkpoint")
    WAYS["fabric, folder"] = Way(partial(_fabric, "save", whole=False, keep=None), load_fabric, True, True)
    WAYS["fabric, file"] = Way(partial(_fabric, "save", whole=True, keep=None), load_fabric, True, True)


def wrap(module: nn.Module) -> None:
    apply_activation_checkpointing(module, check_fn=lambda m: isinstance(m, Layer))


OTHERS: list[tuple[int, dict[str, Any]]] = [
    (2, {"transport": "coalesced"}),
    (1, {"change": wrap, "bucketing_strategy": "none"}),
]


@pytest.mark.parametrize(
    ("options", "others"),
    [
        pytest.param({"change": wrap}, OTHERS, id="flat"),
        pytest.param({"transport": "coalesced"}, OTHERS[1:], id="coalesced", marks=pytest.mark.long),
        pytest.param({"ranks": (2, 2), "sharding_strategy": "zero2"}, OTHERS[:1], id="hybrid", marks=pytest.mark.long),
    ],
)
@on_ranks(lambda options, **_: 4 if "ranks" in options else 3)
def test_each_way_restores_values_and_training(
    rank: int, tmp_path: Path, options: dict[str, Any], others: list[tuple[int, dict[str, Any]]]
) -> None:
    model, optimizer = make(**options)
    train(model, optimizer, 2)
    for group in optimizer.param_groups:
        group["lr"] /= 2
    expected = copy.deepcopy(contents(model, optimizer))  # `step` of AdamW changes in place
    saved = {name: way.save(model, optimizer, tmp_path / name) for name, way in WAYS.items()}
    train(model, optimizer)
    after = copy.deepcopy(contents(model, optimizer))
    for saving in (saving for saving in saved.values() if isinstance(saving, tfs.Saving)):
        saving.result()

    again, second = make(7, **options)
    again.get_buffer("unsaved").copy_(model.get_buffer("unsaved"))
    train(again, second)
    addresses = [param.to_local().data_ptr() for param in again.parameters()]
    for name, way in WAYS.items():
        fill(again, 0.0)
        way.load(again, second, tmp_path / name, saved[name])
        _compare(again, None, expected, name)
        assert [param.to_local().data_ptr() for param in again.parameters()] == addresses, name
        assert all(param.grad is None for param in again.parameters()), name
        if way.holds_optimizer:
            train(again, second)
            assert_equal(contents(again, second), after, name)
    for size, changed in others:
        group = dist.new_group(list(range(size)))
        for name, way in WAYS.items() if rank < size else ():
            if way.is_for_other_ranks:
                other, third = make(8, ranks=group, **changed)
                way.load(other, third, tmp_path / name, saved[name])
                _compare(other, third if way.holds_optimizer else None, expected, (name, size))
        dist.barrier()


def _compare(model: Any, optimizer: Any, expected: dict[str, Any], what: Any) -> None:
    actual = contents(model, optimizer)
    assert_equal(actual, expected if optimizer else {name: expected[name] for name in actual}, what)


def _wrap_without_scalar(module: Any) -> None:
    module.scale = nn.Parameter(module.scale.detach().reshape(1))  # FSDP2 refuses 0-dim parameters
    wrap(module)


def _theirs(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module, mesh = Everything().double(), init_device_mesh("cpu", (dist.get_world_size(),))
    _wrap_without_scalar(module)
    for part in (*module.blocks, module):
        fully_shard(part, mesh=mesh)
    return module, optimizer_of(module)


def _ours(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    return make(seed, change=_wrap_without_scalar)


def _values(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return whole copies of all values, by torch's functions, for a model of either kind."""
    states = _torch_states(model, optimizer)
    of_optimizer = {f"{key} of {n}": v for n, state in states["optim"]["state"].items() for key, v in state.items()}
    values = {name: whole_of(value).clone() for name, value in (states["model"] | of_optimizer).items()}
    return values | {"lr": optimizer.param_groups[0]["lr"]}


@on_ranks(2)
def test_checkpoints_are_exchanged_with_fsdp2(tmp_path: Path) -> None:
    for make_saved, ways in ((_theirs, ["torch's states"]), (_ours, ["torch's states", "checkpoint"])):
        saved = make_saved(1)
        update(*saved)
        for way in ways:
            WAYS[way].save(*saved, tmp_path / f"{make_saved.__name__} {way}")
        expected = _values(*saved)
        update(*saved)
        after = _values(*saved)
        for way in ways:
            for make_loaded, load_it in ((_theirs, _load_torch_states), (_ours, _load_torch_states), (_ours, rows)):
                loaded = make_loaded(2)
                update(*loaded)  # creates optimizer state, which loading replaces
                loaded[1].param_groups[0]["lr"] = 0.5
                load_it(*loaded, tmp_path / f"{make_saved.__name__} {way}", None)
                assert_equal(_values(*loaded), expected, (make_saved, way, make_loaded, load_it))
                update(*loaded)
                assert_equal(_values(*loaded), after, (make_saved, way, make_loaded, load_it))
