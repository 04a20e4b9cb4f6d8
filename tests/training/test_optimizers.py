"""Optimizers that need whole parameters (``WholeParameters``), several on one model, in training and in checkpoints.

Most tests set gradients directly, so that nothing has to be traced.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import WholeParameters

import pytest
import torch
import torch.distributed as dist
from coded import coded, says
from models import Model
from ranks import on_ranks
from recorded import Recorded
from scenario import Run, everywhere
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon


class Matrices(Model):
    """Fewer rows than ranks, uneven rows, an unused matrix, vectors, a 0-dim and a frozen parameter. It is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.blocks = nn.ModuleList(nn.Linear(*sizes) for sizes in ((5, 7), (7, 13), (13, 3)))
        self.unused = nn.Parameter(torch.randn(6, 5))
        self.blocks[1].bias.requires_grad_(False)


def run_of_matrices(**options: Any) -> Run:
    """Return a sharded model and the unsharded one, which must have the same bits, without optimizers."""
    torch.manual_seed(0)
    run = Run(Matrices(), tolerance=0, **options)
    run.optimizers = []
    return run


def add_optimizer(
    run: Run, choose: Callable[[str, torch.Tensor], bool], cls: Any, *, whole: bool = True, **options: Any
) -> Any:
    """Create an optimizer for the parameters for which ``choose`` is true, on each model, and return the first."""
    names = [n for n, p in run.reference.named_parameters() if p.requires_grad and choose(n, p)]
    ours, theirs = ([model.get_parameter(n) for n in names] for model in (run.model, run.reference))
    made = WholeParameters(cls, run.model, ours, **options) if whole else cls(ours, **options)
    run.optimizers += [made, cls(theirs, **options)]
    return made


def train(run: Run, steps: range) -> None:
    for step in steps:
        run.gradients(step)
        run.step()


def _is_matrix(name: str, param: torch.Tensor) -> bool:
    return param.ndim == 2


def _is_not_matrix(name: str, param: torch.Tensor) -> bool:
    return param.ndim != 2


def _always(name: str, param: torch.Tensor) -> bool:
    return True


#
# Training
#


@on_ranks(4)
def test_optimizers_schedulers_and_layouts_are_bit_equal_to_the_unsharded_model(rank: int, world_size: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    alone = [dist.new_group([r]) for r in range(world_size)]
    layouts: list[dict[str, Any]] = [
        {"transport": "coalesced"},
        {"bucketing_strategy": "none", "ranks": alone[rank]},
        {
            "ranks": tfs.Ranks(
                process_group_for=lambda name, param: pairs[rank % 2] if name.startswith("blocks") else None
            )
        },
    ]
    run = run_of_matrices(ranks=(2, 2), transport="coalesced")
    add_optimizer(run, _is_matrix, Muon, lr=0.05, weight_decay=0.1)
    add_optimizer(run, _is_not_matrix, AdamW, whole=False, lr=0.01)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(muon, 0.1, total_steps=6) for muon in run.optimizers[:2]]
    for step in range(3):
        train(run, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    lrs = [optimizer.param_groups[0]["lr"] for optimizer in run.optimizers[:2]]
    assert lrs[0] == lrs[1] != 0.05
    for layout in layouts:
        run = run_of_matrices(**layout)
        add_optimizer(run, _is_matrix, Adafactor, lr=0.05)
        add_optimizer(run, _is_not_matrix, Adafactor, lr=0.02, weight_decay=0.1)  # not elementwise, even for vectors
        train(run, range(3))
    run = run_of_matrices(ranks=alone[rank])
    add_optimizer(run, _is_matrix, Muon, whole=False)  # on one rank the shard has all rows
    train(run, range(1))
    run = run_of_matrices()
    add_optimizer(run, _is_matrix, Adagrad, initial_accumulator_value=0.5)  # creates its state in its constructor
    add_optimizer(run, _is_not_matrix, SGD, momentum=0.9)
    train(run, range(3))


@on_ranks(2)
def test_a_compiled_step_of_an_optimizer_is_refused() -> None:
    run = run_of_matrices()
    ours = add_optimizer(run, _is_matrix, AdamW, whole=False, foreach=True)
    run.gradients(0)
    with pytest.raises(RuntimeError, check=coded("module.called-under-torch-compile", "AdamW.step")):
        torch.compile(ours.step, backend="eager")()
    torch.compiler.reset()  # Dynamo remembers the frames that it has skipped, of any optimizer
    torch.compile(run.optimizers[1].step, backend="eager")()  # of the unsharded model
    ours.step()
    run.tolerance = 1e-6  # compiled, it corrects its moments in other order
    run.compare_parameters()


@on_ranks(2)
def test_optimizers_that_need_more_than_rows_are_refused() -> None:
    for cls in (Muon, Adafactor):
        run = run_of_matrices(transport="coalesced")
        ours = add_optimizer(run, lambda name, param: name == "blocks.1.weight", cls, whole=False, lr=0.05)
        run.gradients(0)
        with pytest.raises(ValueError, check=coded("optimizer.needs-whole-parameters", cls.__name__)):
            ours.step()
    lbfgs = torch.optim.LBFGS([*run.model.parameters()])
    with pytest.raises(ValueError, check=coded("optimizer.mixes-ranks", "LBFGS")):
        lbfgs.step(lambda: torch.tensor(0.0))
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

    with pytest.raises(ValueError, check=coded("optimizer.mixes-ranks", "ZeroRedundancyOptimizer")):
        ZeroRedundancyOptimizer([*run.model.parameters()], SGD, lr=0.1).step()
    [param] = ours.param_groups[0]["params"]
    ours.state[param]["row_var"] = torch.ones(2, 1)  # of the rows, if the step had not been refused
    with pytest.raises(tfs.CheckpointError, check=coded("optimizer.state-of-unknown-shard", "'row_var' of parameter")):
        tfs.save_checkpoint(run.model, "nowhere", ours)


@on_ranks(4)
def test_each_parameter_has_one_owner_and_a_step_issues_two_collectives(world_size: int) -> None:
    run = run_of_matrices()
    muon = add_optimizer(run, _is_matrix, Muon)
    run.gradients(0)
    with Recorded() as recorded:
        muon.step()
    assert recorded.collectives == ["alltoall_base_", "alltoall_base_"], recorded.collectives
    muon.zero_grad()
    with Recorded() as recorded:
        muon.step()  # no rank has gradients
    assert not recorded.collectives

    name_of = {param: name for name, param in run.model.named_parameters()}
    owners = {
        name_of[param]: [rank for rank, owns in enumerate(everywhere(param in muon.state)) if owns]
        for group in muon.param_groups
        for param in group["params"]
    }
    assert owners.pop("unused") == []
    assert all(len(ranks) == 1 for ranks in owners.values()), owners
    assert {r for ranks in owners.values() for r in ranks} == set(range(world_size))  # four parameters, four ranks
    for param, state in muon.state.items():
        assert muon.owns(param)
        assert state["momentum_buffer"].shape == run.reference.get_parameter(name_of[param]).shape
    # Between steps it holds no gradients, and no memory for whole parameters.
    wholes = [p for group in muon.inner.param_groups for p in group["params"]]
    assert all(p.grad is None and p.untyped_storage().nbytes() == 4 for p in wholes)


@on_ranks(2)
def test_whole_parameters_behaves_like_a_torch_optimizer(rank: int) -> None:
    run = run_of_matrices()
    muon = add_optimizer(run, lambda name, param: name in ("row", "blocks.0.weight"), Muon)
    theirs = run.optimizers[1]
    rest = [m.get_parameter("blocks.1.weight") for m in (run.model, run.reference)]
    for optimizer, param in zip((muon, theirs), rest, strict=True):
        optimizer.add_param_group({"params": [param], "lr": 0.3})
    assert {k: v for k, v in muon.param_groups[1].items() if k != "params"} == {
        k: v for k, v in theirs.param_groups[1].items() if k != "params"
    }
    assert muon.defaults == theirs.defaults
    called = []
    muon.register_step_pre_hook(lambda *args: called.append("before"))
    muon.register_step_post_hook(lambda *args: called.append("after"))
    train(run, range(2))
    assert called == ["before", "after"] * 2

    saved, saved_theirs = (copy.deepcopy(optimizer.state_dict()) for optimizer in (muon, theirs))
    before = copy.deepcopy((run.model.state_dict(), run.reference.state_dict()))
    train(run, range(2, 4))
    muon.load_state_dict(saved)
    theirs.load_state_dict(saved_theirs)
    with torch.no_grad():  # the next step must start from values written into shards
        for model, state in zip((run.model, run.reference), before, strict=True):
            model.load_state_dict(state)
    muon.param_groups[1]["lr"] = theirs.param_groups[1]["lr"] = 0.07
    train(run, range(4, 6))

    def closure() -> float:
        assert torch.is_grad_enabled()
        run.gradients(6)
        return 0.5

    assert muon.step(closure) == theirs.step(closure) == 0.5
    run.compare_parameters()
    muon.zero_grad(set_to_none=False)
    assert not any(param.grad.any() for group in muon.param_groups for param in group["params"])

    states = everywhere(saved)
    with pytest.raises(ValueError, check=coded("optimizer.state-of-other-rank")):
        muon.load_state_dict(states[1 - rank])


#
# Checkpoints
#


def _three_optimizers(run: Run) -> None:
    add_optimizer(run, lambda name, param: _is_matrix(name, param) and "blocks" in name, Muon, lr=0.05)
    add_optimizer(run, lambda name, param: _is_matrix(name, param) and "blocks" not in name, Adafactor, lr=0.05)
    add_optimizer(run, _is_not_matrix, AdamW, whole=False, lr=0.02)


def _adamw(run: Run, *, whole: bool) -> None:
    add_optimizer(run, _always, AdamW, whole=whole, lr=0.05)


ADDED: dict[str, Callable[[Run], Any]] = {
    "three": _three_optimizers,
    "whole": partial(_adamw, whole=True),
    "rows": partial(_adamw, whole=False),
}


def _trained(added: str, steps: int, **options: Any) -> Run:
    run = run_of_matrices(**options)
    ADDED[added](run)
    train(run, range(steps))
    return run


@on_ranks(4)
def test_training_on_another_number_of_ranks_continues_bit_equal(rank: int, tmp_path: Path) -> None:
    for added in ADDED:
        run = _trained(added, 2, transport="coalesced")
        tfs.save_checkpoint(run.model, tmp_path / added, run.optimizers[::2])
    dist.barrier()
    for size in (2, 3):
        group = dist.new_group(list(range(size)))
        pairs = [("three", "three"), *itertools.product(("whole", "rows"), repeat=2)]
        for saved, loaded in pairs if rank < size else ():
            expected = _trained(loaded, 3, ranks=group)  # trained without saving and loading
            run = _trained(loaded, 0, ranks=group)
            with torch.no_grad():
                for param in run.model.parameters():
                    param.zero_()
            tfs.load_checkpoint(run.model, tmp_path / saved, run.optimizers[::2])
            run.gradients(2)
            for optimizer in run.optimizers[::2]:
                optimizer.step()
            run.unsharded = expected.unsharded
            run.compare_parameters()


#
# Errors
#


@on_ranks(2)
def test_errors_name_the_invalid_argument(rank: int) -> None:
    run = run_of_matrices(init=tfs.Init(ignored_params=["row"]))
    matrices = [p for p in run.model.parameters() if p.ndim == 2 and p is not run.model.get_parameter("row")]
    unsharded, ignored = run.reference.blocks[1].weight, run.model.get_parameter("row")
    bias = run.model.get_parameter("blocks.2.bias")
    refused: list[tuple[Any, Any, Any, type[Exception], coded | says]] = [
        (AdamW(matrices), run.model, matrices, TypeError, coded("optimizer.class-not-of-torch", "AdamW")),
        (torch.optim.LBFGS, run.model, matrices, TypeError, coded("optimizer.class-requires-closure", "LBFGS")),
        (Muon, run.reference, matrices, TypeError, coded("module.expected-sharded-model")),
        (Muon, run.model, [unsharded], ValueError, coded("optimizer.tensor-not-model-parameter", "(13, 7)")),
        (Muon, run.model, [ignored], ValueError, coded("optimizer.parameter-not-sharded", "row", "Muon")),
        # Errors of the optimizer class are raised on all ranks, with its own message about the whole parameters.
        (Muon, run.model, [bias], ValueError, says(r"Muon only supports 2D parameters .* torch\.Size\(\[3\]\)")),
        (Muon, run.model, [], ValueError, says("empty parameter list")),
    ]
    for cls, model, params, error, expected in refused:
        with pytest.raises(error, check=expected):
            WholeParameters(cls, model, params)
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        WholeParameters(Muon, run.model, matrices, beta=1)
    # Different parameters on each rank.
    refusal = coded("ranks.ranks-disagree", "what WholeParameters was given for Muon, line")
    with pytest.raises(tfs.ScheduleDisagreement, check=refusal):
        WholeParameters(Muon, run.model, matrices[rank:])
    named = [(n, p) for n, p in run.model.named_parameters() if any(p is m for m in matrices)]
    muon = WholeParameters(Muon, run.model, named[:2], lr=0.1)
    assert muon.param_groups[0]["param_names"] == [n for n, _ in named[:2]]
    with pytest.raises(ValueError, check=coded("optimizer.tensor-not-model-parameter")):
        muon.add_param_group({"params": [("other", nn.Parameter(torch.ones(2, 2)))]})
    assert len(muon.param_groups) == 1
    muon.add_param_group({"params": named[2:]})
    assert len(muon.param_groups) == 2


@on_ranks(2)
def test_an_update_that_fails_on_one_rank_does_not_block_the_others(rank: int) -> None:
    run = run_of_matrices()
    muon = add_optimizer(run, _is_matrix, Muon)
    run.gradients(0)
    if rank == 1:
        muon.param_groups[0]["ns_steps"] = 1000
        with pytest.raises(ValueError, match="Number of steps must be less than 100"):
            muon.step()
    else:
        muon.step()
