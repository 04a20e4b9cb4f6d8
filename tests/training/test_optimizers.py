"""Optimizers that need whole parameters, several on one model, in training and in checkpoints.

Most tests make gradients themselves, so that nothing is traced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import WholeParameters, fsdp, full_state_dict
from thunder_fsdp_sched.sharding.sharded_module import gather_param

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Model
from ranks import Ranks
from reference import loss_of
from test_gradients import _collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon


class Matrices(Model):
    """Fewer rows than ranks, uneven rows, an unused matrix among used ones, vectors, a 0-dim and a frozen parameter."""

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


class Pair:
    """A sharded model and its unsharded copy, and an equal choice of optimizers for each."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.reference = Matrices()
        self.model = thunder.jit(copy.deepcopy(self.reference), transforms=[fsdp(**options)])
        self.sharded = next(t for t in self.model._lc_transforms if hasattr(t, "sharded")).sharded
        self.optimizers: list[torch.optim.Optimizer] = []
        self.theirs: list[torch.optim.Optimizer] = []

    def use(self, choose: Callable[[str, torch.Tensor], bool], cls: Any, *, whole: bool = True, **options: Any) -> Any:
        """Gives the parameters that ``choose`` to an optimizer, and those of the reference to another."""
        names = [n for n, p in self.reference.named_parameters() if p.requires_grad and choose(n, p)]
        ours = [self.model.get_parameter(n) for n in names]
        self.optimizers.append(WholeParameters(cls, self.model, ours, **options) if whole else cls(ours, **options))
        self.theirs.append(cls([self.reference.get_parameter(n) for n in names], **options))
        return self.optimizers[-1]

    def gradients(self, step: int) -> None:
        """Gives both the same gradients of trained parameters."""
        generator = torch.Generator().manual_seed(step)
        for name, param in self.reference.named_parameters():
            grad = torch.randn(param.shape, generator=generator)
            if param.requires_grad and name != "unused":
                param.grad = grad
                bucket, index = self.sharded.locations[name]
                self.model.get_parameter(name).grad = bucket.local_rows(index, grad).clone()

    def gather_gradients(self) -> None:
        """Gives the reference the gradients of the sharded model, and checks that ranks agree on which there are."""
        for name, param in self.reference.named_parameters():
            grad = self.model.get_parameter(name).grad
            there = [None] * dist.get_world_size()
            dist.all_gather_object(there, grad is not None)
            assert len(set(there)) == 1, (name, there)
            param.grad = None if grad is None else gather_param(*self.sharded.locations[name], grad)

    def step(self) -> None:
        for optimizer in (*self.optimizers, *self.theirs):
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

    def shared(self) -> dict[str, list[int]]:
        """For each parameter of the first optimizer the ranks that have state of it."""
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


def _is_no_matrix(name: str, param: torch.Tensor) -> bool:
    return param.ndim != 2


def _everything(name: str, param: torch.Tensor) -> bool:
    return True


#
# Training
#


def _muon_and_adamw(rank: int, world_size: int, options: dict[str, Any]) -> None:
    if options.get("mesh"):
        options = {**options, "mesh": init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicate", "shard"))}
    pair = Pair(**options)
    pair.use(_is_matrix, Muon, lr=0.05, weight_decay=0.1)
    pair.use(_is_no_matrix, AdamW, whole=False, lr=0.01)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(muon, 0.1, total_steps=6) for muon in (pair.optimizers[0], pair.theirs[0])
    ]
    for step in range(3):
        (x,) = Matrices.inputs(pair.model, torch.Generator().manual_seed(10 * step + rank), batch=4)
        loss_of(pair.model(x.float())).backward()
        pair.gather_gradients()
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
        pair.check()
    lrs = [optimizer.param_groups[0]["lr"] for optimizer in (pair.optimizers[0], pair.theirs[0])]
    assert lrs[0] == lrs[1] != 0.05


@pytest.mark.parametrize("options", [{}, {"mesh": (2, 2), "transport": "coalesced"}], ids=["flat", "hybrid"])
def test_muon_beside_adamw_gives_the_bits_of_the_unsharded_model(four_ranks: Ranks, options: dict[str, Any]) -> None:
    four_ranks.run(_muon_and_adamw, options)


def _every_class(rank: int, world_size: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    alone = [dist.new_group([r]) for r in range(world_size)]
    layouts: list[dict[str, Any]] = [
        {"transport": "coalesced"},
        {"bucketing_strategy": "none", "process_group": alone[rank]},
        {"process_group_for": lambda name, param: pairs[rank % 2] if name.startswith("blocks") else None},
    ]
    for layout in layouts:
        pair = Pair(**layout)
        pair.use(_is_matrix, Adafactor, lr=0.05)
        pair.use(_is_no_matrix, Adafactor, lr=0.02, weight_decay=0.1)  # vectors, too, are more than their elements
        pair.train(range(3))
    pair = Pair(process_group=alone[rank])
    pair.use(_is_matrix, Muon, whole=False)  # its rows are all rows
    pair.train(range(1))
    pair = Pair()
    pair.use(_is_matrix, Adagrad, initial_accumulator_value=0.5)  # makes its state at once
    pair.use(_is_no_matrix, SGD, momentum=0.9)
    pair.train(range(3))


def test_any_optimizer_on_any_layout_gives_the_bits_of_the_unsharded_model(four_ranks: Ranks) -> None:
    four_ranks.run(_every_class)


def _directly(rank: int, world_size: int) -> None:
    for cls in (Muon, Adafactor):
        pair = Pair(transport="coalesced")
        ours = pair.use(lambda name, param: name == "blocks.1.weight", cls, whole=False, lr=0.05)
        pair.gradients(0)
        with pytest.raises(
            ValueError, match=rf"{cls.__name__} needs whole parameters.*'blocks\.1\.weight'.*WholeParam"
        ):
            ours.step()
        cls.step.__wrapped__(ours)  # what it would have done
        pair.theirs[0].step()
        whole = full_state_dict(pair.model)["blocks.1.weight"]
        assert (whole - pair.reference.blocks[1].weight).abs().max() > 1e-3, cls
    lbfgs = torch.optim.LBFGS([*pair.model.parameters()])
    with pytest.raises(ValueError, match=r"LBFGS computes one direction .*rows of '"):
        lbfgs.step(lambda: torch.tensor(0.0))
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

    with pytest.raises(
        ValueError, match=r"ZeroRedundancyOptimizer copies what one rank has updated to all others.*rows"
    ):
        ZeroRedundancyOptimizer([*pair.model.parameters()], SGD, lr=0.1).step()
    with pytest.raises(tfs.CheckpointError, match=r"'row_var' of parameter.*have to be made by WholeParameters"):
        tfs.save_checkpoint("nowhere", pair.model, ours)


def test_optimizers_that_rows_will_not_do_for_are_refused(ranks: Ranks) -> None:
    ranks.run(_directly)


def _owners(rank: int, world_size: int) -> None:
    pair = Pair()
    muon = pair.use(_is_matrix, Muon)
    pair.gradients(0)
    with _collectives() as issued:
        muon.step()
    assert issued == ["alltoall_base_", "alltoall_base_"], issued
    muon.zero_grad()
    with _collectives() as issued:
        muon.step()  # no rank has gradients
    assert not issued
    owners = pair.shared()
    assert owners.pop("unused") == []
    assert all(len(ranks) == 1 for ranks in owners.values()), owners
    assert {r for ranks in owners.values() for r in ranks} == set(range(world_size))  # four parameters, four ranks
    for param, state in muon.state.items():
        assert muon.owns(param)
        name = next(n for n, p in pair.model.named_parameters() if p is param)
        assert state["momentum_buffer"].shape == pair.reference.get_parameter(name).shape
    # Between steps it has nothing else.
    wholes = [p for group in muon._inner.param_groups for p in group["params"]]
    assert all(p.grad is None and p.untyped_storage().nbytes() == 4 for p in wholes)


def test_each_parameter_has_one_owner_and_a_step_two_collectives(four_ranks: Ranks) -> None:
    four_ranks.run(_owners)


def _as_an_optimizer(rank: int, world_size: int) -> None:
    pair = Pair()
    muon = pair.use(lambda name, param: name in ("row", "blocks.0.weight"), Muon)
    rest = [m.get_parameter("blocks.1.weight") for m in (pair.model, pair.reference)]
    for optimizer, param in zip((muon, pair.theirs[0]), rest, strict=True):
        optimizer.add_param_group({"params": [param], "lr": 0.3})
    assert {k: v for k, v in muon.param_groups[1].items() if k != "params"} == {
        k: v for k, v in pair.theirs[0].param_groups[1].items() if k != "params"
    }
    assert muon.defaults == pair.theirs[0].defaults
    called = []
    muon.register_step_pre_hook(lambda *args: called.append("before"))
    muon.register_step_post_hook(lambda *args: called.append("after"))
    pair.train(range(2))
    assert called == ["before", "after"] * 2

    saved, theirs = copy.deepcopy(muon.state_dict()), copy.deepcopy(pair.theirs[0].state_dict())
    before = copy.deepcopy((pair.model.state_dict(), pair.reference.state_dict()))
    pair.train(range(2, 4))
    muon.load_state_dict(saved)
    pair.theirs[0].load_state_dict(theirs)
    with torch.no_grad():  # what is written into shards is respected
        for model, state in zip((pair.model, pair.reference), before, strict=True):
            model.load_state_dict(state)
    muon.param_groups[1]["lr"] = pair.theirs[0].param_groups[1]["lr"] = 0.07
    pair.train(range(4, 6))

    def closure() -> float:
        assert torch.is_grad_enabled()
        pair.gradients(6)
        return 0.5

    assert muon.step(closure) == pair.theirs[0].step(closure) == 0.5
    pair.check()
    muon.zero_grad(set_to_none=False)
    assert not any(param.grad.any() for group in muon.param_groups for param in group["params"])

    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, saved)
    with pytest.raises(ValueError, match=r"it has the state of '\S+', which another rank owns.*save_checkpoint"):
        muon.load_state_dict(states[1 - rank])


def test_it_is_an_optimizer(ranks: Ranks) -> None:
    ranks.run(_as_an_optimizer)


#
# Checkpoints
#


def _three_optimizers(pair: Pair) -> None:
    pair.use(lambda name, param: _is_matrix(name, param) and "blocks" in name, Muon, lr=0.05)
    pair.use(lambda name, param: _is_matrix(name, param) and "blocks" not in name, Adafactor, lr=0.05)
    pair.use(_is_no_matrix, AdamW, whole=False, lr=0.02)


def _save(rank: int, world_size: int, folder: Path) -> None:
    pair = Pair()
    _three_optimizers(pair)
    pair.train(range(2))
    tfs.save_checkpoint(folder / "three", pair.model, pair.optimizers)
    for whole in (True, False):
        pair = Pair(transport="coalesced")
        pair.use(_everything, AdamW, whole=whole, lr=0.05)
        pair.train(range(2))
        tfs.save_checkpoint(folder / f"adamw-{whole}", pair.model, pair.optimizers)


def _load(rank: int, world_size: int, folder: Path, size: int) -> None:
    group = dist.new_group(list(range(size)))
    if rank >= size:
        return

    def resume(saved: str, use: Callable[[Pair], object]) -> None:
        pair = Pair(process_group=group)
        use(pair)
        expected = Pair(process_group=group)  # its reference was never saved
        use(expected)
        expected.train(range(3))
        with torch.no_grad():
            for param in pair.model.parameters():
                param.zero_()
        tfs.load_checkpoint(folder / saved, pair.model, pair.optimizers)
        pair.gradients(2)
        for optimizer in pair.optimizers:
            optimizer.step()
        pair.reference = expected.reference
        pair.check()

    resume("three", _three_optimizers)
    for was_whole in (True, False):
        for whole in (True, False):
            resume(f"adamw-{was_whole}", lambda pair, whole=whole: pair.use(_everything, AdamW, whole=whole, lr=0.05))
    pair = Pair(process_group=group)
    optimizer = AdamW([pair.model.get_parameter(n) for n in ("row", "unused")])
    with pytest.raises(tfs.CheckpointError, match=r"'\w+_var' of 'row' has shape"):
        tfs.load_checkpoint(folder / "three", pair.model, optimizer)


def test_another_number_of_ranks_goes_on_with_every_bit(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(_save, tmp_path)
    for size in (2, 3):
        four_ranks.run(_load, tmp_path, size)


#
# Errors
#


def _refused(rank: int, world_size: int) -> None:
    pair = Pair(ignored_params=["row"])
    matrices = [p for p in pair.model.parameters() if p.ndim == 2 and p is not pair.model.get_parameter("row")]
    with pytest.raises(TypeError, match=r"optimizer_class: expected a class of torch\.optim.*, got AdamW"):
        WholeParameters(AdamW(matrices), pair.model, matrices)
    with pytest.raises(TypeError, match="optimizer_class: LBFGS computes the loss several times"):
        WholeParameters(torch.optim.LBFGS, pair.model, matrices)
    with pytest.raises(TypeError, match=r"expected the result of thunder\.jit"):
        WholeParameters(Muon, pair.reference, matrices)
    with pytest.raises(ValueError, match=r"a tensor of shape \(13, 7\) is no parameter of the model"):
        WholeParameters(Muon, pair.model, [pair.reference.blocks[1].weight])
    with pytest.raises(ValueError, match=r"'row' is not sharded \(ignored_params\).*pass it to Muon directly"):
        WholeParameters(Muon, pair.model, [pair.model.get_parameter("row")])
    # What the class refuses, it refuses on all ranks, in its own words and about whole parameters.
    with pytest.raises(ValueError, match=r"Muon only supports 2D parameters .* torch\.Size\(\[3\]\)"):
        WholeParameters(Muon, pair.model, [pair.model.get_parameter("blocks.2.bias")])
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        WholeParameters(Muon, pair.model, matrices, beta=1)
    with pytest.raises(ValueError, match="empty parameter list"):
        WholeParameters(Muon, pair.model, [])
    # Chosen by what differs between ranks.
    with pytest.raises(tfs.ScheduleDisagreement, match=r"what WholeParameters was given for Muon, line \d"):
        WholeParameters(Muon, pair.model, matrices[rank:])
    named = [(n, p) for n, p in pair.model.named_parameters() if any(p is m for m in matrices)]
    muon = WholeParameters(Muon, pair.model, named[:2], lr=0.1)
    assert muon.param_groups[0]["param_names"] == [n for n, _ in named[:2]]
    with pytest.raises(ValueError, match="no parameter of the model"):
        muon.add_param_group({"params": [("other", nn.Parameter(torch.ones(2, 2)))]})
    assert len(muon.param_groups) == 1
    muon.add_param_group({"params": named[2:]})
    assert len(muon.param_groups) == 2


def test_errors_name_what_is_wrong(ranks: Ranks) -> None:
    ranks.run(_refused)


def _update_fails(rank: int, world_size: int) -> None:
    pair = Pair()
    muon = pair.use(_is_matrix, Muon)
    pair.gradients(0)
    if rank == 1:
        muon.param_groups[0]["ns_steps"] = 1000
        with pytest.raises(ValueError, match="Number of steps must be less than 100"):
            muon.step()
    else:
        muon.step()


def test_an_update_that_fails_on_one_rank_holds_up_no_other(ranks: Ranks) -> None:
    ranks.run(_update_fails)
