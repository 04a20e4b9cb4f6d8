"""Checkpoints on disk: other numbers of ranks, what does not fit, interrupted saves, whole models, optimizers."""

from __future__ import annotations

import contextlib
import os
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
from coded import coded
from ranks import RankError, Ranks, on_ranks
from saving import Everything, assert_equal, contents, fill, make, on_first, refused, small, update
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop

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
    "more": (_add, coded("state-dict.does-not-fit-model", "'another.weight' is missing", "'another.bias' is missing")),
    "fewer": (_remove, coded("state-dict.does-not-fit-model", "'blocks.1.up.weight' is unknown")),
    "another shape": (_reshape, coded("state-dict.does-not-fit-model", "mix", "(5, 4)", "(5, 6)")),
}
DAMAGE = {
    "no list": (_delete(".metadata"), coded("checkpoint.save-did-not-end")),
    "no folder": (shutil.rmtree, coded("checkpoint.folder-does-not-exist")),
    "empty": (_empty, coded("checkpoint.folder-is-empty")),
    "file": (_become_file, coded("checkpoint.folder-is-file")),
    "parent": (_move_below, coded("checkpoint.folder-of-checkpoints", "(step-1)", "latest_checkpoint('/")),
    "other files": (
        lambda f: (_empty(f), (f / "a.safetensors").touch()),
        coded("checkpoint.folder-of-other-files", "a.safetensors", "load_safetensors"),
    ),
    "list cut": (_cut(".metadata"), coded("checkpoint.list-not-readable", ".metadata")),
    "data cut": (_cut("__1_*.distcp"), coded("checkpoint.not-loaded", "truncated")),
    "no data": (_delete("__1_*.distcp"), coded("checkpoint.not-loaded", "No such file")),
}
OTHER_ARGUMENTS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], coded]] = {
    "groups": (torch.optim.AdamW, {}, coded("checkpoint.optimizer-group-missing", "param_groups[0] of AdamW")),
    "foreign optimizer": (
        lambda _: torch.optim.SGD([nn.Parameter(torch.ones(3))]),
        {},
        coded("optimizer.tensor-not-a-parameter", "param_groups[0] of SGD", "(3,)"),
    ),
    "keys": (
        lambda _: (),
        {"keys": ("network", "optim")},
        coded("checkpoint.name-not-held", "'network'", "['model', 'optim', 'step']"),
    ),
    "extra": (lambda _: (), {"extra": {"epoch": 0}}, coded("checkpoint.name-not-held", "'epoch'")),
    "no dictionary": (lambda _: (), {"extra": ("step", 1)}, coded("checkpoint.extra-not-dictionary", "tuple")),
}


@on_ranks(2)
def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(rank: int, tmp_path: Path) -> None:
    model, optimizer = make()
    save_checkpoint(model, tmp_path / "rows", optimizer, extra={"step": 1})
    tfs.save_safetensors(model, tmp_path / "whole")
    for change, expected in OTHER_MODELS.values():
        other, _ = make(change=change)
        refused(expected, other, load_checkpoint, other, tmp_path / "rows")
        refused(expected, other, tfs.load_safetensors, other, tmp_path / "whole")
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
    for name, (damage, expected) in DAMAGE.items():
        on_first(shutil.copytree, tmp_path / "rows", tmp_path / name)
        on_first(damage, tmp_path / name)
        refused(expected, model, load_checkpoint, model, tmp_path / name, optimizer)
    trained = [param for param in model.parameters() if param.requires_grad]
    for make_optimizer, arguments, expected in OTHER_ARGUMENTS.values():
        refused(expected, model, load_checkpoint, model, tmp_path / "rows", make_optimizer(trained), **arguments)


@on_ranks(2)
def test_invalid_saves_are_refused_on_every_rank(rank: int, tmp_path: Path) -> None:
    model, optimizer = make()
    save_checkpoint(model, tmp_path / "1")
    complete = coded("checkpoint.folder-already-complete", "checkpoint")
    refused(complete, model, save_checkpoint, model, tmp_path / "1")
    second = tmp_path / "2"
    twice = torch.optim.SGD(list(model.parameters())[:1])
    for expected, optimizers, extra in (
        (coded("checkpoint.extra-name-taken", "'optim'"), optimizer, {"optim": 1}),
        (coded("checkpoint.extra-not-dictionary", "list"), (), [1]),
        (coded("optimizer.parameter-in-two-optimizers", "'scale'"), [optimizer, twice], None),
        (coded("optimizer.got-state-dictionary"), optimizer.state_dict(), None),
    ):
        refused(expected, model, save_checkpoint, model, second, optimizers, extra=extra)
    # An error on one rank is raised on all ranks.
    place = second if rank == 0 else tmp_path / "1"
    refused(complete.naming("(on ranks [1])"), model, save_checkpoint, model, place)
    assert tfs.latest_checkpoint(tmp_path) == tmp_path / "1" and not second.exists()
    assert tfs.latest_checkpoint(second) is None


@on_ranks(4)
def test_different_parameters_with_one_name_cannot_be_saved(rank: int, tmp_path: Path) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model, _ = make(
        ranks=tfs.Ranks(process_group_for=lambda name, param: pairs[rank % 2] if name.startswith("blocks.0") else None)
    )
    with pytest.raises(
        tfs.CheckpointError, check=coded("checkpoint.parameter-differs-by-rank", "'blocks.0.up.weight'", "[0, 2]")
    ):
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
    refused(coded("checkpoint.folder-already-complete", "model"), model, tfs.save_safetensors, model, folder)

    # Another plan; and a single file that uses the other name of tied parameters, and holds a 0-dim tensor.
    single = {("head.weight" if name == "embedding.weight" else name): value for name, value in tensors.items()}
    on_first(save_file, single, tmp_path / "all.safetensors")
    for source in (folder, tmp_path / "all.safetensors"):
        other, _ = make(4, transport="coalesced", bucketing_strategy="none")
        tfs.load_safetensors(other, source)
        assert_equal(contents(other), gathered)
    fill(other, 1.0)
    on_first(_cut("model-00002-*.safetensors"), folder)
    for options, code in (
        ({}, "checkpoint.file-checksum-wrong"),
        ({"verify_checksums": False}, "checkpoint.file-not-readable"),
    ):
        refused(coded(code, "model-00002-"), other, tfs.load_safetensors, other, folder, **options)
    on_first(index.unlink)
    refused(coded("checkpoint.export-did-not-end"), other, tfs.load_safetensors, other, folder)
    save_checkpoint(other, tmp_path / "rows")
    for wrong, why in (("none", "it does not exist"), ("rows", "it is a checkpoint, which load_checkpoint")):
        expected = coded("checkpoint.source-without-safetensors", wrong, why)
        refused(expected, other, tfs.load_safetensors, other, tmp_path / wrong)


#
# Optimizers must be the same on all ranks and of the class that was saved
#


def _groups(params: list[Any], rank: int) -> Optimizer:
    return AdamW([{"params": params[:1], "lr": 0.3}, {"params": params[1:], "lr": (1 + rank) / 10}])


# What a rank has as its optimizers, and what the error says of the ranks.
DIFFERENT: dict[str, tuple[Callable[[Any, list[Any], int], Any], str]] = {
    "option": (lambda m, p, r: _groups(p, r), "'lr' of param_groups[1] of AdamW: 0.1 on ranks [0]; 0.2 on ranks [1]"),
    "number": (lambda m, p, r: [] if r else SGD(p), "optimizers: SGD on ranks [0]; none on ranks [1]"),
    "class": (lambda m, p, r: (AdamW if r else SGD)(p), "optimizers: SGD on ranks [0]; AdamW on ranks [1]"),
    "parameters": (
        lambda m, p, r: SGD(p[:2] if r else p),
        "param_groups[0] of SGD: 0.weight, 0.bias, 2.weight, 2.bias on ranks [0]; 0.weight, 0.bias on ranks [1]",
    ),
    "state": (
        lambda m, p, r: AdamW(p) if r else update(m, AdamW(p)),
        "['step'] of '0.weight': 1.0 on ranks [0]; none on ranks [1]",
    ),
    "steps": (
        lambda m, p, r: update(m, update(m, AdamW(p)) if r else AdamW(p)),
        "['step'] of '0.weight': 1.0 on ranks [0]; 2.0 on ranks [1]",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
@on_ranks(2)
def test_optimizers_that_differ_between_ranks_are_refused(rank: int, tmp_path: Path, case: str) -> None:
    model, same = small()
    choose, difference = DIFFERENT[case]
    expected = coded("ranks.saved-values-differ", difference)
    optimizers = choose(model, list(model.parameters()), rank)
    refused(expected, model, save_checkpoint, model, tmp_path / "refused", optimizers)
    assert not (tmp_path / "refused").exists()
    save_checkpoint(model, tmp_path / "same", iter([same]))
    expected = coded("ranks.optimizers-differ", "optimizers: none on ranks [0]; AdamW on ranks [1]")
    refused(expected, model, load_checkpoint, model, tmp_path / "same", [same] if rank else [])
    load_checkpoint(model, tmp_path / "same", iter([same]))
    of_iterator, of_list = (tfs.get_optimizer_state_dict(model, several) for several in (iter([same]), [same]))
    assert len(of_iterator["param_groups"]) == len(of_list["param_groups"]) == 1


# The optimizer that was saved, the one it is loaded into, and what the error names.
OTHER_KINDS: dict[str, tuple[Callable[[Any], Optimizer], Callable[[Any], Optimizer], tuple[str, ...]]] = {
    "AdamW into SGD": (
        AdamW,
        lambda p: SGD(p, momentum=0.9),
        ("param_groups[0] of SGD has no option 'amsgrad', 'betas'",),
    ),
    "AdamW into RMSprop": (AdamW, RMSprop, ("of RMSprop has no option 'amsgrad', 'betas'",)),
    "Adagrad into AdamW": (Adagrad, AdamW, ("of AdamW has no option 'initial_accumulator_value', 'lr_decay'",)),
    "AMSGrad into none": (
        lambda p: AdamW(p, amsgrad=True),
        AdamW,
        ("amsgrad=True", "param_groups[0] of AdamW has False"),
    ),
    "none into AMSGrad": (AdamW, lambda p: AdamW(p, amsgrad=True), ("amsgrad=False", "has True")),
    "momentum into none": (lambda p: SGD(p, momentum=0.9), SGD, ("momentum=0.9", "has 0")),
    "none into momentum": (SGD, lambda p: SGD(p, momentum=0.9, lr=0.1), ("momentum=0", "has 0.9")),
}


@on_ranks(2)
def test_the_state_of_another_optimizer_class_is_refused(tmp_path: Path) -> None:
    for case, (saved, loaded, names) in OTHER_KINDS.items():
        model, _ = small()
        save_checkpoint(model, tmp_path / case, update(model, saved(model.parameters())))
        for steps in (0, 1):
            other, _ = small(5.0)
            optimizer = loaded(other.parameters())
            for _ in range(steps):
                update(other, optimizer)
            before = [dict(group) for group in optimizer.param_groups]
            expected = coded("checkpoint.optimizers-do-not-fit", *names)
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
