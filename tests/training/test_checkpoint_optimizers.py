"""Optimizers in checkpoints must be the same on all ranks and of the class that was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp, full_state_dict, load_checkpoint, save_checkpoint
from thunder_fsdp_sched.runtime.row_dtensor import local_rows

import pytest
import thunder
import torch
from ranks import Ranks
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop


def _model() -> Any:
    return thunder.jit(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, bias=False)), transforms=[fsdp()])


def _step(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _differ(rank: int, world_size: int, folder: Path) -> None:
    model = _model()
    params = list(model.parameters())

    def refused(message: str, *optimizers: Optimizer) -> None:
        with pytest.raises(tfs.CheckpointError, match=f"optimizers differ between ranks.*{message}"):
            save_checkpoint(folder / "refused", model, optimizers)
        assert not (folder / "refused").exists() or not any((folder / "refused").iterdir())

    refused(
        r"'lr' of param_groups\[1\] of AdamW: 0\.1 on ranks \[0\]; 0\.2 on ranks \[1\]",
        AdamW([{"params": params[:1], "lr": 0.3}, {"params": params[1:], "lr": (1 + rank) / 10}]),
    )
    refused(r"optimizers: SGD on ranks \[0\]; none on ranks \[1\]", *([SGD(params)] if rank == 0 else []))
    refused(r"optimizers: SGD on ranks \[0\]; AdamW on ranks \[1\]", (AdamW if rank else SGD)(params))
    refused(
        r"the parameters of param_groups\[0\] of SGD: 0\.weight, 0\.bias, 1\.weight on ranks \[0\]; 0\.weight, 0",
        SGD(params if rank == 0 else params[:2]),
    )
    stepped = AdamW(params, lr=torch.tensor(0.1))
    if rank == 0:
        _step(stepped)
    refused(r"the state of '0\.weight': exp_avg, exp_avg_sq, step on ranks \[0\]; none on ranks \[1\]", stepped)
    if rank == 1:
        _step(stepped), _step(stepped)
    refused(r"'step' of '0\.weight': 1\.0 on ranks \[0\]; 2\.0 on ranks \[1\]", stepped)

    same = _step(AdamW(params, lr=torch.tensor(0.1)))
    save_checkpoint(folder / "same", model, iter([same]))
    with pytest.raises(
        tfs.CheckpointError, match=r"ranks load into different optimizers, nothing is changed: optimizers:"
    ):
        load_checkpoint(folder / "same", model, [same] if rank else [])
    load_checkpoint(folder / "same", model, iter([same]))


def test_optimizers_that_differ_between_ranks_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_differ, tmp_path)


# The optimizer that was saved, the one it is loaded into, and the error.
OTHER_KINDS: dict[str, tuple[Callable[[Any], Optimizer], Callable[[Any], Optimizer], str]] = {
    "AdamW into SGD": (
        AdamW,
        lambda p: SGD(p, momentum=0.9),
        r"another kind of optimizer: param_groups\[0\] of SGD has no option 'amsgrad', 'betas'",
    ),
    "AdamW into RMSprop": (AdamW, RMSprop, r"of RMSprop has no option 'amsgrad', 'betas'"),
    "Adagrad into AdamW": (Adagrad, AdamW, r"of AdamW has no option 'initial_accumulator_value', 'lr_decay'"),
    "AMSGrad into none": (
        lambda p: AdamW(p, amsgrad=True),
        AdamW,
        r"amsgrad=True where param_groups\[0\] of AdamW has False",
    ),
    "none into AMSGrad": (AdamW, lambda p: AdamW(p, amsgrad=True), r"amsgrad=False where .* has True"),
    "momentum into none": (lambda p: SGD(p, momentum=0.9), SGD, r"momentum=0\.9 where .* has 0"),
    "none into momentum": (
        SGD,
        lambda p: SGD(p, momentum=0.9, lr=0.1),
        r"saved with momentum=0 where .* has 0\.9",
    ),
}


def _load_other_kinds(rank: int, world_size: int, folder: Path) -> None:
    for case, (saved, loaded, message) in OTHER_KINDS.items():
        model = _model()
        save_checkpoint(folder / case, model, _step(saved(model.parameters())))
        for stepped in (False, True):
            other = _model()
            optimizer = loaded(other.parameters())
            if stepped:
                _step(optimizer)
            before, groups = full_state_dict(other), [dict(group) for group in optimizer.param_groups]
            with pytest.raises(
                tfs.CheckpointError, match=f"does not fit the optimizers, nothing is changed.*{message}"
            ):
                load_checkpoint(folder / case, other, optimizer)
            assert all(torch.equal(value, before[name]) for name, value in full_state_dict(other).items())
            assert [dict(group) for group in optimizer.param_groups] == groups


def test_the_state_of_another_optimizer_class_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_load_other_kinds, tmp_path)


class _Own(AdamW):
    """An optimizer whose step needs an attribute that is not an option of its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.scale = 1.0

    def step(self, closure: Any = None) -> None:
        super().step(closure if self.scale else None)


def _load_the_same_kind(rank: int, world_size: int, folder: Path) -> None:
    kinds: dict[str, Callable[[Any, Any], Optimizer]] = {
        "AdamW": lambda m, p: AdamW(p, lr=torch.tensor(0.1), capturable=False),
        "Adam, fused": lambda m, p: Adam(p, fused=True, amsgrad=True),
        "SGD": lambda m, p: SGD(p),
        "SGD, momentum": lambda m, p: SGD(p, momentum=0.9),
        "Adagrad": lambda m, p: Adagrad(p),
        "its own": lambda m, p: _Own(p),
        "Adafactor": lambda m, p: tfs.WholeParameters(Adafactor, m, p),
        "Muon": lambda m, p: tfs.WholeParameters(Muon, m, [q for q in p if q.ndim == 2]),
    }
    for case, make in kinds.items():
        for steps in (0, 1):
            model, other = _model(), _model()
            optimizers = [make(m, list(m.parameters())) for m in (model, other)]
            for _ in range(steps):
                _step(optimizers[0])
            for group in optimizers[0].param_groups:
                group["initial_lr"] = group["lr"]  # as schedulers do
            save_checkpoint(folder / f"{case} {steps}", model, optimizers[0])
            hooks = []
            optimizers[1].register_step_pre_hook(lambda *_, hooks=hooks: hooks.append("step"))
            load_checkpoint(folder / f"{case} {steps}", other, optimizers[1])
            assert not hooks and optimizers[1].param_groups[0]["initial_lr"] == optimizers[0].param_groups[0]["lr"]
            ours, theirs = ([o.state.get(p, {}) for g in o.param_groups for p in g["params"]] for o in optimizers)
            for saved, loaded in zip(ours, theirs, strict=True):
                assert saved.keys() == loaded.keys()
                for key, value in saved.items():
                    torch.testing.assert_close(local_rows(value), local_rows(loaded[key]), rtol=0, atol=0)


def test_the_state_of_the_same_class_is_loaded_into_new_optimizers(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_load_the_same_kind, tmp_path)


def _give_odd_extra(rank: int, world_size: int, folder: Path) -> None:
    model = _model()
    save_checkpoint(folder / "good", model, extra={"step": 1})
    for extra in ([1], "step", 3, ("step", 1)):
        for call in (save_checkpoint, load_checkpoint):
            with pytest.raises(tfs.CheckpointError, match=r"extra: expected a dictionary of values by name, got"):
                call(folder / ("good" if call is load_checkpoint else "bad"), model, extra=extra)


def test_extra_that_is_not_a_dictionary_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_give_odd_extra, tmp_path)
