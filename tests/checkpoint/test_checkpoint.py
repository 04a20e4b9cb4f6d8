"""Checkpoints on disk: other numbers of ranks, what does not fit, interrupted saves, whole models, optimizers."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import load_checkpoint, save_checkpoint

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankError, Ranks, on_ranks
from saving import Everything, assert_equal, contents, fill, make, on_first, refused, small, train, update
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop


@pytest.mark.parametrize(
    "saved_with, loaded_with, sizes",
    [
        pytest.param({}, {}, (2, 1, 3), id="flat"),
        pytest.param(
            {"ranks": (2, 2), "sharding_strategy": "zero2"},
            {"transport": "coalesced"},
            (3,),
            id="hybrid",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"transport": "coalesced", "sharding_strategy": "zero2"},
            {"bucketing_strategy": "none"},
            (2,),
            id="coalesced",
            marks=pytest.mark.long,
        ),
    ],
)
@on_ranks(4)
def test_other_numbers_of_ranks_load_the_same_bits(
    rank: int, tmp_path: Path, saved_with: dict[str, Any], loaded_with: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    model, optimizer = make(**saved_with)
    train(model, optimizer, 2)
    for group in optimizer.param_groups:
        group["lr"] /= 2
    ema = {name: param.detach() * 2 for name, param in model.named_parameters()}  # DTensors
    save_checkpoint(model, tmp_path / "rows", optimizer, extra={"step": 2, "rng": torch.arange(3), "ema": ema})
    tfs.save_safetensors(model, tmp_path / "whole")
    expected = contents(model, optimizer)
    for size in sizes:
        group = dist.new_group(list(range(size)))
        if rank < size:
            other, second = make(7, ranks=group, **loaded_with)
            average = {name: torch.empty_like(param) for name, param in other.named_parameters()}
            wanted = {"step": 0, "rng": None, "ema": average}
            rest = load_checkpoint(other, tmp_path / "rows", second, extra=wanted)
            assert rest["step"] == 2 and rest["rng"].tolist() == [0, 1, 2]
            assert_equal(rest["ema"], {name: 2 * expected[name] for name in average})
            assert_equal(contents(other, second), expected, size)
            assert all(param.grad is None for param in other.parameters())
            other, _ = make(8, ranks=group, **loaded_with)
            tfs.load_safetensors(other, tmp_path / "whole")
            assert_equal(contents(other), {name: expected[name] for name in contents(other)}, size)
        dist.barrier()


@on_ranks(2)
def test_pickled_entries_are_dtensors_or_pieces_that_refuse_operators() -> None:
    even, _ = make(transport="coalesced")
    uneven, _ = make()
    entries = tfs.get_model_state_dict(even)
    kinds = {name: type(pickle.loads(pickle.dumps(e))) for name, e in entries.items() if hasattr(e, "to_local")}
    row_piece = kinds.pop("scale")  # a single row cannot be divided
    assert set(kinds.values()) == {DTensor}
    for entry in (e for e in entries.values() if hasattr(e, "to_local")):
        own = pickle.loads(pickle.dumps(entry)).to_local()
        assert own.untyped_storage().nbytes() == own.nbytes, "an entry is pickled without the rest of its bucket"
    entry = next(e for e in tfs.get_model_state_dict(uneven).values() if hasattr(e, "to_local") and not e.rows.is_even)
    assert "RowDTensor(rows [" in repr(entry)
    piece = pickle.loads(pickle.dumps(entry))
    assert "RowPiece(rows [" in repr(piece)
    assert isinstance(piece.to(torch.float32), row_piece) and isinstance(piece.clone(), row_piece)
    with pytest.raises(NotImplementedError, match="take them with to_local"):
        piece + 1


@pytest.mark.long  # `test_saving_beside` has it with each step
@on_ranks(2)
def test_an_asynchronous_save_holds_the_values_at_its_start(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer)
    expected = contents(model, optimizer)
    state = {"model": tfs.get_model_state_dict(model), "optim": tfs.get_optimizer_state_dict(model, optimizer)}
    saving = dcp.async_save(state, checkpoint_id=tmp_path)
    fill(model, 0.0)
    saving.result()
    other, second = make(5)
    load_checkpoint(other, tmp_path, second)
    assert_equal(contents(other, second), expected)


#
# What does not fit
#


def _add(module: nn.Module) -> None:
    module.another = nn.Linear(4, 4)


def _remove(module: Any) -> None:
    del module.blocks[1]


def _reshape(module: nn.Module) -> None:
    module.mix = nn.Parameter(torch.randn(5, 6))


def _cut(pattern: str) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        file = min(folder.glob(pattern))
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return cut


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _move_below(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    folder.with_name("moved").rename(folder / "step-1")


def _become_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def _delete(pattern: str) -> Callable[[Path], None]:
    return lambda folder: min(folder.glob(pattern)).unlink()


OTHER_MODELS = {
    "more": (_add, "'another.weight' is missing; 'another.bias' is missing"),
    "fewer": (_remove, r"'blocks\.1\.\w+\.weight' is unknown"),
    "another shape": (_reshape, r"'mix' has shape \(5, 4\) there, \(5, 6\) in the model"),
}
DAMAGE = {
    "no list": (_delete(".metadata"), "is a checkpoint whose save did not end"),
    "no folder": (shutil.rmtree, "does not exist, so it is no checkpoint"),
    "empty": (_empty, "is an empty folder, so it is no checkpoint"),
    "file": (_become_file, "is a file, and a checkpoint is a folder. Load whole parameters with load_safetensors"),
    "parent": (_move_below, r"is no checkpoint, but holds some in subfolders \(step-1\): load latest_checkpoint\('/"),
    "other files": (lambda f: (_empty(f), (f / "a.safetensors").touch()), "it holds a.safetensors .*load_safetensors"),
    "list cut": (_cut(".metadata"), r"\.metadata cannot be read"),
    "data cut": (_cut("__1_*.distcp"), "was not loaded, nothing is changed.*is truncated"),
    "no data": (_delete("__1_*.distcp"), "was not loaded, nothing is changed"),
}
OTHER_ARGUMENTS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "groups": (torch.optim.AdamW, {}, r"has no group of the same parameters as param_groups\[0\] of AdamW"),
    "foreign optimizer": (
        lambda _: torch.optim.SGD([nn.Parameter(torch.ones(3))]),
        {},
        r"param_groups\[0\] of SGD holds a tensor of shape \(3,\) that is no parameter of the model",
    ),
    "keys": (lambda _: (), {"keys": ("network", "optim")}, r"holds no 'network', but \['model', 'optim', 'step'\]"),
    "extra": (lambda _: (), {"extra": {"epoch": 0}}, "holds no 'epoch', but"),
    "no dictionary": (
        lambda _: (),
        {"extra": ("step", 1)},
        "extra: expected a dictionary of values by name, got a tup",
    ),
}


@on_ranks(2)
def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(rank: int, tmp_path: Path) -> None:
    model, optimizer = make()
    save_checkpoint(model, tmp_path / "rows", optimizer, extra={"step": 1})
    tfs.save_safetensors(model, tmp_path / "whole")
    for change, message in OTHER_MODELS.values():
        other, _ = make(change=change)
        refused(message, other, load_checkpoint, other, tmp_path / "rows")
        refused(message, other, tfs.load_safetensors, other, tmp_path / "whole")
    for load in (
        lambda model: load_checkpoint(model, tmp_path / "rows", strict=False),
        lambda model: tfs.load_safetensors(model, tmp_path / "whole", strict=False),
    ):
        fewer, _ = make(change=_remove)
        load(fewer)
        assert_equal(contents(fewer), {n: v for n, v in contents(model).items() if not n.startswith("blocks.1.")})
        more, _ = make(seed=1, change=_add)
        before = contents(more)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load(more)
        texts = [str(w.message) for w in caught if "which keep their values (strict=False)" in str(w.message)]
        assert len(texts) == (rank == 0) and all(
            "holds no 'another.weight', 'another.bias', " in text for text in texts
        )
        added = {name: value for name, value in before.items() if name.startswith("another.")}
        assert_equal(contents(more), contents(model) | added)
    for name, (damage, message) in DAMAGE.items():
        on_first(shutil.copytree, tmp_path / "rows", tmp_path / name)
        on_first(damage, tmp_path / name)
        refused(message, model, load_checkpoint, model, tmp_path / name, optimizer)
    trained = [param for param in model.parameters() if param.requires_grad]
    for make_optimizer, arguments, message in OTHER_ARGUMENTS.values():
        refused(message, model, load_checkpoint, model, tmp_path / "rows", make_optimizer(trained), **arguments)


@on_ranks(2)
def test_invalid_saves_are_refused_on_every_rank(rank: int, tmp_path: Path) -> None:
    model, optimizer = make()
    save_checkpoint(model, tmp_path / "1")
    refused("holds a checkpoint already", model, save_checkpoint, model, tmp_path / "1")
    second = tmp_path / "2"
    twice = torch.optim.SGD(list(model.parameters())[:1])
    refused("extra: the name 'optim' is taken", model, save_checkpoint, model, second, optimizer, extra={"optim": 1})
    refused("expected a dictionary of values by name", model, save_checkpoint, model, second, extra=[1])
    refused("is in two of them", model, save_checkpoint, model, second, [optimizer, twice])
    refused("got a dictionary: pass the optimizer, not", model, save_checkpoint, model, second, optimizer.state_dict())
    with pytest.raises(TypeError, match=r"expected the result of thunder\.jit"):
        save_checkpoint(nn.Linear(2, 2), second)
    for function in (save_checkpoint, tfs.save_checkpoint_async, tfs.load_checkpoint):
        with pytest.raises(TypeError, match="the model comes first"):
            function(second, model)  # type: ignore[arg-type]
    # An error on one rank is raised on all ranks.
    place = second if rank == 0 else tmp_path / "1"
    refused(r"holds a checkpoint already.* \(on ranks \[1\]\)", model, save_checkpoint, model, place)
    assert tfs.latest_checkpoint(tmp_path) == tmp_path / "1" and not second.exists()
    assert tfs.latest_checkpoint(second) is None


@on_ranks(4)
def test_different_parameters_with_one_name_cannot_be_saved(rank: int, tmp_path: Path) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model, _ = make(
        ranks=tfs.Ranks(process_group_for=lambda name, param: pairs[rank % 2] if name.startswith("blocks.0") else None)
    )
    with pytest.raises(tfs.CheckpointError, match=r"'blocks\.0\.\S+' is sharded over ranks \[\d, \d\] alone"):
        save_checkpoint(model, tmp_path / "checkpoint")


def _save_while_a_rank_dies(rank: int, world_size: int, folder: Path) -> None:
    model, _ = small()
    if rank == 1:
        FileSystemWriter.write_data = lambda *_: os._exit(9)  # type: ignore[method-assign]
    save_checkpoint(model, folder)


def test_a_rank_that_dies_while_saving_is_an_error_on_the_others(tmp_path: Path) -> None:
    with contextlib.closing(Ranks(2)) as workers, pytest.raises(RankError, match="was not saved: rank 1 is gone"):
        workers.run(_save_while_a_rank_dies, tmp_path / "0", timeout=60)
    assert not any((tmp_path / "0").iterdir())


#
# Whole models in safetensors files
#


@on_ranks(2)
def test_whole_models_are_exported_and_imported(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, _ = make()
    folder = tmp_path / "whole"
    index = tfs.save_safetensors(model, folder)
    assert index.name == "model.safetensors.index.json"
    dist.barrier()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    gathered = contents(model)
    assert_equal(tensors, {name: value for name, value in gathered.items() if name != "head.weight"})
    assert Everything().double().load_state_dict(tensors, strict=False).missing_keys == ["head.weight"]
    refused("holds a model already", model, tfs.save_safetensors, model, folder)

    # Another plan; and a single file that uses the other name of tied parameters, and holds a 0-dim tensor.
    single = {("head.weight" if name == "embedding.weight" else name): value for name, value in tensors.items()}
    on_first(save_file, single, tmp_path / "all.safetensors")
    for source in (folder, tmp_path / "all.safetensors"):
        other, _ = make(4, transport="coalesced", bucketing_strategy="none")
        tfs.load_safetensors(other, source)
        assert_equal(contents(other), gathered)
    fill(other, 1.0)
    on_first(_cut("model-00002-*.safetensors"), folder)
    for options, message in (
        ({}, r"model-00002-\w+\.safetensors is damaged, nothing is changed"),
        ({"verify_checksums": False}, r"model-00002-\w+\.safetensors cannot be read"),
    ):
        refused(message, other, tfs.load_safetensors, other, folder, **options)
    on_first(index.unlink)
    refused("its export did not end", other, tfs.load_safetensors, other, folder)
    save_checkpoint(other, tmp_path / "rows")
    for wrong, why in (("none", "it does not exist"), ("rows", "it is a checkpoint, which load_checkpoint")):
        message = rf"is no \.safetensors file and no folder with one: {why}"
        refused(message, other, tfs.load_safetensors, other, tmp_path / wrong)


#
# Optimizers must be the same on all ranks and of the class that was saved
#


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
    choose, message = DIFFERENT[case]
    optimizers = choose(model, list(model.parameters()), rank)
    refused(f"differ between ranks: {message}", model, save_checkpoint, model, tmp_path / "refused", optimizers)
    assert not (tmp_path / "refused").exists()
    save_checkpoint(model, tmp_path / "same", iter([same]))
    message = r"ranks load into different optimizers, nothing is changed: optimizers:"
    refused(message, model, load_checkpoint, model, tmp_path / "same", [same] if rank else [])
    load_checkpoint(model, tmp_path / "same", iter([same]))
    of_iterator, of_list = (tfs.get_optimizer_state_dict(model, several) for several in (iter([same]), [same]))
    assert len(of_iterator["param_groups"]) == len(of_list["param_groups"]) == 1


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
        save_checkpoint(model, tmp_path / case, update(model, saved(model.parameters())))
        for steps in (0, 1):
            other, _ = small(5.0)
            optimizer = loaded(other.parameters())
            for _ in range(steps):
                update(other, optimizer)
            before = [dict(group) for group in optimizer.param_groups]
            expected = f"does not fit the optimizers, nothing is changed.*{message}"
            refused(expected, other, load_checkpoint, other, tmp_path / case, optimizer)
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
    for case, optimizer_of in SAME_KINDS.items():
        for steps in (0, 1):
            model, other = small()[0], small(5.0)[0]
            optimizers = [optimizer_of(m, list(m.parameters())) for m in (model, other)]
            for _ in range(steps):
                update(model, optimizers[0])
            for group in optimizers[0].param_groups:
                group["initial_lr"] = group["lr"]  # as schedulers do
            save_checkpoint(model, tmp_path / f"{case} {steps}", optimizers[0])
            hooks: list[str] = []
            optimizers[1].register_step_pre_hook(lambda *_, hooks=hooks: hooks.append("step"))
            load_checkpoint(other, tmp_path / f"{case} {steps}", optimizers[1])
            assert not hooks and "initial_lr" in optimizers[1].param_groups[0]
            assert_equal(contents(other, optimizers[1]), contents(model, optimizers[0]), (case, steps))
