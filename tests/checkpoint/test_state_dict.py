"""State dicts, sharded and unsharded: saving, loading, names as of the unsharded module, and entries that are refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp, full_state_dict

import pytest
import thunder
import torch
import torch.distributed.checkpoint as dcp
from coded import coded, says
from internals import RowDTensor
from models import Layer, modeled
from ranks import on_ranks
from saving import Everything, Holder, assert_equal, fill, update
from scenario import Run, everywhere, loss_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict


def _run(seed: int = 0, **options: Any) -> Run:
    torch.manual_seed(seed)
    return Run(Everything().double(), **options)


@on_ranks(2)
def test_full_state_dict_loads_into_the_unsharded_module() -> None:
    run = _run()
    before = copy.deepcopy(run.reference.state_dict())
    unsharded = full_state_dict(run.model)
    assert_equal(unsharded, before)
    assert_equal({name.removeprefix("."): value for name, value in run.model.original_state_dict().items()}, before)
    run.train(2)
    with tfs.eager(run.model) as module:
        assert {name: value.shape for name, value in module.state_dict().items()} == {
            name: value.shape for name, value in before.items()
        }
    for name, _ in run.model.named_parameters():
        assert torch.equal(unsharded[name], before[name]), f"{name} must be a copy, not a view of the shards"
    assert all(value.device.type == "cpu" and not value.requires_grad for value in unsharded.values())
    fresh = Everything().double()
    fresh.load_state_dict(full_state_dict(run.model), strict=True)
    run.close(fresh.state_dict(), run.reference.state_dict(), "loaded")
    assert fresh.head.weight is fresh.embedding.weight


@on_ranks(2)
def test_whole_values_are_loaded_from_any_dtype_and_in_part() -> None:
    model = _run(seed=9, oracle=None).model
    whole = {n: torch.randn_like(v) if v.is_floating_point() else v for n, v in full_state_dict(model).items()}
    whole["head.weight"] = whole["embedding.weight"]
    whole = everywhere(whole)[0]  # the first rank's
    model.load_original_state_dict({name: value.float() for name, value in whole.items()})
    expected = {n: v.float().to(v.dtype) if v.is_floating_point() else v for n, v in whole.items()}
    assert_equal(full_state_dict(model), expected)
    some = {"head.weight": torch.full((5, 4), 2.0), "scale": torch.tensor(3.0), "blocks.0.up.bias": torch.ones(8)}
    model.load_original_state_dict(some)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    some["embedding.weight"] = some["head.weight"]
    assert_equal(full_state_dict(model), expected | {name: value.double() for name, value in some.items()})


@on_ranks(2)
def test_the_error_names_a_replaced_parameter_on_every_rank() -> None:
    model = Everything().double()
    sharded = thunder.jit(model, transforms=[fsdp(bucketing_strategy="none")])
    (x,) = model.inputs(torch.Generator().manual_seed(0))
    loss_of(sharded(x)).backward()
    for name in ("mix", "scale"):
        param = sharded.get_parameter(name)
        with pytest.raises(RuntimeError, check=coded("parameter.data-cannot-be-assigned", name)):
            param.data = param.data.clone()
        ours = param._local_tensor
        param._local_tensor = ours.clone()
        # Every rank raises, even one that has no rows of the parameter. No rank waits for the others.
        with pytest.raises(RuntimeError, check=coded("parameter.outside-shard-buffer", name)):
            sharded(x)
        param._local_tensor = ours
        loss_of(sharded(x)).backward()


#
# Every entry of a sharded model's state dict knows its unsharded shape and its rows
#


def _models(**options: Any) -> tuple[dict[str, Any], nn.Module]:
    """Return the modules through which users can take a state dict, by prefix of the names, and an unsharded copy."""
    module = Everything().double()
    twin = copy.deepcopy(module)
    jitted = thunder.jit(module, transforms=[fsdp(**options)])
    lists = nn.ModuleList([module])
    return {"": jitted, "net.": Holder(jitted), "0.": lists, "original": module, "part": module.blocks}, twin


def _model_entries(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the model's entries of a state dict, under the names of the unsharded module."""
    if prefix == "part":
        return {f"blocks.{name}": value for name, value in state.items()}
    prefix = "" if prefix == "original" else prefix
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _pickled(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("transport", ["flat", "coalesced"])
@on_ranks(2)
def test_state_dict_entries_of_a_sharded_model_look_like_unsharded_parameters(tmp_path: Path, transport: str) -> None:
    models, twin = _models(transport=transport)
    jitted, expected = models[""], {name: value.shape for name, value in twin.state_dict().items()}
    locations = jitted._lc_transforms[-1].sharded.locations
    before = full_state_dict(jitted)
    for prefix, owner in models.items():
        names = [name for name in expected if prefix != "part" or name.startswith("blocks.")]
        entries = _model_entries(owner.state_dict(), prefix)
        assert {name: entry.shape for name, entry in entries.items()} == {name: expected[name] for name in names}
        for name in entries.keys() & locations.keys():
            assert type(entries[name]) is RowDTensor
            rows = entries[name].to_local()
            assert rows.numel() == 0 or rows.data_ptr() == jitted.get_parameter(name).to_local().data_ptr(), name
            own = pickle.loads(pickle.dumps(entries[name])).to_local()
            assert own.untyped_storage().nbytes() == own.nbytes, "pickled without the rest of its bucket"

        # Save with code that knows nothing of this package: DCP, and pickle on each rank.
        dcp.save({"model": owner.state_dict()}, checkpoint_id=tmp_path / prefix)
        sizes = dcp.FileSystemReader(tmp_path / prefix).read_metadata().state_dict_metadata
        saved = _model_entries({n.removeprefix("model."): entry for n, entry in sizes.items()}, prefix)
        assert {name: entry.size for name, entry in saved.items()} == {name: expected[name] for name in names}
        states = [copy.deepcopy(owner.state_dict()), _pickled(owner.state_dict())]
        states.append({name: value.clone().cpu() for name, value in owner.state_dict().items()})
        fill(jitted, 0.0)
        blank = full_state_dict(jitted)
        loaded = {name: before[name] if name in names else blank[name] for name in before}
        for state in (*states, None):
            fill(jitted, 0.0)
            if state is None:
                in_place = {"model": owner.state_dict()}
                dcp.load(in_place, checkpoint_id=tmp_path / prefix)
                assert_equal(full_state_dict(jitted), loaded, prefix)
                state = in_place["model"]
            owner.load_state_dict(state)
            assert_equal(full_state_dict(jitted), loaded, prefix)
        models["original"].load_state_dict(before)  # unsharded tensors


@on_ranks(2)
def test_state_of_an_optimizer_has_unsharded_shapes_and_takes_the_place_of_other_rows(tmp_path: Path) -> None:
    """``test_ways`` saves and loads it in all ways."""
    models, twin = _models()
    pairs = []
    for jitted in (models[""], thunder.jit(Everything().double(), transforms=[fsdp(transport="coalesced")])):
        pairs.append((jitted, update(jitted, torch.optim.AdamW(jitted.parameters(), lr=0.1), 1.0 + len(pairs))))
    (jitted, optimizer), (_, theirs) = pairs
    dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=tmp_path)
    saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    for number, (name, _) in enumerate(jitted.named_parameters()):
        for key, value in optimizer.state_dict()["state"][number].items():
            unsharded = twin.get_parameter(name).shape or (1,)
            assert saved[f"optim.state.{number}.{key}"].size == value.shape == (unsharded if value.ndim else ())
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    ours, others = (tfs.get_optimizer_state_dict(model, update(model, o))["state"] for model, o in pairs)
    for name, state in ours.items():
        assert_equal(state, others[name], name)
    with pytest.raises(TypeError, check=coded("state-dict.sharded-parameter-pickled")):
        _pickled(dict(jitted.named_parameters()))


@on_ranks(2)
def test_entries_with_other_rows_and_plain_rows_are_refused(rank: int) -> None:
    models, twin = _models()
    jitted = models[""]
    before = full_state_dict(jitted)
    # Pickled on each rank, entries are pieces: unpickled here, they are those of the other rank.
    theirs = everywhere({name: value for name, value in jitted.state_dict().items()})[1 - rank]
    rows = {name: param.to_local().detach().clone() for name, param in jitted.named_parameters()}
    for owner in models.values():
        own = owner.state_dict()
        with pytest.raises(ValueError, check=coded("state-dict.keep-vars-of-sharded")):
            owner.state_dict(keep_vars=True)
        with pytest.raises(ValueError, check=coded("state-dict.assign-to-sharded-parameter")):
            owner.load_state_dict(copy.deepcopy(own), assign=True)
        buffers = {name: value.clone() for name, value in own.items() if name.endswith(("offset", "running_mean"))}
        if buffers:
            with pytest.raises(ValueError, check=coded("state-dict.assign-to-sharded-parameter", "offset")):
                owner.load_state_dict(buffers, strict=False, assign=True)
    for owner, wrong, error in (
        (jitted, rows, r"size mismatch for .*this rank's rows"),
        (jitted, theirs, r"size mismatch for .*needs rows \[\d, \d\).*dcp\.load"),
        (jitted, {"mix": torch.zeros(9, 9)}, r"size mismatch for mix: .*\(5, 4\).*\(9, 9\)"),
        (models["net."], {f"net.{n}": v for n, v in rows.items()}, r"size mismatch for net\._model\..*\(5, 4\)"),
    ):
        with pytest.raises(RuntimeError, match=error):
            owner.load_state_dict({**owner.state_dict(), **wrong})
    for wrong, error in (
        ({**before, "mix": torch.zeros(4, 5)}, says(r"size mismatch for mix: .*\(5, 4\).*\(4, 5\)")),
        ({"other": torch.zeros(1)}, coded("state-dict.unknown-original-entry", "other")),
    ):
        with pytest.raises(RuntimeError, check=error):
            jitted.load_original_state_dict(wrong)
    assert_equal(full_state_dict(jitted), before)

    # Entries cannot be copied to unsharded tensors, or saved in a format that cannot represent them.
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        twin.load_state_dict(jitted.state_dict())
    piece = next(value for _, value in sorted(theirs.items()) if type(value).__name__ == "RowPiece")
    for target in (torch.zeros(piece.shape, dtype=piece.dtype), torch.zeros(3, dtype=piece.dtype)):
        for into, source in ((target, piece), (piece, target)):
            with pytest.raises(ValueError, check=coded("state-dict.row-piece-copies-other-rows")):
                into.copy_(source)
    safetensors = pytest.importorskip("safetensors.torch")
    assert "RowPiece(rows [" in repr(piece) and "RowDTensor(rows [" in repr(jitted.state_dict()["mix"])
    assert all(type(made) is type(piece) for made in (piece.to(torch.float32), piece.clone()))
    with pytest.raises(NotImplementedError, check=coded("state-dict.row-piece-unsupported-operator")):
        piece + 1
    for use in (
        piece.share_memory_,
        piece.numpy,
        piece.norm,
        lambda: piece.view(-1),
        lambda: torch.stack([piece]),
        lambda: safetensors.save({"piece": piece}),
        lambda: safetensors.save({"entry": next(iter(jitted.state_dict().values()))}),
    ):
        with pytest.raises((NotImplementedError, RuntimeError, ValueError)):
            use()


#
# Names, also of parts and under activation checkpointing
#

WRAPPED = "_checkpoint_wrapped_module"


@modeled(
    count=lambda: nn.Buffer(torch.zeros(())),
    unsaved=lambda: nn.Buffer(torch.ones(4), persistent=False),
    scale=(4,),
    embedding=partial(nn.Linear, 4, 4, bias=False),
    blocks=lambda: nn.ModuleList(Layer(4) for _ in range(2)),
    norm=partial(nn.BatchNorm1d, 4),
    head=partial(nn.Linear, 4, 4),
)
def Net(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A model with two blocks, and buffers that forward replaces; see ``_make`` for tied parameters."""
    self.count = self.count + 1
    x = self.embedding(x * self.scale * self.unsaved)
    for block in self.blocks:
        x = block(x)
    return self.head(self.norm(x))


def _wrap(module: nn.Module) -> nn.Module:
    apply_activation_checkpointing(module, check_fn=lambda m: isinstance(m, Layer))
    return module


def _make(seed: int = 0, *, wrap: bool = True) -> Any:
    torch.manual_seed(seed)
    net: Any = Net()
    net.head.weight = net.embedding.weight
    net.blocks[0].register_buffer("first_count", net.count)
    net.double()
    return _wrap(net) if wrap else net


def _without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {n: v for n, v in state.items() if not any(name in n for name in names)}


PARTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "all": lambda state: dict(state),
    "with metadata": lambda state: state,
    "every second": lambda state: dict(list(state.items())[::2]),
    "one tied name": _without("embedding.weight"),
    "the other tied name": _without("head.weight"),
    "no buffers": _without("norm.running", "norm.num", "count"),
    "no block": _without("blocks.1."),
    "nothing": lambda state: {},
    "more": lambda state: {
        **state,
        "x.y": torch.zeros(1),
        "blocks.0.z": torch.zeros(1),
        "blocks.7.up.bias": torch.ones(1),
    },
}


@on_ranks(2)
def test_missing_and_unexpected_keys_are_those_of_the_unsharded_module() -> None:
    other, plain, module = _make(1), _make(), _make()
    for net in (other, plain, module):
        net.blocks[0] = getattr(net.blocks[0], WRAPPED)  # blocks with and without a wrapper
        net.blocks[1].up.bias = net.blocks[0].up.bias
    jitted = thunder.jit(module, transforms=[fsdp(init=tfs.Init(ignored_params=["blocks.1.up.bias"]))])
    pairs = {
        "jitted": (jitted, plain, other),
        "original": (module, plain, other),
        "holder": (Holder(jitted), Holder(plain), Holder(other)),
        "list": (nn.ModuleList([module]), nn.ModuleList([plain]), nn.ModuleList([other])),
        "blocks": (module.blocks, plain.blocks, other.blocks),
        "block": (module.blocks[0], plain.blocks[0], other.blocks[0]),
        "wrapped block": (module.blocks[1], plain.blocks[1], other.blocks[1]),
    }
    for case, (ours, theirs, source) in pairs.items():
        for part, take in PARTS.items():
            state = take(source.state_dict())
            for owner in (ours, theirs):
                fill(owner, 0.0)
            actual, expected = (owner.load_state_dict(state, strict=False) for owner in (ours, theirs))
            assert actual.missing_keys == expected.missing_keys, (case, part)
            assert actual.unexpected_keys == expected.unexpected_keys, (case, part)
            assert_equal(full_state_dict(jitted), plain.state_dict(), (case, part))
            messages = []
            for owner in (ours, theirs):
                try:
                    owner.load_state_dict(state)
                except RuntimeError as error:
                    messages.append(str(error).partition("\n")[2])
            assert messages[:1] == messages[1:], (case, part)  # as nested modules name them


@on_ranks(2)
def test_names_leave_out_wrappers_for_activation_checkpointing() -> None:
    plain = _make(wrap=False)
    expected = plain.state_dict()
    trained = {name for name, _ in plain.named_parameters()}
    model = thunder.jit(_make(), transforms=[fsdp()])
    assert any(WRAPPED in name for name, _ in model.named_parameters())  # as with FSDP2
    optimizer = update(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for names in (tfs.get_optimizer_state_dict(model, optimizer), get_optimizer_state_dict(model, optimizer)):
        assert names["state"].keys() == trained
        assert {name for group in names["param_groups"] for name in group["params"]} == trained
    values = full_state_dict(model)
    assert values.keys() == expected.keys()
    for state in (
        model.state_dict(),
        get_model_state_dict(model),
        model._model.state_dict(),
        tfs.get_model_state_dict(model),
    ):
        assert_equal(state, values)
    assert {name for name, _ in tfs.stream_full_parameters(model)} == trained


@on_ranks(2)
def test_a_wrapper_around_the_whole_model_is_refused() -> None:
    with pytest.raises(ValueError, check=coded("module.parameters-renamed-by-wrapper", "CheckpointWrapper", "scale")):
        thunder.jit(checkpoint_wrapper(_make()), transforms=[fsdp()])


@on_ranks(2)
def test_parameters_that_the_module_does_not_have_are_refused() -> None:
    class Adds(thunder.Transform):
        def transform_module(self, model: Any) -> None:
            model._overrides_parameters["0.weight.added"] = nn.Parameter(torch.zeros(2))

    model = thunder.jit(nn.Sequential(nn.Linear(2, 2)), transforms=[fsdp(), Adds()])
    for use in (model.state_dict, lambda: model.load_state_dict({}, strict=False)):
        with pytest.raises(
            NotImplementedError, check=coded("state-dict.parameter-of-another-transform", "0.weight.added")
        ):
            use()
