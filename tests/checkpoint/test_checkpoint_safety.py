"""Damaged, different, forged, or concurrently saved checkpoints raise on every rank and change nothing."""

from __future__ import annotations

import enum
import io
import json
import os
import pickle
import random
import shutil
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import load_checkpoint, save_checkpoint
from thunder_fsdp_sched.extras.checkpoint import folder as folders

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from coded import coded
from ranks import on_ranks
from saving import INDEX, METADATA, fill, on_first, refused, small
from torch import nn


def _holds(model: Any, value: float) -> bool:
    return all((param == value).all() for param in tfs.full_state_dict(model).values())


#
# Different and damaged checkpoints
#

EXTRA = {"step": 0, "rng": torch.zeros(8, dtype=torch.int64)}


def _save_two(folder: Path) -> None:
    model, optimizer = small()
    for number, value in enumerate((1.0, 2.0)):
        fill(model, value)
        save_checkpoint(model, folder / str(number), optimizer, extra={"step": number, "rng": torch.arange(8)})
        tfs.save_safetensors(model, folder / f"whole-{number}")


@on_ranks(2)
def test_ranks_must_load_the_same_checkpoint_but_maybe_from_copies_of_it(rank: int, tmp_path: Path) -> None:
    _save_two(tmp_path)
    model, optimizer = small(5.0)
    differ = coded("ranks.checkpoints-differ")
    named = differ.naming(f"ranks [0] {tmp_path}/0", f"ranks [1] {tmp_path}/1")
    refused(named, model, load_checkpoint, model, tmp_path / str(rank), optimizer)
    refused(differ, model, tfs.load_safetensors, model, tmp_path / f"whole-{rank}")

    # Each rank may load its own copy, as on local disks.
    copy = shutil.copytree(tmp_path / "0", tmp_path / f"copy-{rank}")
    whole = shutil.copytree(tmp_path / "whole-0", tmp_path / f"whole-copy-{rank}")
    assert load_checkpoint(model, copy, optimizer, extra=EXTRA)["step"] == 0 and _holds(model, 1.0)
    fill(model, 5.0)
    tfs.load_safetensors(model, whole)
    assert _holds(model, 1.0)
    if rank == 1:
        for file in whole.glob("*.safetensors"):
            _flip(file, 8 * (file.stat().st_size - 3))
    refused(coded("checkpoint.file-checksum-wrong", "(on ranks [1])"), model, tfs.load_safetensors, model, whole)
    # Without checksums, different files are compared by content.
    content = json.loads((whole / INDEX).read_text())
    del content["metadata"]["crc32"]
    (whole / INDEX).write_text(json.dumps(content))
    refused(differ, model, tfs.load_safetensors, model, whole)


def _flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


@on_ranks(2)
def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path) -> None:
    _save_two(tmp_path)
    model, optimizer = small(5.0)
    folder, whole = tmp_path / "0", tmp_path / "whole-0"
    draw = random.Random(0)
    files = [*sorted(folder.glob("*.distcp")), folder / METADATA]
    found = 0
    for file in files * 8:
        bit = draw.randrange(8 * file.stat().st_size)
        on_first(_flip, file, bit)
        fill(model, 5.0)
        try:
            rest = load_checkpoint(model, folder, optimizer, extra=EXTRA)
        except tfs.CheckpointError:
            found += _holds(model, 5.0)
        else:
            assert _holds(model, 1.0) and rest["step"] == 0 and rest["rng"].tolist() == list(range(8))
        on_first(_flip, file, bit)
    assert found >= 23  # all but flips in padding between entries, if a file has any
    for file in sorted(whole.glob("*.safetensors")):
        bit = 8 * (file.stat().st_size - draw.randrange(1, 16))
        on_first(_flip, file, bit)
        refused(coded("checkpoint.file-checksum-wrong", file.name), model, tfs.load_safetensors, model, whole)
        tfs.load_safetensors(model, whole, verify_checksums=False)
        on_first(_flip, file, bit)
    load_checkpoint(model, folder, optimizer, extra=EXTRA)

    # A data file of another save, with the same names and lengths.
    mine, theirs = (min((tmp_path / n).glob("__1_*.distcp")) for n in "01")
    on_first(shutil.copy, theirs, mine)
    refused(coded("checkpoint.not-loaded", "checksum"), model, load_checkpoint, model, folder, optimizer)
    load_checkpoint(model, folder, optimizer, verify_checksums=False)


@on_ranks(2)
def test_checkpoints_of_dcp_are_loaded(tmp_path: Path) -> None:
    saved, optimizer = small()
    state = {"model": tfs.get_model_state_dict(saved), "optim": tfs.get_optimizer_state_dict(saved, optimizer)}
    scheduler = {"last_epoch": 4, "_last_lr": [0.5], "milestones": Counter([3]), "nested": {1: 2}, "verbose": False}
    dcp.save({**state, "step": 0, "scheduler": scheduler}, checkpoint_id=tmp_path / "dcp")  # as by older versions
    blank = {"last_epoch": 0, "_last_lr": [0.0], "milestones": Counter([3, 3]), "nested": {1: 0}}
    model, other = small(5.0)
    extra = {"step": 9, "scheduler": blank}
    assert load_checkpoint(model, tmp_path / "dcp", other, extra=extra) == {"step": 0, "scheduler": scheduler}
    assert _holds(model, 1.0) and other.param_groups[0]["lr"] == 0.125
    for wrong, expected in (
        (
            {"scheduler": {**blank, "more": 1}},
            coded("checkpoint.extra-entry-not-saved", "extra['scheduler']", "'more'"),
        ),
        (
            {"scheduler": {**blank, "milestones": Counter()}},
            coded("checkpoint.extra-entry-not-given", "extra['scheduler']['milestones']['3']"),
        ),
        ({"scheduler": None}, coded("checkpoint.extra-dictionary-expected", "extra['scheduler']", "NoneType")),
        ({"epoch": 0}, coded("checkpoint.name-not-held", "'epoch'")),
    ):
        refused(expected, model, load_checkpoint, model, tmp_path / "dcp", other, extra=wrong)
    # The archives that DCP writes have checksums of their own, which detect a flipped bit.
    file = min((tmp_path / "dcp").glob("__0_*.distcp"))
    on_first(_flip, file, 8 * file.read_bytes().index(torch.ones(3).numpy().tobytes()))
    refused(coded("checkpoint.not-loaded", "checksum"), model, load_checkpoint, model, tmp_path / "dcp")


@on_ranks(2)
def test_loading_warns_once_about_casts_with_names(rank: int, tmp_path: Path) -> None:
    double, doubles = small(dtype=torch.float64)
    model, optimizer = small(5.0)
    save_checkpoint(double, tmp_path / "double", doubles)
    tfs.save_safetensors(double, tmp_path / "whole")
    state = {"model": tfs.get_model_state_dict(model), "optim": tfs.get_optimizer_state_dict(double, doubles)}
    dcp.save(state, checkpoint_id=tmp_path / "state")
    cast = "0.weight from float64 to float32"
    loads: list[tuple[Callable[[], Any], str | None]] = [
        (lambda: load_checkpoint(model, tmp_path / "double", optimizer), cast),
        (lambda: tfs.load_safetensors(model, tmp_path / "whole"), cast),
        (lambda: load_checkpoint(model, tmp_path / "state", optimizer), f"exp_avg of {cast}"),
        (lambda: load_checkpoint(double, tmp_path / "double", doubles), None),
        (lambda: tfs.load_safetensors(double, tmp_path / "whole"), None),
    ]
    for load, expected in loads:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load()
        texts = [str(w.message) for w in caught if " casts what " in str(w.message)]
        assert len(texts) == (expected is not None and rank == 0) and all(expected in text for text in texts)


class _MakesFolderWhenUnpickled:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path | str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@on_ranks(2)
def test_latest_checkpoint_skips_damaged_newer_ones(tmp_path: Path) -> None:
    model, _ = small()
    for name in ("good", "cut", "empty", "forged", "data"):
        save_checkpoint(model, tmp_path / name)

    def damage() -> None:
        data = (tmp_path / "good" / METADATA).read_bytes()
        (tmp_path / "cut" / METADATA).write_bytes(data[: len(data) // 2])
        (tmp_path / "empty" / METADATA).write_bytes(b"")
        (tmp_path / "forged" / METADATA).write_bytes(pickle.dumps(_MakesFolderWhenUnpickled(tmp_path / "proof")))
        next((tmp_path / "data").glob("*.distcp")).write_bytes(b"")

    on_first(damage)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert tfs.latest_checkpoint(tmp_path) == tmp_path / "good"
    assert len([w for w in caught if "leaves out" in str(w.message)]) == 4
    for name in ("cut", "forged"):
        refused(coded("checkpoint.list-not-readable", ".metadata"), model, load_checkpoint, model, tmp_path / name)
        refused(coded("checkpoint.folder-already-complete"), model, save_checkpoint, model, tmp_path / name)
    # Without hard links, a killed run leaves an empty file. Saving into the folder again loses nothing.
    refused(coded("checkpoint.save-did-not-end"), model, load_checkpoint, model, tmp_path / "empty")
    save_checkpoint(model, tmp_path / "empty")
    assert tfs.latest_checkpoint(tmp_path) == tmp_path / "empty"
    assert not (tmp_path / "proof").exists()


#
# Pickle
#


@on_ranks(2)
def test_values_that_are_not_plain_are_refused_by_name_and_never_run_code(rank: int, tmp_path: Path) -> None:
    model, optimizer = small()
    state: dict[str, Any] = {"model": tfs.get_model_state_dict(model)}
    forged = _MakesFolderWhenUnpickled(tmp_path / "proof")
    dcp.save({**state, "step": forged, "number": 1}, checkpoint_id=tmp_path / "extra")
    expected = coded("checkpoint.not-loaded", "'step' is not a plain value")
    refused(expected, model, load_checkpoint, model, tmp_path / "extra", extra={"step": 0})
    assert load_checkpoint(model, tmp_path / "extra", extra={"number": 0}) == {"number": 1}
    state["optim"] = tfs.get_optimizer_state_dict(model, optimizer)
    state["optim"]["param_groups"][0]["lr"] = forged
    dcp.save(state, checkpoint_id=tmp_path / "group")
    expected = coded("checkpoint.not-loaded", "lr' is not a plain value")
    refused(expected, model, load_checkpoint, model, tmp_path / "group", optimizer)
    assert not (tmp_path / "proof").exists()
    # Such values cannot be saved either, nor those that differ between ranks.
    optimizer.param_groups[0]["note"] = threading.Lock
    differ = coded("ranks.saved-values-differ")
    for expected, optimizers, extra in (
        (coded("checkpoint.value-cannot-be-held", "optim['param_groups'][0]['note']"), optimizer, None),
        (coded("checkpoint.value-cannot-be-held", "extra['a'][0]", "Path"), (), {"a": [Path("b")]}),
        (differ.naming("extra['loss']: 0.0 on ranks [0]; 1.0 on ranks [1]"), (), {"loss": float(rank)}),
        (differ.naming("extra['a']['rng']"), (), {"a": {"rng": torch.tensor([rank])}}),
    ):
        refused(expected, model, save_checkpoint, model, tmp_path / "unsaved", optimizers, extra=extra)
        assert not (tmp_path / "unsaved").exists()


class _CallsGetattr:
    """Is unpickled by a call of ``getattr``."""

    def __init__(self, owner: Any, name: str) -> None:
        self.args = (owner, name)

    def __reduce__(self) -> Any:
        return getattr, self.args


class _OldPickler(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


@on_ranks(1)
def test_metadata_of_all_versions_of_python_are_read(tmp_path: Path) -> None:
    model, _ = small()
    dcp.save({"model": tfs.get_model_state_dict(model)}, checkpoint_id=tmp_path)
    file = io.BytesIO()
    _OldPickler(file).dump(_metadata(tmp_path))
    assert b"getattr" in file.getvalue()
    (tmp_path / METADATA).write_bytes(file.getvalue())
    fill(model, 5.0)
    load_checkpoint(model, tmp_path)
    assert _holds(model, 1.0)


def _metadata(folder: Path) -> Any:
    return dcp.FileSystemReader(folder).read_metadata()


@pytest.mark.parametrize(
    "forged, name",
    [
        (_MakesFolderWhenUnpickled("nowhere/proof"), f"{os.mkdir.__module__}.mkdir"),
        (OrderedDict(a=1), "dict"),
        ({"a": io.BytesIO()}, "_io.BytesIO"),
        (getattr, "function"),
        (_CallsGetattr(torch.Size, "mro"), "'mro' of <class 'torch.Size'>"),
        (_CallsGetattr(torch.Tensor, "data"), "torch.Tensor"),
        (torch.save, "torch.serialization.save"),
        (torch.nn, "torch.nn"),
        (np.float64(1), "numpy"),
    ],
)
def test_metadata_with_other_classes_are_refused_without_running_them(
    one_rank: None, tmp_path: Path, forged: Any, name: str
) -> None:
    data = b"ctorch\nnn\n." if forged is torch.nn else pickle.dumps(forged)
    (tmp_path / METADATA).write_bytes(data)
    refused(coded("checkpoint.list-not-readable", name), model := small()[0], load_checkpoint, model, tmp_path)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"relative_path": "/etc/passwd"}, "outside its folder, '/etc/passwd'"),
        ({"relative_path": "../other/__0_0.distcp"}, "outside its folder, '../other/__0_0.distcp'"),
        ({"relative_path": 7}, "TypeError"),
        ({"offset": -1}, "names no range of"),
    ],
)
def test_metadata_that_name_other_files_or_no_range_are_refused(
    one_rank: None, tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    save_checkpoint(model := small()[0], tmp_path)
    found = _metadata(tmp_path)
    for info in found.storage_data.values():
        vars(info).update(change)
    (tmp_path / METADATA).write_bytes(pickle.dumps(found))
    refused(coded("checkpoint.list-not-readable", name), model, load_checkpoint, model, tmp_path)


#
# Extra values
#


def _schedulers() -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    of = torch.optim.lr_scheduler
    made = [
        of.MultiStepLR(optimizer, [2, 5]),
        of.CosineAnnealingLR(optimizer, 10),
        of.ReduceLROnPlateau(optimizer),
        of.OneCycleLR(optimizer, 0.5, 10),
        of.SequentialLR(optimizer, [of.ConstantLR(optimizer), of.LinearLR(optimizer)], [3]),
        of.CosineAnnealingWarmRestarts(optimizer, 3),
    ]
    return {type(scheduler).__name__: scheduler.state_dict() for scheduler in made}


def _values() -> dict[str, Any]:
    return {
        "plain": [None, True, 3, -0.0, 1e-320, "text \u00e9", [], (), {}, b"\x00\xff", b""],
        "odd": (float("inf"), float("-inf"), float("nan"), (1, [2, (3,)])),
        "keys": {1: "a", "1": "b", -3: {"x": 1}, (1, 2): {3, 4}},
        "ordered": OrderedDict(b=1, a=Counter("aab")),
        "random": random.Random(5).getstate(),
        "schedulers": _schedulers(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "numpy": [np.random.RandomState(3).get_state(), np.float64(0.5), np.array([True]), np.zeros((0, 2), np.int8)],
        "rng": torch.get_rng_state(),
        "loader": {
            "epoch": 1,
            "queue": [torch.arange(3, dtype=torch.bfloat16), {"seed": torch.tensor(4)}],
            "empty": torch.ones(0),
        },
    }


@on_ranks(2)
def test_extra_values_survive_saving_and_loading(tmp_path: Path) -> None:
    model, optimizer = small()
    values, entries = _values(), tfs.get_model_state_dict(model)
    save_checkpoint(model, tmp_path / "rows", optimizer, extra={**values, "ema": entries})
    ema = {name: torch.empty_like(entry) for name, entry in entries.items()}
    blank: dict[str, Any] = {**dict.fromkeys(values), "schedulers": _schedulers(), "ema": ema}
    loaded = load_checkpoint(model, tmp_path / "rows", optimizer, extra=blank)
    for name, entry in loaded.pop("ema").items():
        assert torch.equal(entry.to_local(), entries[name].to_local()), name
    torch.set_printoptions(profile="full")
    with np.printoptions(threshold=10_000):
        assert repr(loaded) == repr(values)  # types, order and bits
    torch.set_printoptions(profile="default")
    for wrong, expected in (
        ({"rng": torch.zeros(3)}, coded("checkpoint.extra-shape-mismatch", "extra['rng']", "(3,)")),
        ({"rng": 3}, coded("checkpoint.extra-type-mismatch", "extra['rng']", "tensor", "int")),
        ({"keys": torch.zeros(3)}, coded("checkpoint.extra-type-mismatch", "extra['keys']", "dict", "Tensor")),
        ({"random": {"a": 1}}, coded("checkpoint.extra-type-mismatch", "extra['random']", "tuple", "dict")),
        (
            {"loader": {"epoch": 0, "more": 1}},
            coded("checkpoint.extra-entry-not-saved", "extra['loader']", "'more'", "['epoch'"),
        ),
        ({"later": 1}, coded("checkpoint.name-not-held", "'later'", "['model', 'optim', 'plain'")),
    ):
        assert "optimizer" not in refused(expected, model, load_checkpoint, model, tmp_path / "rows", extra=wrong)


_ITSELF: list[Any] = []
_ITSELF.append(_ITSELF)


@pytest.mark.parametrize(
    "value, expected",
    [
        ({"a": {"b": [1, Path("c")]}}, coded("checkpoint.value-cannot-be-held", "extra['a']['b'][1]", "pathlib.")),
        (
            {"a": nn.Linear(1, 1)},
            coded("checkpoint.value-cannot-be-held", "extra['a']", "torch.nn.modules.linear.Linear"),
        ),
        ({"a": {Path("b"): 3}}, coded("checkpoint.value-cannot-be-held", "extra['a']", "builtins.dict")),
        ({"a": np.array([object()])}, coded("checkpoint.value-cannot-be-held", "extra['a']", "numpy.ndarray")),
        ({1: 2}, coded("checkpoint.extra-name-not-text", "1")),
        ({"a": len}, coded("checkpoint.value-cannot-be-held", "extra['a']", "builtins.builtin_function_or_method")),
        ({"a": _ITSELF}, coded("checkpoint.extra-nested-too-deeply")),
    ],
)
def test_unsupported_extra_values_are_refused_with_their_path(
    one_rank: None, tmp_path: Path, value: Any, expected: coded
) -> None:
    refused(expected, model := small()[0], save_checkpoint, model, tmp_path, extra=value)


#
# Two runs save into one folder
#


def _begin(folder: Path, number: int) -> folders.SaveRun:
    run = folders.SaveRun(folder, METADATA, f"{number:012d}")
    run.begin()
    (folder / f"__0_{run.id}_0.distcp").touch()
    (run.draft / METADATA).write_text(run.id)
    return run


@pytest.mark.parametrize("hard_links", [True, False])
def test_the_first_run_to_finish_completes_a_folder_and_deletes_the_files_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard_links: bool
) -> None:
    def refuse(source: Any, target: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not hard_links:
        monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "model-00001-aaaaaaaaaaaa.safetensors").touch()  # of a whole model in the same folder
    _, slow, ours = (_begin(tmp_path, number) for number in range(3))  # the first was killed
    with pytest.raises(ValueError, check=coded("ranks.folders-differ")):
        folders.SaveRun(tmp_path / "other", METADATA, ours.id).check()
    ours.check()
    ours.complete()
    ours.clean_up()
    kept = {"notes.txt", "model-00001-aaaaaaaaaaaa.safetensors", METADATA, f"__0_{ours.id}_0.distcp"}
    assert {entry.name for entry in tmp_path.iterdir()} == kept
    slow.draft.mkdir()
    (slow.draft / METADATA).write_text("theirs")
    with pytest.raises(ValueError, check=coded("checkpoint.folder-completed-by-other-run")):
        slow.complete()
    slow.clean_up()
    assert {entry.name for entry in tmp_path.iterdir()} == kept
    assert (tmp_path / METADATA).read_text() == ours.id
    with pytest.raises(ValueError, check=coded("checkpoint.folder-already-complete", "checkpoint")):
        _begin(tmp_path, 3)
