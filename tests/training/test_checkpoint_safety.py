"""Damaged, different, forged, or concurrently saved checkpoints raise on every rank and change nothing."""

from __future__ import annotations

import enum
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp, full_state_dict, load_checkpoint, save_checkpoint
from thunder_fsdp_sched.checkpoint import claim as claims
from thunder_fsdp_sched.checkpoint import extra as extras
from thunder_fsdp_sched.checkpoint.claim import (
    INDEX,
    METADATA,
    check_claim,
    claim,
    complete_folder,
    release_claim,
)
from thunder_fsdp_sched.checkpoint.metadata import read_metadata, seal
from thunder_fsdp_sched.sharding.jitted_state import rows_by_name

import numpy as np
import pytest
import thunder
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter


def _model(value: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.optim.Optimizer]:
    """Return a small sharded model with all parameters equal to ``value``, and its optimizer, which has state."""
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(value)
    model = thunder.jit(module, transforms=[fsdp()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model, optimizer


def _holds(model: Any, value: float) -> bool:
    return all((param == value).all() for param in full_state_dict(model).values())


def _assert_refused(model: Any, message: str, call: Any, *args: Any, **kwargs: Any) -> str:
    before = {name: tensor.clone() for name, tensor in rows_by_name(model).items()}
    with pytest.raises(tfs.CheckpointError, match=message) as caught:
        call(*args, **kwargs)
    for name, tensor in rows_by_name(model).items():
        assert torch.equal(tensor, before[name]), name
    return str(caught.value)


#
# Different and damaged checkpoints
#


def _different_and_damaged(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = _model(1.0)
    for number, value in enumerate((1.0, 2.0)):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(value)
        save_checkpoint(folder / str(number), model, optimizer, extra={"step": number, "rng": torch.arange(8)})
        tfs.save_safetensors(model, folder / f"whole-{number}")
    other, other_optimizer = _model(5.0)
    extra = {"step": 0, "rng": torch.zeros(8, dtype=torch.int64)}

    # Each rank loads another checkpoint. Names and shapes are the same.
    message = _assert_refused(
        other, "ranks load different checkpoints", load_checkpoint, folder / str(rank), other, other_optimizer
    )
    assert f"ranks [0] {folder}/0" in message and f"ranks [1] {folder}/1" in message
    _assert_refused(other, "ranks load different", tfs.load_safetensors, other, folder / f"whole-{rank}")

    # Each rank may load its own copy, as on local disks.
    shutil.copytree(folder / "0", folder / f"copy-{rank}")
    shutil.copytree(folder / "whole-0", folder / f"whole-copy-{rank}")
    assert load_checkpoint(folder / f"copy-{rank}", other, other_optimizer, extra=extra)["step"] == 0
    assert _holds(other, 1.0)
    _fill(other, 5.0)
    tfs.load_safetensors(other, folder / f"whole-copy-{rank}")
    assert _holds(other, 1.0)
    # One copy is damaged: both ranks raise.
    if rank == 1:
        for file in (folder / "whole-copy-1").glob("*.safetensors"):
            _flip(file, 8 * (file.stat().st_size - 3))
    _assert_refused(other, r"is damaged.*ranks \[1\]", tfs.load_safetensors, other, folder / f"whole-copy-{rank}")
    # Without checksums, different files are compared by content.
    index = folder / f"whole-copy-{rank}" / INDEX
    content = json.loads(index.read_text())
    del content["metadata"]["crc32"]
    index.write_text(json.dumps(content))
    _assert_refused(other, "ranks load different", tfs.load_safetensors, other, folder / f"whole-copy-{rank}")

    # A flipped bit anywhere is an error, unless it is in padding.
    draw = random.Random(0)
    files = [*sorted((folder / "0").glob("*.distcp")), folder / "0" / METADATA]
    found = 0
    for number in range(24):
        file = files[number % len(files)]
        bit = draw.randrange(8 * file.stat().st_size)
        _flip_on_first(file, bit)
        found += _is_refused_or_correct(
            other, lambda: load_checkpoint(folder / "0", other, other_optimizer, extra=extra)
        )
        _flip_on_first(file, bit)
    assert found >= 23  # all but flips in padding between entries, if a file has any
    for file in sorted((folder / "whole-0").glob("*.safetensors")):
        bit = draw.randrange(8 * file.stat().st_size)
        _flip_on_first(file, bit)
        _assert_refused(other, "is damaged, nothing is changed", tfs.load_safetensors, other, folder / "whole-0")
        if bit // 8 > file.stat().st_size - 16:
            tfs.load_safetensors(other, folder / "whole-0", verify_checksums=False)
        _flip_on_first(file, bit)
    _fill(other, 5.0)
    load_checkpoint(folder / "0", other, other_optimizer, extra=extra)
    assert _holds(other, 1.0)

    # A data file of another save, with the same names and lengths.
    dist.barrier()
    if rank == 0:
        mine, theirs = (sorted((folder / n).glob("__1_*.distcp"))[0] for n in "01")
        shutil.copy(theirs, mine)
    dist.barrier()
    _assert_refused(other, "is damaged: the checksum of", load_checkpoint, folder / "0", other, other_optimizer)
    load_checkpoint(folder / "0", other, other_optimizer, verify_checksums=False)


def _fill(model: Any, value: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def _flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def _flip_on_first(file: Path, bit: int) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        _flip(file, bit)
    dist.barrier()


def _is_refused_or_correct(model: Any, load: Any) -> bool:
    _fill(model, 5.0)
    try:
        rest = load()
    except tfs.CheckpointError:
        assert _holds(model, 5.0)
        return True
    assert _holds(model, 1.0) and rest["step"] == 0 and rest["rng"].tolist() == list(range(8))
    return False


def test_different_or_damaged_checkpoints_are_refused_and_change_nothing(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_different_and_damaged, tmp_path)


def _without_checksums(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = _model(1.0)
    save_checkpoint(folder / "ours", model, optimizer, extra={"step": 3}, checksums=False)
    tfs.save_safetensors(model, folder / "whole", checksums=False)
    state = {"model": tfs.get_model_state_dict(model), "optim": tfs.get_optimizer_state_dict(model, optimizer)}
    scheduler = {"last_epoch": 4, "_last_lr": [0.5], "milestones": Counter([3]), "nested": {1: 2}, "verbose": False}
    dcp.save(
        {**state, "step": 3, "scheduler": scheduler}, checkpoint_id=folder / "dcp"
    )  # as saved by versions without extra.json
    for name in ("ours", "dcp"):
        other, other_optimizer = _model(5.0)
        blank = {"last_epoch": 0, "_last_lr": [0.0], "milestones": Counter([3, 3]), "nested": {1: 0}}
        extra = {"step": 0, **({"scheduler": blank} if name == "dcp" else {})}
        loaded = load_checkpoint(folder / name, other, other_optimizer, extra=extra)
        assert loaded == {"step": 3, **({"scheduler": scheduler} if name == "dcp" else {})}
        assert _holds(other, 1.0) and other_optimizer.param_groups[0]["lr"] == 0.125
        tfs.load_safetensors(other, folder / "whole")
    for wrong, message in (
        ({"scheduler": {**blank, "more": 1}}, r"extra\['scheduler'\]\['more'\] is not in the checkpoint"),
        ({"scheduler": {**blank, "milestones": Counter()}}, r"extra\['scheduler'\]\['milestones'\]\['3'\] is in the"),
        ({"epoch": 0}, "holds no 'epoch', but"),
    ):
        _assert_refused(other, message, load_checkpoint, folder / "dcp", other, other_optimizer, extra=wrong)
    # The archives that DCP writes have checksums of their own, which detect a flipped bit.
    dist.barrier()
    if rank == 0:
        [file] = (folder / "dcp").glob("__0_*.distcp")
        data = file.read_bytes()
        at = data.index(torch.ones(3).numpy().tobytes())
        _flip(file, 8 * at)
    dist.barrier()
    _assert_refused(other, r"is damaged: the checksum of", load_checkpoint, folder / "dcp", other)


def test_checkpoints_without_checksums_are_loaded(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_without_checksums, tmp_path)


def _load_with_casts(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = _model(1.0, torch.float64)
    save_checkpoint(folder / "double", model, optimizer)
    tfs.save_safetensors(model, folder / "whole")
    other, other_optimizer = _model(5.0)
    for load in (
        lambda: load_checkpoint(folder / "double", other, other_optimizer),
        lambda: tfs.load_safetensors(other, folder / "whole"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load()
        cast_warnings = [str(w.message) for w in caught if " casts what " in str(w.message)]
        assert len(cast_warnings) == (1 if rank == 0 else 0)
        assert all("0.weight from float64 to float32" in text for text in cast_warnings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(folder / "double", model, optimizer)
        tfs.load_safetensors(model, folder / "whole")
    # A cast of the optimizer's state only.
    state = {"model": tfs.get_model_state_dict(other), "optim": tfs.get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder / "state")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_checkpoint(folder / "state", other, other_optimizer)
    cast_warnings = [str(w.message) for w in caught if " casts what " in str(w.message)]
    assert bool(cast_warnings) is (rank == 0) and all(
        "exp_avg of 0.weight from float64 to float32" in t for t in cast_warnings
    )


def test_loading_warns_once_about_casts_with_names(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_load_with_casts, tmp_path)


def _find_latest(rank: int, world_size: int, folder: Path) -> None:
    model, _ = _model()
    for name in ("good", "cut", "empty", "forged", "data"):
        save_checkpoint(folder / name, model)
        dist.barrier()
    if rank == 0:
        data = (folder / "good" / METADATA).read_bytes()
        (folder / "cut" / METADATA).write_bytes(data[: len(data) // 2])
        (folder / "empty" / METADATA).write_bytes(b"")
        (folder / "forged" / METADATA).write_bytes(pickle.dumps(_MakesFolderWhenUnpickled(str(folder / "proof"))))
        next((folder / "data").glob("*.distcp")).write_bytes(b"")
        for age, name in enumerate(("good", "cut", "empty", "forged", "data")):
            os.utime(folder / name / METADATA, (1000 + age, 1000 + age))
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert tfs.latest_checkpoint(folder) == folder / "good"
    left_out = [str(w.message) for w in caught if "leaves out" in str(w.message)]
    assert len(left_out) == 4
    for name in ("cut", "forged"):
        _assert_refused(model, r"\.metadata cannot be read", load_checkpoint, folder / name, model)
        _assert_refused(model, "holds a checkpoint already", save_checkpoint, folder / name, model)
    # Without hard links, a killed run leaves an empty file. Saving into the folder again loses nothing.
    _assert_refused(model, "is a checkpoint whose save did not end", load_checkpoint, folder / "empty", model)
    save_checkpoint(folder / "empty", model)
    assert tfs.latest_checkpoint(folder) == folder / "empty"
    assert not (folder / "proof").exists()


class _MakesFolderWhenUnpickled:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_latest_checkpoint_skips_damaged_newer_ones(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_find_latest, tmp_path)


#
# Pickle
#


def _load_and_save_unsafe_values(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = _model()
    state = {"model": tfs.get_model_state_dict(model)}
    dcp.save(
        {**state, "step": _MakesFolderWhenUnpickled(str(folder / "proof")), "number": 1}, checkpoint_id=folder / "extra"
    )
    _assert_refused(model, r"'step' is no plain value", load_checkpoint, folder / "extra", model, extra={"step": 0})
    assert load_checkpoint(folder / "extra", model, extra={"number": 0}) == {"number": 1}
    groups = tfs.get_optimizer_state_dict(model, optimizer)
    groups["param_groups"][0]["lr"] = _MakesFolderWhenUnpickled(str(folder / "proof"))
    dcp.save({**state, "optim": groups}, checkpoint_id=folder / "group")
    _assert_refused(model, r"lr' is no plain value", load_checkpoint, folder / "group", model, optimizer)
    assert not (folder / "proof").exists()
    # Such values cannot be saved either.
    optimizer.param_groups[0]["note"] = threading.Lock
    _assert_refused(
        model, r"optim\['param_groups'\]\[0\]\['note'\]", save_checkpoint, folder / "note", model, optimizer
    )
    _assert_refused(
        model, r"extra\['a'\]\[0\] is a .*Path", save_checkpoint, folder / "path", model, extra={"a": [Path("b")]}
    )
    different = {"step": 1, "loss": float(rank)}
    _assert_refused(
        model, "extra: 'loss' differs between ranks", save_checkpoint, folder / "loss", model, extra=different
    )
    assert not (folder / "note").exists() and not (folder / "path").exists() and not (folder / "loss").exists()


def test_values_that_are_not_plain_are_refused_by_name_and_never_run_code(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_load_and_save_unsafe_values, tmp_path)


class _CallsGetattr:
    """Is unpickled by a call of ``getattr``."""

    def __init__(self, owner: Any, name: str) -> None:
        self.args = (owner, name)

    def __reduce__(self) -> Any:
        return getattr, self.args


class _OldPickler(pickle.Pickler):
    """Pickles enumerations like the first releases of Python 3.11."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_enumerations_pickled_by_other_pythons_are_read(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    found, _ = read_metadata(tmp_path)
    file = io.BytesIO()
    _OldPickler(file).dump(found)
    assert b"getattr" in file.getvalue()
    (tmp_path / METADATA).write_bytes(file.getvalue())
    assert read_metadata(tmp_path)[0] == found


@pytest.mark.parametrize(
    "forged, message",
    [
        (_MakesFolderWhenUnpickled("nowhere/proof"), r"names (posix|nt)\.mkdir, .*was not called"),
        (OrderedDict(a=1), "it holds a dict"),
        ({"a": io.BytesIO()}, "names _io.BytesIO"),
        (getattr, "it holds a function"),
        (_CallsGetattr(torch.Size, "mro"), "takes the attribute 'mro'"),
        (_CallsGetattr(torch.Tensor, "data"), "names torch.Tensor"),
        (torch.save, "names torch.serialization.save"),
        (torch.nn, "cannot be read"),
        (np.float64(1), "names numpy"),
    ],
)
def test_metadata_with_other_classes_are_refused_without_running_them(
    tmp_path: Path, forged: Any, message: str
) -> None:
    try:
        data = pickle.dumps(forged)
    except TypeError:
        data = b"ctorch\nnn\n."
    (tmp_path / METADATA).write_bytes(seal(data))
    with pytest.raises(ValueError, match=message):
        read_metadata(tmp_path)


def test_metadata_that_name_files_outside_their_folder_are_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    found, digest = read_metadata(tmp_path)
    assert list(found.state_dict_metadata) == ["a"] and len(digest) == 64
    for name in ("/etc/passwd", "../other/__0_0.distcp"):
        for info in found.storage_data.values():
            info.relative_path = name
        (tmp_path / METADATA).write_bytes(pickle.dumps(found))
        with pytest.raises(ValueError, match="it names a file outside its folder"):
            read_metadata(tmp_path)


#
# Extra values
#


def _schedulers() -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    lr_scheduler = torch.optim.lr_scheduler
    made = [
        lr_scheduler.MultiStepLR(optimizer, [2, 5]),
        lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lr_scheduler.ReduceLROnPlateau(optimizer),
        lr_scheduler.OneCycleLR(optimizer, 0.5, 10),
        lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.LinearLR(optimizer)], [3]
        ),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    ]
    return {type(scheduler).__name__: scheduler.state_dict() for scheduler in made}


def _values() -> dict[str, Any]:
    return {
        "plain": [None, True, 3, -0.0, 1e-320, "text \u00e9", [], (), {}, b"\x00\xff"],
        "odd": (float("inf"), float("-inf"), (1, [2, (3,)])),
        "keys": {1: "a", "1": "b", -3: {"x": 1}},
        "types": {"$type": "tuple", "items": [1]},
        "ordered": OrderedDict(b=1, a=Counter("aab")),
        "random": random.Random(5).getstate(),
        "schedulers": _schedulers(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
    }


def _assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _assert_equal(a, b)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            _assert_equal(one[key], other[key])
    elif isinstance(one, (torch.Tensor, np.ndarray)):
        assert one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    else:
        assert one == other or one != one


def _save_and_load_extra(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = _model()
    values = {
        **_values(),
        "numpy": np.random.RandomState(3).get_state(),
        "rng": torch.get_rng_state(),
        "loader": {
            "epoch": 1,
            "queue": [torch.arange(3, dtype=torch.bfloat16), {"seed": torch.tensor(4)}],
            "empty": torch.ones(0),
        },
        "ema": tfs.get_model_state_dict(model),
    }
    save_checkpoint(folder, model, optimizer, extra=values)
    ema = {name: torch.empty_like(entry) for name, entry in tfs.get_model_state_dict(model).items()}
    blank: dict[str, Any] = {**dict.fromkeys(values), "schedulers": _schedulers(), "ema": ema}
    loaded = load_checkpoint(folder, model, optimizer, extra=blank)
    assert loaded.keys() == values.keys()
    loaded_ema = loaded.pop("ema")
    for name, entry in values.pop("ema").items():
        assert torch.equal(entry.to_local(), loaded_ema[name].to_local()), name
    _assert_equal(loaded, values)
    assert load_checkpoint(folder, model, extra={"rng": torch.empty_like(values["rng"])}).keys() == {"rng"}
    for wrong, message in (
        ({"rng": torch.zeros(3)}, r"extra\['rng'\] has shape \(\d+,\) in the checkpoint, but \(3,\) was given"),
        ({"rng": 3}, r"extra\['rng'\] is a tensor in the checkpoint, but a int was given"),
        ({"keys": torch.zeros(3)}, r"extra\['keys'\] is a dict in the checkpoint, but a Tensor was given"),
        ({"random": {"a": 1}}, r"extra\['random'\] is a tuple in the checkpoint, but a dict was given"),
        ({"loader": {"epoch": 0, "more": 1}}, r"extra\['loader'\] has no 'more' in the checkpoint, but \['epoch'"),
        ({"later": 1}, r"holds no 'later', but \['model', 'optim', 'plain'"),
    ):
        text = _assert_refused(model, message, load_checkpoint, folder, model, optimizer, extra=wrong)
        assert "optimizer" not in text


def test_extra_values_survive_saving_and_loading(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_save_and_load_extra, tmp_path / "checkpoint")


def test_extra_values_survive_json() -> None:
    values = _values()
    text, tensors = extras.encode(values)
    assert not tensors
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    _assert_equal(extras.decode(text, lambda name: pytest.fail("no tensor")), values)
    nan = extras.decode(extras.encode({"a": float("nan")})[0], lambda name: name)["a"]
    assert nan != nan


@pytest.mark.parametrize(
    "value, message",
    [
        ({"a": {"b": [1, {2}]}}, r"extra\['a'\]\['b'\]\[1\] is a builtins\.set"),
        ({"a": nn.Linear(1, 1)}, r"extra\['a'\] is a torch\.nn\.modules\.linear\.Linear.*state_dict\(\)"),
        ({"a": {(1, 2): 3}}, r"extra\['a'\] has the key \(1, 2\)"),
        ({"a": np.array([object()])}, r"extra\['a'\] is a numpy\.ndarray"),
        ({1: 2}, "1 cannot be a name"),
        ({"a": len}, r"extra\['a'\] is a builtins\.builtin_function_or_method"),
    ],
)
def test_unsupported_extra_values_are_refused_with_their_path(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        extras.encode(value)


def test_extra_values_that_contain_themselves_are_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="contains itself"):
        extras.encode({"a": value})


#
# Two runs save into one folder
#


def _two_runs(rank: int, world_size: int, folder: Path) -> int:
    """Save from two runs, ranks 0 and 1 and ranks 2 and 3, into the same folders at once. Return how many succeeded."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(1.0 + rank // 2)
    model = thunder.jit(module, transforms=[fsdp(process_group=pairs[rank // 2])])
    reader = thunder.jit(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), transforms=[fsdp()])
    saves = sum(_race(rank, folder / "one-host", number, model, reader) for number in range(4))
    # On two hosts a run takes over the other's claim. Unique file names and the exclusive link must suffice.
    with mock.patch.object(claims, "_system", lambda: {"host": f"host {rank // 2}"}):
        return saves + sum(_race(rank, folder / "two-hosts", number, model, reader) for number in range(4))


def _race(rank: int, folder: Path, number: int, model: Any, reader: Any) -> int:
    """Save from both runs into one folder and return how many succeeded."""
    is_whole = number % 2
    target = folder / str(number)
    dist.barrier()
    try:
        if is_whole:
            tfs.save_safetensors(model, target)
        else:
            save_checkpoint(target, model, extra={"run": rank // 2})
        result = "saved"
    except tfs.CheckpointError as error:
        result = str(error)
        if folder.name == "one-host":
            words = ("another run", "other runs", "not the folder", "already", "nevertheless")
            assert any(word in result for word in words), result
    successes: list[Any] = [None] * 4
    dist.all_gather_object(successes, result == "saved")
    assert successes[0] == successes[1] and successes[2] == successes[3]
    winners = [run for run in (0, 1) if successes[2 * run]]
    assert len(winners) <= 1, "both runs claim to have saved into one folder"
    for winner in winners:
        # The folder has all files of the winner. On one host it has no others.
        if is_whole:
            tfs.load_safetensors(reader, target)
            files = {*json.loads((target / INDEX).read_text())["weight_map"].values(), INDEX}
        else:
            assert load_checkpoint(target, reader, extra={"run": 0}) == {"run": winner}
            files = {info.relative_path for info in read_metadata(target)[0].storage_data.values()} | {METADATA}
        assert _holds(reader, 1.0 + winner)
        assert {entry.name for entry in target.iterdir()} >= files
        if folder.name == "one-host":
            assert {entry.name for entry in target.iterdir()} == files
    return len(winners)


def test_at_most_one_of_two_runs_saves_into_a_folder(four_ranks: Ranks, tmp_path: Path) -> None:
    saved = four_ranks.run(_two_runs, tmp_path)
    assert len(set(saved)) == 1 and saved[0] >= 4  # of 8 races: usually one of the runs wins


def _different_folders(rank: int, world_size: int, folder: Path) -> None:
    model, _ = _model()
    message = r"is not the folder that the first rank has claimed.*\(on ranks \[1\]\)"
    _assert_refused(model, message, save_checkpoint, folder / str(rank), model)
    _assert_refused(model, message, tfs.save_safetensors, model, folder / str(rank))
    dist.barrier()  # the first rank cleans up after reporting to the others
    assert not any((folder / "0").iterdir()) and not (folder / "1").exists()
    dist.barrier()
    # A failed save leaves nothing in the folder, and a later one succeeds.
    keep = FileSystemWriter.write_data

    def fail(*args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return keep(*args, **kwargs)

    FileSystemWriter.write_data = fail  # type: ignore[method-assign]
    try:
        _assert_refused(model, "was not saved: rank 1: OSError.*No space left", save_checkpoint, folder / "0", model)
    finally:
        FileSystemWriter.write_data = keep  # type: ignore[method-assign]
    dist.barrier()
    assert not any((folder / "0").iterdir())
    dist.barrier()
    save_checkpoint(folder / "0", model)
    load_checkpoint(folder / "0", model)


def test_ranks_must_save_into_the_same_folder(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_different_folders, tmp_path)


def test_a_claim_is_held_while_its_process_lives(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "import thunder_fsdp_sched\n"
        "from thunder_fsdp_sched.checkpoint.claim import claim\n"
        "run = claim(Path(sys.argv[1]), '.metadata')\n"
        "(Path(sys.argv[1]) / f'__0_{run}_0.distcp').write_bytes(b'half')\n"
        "print(run, flush=True); time.sleep(600)\n"
    )
    root = str(Path(tfs.__file__).parents[1])
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), root]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        run = owner.stdout.readline().strip()
        check_claim(tmp_path, run)
        with pytest.raises(ValueError, match=rf"another run is saving into .* \(process {owner.pid} on "):
            claim(tmp_path, METADATA)
    finally:
        owner.kill()
    # A zombie process counts as dead.
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
    ours = claim(tmp_path, METADATA)
    owner.wait()
    check_claim(tmp_path, ours)
    assert [entry.name for entry in tmp_path.iterdir()] == [".claim"], "the files of the dead run must be deleted"
    with pytest.raises(ValueError, match=f"process {os.getpid()} on"):
        claim(tmp_path, METADATA)
    release_claim(tmp_path, METADATA, ours)
    assert not any(tmp_path.iterdir())


def test_a_claim_of_another_host_is_taken_over_without_deleting_its_files(tmp_path: Path) -> None:
    theirs = claim(tmp_path, METADATA)
    owner = json.loads((tmp_path / ".claim").read_text())
    (tmp_path / ".claim").write_text(json.dumps({**owner, "namespace": "of another container"}))
    (tmp_path / f"__0_{theirs}_0.distcp").touch()
    ours = claim(tmp_path, METADATA)
    with pytest.raises(ValueError, match="is not the folder that the first rank has claimed"):
        check_claim(tmp_path, theirs)
    assert (tmp_path / f"__0_{theirs}_0.distcp").exists()
    (tmp_path / f"__0_{ours}_0.distcp").touch()
    for run in (ours, theirs):
        (tmp_path / f".{run}").mkdir()
        (tmp_path / f".{run}" / METADATA).write_text(run)
    # The other run is still alive, and completes the folder first.
    complete_folder(tmp_path, METADATA, theirs, tmp_path / f".{theirs}" / METADATA)
    release_claim(tmp_path, METADATA, theirs)
    with pytest.raises(ValueError, match="another run has completed"):
        complete_folder(tmp_path, METADATA, ours, tmp_path / f".{ours}" / METADATA)
    release_claim(tmp_path, METADATA, ours)
    assert {entry.name for entry in tmp_path.iterdir()} == {METADATA, f".{theirs}", f"__0_{theirs}_0.distcp"}
    assert (tmp_path / METADATA).read_text() == theirs
    with pytest.raises(ValueError, match="has completed"):
        claim(tmp_path, METADATA)


def test_without_hard_links_only_one_run_completes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Any, target: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    run = claim(tmp_path, METADATA)
    (tmp_path / "list").write_text("contents")
    complete_folder(tmp_path, METADATA, run, tmp_path / "list")
    assert (tmp_path / METADATA).read_text() == "contents"
    with pytest.raises(ValueError, match="another run has completed"):
        complete_folder(tmp_path, METADATA, run, tmp_path / "list")
