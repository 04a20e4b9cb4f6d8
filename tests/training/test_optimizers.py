"""Optimizers that need whole parameters (``WholeParameters``), several on one model, in training and in checkpoints.

Most tests set gradients directly, so that nothing has to be traced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import WholeParameters, fsdp, full_state_dict
from thunder_fsdp_sched.runtime.row_dtensor import RowDTensor

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Model
from ranks import Ranks, on_ranks
from scenario import loss_of
from test_gradients import _RecordCollectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon


class Matrices(Model):
    """A model with fewer rows than ranks, uneven rows, an unused matrix, vectors, a 0-dim and a frozen parameter."""

    width = 5

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.blocks = nn.ModuleList(nn.Linear(*sizes) for sizes in ((5, 7), (7, 13), (13, 3)))
        self.unused = nn.Parameter(torch.randn(6, 5))
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + self.row
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


class ShardedAndReference:
    """A sharded model and its unsharded copy, with the same optimizers for each."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.reference = Matrices()
        self.model = thunder.jit(copy.deepcopy(self.reference), transforms=[fsdp(**options)])
        self.sharded = next(t for t in self.model._lc_transforms if hasattr(t, "sharded")).sharded
        self.optimizers: list[torch.optim.Optimizer] = []
        self.reference_optimizers: list[torch.optim.Optimizer] = []

    def add_optimizer(
        self, choose: Callable[[str, torch.Tensor], bool], cls: Any, *, whole: bool = True, **options: Any
    ) -> Any:
        """Create an optimizer for the parameters for which ``choose`` is true, on each model."""
        names = [n for n, p in self.reference.named_parameters() if p.requires_grad and choose(n, p)]
        ours = [self.model.get_parameter(n) for n in names]
        self.optimizers.append(WholeParameters(cls, self.model, ours, **options) if whole else cls(ours, **options))
        self.reference_optimizers.append(cls([self.reference.get_parameter(n) for n in names], **options))
        return self.optimizers[-1]

    def gradients(self, step: int) -> None:
        """Set the same random gradients on both models."""
        generator = torch.Generator().manual_seed(step)
        for name, param in self.reference.named_parameters():
            grad = torch.randn(param.shape, generator=generator)
            if param.requires_grad and name != "unused":
                param.grad = grad
                bucket, index = self.sharded.locations[name]
                rows = bucket.rows[index].of(grad).clone()
                self.model.get_parameter(name).grad = RowDTensor.wrap(rows, bucket.rows[index])

    def gather_gradients(self) -> None:
        """Copy the sharded model's gradients to the reference, and check that all ranks have the same ones."""
        for name, param in self.reference.named_parameters():
            grad = self.model.get_parameter(name).grad
            has_grad = [None] * dist.get_world_size()
            dist.all_gather_object(has_grad, grad is not None)
            assert len(set(has_grad)) == 1, (name, has_grad)
            param.grad = None if grad is None else grad.full_tensor()

    def step(self) -> None:
        for optimizer in (*self.optimizers, *self.reference_optimizers):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: range) -> None:
        for step in steps:
            self.gradients(step)
            self.step()
        self.check()

    def check(self) -> None:
        whole = full_state_dict(self.model)
        for name, param in self.reference.state_dict().items():
            assert torch.equal(whole[name], param), name

    def ranks_with_state(self) -> dict[str, list[int]]:
        """Return, for each parameter of the first optimizer, the ranks that have state for it."""
        owners: dict[str, list[int]] = {}
        for group in self.optimizers[0].param_groups:
            for param in group["params"]:
                name = next(n for n, p in self.model.named_parameters() if p is param)
                all_ranks: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(all_ranks, param in self.optimizers[0].state)
                owners[name] = [rank for rank, has in enumerate(all_ranks) if has]
        return owners


def _is_matrix(name: str, param: torch.Tensor) -> bool:
    return param.ndim == 2


def _is_not_matrix(name: str, param: torch.Tensor) -> bool:
    return param.ndim != 2


def _always(name: str, param: torch.Tensor) -> bool:
    return True


#
# Training
#


@pytest.mark.parametrize("options", [{}, {"mesh": (2, 2), "transport": "coalesced"}], ids=["flat", "hybrid"])
@on_ranks(4)
def test_muon_with_adamw_is_bit_equal_to_the_unsharded_model(rank: int, options: dict[str, Any]) -> None:
    if options.get("mesh"):
        options = {**options, "mesh": init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicate", "shard"))}
    both = ShardedAndReference(**options)
    both.add_optimizer(_is_matrix, Muon, lr=0.05, weight_decay=0.1)
    both.add_optimizer(_is_not_matrix, AdamW, whole=False, lr=0.01)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(muon, 0.1, total_steps=6)
        for muon in (both.optimizers[0], both.reference_optimizers[0])
    ]
    for step in range(3):
        (x,) = Matrices.inputs(both.model, torch.Generator().manual_seed(10 * step + rank), batch=4)
        loss_of(both.model(x.float())).backward()
        both.gather_gradients()
        both.step()
        for scheduler in schedulers:
            scheduler.step()
        both.check()
    lrs = [optimizer.param_groups[0]["lr"] for optimizer in (both.optimizers[0], both.reference_optimizers[0])]
    assert lrs[0] == lrs[1] != 0.05


@on_ranks(4)
def test_several_optimizers_and_layouts_are_bit_equal_to_the_unsharded_model(rank: int, world_size: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    alone = [dist.new_group([r]) for r in range(world_size)]
    layouts: list[dict[str, Any]] = [
        {"transport": "coalesced"},
        {"bucketing_strategy": "none", "process_group": alone[rank]},
        {"process_group_for": lambda name, param: pairs[rank % 2] if name.startswith("blocks") else None},
    ]
    for layout in layouts:
        both = ShardedAndReference(**layout)
        both.add_optimizer(_is_matrix, Adafactor, lr=0.05)
        both.add_optimizer(_is_not_matrix, Adafactor, lr=0.02, weight_decay=0.1)  # not elementwise, even for vectors
        both.train(range(3))
    both = ShardedAndReference(process_group=alone[rank])
    both.add_optimizer(_is_matrix, Muon, whole=False)  # on one rank the shard has all rows
    both.train(range(1))
    both = ShardedAndReference()
    both.add_optimizer(_is_matrix, Adagrad, initial_accumulator_value=0.5)  # creates its state in its constructor
    both.add_optimizer(_is_not_matrix, SGD, momentum=0.9)
    both.train(range(3))


@on_ranks(2)
def test_optimizers_that_need_more_than_rows_are_refused() -> None:
    for cls in (Muon, Adafactor):
        both = ShardedAndReference(transport="coalesced")
        ours = both.add_optimizer(lambda name, param: name == "blocks.1.weight", cls, whole=False, lr=0.05)
        both.gradients(0)
        with pytest.raises(
            ValueError, match=rf"{cls.__name__} needs whole parameters.*'blocks\.1\.weight'.*WholeParam"
        ):
            ours.step()
    lbfgs = torch.optim.LBFGS([*both.model.parameters()])
    with pytest.raises(ValueError, match=r"LBFGS computes one direction .*rows of '"):
        lbfgs.step(lambda: torch.tensor(0.0))
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

    with pytest.raises(
        ValueError, match=r"ZeroRedundancyOptimizer copies what one rank has updated to all others.*rows"
    ):
        ZeroRedundancyOptimizer([*both.model.parameters()], SGD, lr=0.1).step()
    [param] = ours.param_groups[0]["params"]
    ours.state[param]["row_var"] = torch.ones(2, 1)  # of the rows, if the step had not been refused
    with pytest.raises(tfs.CheckpointError, match=r"'row_var' of parameter.*have to be made by WholeParameters"):
        tfs.save_checkpoint("nowhere", both.model, ours)


@on_ranks(4)
def test_each_parameter_has_one_owner_and_a_step_issues_two_collectives(world_size: int) -> None:
    both = ShardedAndReference()
    muon = both.add_optimizer(_is_matrix, Muon)
    both.gradients(0)
    with _RecordCollectives() as issued:
        muon.step()
    assert issued == ["alltoall_base_", "alltoall_base_"], issued
    muon.zero_grad()
    with _RecordCollectives() as issued:
        muon.step()  # no rank has gradients
    assert not issued
    owners = both.ranks_with_state()
    assert owners.pop("unused") == []
    assert all(len(ranks) == 1 for ranks in owners.values()), owners
    assert {r for ranks in owners.values() for r in ranks} == set(range(world_size))  # four parameters, four ranks
    for param, state in muon.state.items():
        assert muon.owns(param)
        name = next(n for n, p in both.model.named_parameters() if p is param)
        assert state["momentum_buffer"].shape == both.reference.get_parameter(name).shape
    # Between steps it holds no gradients, and no memory for whole parameters.
    wholes = [p for group in muon._inner.param_groups for p in group["params"]]
    assert all(p.grad is None and p.untyped_storage().nbytes() == 4 for p in wholes)


@on_ranks(2)
def test_whole_parameters_behaves_like_a_torch_optimizer(rank: int, world_size: int) -> None:
    both = ShardedAndReference()
    muon = both.add_optimizer(lambda name, param: name in ("row", "blocks.0.weight"), Muon)
    rest = [m.get_parameter("blocks.1.weight") for m in (both.model, both.reference)]
    for optimizer, param in zip((muon, both.reference_optimizers[0]), rest, strict=True):
        optimizer.add_param_group({"params": [param], "lr": 0.3})
    assert {k: v for k, v in muon.param_groups[1].items() if k != "params"} == {
        k: v for k, v in both.reference_optimizers[0].param_groups[1].items() if k != "params"
    }
    assert muon.defaults == both.reference_optimizers[0].defaults
    called = []
    muon.register_step_pre_hook(lambda *args: called.append("before"))
    muon.register_step_post_hook(lambda *args: called.append("after"))
    both.train(range(2))
    assert called == ["before", "after"] * 2

    saved, reference_optimizers = (
        copy.deepcopy(muon.state_dict()),
        copy.deepcopy(both.reference_optimizers[0].state_dict()),
    )
    before = copy.deepcopy((both.model.state_dict(), both.reference.state_dict()))
    both.train(range(2, 4))
    muon.load_state_dict(saved)
    both.reference_optimizers[0].load_state_dict(reference_optimizers)
    with torch.no_grad():  # the next step must start from values written into shards
        for model, state in zip((both.model, both.reference), before, strict=True):
            model.load_state_dict(state)
    muon.param_groups[1]["lr"] = both.reference_optimizers[0].param_groups[1]["lr"] = 0.07
    both.train(range(4, 6))

    def closure() -> float:
        assert torch.is_grad_enabled()
        both.gradients(6)
        return 0.5

    assert muon.step(closure) == both.reference_optimizers[0].step(closure) == 0.5
    both.check()
    muon.zero_grad(set_to_none=False)
    assert not any(param.grad.any() for group in muon.param_groups for param in group["params"])

    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, saved)
    with pytest.raises(ValueError, match=r"it has the state of '\S+', which another rank owns.*save_checkpoint"):
        muon.load_state_dict(states[1 - rank])


#
# Checkpoints
#


def _three_optimizers(both: ShardedAndReference) -> None:
    both.add_optimizer(lambda name, param: _is_matrix(name, param) and "blocks" in name, Muon, lr=0.05)
    both.add_optimizer(lambda name, param: _is_matrix(name, param) and "blocks" not in name, Adafactor, lr=0.05)
    both.add_optimizer(_is_not_matrix, AdamW, whole=False, lr=0.02)


def _save(rank: int, world_size: int, folder: Path) -> None:
    both = ShardedAndReference()
    _three_optimizers(both)
    both.train(range(2))
    tfs.save_checkpoint(folder / "three", both.model, both.optimizers)
    for whole in (True, False):
        both = ShardedAndReference(transport="coalesced")
        both.add_optimizer(_always, AdamW, whole=whole, lr=0.05)
        both.train(range(2))
        tfs.save_checkpoint(folder / f"adamw-{whole}", both.model, both.optimizers)


def _load(rank: int, world_size: int, folder: Path, size: int) -> None:
    group = dist.new_group(list(range(size)))
    if rank >= size:
        return

    def resume(saved: str, add_optimizer: Callable[[ShardedAndReference], object]) -> None:
        both = ShardedAndReference(process_group=group)
        add_optimizer(both)
        expected = ShardedAndReference(process_group=group)  # trained without saving and loading
        add_optimizer(expected)
        expected.train(range(3))
        with torch.no_grad():
            for param in both.model.parameters():
                param.zero_()
        tfs.load_checkpoint(folder / saved, both.model, both.optimizers)
        both.gradients(2)
        for optimizer in both.optimizers:
            optimizer.step()
        both.reference = expected.reference
        both.check()

    resume("three", _three_optimizers)
    for was_whole in (True, False):
        for whole in (True, False):
            resume(
                f"adamw-{was_whole}", lambda both, whole=whole: both.add_optimizer(_always, AdamW, whole=whole, lr=0.05)
            )
    both = ShardedAndReference(process_group=group)
    optimizer = AdamW([both.model.get_parameter(n) for n in ("row", "unused")])
    with pytest.raises(tfs.CheckpointError, match=r"of AdamW has no option 'beta2_decay', 'd'"):
        tfs.load_checkpoint(folder / "three", both.model, optimizer)


def test_training_on_another_number_of_ranks_continues_bit_equal(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(_save, tmp_path)
    for size in (2, 3):
        four_ranks.run(_load, tmp_path, size)


#
# Errors
#


@on_ranks(2)
def test_errors_name_the_invalid_argument(rank: int) -> None:
    both = ShardedAndReference(ignored_params=["row"])
    matrices = [p for p in both.model.parameters() if p.ndim == 2 and p is not both.model.get_parameter("row")]
    with pytest.raises(TypeError, match=r"optimizer_class: expected a class of torch\.optim.*, got AdamW"):
        WholeParameters(AdamW(matrices), both.model, matrices)
    with pytest.raises(TypeError, match="optimizer_class: LBFGS computes the loss several times"):
        WholeParameters(torch.optim.LBFGS, both.model, matrices)
    with pytest.raises(TypeError, match=r"expected the result of thunder\.jit"):
        WholeParameters(Muon, both.reference, matrices)
    with pytest.raises(ValueError, match=r"a tensor of shape \(13, 7\) is no parameter of the model"):
        WholeParameters(Muon, both.model, [both.reference.blocks[1].weight])
    with pytest.raises(ValueError, match=r"'row' is not sharded \(ignored_params\).*pass it to Muon directly"):
        WholeParameters(Muon, both.model, [both.model.get_parameter("row")])
    # Errors of the optimizer class are raised on all ranks, with its own message about the whole parameters.
    with pytest.raises(ValueError, match=r"Muon only supports 2D parameters .* torch\.Size\(\[3\]\)"):
        WholeParameters(Muon, both.model, [both.model.get_parameter("blocks.2.bias")])
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        WholeParameters(Muon, both.model, matrices, beta=1)
    with pytest.raises(ValueError, match="empty parameter list"):
        WholeParameters(Muon, both.model, [])
    # Different parameters on each rank.
    with pytest.raises(tfs.ScheduleDisagreement, match=r"what WholeParameters was given for Muon, line \d"):
        WholeParameters(Muon, both.model, matrices[rank:])
    named = [(n, p) for n, p in both.model.named_parameters() if any(p is m for m in matrices)]
    muon = WholeParameters(Muon, both.model, named[:2], lr=0.1)
    assert muon.param_groups[0]["param_names"] == [n for n, _ in named[:2]]
    with pytest.raises(ValueError, match="no parameter of the model"):
        muon.add_param_group({"params": [("other", nn.Parameter(torch.ones(2, 2)))]})
    assert len(muon.param_groups) == 1
    muon.add_param_group({"params": named[2:]})
    assert len(muon.param_groups) == 2


@on_ranks(2)
def test_an_update_that_fails_on_one_rank_does_not_block_the_others(rank: int) -> None:
    both = ShardedAndReference()
    muon = both.add_optimizer(_is_matrix, Muon)
    both.gradients(0)
    if rank == 1:
        muon.param_groups[0]["ns_steps"] = 1000
        with pytest.raises(ValueError, match="Number of steps must be less than 100"):
            muon.step()
    else:
        muon.step()
