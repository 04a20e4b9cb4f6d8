"""Optimizers in checkpoints must be the same on all ranks and of the class that was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import load_checkpoint, save_checkpoint

import pytest
import torch
from ranks import on_ranks
from saving import assert_equal, contents, refused, small, update
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop


def _groups(params: list[Any], rank: int) -> Optimizer:
    return AdamW([{"params": params[:1], "lr": 0.3}, {"params": params[1:], "lr": (1 + rank) / 10}])


DIFFERENT: dict[str, tuple[Callable[[Any, list[Any], int], Any], str]] = {
    "option": (lambda m, p, r: _groups(p, r), r"'lr' of param_groups\[1\] of AdamW: 0\.1 on ranks \[0\]; 0\.2 on ra"),
    "number": (lambda m, p, r: [] if r else SGD(p), r"optimizers: SGD on ranks \[0\]; none on ranks \[1\]"),
    "class": (lambda m, p, r: (AdamW if r else SGD)(p), r"optimizers: SGD on ranks \[0\]; AdamW on ranks \[1\]"),
    "parameters": (
        lambda m, p, r: SGD(p[:2] if r else p),
        r"the parameters of param_groups\[0\] of SGD: 0\.weight, 0\.bias, 2\.weight, 2\.bias on ranks \[0\]; 0\.weight, 0",
    ),
    "state": (
        lambda m, p, r: AdamW(p) if r else update(m, AdamW(p)),
        r"\['step'\] of '0\.weight': 1\.0 on ranks \[0\]; none on ranks \[1\]",
    ),
    "steps": (
        lambda m, p, r: update(m, update(m, AdamW(p)) if r else AdamW(p)),
        r"\['step'\] of '0\.weight': 1\.0 on ranks \[0\]; 2\.0 on ranks \[1\]",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
@on_ranks(2)
def test_optimizers_that_differ_between_ranks_are_refused(rank: int, tmp_path: Path, case: str) -> None:
    model, same = small()
    make, message = DIFFERENT[case]
    optimizers = make(model, list(model.parameters()), rank)
    refused(f"differ between ranks: {message}", model, save_checkpoint, tmp_path / "refused", model, optimizers)
    assert not (tmp_path / "refused").exists()
    save_checkpoint(tmp_path / "same", model, iter([same]))
    message = r"ranks load into different optimizers, nothing is changed: optimizers:"
    refused(message, model, load_checkpoint, tmp_path / "same", model, [same] if rank else [])
    load_checkpoint(tmp_path / "same", model, iter([same]))


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
    "none into momentum": (SGD, lambda p: SGD(p, momentum=0.9, lr=0.1), r"saved with momentum=0 where .* has 0\.9"),
}


@on_ranks(2)
def test_the_state_of_another_optimizer_class_is_refused(tmp_path: Path) -> None:
    for case, (saved, loaded, message) in OTHER_KINDS.items():
        model, _ = small()
        save_checkpoint(tmp_path / case, model, update(model, saved(model.parameters())))
        for steps in (0, 1):
            other, _ = small(5.0)
            optimizer = loaded(other.parameters())
            for _ in range(steps):
                update(other, optimizer)
            before = [dict(group) for group in optimizer.param_groups]
            expected = f"does not fit the optimizers, nothing is changed.*{message}"
            refused(expected, other, load_checkpoint, tmp_path / case, other, optimizer)
            assert [dict(group) for group in optimizer.param_groups] == before


class _Own(AdamW):
    """An optimizer whose step needs an attribute that is not an option of its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.scale = 1.0

    def step(self, closure: Any = None) -> None:
        super().step(closure if self.scale else None)


SAME_KINDS: dict[str, Callable[[Any, Any], Optimizer]] = {
    "AdamW": lambda m, p: AdamW(p, lr=torch.tensor(0.1), capturable=False),
    "Adam, fused": lambda m, p: Adam(p, fused=True, amsgrad=True),
    "SGD": lambda m, p: SGD(p),
    "SGD, momentum": lambda m, p: SGD(p, momentum=0.9),
    "Adagrad": lambda m, p: Adagrad(p),
    "its own": lambda m, p: _Own(p),
    "Adafactor": lambda m, p: tfs.WholeParameters(Adafactor, m, p),
    "Muon": lambda m, p: tfs.WholeParameters(Muon, m, [q for q in p if q.ndim == 2]),
}


@on_ranks(2)
def test_the_state_of_the_same_class_is_loaded_into_new_optimizers(tmp_path: Path) -> None:
    for case, make in SAME_KINDS.items():
        for steps in (0, 1):
            model, other = small()[0], small(5.0)[0]
            optimizers = [make(m, list(m.parameters())) for m in (model, other)]
            for _ in range(steps):
                update(model, optimizers[0])
            for group in optimizers[0].param_groups:
                group["initial_lr"] = group["lr"]  # as schedulers do
            save_checkpoint(tmp_path / f"{case} {steps}", model, optimizers[0])
            hooks: list[str] = []
            optimizers[1].register_step_pre_hook(lambda *_, hooks=hooks: hooks.append("step"))
            load_checkpoint(tmp_path / f"{case} {steps}", other, optimizers[1])
            assert not hooks and "initial_lr" in optimizers[1].param_groups[0]
            assert_equal(contents(other, optimizers[1]), contents(model, optimizers[0]), (case, steps))
