"""Checkpoints on disk: other numbers of ranks, FSDP2, checkpoints that do not fit, interrupted saves, safetensors."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp, full_state_dict, get_model_state_dict, load_checkpoint, save_checkpoint
from thunder_fsdp_sched.checkpoint import RowPiece
from thunder_fsdp_sched.runtime.row_dtensor import RowDTensor, local_rows
from thunder_fsdp_sched.sharding.jitted_state import rows_by_name

import pytest
import thunder
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import GPT, Layer
from profiles import LONG_ONLY
from ranks import RankError, Ranks
from reference import loss_of
from test_state_dict import Everything
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def _everything(seed: int = 0, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return a sharded model with every kind of parameter, and an optimizer with two parameter groups."""
    torch.manual_seed(seed)
    sharded = thunder.jit(Everything().double(), transforms=[fsdp(**options)])
    trained = [p for p in sharded.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim > 1]
    rest = [p for p in trained if p.ndim <= 1]
    return sharded, torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def _train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        inputs = Everything.inputs(model, torch.Generator().manual_seed(10 * step + rank), batch=4)
        loss_of(model(*inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _gathered_optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimizer's state, gathered, and its settings."""
    sharded = next(t for t in model._lc_transforms if hasattr(t, "sharded")).sharded
    gathered: dict[str, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        gathered[f"lr {number}"] = torch.tensor([group["lr"], group["weight_decay"]])
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            assert isinstance(value, RowDTensor) == (key != "step" and name in sharded.locations), (name, key)
            gathered[f"{name} {key}"] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return gathered


def _assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def _save_on_all(rank: int, world_size: int, folder: Path, options: dict[str, Any]) -> tuple[Any, ...]:
    if options.pop("hybrid", False):
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = _everything(**options)
    _train(
        model, optimizer, 0, range(2)
    )  # the same data on all ranks, because only one rank's running statistics are saved
    for group in optimizer.param_groups:
        group["lr"] /= 2
    save_checkpoint(folder, model, optimizer, extra={"step": 2, "rng": torch.arange(3)})
    return full_state_dict(model), _gathered_optimizer_state(model, optimizer)


def _load_on_some(
    rank: int, world_size: int, size: int, folder: Path, options: dict[str, Any], saved: tuple[Any, ...]
) -> None:
    group = dist.new_group(list(range(size)))
    if rank >= size:
        return
    model, optimizer = _everything(seed=7, process_group=group, **options)
    rest = load_checkpoint(folder, model, optimizer, extra={"step": 0, "rng": torch.zeros(3, dtype=torch.int64)})
    assert rest["step"] == 2 and rest["rng"].tolist() == [0, 1, 2]
    _assert_equal(full_state_dict(model), saved[0])
    _assert_equal(_gathered_optimizer_state(model, optimizer), saved[1])
    assert all(p.grad is None for p in model.parameters())
    if size == 2:
        _train(model, optimizer, rank, range(2, 3))


@pytest.mark.parametrize(
    "saved_with, loaded_with, sizes",
    [
        ({}, {}, (2, 1, 3)),
        pytest.param(
            *({"transport": "coalesced", "sharding_strategy": "zero2"}, {"bucketing_strategy": "none"}, (2,)),
            marks=LONG_ONLY,
        ),
        ({"hybrid": True, "sharding_strategy": "zero2"}, {"transport": "coalesced"}, (3,)),
    ],
    ids=["flat", "coalesced", "hybrid"],
)
def test_other_numbers_of_ranks_load_the_same_bits(
    four_ranks: Ranks, tmp_path: Path, saved_with: dict[str, Any], loaded_with: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    saved = four_ranks.run(_save_on_all, tmp_path / "checkpoint", saved_with)[0]
    for size in sizes:
        four_ranks.run(_load_on_some, size, tmp_path / "checkpoint", loaded_with, saved, timeout=60)


def _entries(rank: int, world_size: int) -> None:
    model, _ = _everything()
    even, _ = _everything(transport="coalesced")
    module = Everything()
    for sharded in (model, even):
        entries = get_model_state_dict(sharded)
        assert entries.keys() == module.state_dict().keys()
        for name, entry in entries.items():
            assert entry.shape == module.state_dict()[name].shape, name
            if name in sharded._overrides_parameters:
                assert local_rows(entry).data_ptr() == local_rows(sharded.get_parameter(name)).data_ptr(), name
        assert all(isinstance(entries[name], DTensor) for name in entries.keys() & sharded._overrides_parameters.keys())
    kinds = {name: type(pickle.loads(pickle.dumps(e))) for name, e in get_model_state_dict(even).items()}
    assert {kinds.pop("scale")} == {RowPiece}  # a single row cannot be divided
    assert {kind for name, kind in kinds.items() if name in even._overrides_parameters} == {DTensor}
    entry = next(e for e in get_model_state_dict(model).values() if isinstance(e, DTensor) and not e.rows.is_even)
    assert "RowDTensor(rows [" in repr(entry)
    piece = pickle.loads(pickle.dumps(entry))
    assert "RowPiece(rows [" in repr(piece)
    assert isinstance(piece.to(torch.float32), RowPiece) and isinstance(piece.clone(), RowPiece)
    with pytest.raises(NotImplementedError, match="take them with to_local"):
        piece + 1


def test_entries_have_the_names_and_shapes_of_the_original_module(ranks: Ranks) -> None:
    ranks.run(_entries)


#
# FSDP2
#


def _gpt() -> GPT:
    torch.manual_seed(3)
    return GPT(width=12, vocab=19, blocks=1, block=Layer)


def _steps(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(0, 19, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _fsdp2(world_size: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = _gpt()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _full_tensors(entries: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {n: e.full_tensor() if isinstance(e, DTensor) else e for n, e in entries.items()}


def _load_fsdp2_checkpoint(rank: int, world_size: int, folder: Path, options: dict[str, Any]) -> None:
    theirs, their_optimizer = _fsdp2(world_size)
    _steps(theirs, their_optimizer, rank, range(2))
    state = {
        "model": torch_state_dict.get_model_state_dict(theirs),
        "optim": torch_state_dict.get_optimizer_state_dict(theirs, their_optimizer),
    }
    dcp.save(state, checkpoint_id=folder)
    ours = thunder.jit(_gpt(), transforms=[fsdp(**options)])
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.5)
    load_checkpoint(folder, ours, optimizer)
    _assert_equal(full_state_dict(ours), _full_tensors(theirs.state_dict()))
    moments = {
        f"{name} {key}": value for name, of_param in state["optim"]["state"].items() for key, value in of_param.items()
    }
    our_moments = {n: v for n, v in _gathered_optimizer_state(ours, optimizer).items() if not n.startswith("lr")}
    _assert_equal(our_moments, _full_tensors(moments))
    assert optimizer.param_groups[0]["lr"] == 0.01
    expected = _steps(theirs, their_optimizer, rank, range(2, 4))
    torch.testing.assert_close(_steps(ours, optimizer, rank, range(2, 4)), expected, rtol=1e-5, atol=1e-5)


def _save_for_fsdp2(rank: int, world_size: int, folder: Path, options: dict[str, Any]) -> None:
    ours = thunder.jit(_gpt(), transforms=[fsdp(**options)])
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    _steps(ours, optimizer, rank, range(2))
    save_checkpoint(folder, ours, optimizer)
    theirs, their_optimizer = _fsdp2(world_size)
    _steps(theirs, their_optimizer, rank, range(7, 8))  # creates optimizer state, which loading overwrites
    state = {
        "model": torch_state_dict.get_model_state_dict(theirs),
        "optim": torch_state_dict.get_optimizer_state_dict(theirs, their_optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    torch_state_dict.set_state_dict(
        theirs, their_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    _assert_equal(_full_tensors(theirs.state_dict()), full_state_dict(ours))
    expected = _steps(ours, optimizer, rank, range(2, 4))
    torch.testing.assert_close(_steps(theirs, their_optimizer, rank, range(2, 4)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("direction", "transport"),
    [(_load_fsdp2_checkpoint, "flat"), (_save_for_fsdp2, "coalesced")],
    ids=["from-fsdp2-flat", "to-fsdp2-coalesced"],
)
def test_training_continues_from_a_checkpoint_of_fsdp2_and_vice_versa(
    ranks: Ranks, tmp_path: Path, direction: Callable[..., None], transport: str
) -> None:
    ranks.run(direction, tmp_path / "checkpoint", {"transport": transport})


def _save_while_training_goes_on(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = _everything()
    _train(model, optimizer, 0, range(1))
    expected = full_state_dict(model), _gathered_optimizer_state(model, optimizer)
    state = {"model": get_model_state_dict(model), "optim": tfs.get_optimizer_state_dict(model, optimizer)}
    saving = dcp.async_save(state, checkpoint_id=folder)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    saving.result()
    other, other_optimizer = _everything(seed=5)
    load_checkpoint(folder, other, other_optimizer)
    _assert_equal(full_state_dict(other), expected[0])
    _assert_equal(_gathered_optimizer_state(other, other_optimizer), expected[1])


def test_an_asynchronous_save_holds_the_values_at_its_start(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_save_while_training_goes_on, tmp_path / "checkpoint")


#
# Checkpoints that do not fit
#


class _ModelThatDoesNotFit(Everything):
    def __init__(self, case: str) -> None:
        super().__init__()
        if case == "missing":
            self.another = torch.nn.Linear(4, 4)
        if case == "extra":
            del self.blocks[1]
        if case == "shape":
            self.mix = torch.nn.Parameter(torch.randn(5, 6))


def _damage(folder: Path, case: str) -> None:
    if case == "incomplete":
        (folder / ".metadata").unlink()
    elif case == "gone":
        shutil.rmtree(folder)
    elif case == "metadata cut":
        data = (folder / ".metadata").read_bytes()
        (folder / ".metadata").write_bytes(data[: len(data) // 2])
    elif case in ("data cut", "data gone"):
        [file] = sorted(folder.glob("__1_*.distcp"))[:1]
        if case == "data gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


FAULTS = {
    "missing": "does not fit the model: 'another.weight' is missing; 'another.bias' is missing",
    "extra": r"does not fit the model: 'blocks\.1\.\w+\.weight' is unknown",
    "shape": r"'mix' has shape \(5, 4\) there, \(5, 6\) in the model",
    "incomplete": "is a checkpoint whose save did not end",
    "gone": "is no checkpoint",
    "metadata cut": r"\.metadata cannot be read",
    "data cut": "was not loaded, nothing is changed",
    "data gone": "was not loaded, nothing is changed",
    "groups": r"has no group of the same parameters as param_groups\[0\] of AdamW",
    "optimizer of others": r"param_groups\[0\] of SGD holds a tensor of shape \(3,\) that is no parameter of the model",
    "key": r"holds no 'network', but \['model', 'optim', 'step'\]",
    "extra name": r"holds no 'epoch', but",
}


def _load_what_does_not_fit(rank: int, world_size: int, folder: Path, case: str) -> None:
    model, optimizer = _everything()
    save_checkpoint(folder, model, optimizer, extra={"step": 1})
    dist.barrier()
    if rank == 0:
        _damage(folder, case)
    dist.barrier()
    if case in ("missing", "extra", "shape"):
        model = thunder.jit(_ModelThatDoesNotFit(case).double(), transforms=[fsdp()])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers: Any = torch.optim.AdamW(trained) if case == "groups" else optimizer
    if case == "optimizer of others":
        optimizers = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    if case in ("missing", "extra", "shape"):
        optimizers = ()
    _change_parameters(model)
    before = {n: t.clone() for n, t in rows_by_name(model).items()}
    keys = ("network", "optim") if case == "key" else ("model", "optim")
    with pytest.raises(tfs.CheckpointError, match=FAULTS[case]):
        load_checkpoint(folder, model, optimizers, keys=keys, extra={"epoch": 0} if case == "extra name" else None)
    _assert_equal(rows_by_name(model), before)


def _change_parameters(model: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)


@pytest.mark.parametrize("case", FAULTS)
def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(
    ranks: Ranks, tmp_path: Path, case: str
) -> None:
    ranks.run(_load_what_does_not_fit, tmp_path / "checkpoint", case, timeout=60)


def _load_larger_model(rank: int, world_size: int, folder: Path) -> None:
    model, _ = _everything()
    save_checkpoint(folder, model)
    fewer = thunder.jit(_ModelThatDoesNotFit("extra").double(), transforms=[fsdp()])
    load_checkpoint(folder, fewer, strict=False)
    gathered = full_state_dict(model)
    _assert_equal(full_state_dict(fewer), {n: v for n, v in gathered.items() if not n.startswith("blocks.1.")})


def test_strict_false_loads_from_a_checkpoint_of_a_larger_model(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_load_larger_model, tmp_path / "checkpoint")


def _save_what_cannot_be_saved(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = _everything()
    save_checkpoint(folder / "1", model)
    with pytest.raises(tfs.CheckpointError, match="holds a checkpoint already"):
        save_checkpoint(folder / "1", model)
    with pytest.raises(tfs.CheckpointError, match="extra: the name 'optim' is taken"):
        save_checkpoint(folder / "2", model, optimizer, extra={"optim": 1})
    twice = torch.optim.SGD(list(model.parameters())[:1])
    with pytest.raises(tfs.CheckpointError, match="is in two of them"):
        save_checkpoint(folder / "2", model, [optimizer, twice])
    with pytest.raises(TypeError, match=r"expected the result of thunder\.jit"):
        save_checkpoint(folder / "2", torch.nn.Linear(2, 2))
    # An error on one rank is raised on all ranks.
    place = folder / "2" if rank == 0 else folder / "1"
    with pytest.raises(tfs.CheckpointError, match=r"holds a checkpoint already.* \(on ranks \[1\]\)"):
        save_checkpoint(place, model)
    assert tfs.latest_checkpoint(folder) == folder / "1"


def test_invalid_saves_are_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_save_what_cannot_be_saved, tmp_path, timeout=60)


def _different_parameters_under_one_name(rank: int, world_size: int, folder: Path) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    options = {"process_group_for": lambda name, param: pairs[rank % 2] if name.startswith("blocks.0") else None}
    model, _ = _everything(**options)
    with pytest.raises(tfs.CheckpointError, match=r"'blocks\.0\.\S+' is sharded over ranks \[\d, \d\] alone"):
        save_checkpoint(folder, model)


def test_different_parameters_with_one_name_cannot_be_saved(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(_different_parameters_under_one_name, tmp_path / "checkpoint", timeout=60)


#
# A rank is killed while saving
#


def _save_and_be_killed(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = _everything()
    _train(model, optimizer, 0, range(1))
    save_checkpoint(folder / "good", model, optimizer)
    torch.save((full_state_dict(model), _gathered_optimizer_state(model, optimizer)), folder / f"expected-{rank}")
    _train(model, optimizer, rank, range(1, 2))
    if rank == 1:
        # It dies with a partly written file.
        def die(*args: Any, **kwargs: Any) -> Any:
            (folder / "bad" / "__1_0.distcp").write_bytes(b"half")
            os._exit(9)

        FileSystemWriter.write_data = die  # type: ignore[method-assign]
    save_checkpoint(folder / "bad", model, optimizer)


def _load_the_last_good_one(rank: int, world_size: int, folder: Path) -> None:
    latest = tfs.latest_checkpoint(folder)
    assert latest == folder / "good"
    model, optimizer = _everything(seed=9)
    load_checkpoint(latest, model, optimizer)
    state, optimizer_state = torch.load(folder / f"expected-{rank}")
    _assert_equal(full_state_dict(model), state)
    _assert_equal(_gathered_optimizer_state(model, optimizer), optimizer_state)
    with pytest.raises(tfs.CheckpointError, match="is a checkpoint whose save did not end"):
        load_checkpoint(folder / "bad", model)


def test_a_rank_killed_while_saving_leaves_the_last_checkpoint_loadable(tmp_path: Path) -> None:
    workers = Ranks(2)
    try:
        with pytest.raises(RankError, match="rank 1 failed\nthe process died, exit code 9"):
            workers.run(_save_and_be_killed, tmp_path, timeout=60)
        workers.run(_load_the_last_good_one, tmp_path)
    finally:
        workers.close()


def test_there_is_no_latest_checkpoint_in_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert tfs.latest_checkpoint(tmp_path) is None
    assert tfs.latest_checkpoint(tmp_path / "nowhere") is None


#
# Whole models in safetensors files
#


def _export_and_import(rank: int, world_size: int, folder: Path) -> None:
    from safetensors.torch import load_file

    model, _ = _everything()
    index = tfs.save_safetensors(model, folder / "whole")
    dist.barrier()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted((folder / "whole").glob("*.safetensors")):
        tensors |= load_file(file)
    gathered = full_state_dict(model)
    tied = {"head.weight"}
    _assert_equal(tensors, {n: v for n, v in gathered.items() if n not in tied})
    assert index.name == "model.safetensors.index.json"
    fresh = Everything().double()
    assert set(fresh.load_state_dict(tensors, strict=False).missing_keys) == tied
    with pytest.raises(tfs.CheckpointError, match="holds a model already"):
        tfs.save_safetensors(model, folder / "whole")

    other, _ = _everything(seed=4, transport="coalesced", bucketing_strategy="none")
    tfs.load_safetensors(other, folder / "whole")
    _assert_equal(full_state_dict(other), gathered)

    _change_parameters(other)
    before = {n: t.clone() for n, t in rows_by_name(other).items()}
    for case, message in (
        ("missing", "'another.weight' is missing"),
        ("extra", "is unknown"),
        ("shape", r"'mix' has shape \(5, 4\) there"),
    ):
        unfit = thunder.jit(_ModelThatDoesNotFit(case).double(), transforms=[fsdp()])
        with pytest.raises(tfs.CheckpointError, match=message):
            tfs.load_safetensors(unfit, folder / "whole")
    dist.barrier()
    if rank == 0:
        [file] = (folder / "whole").glob("model-00002-*.safetensors")
        file.write_bytes(file.read_bytes()[:-8])
    dist.barrier()
    with pytest.raises(tfs.CheckpointError, match=r"model-00002-\w+\.safetensors is damaged, nothing is changed"):
        tfs.load_safetensors(other, folder / "whole")
    with pytest.raises(tfs.CheckpointError, match=r"model-00002-\w+\.safetensors cannot be read"):
        tfs.load_safetensors(other, folder / "whole", verify_checksums=False)
    _assert_equal(rows_by_name(other), before)
    dist.barrier()
    if rank == 0:
        index.unlink()
    dist.barrier()
    with pytest.raises(tfs.CheckpointError, match="its export did not end"):
        tfs.load_safetensors(other, folder / "whole")
    with pytest.raises(tfs.CheckpointError, match=r"is no \.safetensors file and no folder with one"):
        tfs.load_safetensors(other, folder / "nowhere")


def test_whole_models_are_exported_and_imported(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_export_and_import, tmp_path)


def _import_one_file(rank: int, world_size: int, folder: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(11)
    module = Everything().double()
    state = {
        n: t.clone() for n, t in module.state_dict().items() if n != "embedding.weight"
    }  # the tied parameter is under its other name
    if rank == 0:
        save_file(state, folder / "all.safetensors")
    dist.barrier()
    model, _ = _everything()
    tfs.load_safetensors(model, folder / "all.safetensors")
    _assert_equal(full_state_dict(model), dict(module.state_dict()))


def test_a_single_file_that_uses_the_other_name_of_a_tied_parameter_is_imported(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_import_one_file, tmp_path)


def _gather_dtensor_entries(rank: int, world_size: int) -> None:
    even, _ = _everything(transport="coalesced")
    entry = get_model_state_dict(even)["mix"]
    assert isinstance(entry, DTensor) and isinstance(entry.device_mesh, DeviceMesh)
    torch.testing.assert_close(entry.full_tensor(), full_state_dict(even)["mix"], rtol=0, atol=0)


def test_dtensor_entries_can_be_gathered_with_full_tensor(ranks: Ranks) -> None:
    ranks.run(_gather_dtensor_entries)
