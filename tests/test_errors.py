"""Mistakes of users raise errors that name the mistake and say what to do instead."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thunder_fsdp_sched import (
    CommPolicy,
    Debug,
    FSDPTransform,
    Init,
    Ranks,
    ScheduleDisagreement,
    Sharding,
    fsdp,
    full_state_dict,
)

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Model, Stack, compile_model
from ranks import on_ranks
from thunder.distributed import FSDPBucketingStrategy, FSDPType
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

#
# Options, which are checked before there is a module or a process group
#

# The option, a value, the error, and what it says after the option's name.
WRONG_OPTIONS: list[tuple[str, Any, type[Exception], str]] = [
    ("sharding_strategy", "zero4", ValueError, "expected 'zero2', 'zero3'.*got 'zero4'"),
    *(
        ("sharding_strategy", value, ValueError, f"expected .*got {value}; .* stage 3 are 'zero3'")
        for value in (3, None)
    ),
    ("bucketing_strategy", "blocks", ValueError, "expected 'none', 'layer', 'block'.*got 'blocks"),
    ("bucketing_strategy", 0, ValueError, "a size in bytes must be positive, got 0"),
    ("bucketing_strategy", True, TypeError, ".*got True"),
    ("bucketing_strategy", "25 bananas", ValueError, "expected bytes .*got '25 bananas'"),
    ("prefetch", -1, ValueError, "expected 0 or more buckets, got -1"),
    ("prefetch", True, TypeError, "expected a number of buckets.*got True"),
    ("max_gathers_in_flight", 0, ValueError, "expected 1 or more gathers, got 0"),
    ("agree", "often", ValueError, "expected 'step', 'compile' or 'never', got 'often'"),
    ("ranks", "world", TypeError, "expected a .*ProcessGroup, a 1-D or 2-D DeviceMesh, .*got 'world' of type str"),
    ("init", {"device": "cpu"}, TypeError, r"expected Init\(...\), got .* of type dict"),
    ("debug", True, TypeError, r"expected Debug\(...\), got True"),
    ("accumulate", "both", ValueError, "expected 'unsharded', 'sharded' or None, got 'both'"),
    ("all_reduce_hook", "average", TypeError, r"expected a callable \(bucket name, gradients\)"),
    *(
        ("gradient_divide_factor", factor, error, "expected a positive number or None")
        for error, factors in ((ValueError, (0, -1.0, float("nan"), float("inf"))), (TypeError, ("2", True)))
        for factor in factors
    ),
]


@pytest.mark.parametrize(("option", "value", "error", "message"), WRONG_OPTIONS)
def test_errors_name_an_invalid_option(option: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"{option}: {message}"):
        fsdp(**{option: value})


FORMATS = "None, 'bfloat16', 'float8_e4m3fn', 'int8'"
# A group of options, a field, a value, the error, and what it says after the field's name.
WRONG_FIELDS: list[tuple[type, str, Any, type[Exception], str]] = [
    (Sharding, "strategy", "zero4", ValueError, "expected 'zero2', 'zero3'.*got 'zero4'"),
    (Sharding, "max_unsharded_bytes", "much", ValueError, "expected bytes .*got 'much'"),
    (Sharding, "reshard_after_backward", 1, TypeError, "expected a bool, got 1 of type int"),
    (Sharding, "secondary_ranks", True, TypeError, "expected a number of ranks or None, got True"),
    (Sharding, "secondary_ranks", 1, ValueError, ".*the strategy 'zero2' keeps whole parameters"),
    (Ranks, "mesh", 2, TypeError, "expected a 1-D .*DeviceMesh.*got 2 of type int"),
    (Ranks, "process_group_for", dist, TypeError, "expected a callable"),
    (Init, "device", 1.5, TypeError, "expected a torch.device.*got 1.5 of type float"),
    (Init, "broadcast_from", False, TypeError, "expected a global rank.*got False"),
    (Init, "ignored_params", "wte.weight", TypeError, "expected parameters or their names, got str"),
    (Init, "ignored_params", nn.Parameter(torch.zeros(2, 2)), TypeError, ".* got tensor"),
    (Init, "device", "gpu", ValueError, "expected a torch.device, its name or None, got 'gpu': "),
    (Init, "device", "meta", ValueError, "shards need memory.*name the device on which to train it"),
    (Init, "device", True, TypeError, "expected a torch.device.*got True of type bool"),
    (Debug, "audit", "no", TypeError, "expected a bool, got 'no' of type str"),
    (CommPolicy, "gather", "int4", ValueError, f"expected {FORMATS}, got 'int4'"),
    (CommPolicy, "reduce", "mxfp8", ValueError, f"expected {FORMATS}, got 'mxfp8'"),
    (CommPolicy, "reduce", ["int8"], ValueError, rf"expected {FORMATS}, got \['int8'\]"),
    *((CommPolicy, "block", n, ValueError, f"expected a positive number of elements, got {n}") for n in (0, -1)),
    (CommPolicy, "block", 64.0, TypeError, r"expected a number of elements \(int\), got 64.0"),
    (CommPolicy, "exempt", "head", TypeError, "expected a list or tuple of names, got 'head'"),
    (CommPolicy, "exempt", ("a", 1), TypeError, r"expected a list or tuple of names, got \('a', 1\)"),
    (CommPolicy, "min_ndim", 1.0, TypeError, r"expected a number of dimensions \(int\), got 1.0"),
    (CommPolicy, "error_feedback", 1, TypeError, "expected a bool, got 1"),
    (CommPolicy, "error_feedback", True, ValueError, "nothing is lost without reduce; choose one of 'bfloat16', 'floa"),
]


@pytest.mark.parametrize(("group", "name", "value", "error", "message"), WRONG_FIELDS)
def test_errors_name_an_invalid_field(group: type, name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"{group.__name__}: {name}: {message}"):
        group(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secondary_ranks": 2}, "Sharding: secondary_ranks: the strategy 'zero2' keeps whole parameters"),
        ({"max_unsharded_bytes": "1GiB"}, "Sharding: max_unsharded_bytes: the strategy 'zero2' keeps every bucket"),
    ],
)
def test_errors_name_options_that_exclude_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sharding("zero2", **options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("all_reduce_hook", lambda name, gradients: None),
        ("Sharding: secondary_ranks", Sharding(secondary_ranks=2)),
        ("agree='compile'", "compile"),
        ("agree='never'", "never"),
    ],
)
def test_errors_name_what_ranks_that_differ_cannot_have(option: str, value: Any) -> None:
    name = "sharding_strategy" if option.startswith("Sharding") else option.partition("=")[0]
    with pytest.raises(ValueError, match=f"ranks_may_differ=True and {option}: pass one of them, because"):
        fsdp(ranks_may_differ=True, **{name: value})
    with pytest.raises(TypeError, match=r"ranks_may_differ: .*got 1"):
        fsdp(ranks_may_differ=1)  # type: ignore[arg-type]


def test_ranks_that_differ_cannot_have_symbolic_values(one_rank: None) -> None:
    with pytest.raises(ValueError, match="ranks_may_differ=True and cache='symbolic values'"):
        thunder.jit(nn.Linear(4, 4), cache="symbolic values", transforms=[fsdp(ranks_may_differ=True)])


def test_errors_name_a_field_of_a_policy_that_is_no_dtype() -> None:
    with pytest.raises(ValueError, match="mp_policy: param_dtype must be a floating-point dtype, got 'bf16'"):
        fsdp(mp_policy=MixedPrecisionPolicy(param_dtype="bf16"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        *((name, "module name, module") for name in ("sharding_strategy", "mp_policy", "gradient_divide_factor")),
        ("bucketing_strategy", "parameter name, parameter"),
        ("transport", "bucket name, parameters"),
        ("all_reduce_hook", "bucket name, gradients"),
    ],
)
def test_errors_name_an_option_whose_function_takes_other_arguments(option: str, arguments: str) -> None:
    with pytest.raises(TypeError, match=rf"^{option}: the callable must accept \({arguments}\), but .* are \(name\)"):
        fsdp(**{option: lambda name: None})  # type: ignore[arg-type]
    fsdp(**{option: functools.partial(lambda prefix, name, value: None, "a")})  # type: ignore[arg-type]
    fsdp(**{option: lambda *args: None})  # type: ignore[arg-type]


def test_options_must_be_known_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        fsdp("zero3")  # type: ignore[arg-type]
    for name, similar in (("bucket_strategy", "bucketing_strategy"), ("prefetchs", "prefetch")):
        with pytest.raises(TypeError, match=f"no option '{name}'; did you mean '{similar}'?"):
            fsdp(**{name: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"no option 'zzz'$"):
        fsdp(zzz=1)  # type: ignore[call-arg]


def test_former_names_of_options_and_fields_of_groups_raise_an_error_with_the_spelling() -> None:
    for name, spelling in (
        ("mesh", "ranks=mesh"),
        ("device", "init=Init(device=...)"),
        ("release", "sharding_strategy=Sharding(release=True)"),
        ("reshard_after_forward", 'sharding_strategy="zero3" for True'),
        ("audit", "debug=Debug(audit=...)"),
        ("secondary_ranks", "sharding_strategy=Sharding(secondary_ranks=...)"),
        ("skip_passes", "debug=Debug(skip_passes=...)"),
        ("auto_wrap_policy", "bucketing_strategy=..., by default a bucket for each block"),  # FSDP1
        ("bucket_cap_mb", 'bucketing_strategy="25MB"'),  # DDP
        ("stage", 'sharding_strategy="zero2" or "zero3"'),  # DeepSpeed
    ):
        with pytest.raises(TypeError, match=f"^{name}: now {re.escape(spelling)}"):
            fsdp(**{name: 1})  # type: ignore[arg-type]


def test_the_error_of_a_model_given_to_fsdp_says_where_it_belongs() -> None:
    with pytest.raises(TypeError, match=r"model is not an argument.*thunder\.jit\(model, transforms=\[fsdp"):
        fsdp(Stack(1))  # type: ignore[arg-type]


def test_transforms_must_be_a_list_of_what_fsdp_returns() -> None:
    for transforms, message in ((fsdp(), "expected a list"), ([fsdp], r"expected fsdp\(...\), got the function")):
        with pytest.raises(TypeError, match=rf"transforms: {message}.*thunder\.jit\(model, transforms=\[fsdp"):
            thunder.jit(Stack(1), transforms=transforms)
    for made in (fsdp().compiled, fsdp().schedules):
        with pytest.raises(IndexError, match="nothing is compiled yet: call the jitted module first"):
            made[-1]
        assert made == [] == made[:1]


def test_a_bucket_of_a_few_bytes_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"bucketing_strategy=25 is a size of 25 bytes.*Megabytes are '25MB'"):
        fsdp(bucketing_strategy=25)


@pytest.mark.parametrize(
    "model", [Stack(1), thunder.jit(Stack(1)), Stack(1).forward], ids=["module", "jitted", "method"]
)
def test_functions_of_sharded_models_refuse_others_by_name(model: Any) -> None:
    with pytest.raises(TypeError, match=r"model: expected the result of thunder\.jit\(.*that no fsdp\(\.\.\.\) shards"):
        full_state_dict(model)


@pytest.mark.parametrize(
    ("options", "expected_in_repr"),
    [
        ({"sharding_strategy": "ZeRO2"}, "'zero2'"),
        ({"sharding_strategy": FSDPType.ZERO2}, "'zero2'"),
        ({"sharding_strategy": FSDPType.ZERO3}, "'zero3'"),
        ({"bucketing_strategy": "Layer"}, "'layer'"),
        ({"bucketing_strategy": FSDPBucketingStrategy.NONE}, "'none'"),
        ({"bucketing_strategy": FSDPBucketingStrategy.BLOCK}, "'block'"),
        ({"bucketing_strategy": 1024}, "1024"),
        ({"bucketing_strategy": "25MB"}, "25000000"),
        ({"bucketing_strategy": "2 KiB"}, "2048"),
        ({"prefetch": 0}, "prefetch=0"),
    ],
    ids=str,
)
def test_options_are_accepted_in_all_spellings_and_shown_in_repr(
    options: dict[str, Any], expected_in_repr: str
) -> None:
    assert expected_in_repr in repr(fsdp(**options))


# Options that need a module: the option, a value, the error, and what it says after the option's name.
ENCODED, OF_LAST = CommPolicy(gather="int8"), CommPolicy(gather="int8", exempt=("*.wieght",))
CALLABLE = ", returned by the callable for "
WRONG_FOR_A_MODULE: list[tuple[str, Any, type[Exception], str]] = [
    ("comm_policy", "int8", TypeError, ": expected a CommPolicy or None, got"),
    ("comm_policy", CommPolicy, TypeError, ": expected a CommPolicy or None, got"),
    ("comm_policy", lambda *_: "int8", TypeError, f"{CALLABLE}the root module: exp"),
    (
        "comm_policy",
        CommPolicy(gather="int8", exempt=("first", "frist")),
        ValueError,
        ".*exempt: 'frist' matches no .*are 'first.w",
    ),
    ("comm_policy", lambda n, _: OF_LAST if n == "last" else None, ValueError, r".*exempt: '\*.wieght' matches no par"),
    (
        "sharding_strategy",
        lambda n, _: True if n == "last" else None,
        ValueError,
        f"{CALLABLE}module 'last': expected 'zero2', 'zero3' or .*, got True",
    ),
    (
        "sharding_strategy",
        lambda *_: "zero1",
        ValueError,
        f"{CALLABLE}the root module: expected 'zero2', .*, got 'zero1'",
    ),
    (
        "mp_policy",
        lambda n, _: torch.bfloat16 if n == "blocks.0" else None,
        TypeError,
        f"{CALLABLE}module 'blocks.0': expected a MixedPrecisionPolicy or None, got",
    ),
    (
        "mp_policy",
        lambda *_: MixedPrecisionPolicy(torch.int8),
        ValueError,
        ", .* for the root module: param_dtype must be a floating-point dtype, got torch.int8",
    ),
]


@pytest.mark.parametrize(("option", "value", "error", "message"), WRONG_FOR_A_MODULE)
def test_errors_name_an_option_that_is_wrong_for_a_module(
    option: str, value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"{option}{message}"):
        compile_model(lambda: Stack(1).double(), **{option: value})


def test_a_transport_that_cannot_send_a_format_names_one_that_can() -> None:
    with pytest.raises(ValueError, match=r"all_reduce': .*; use 'flat' or .*\(bucket 'f"):
        compile_model(lambda: Stack(1).double(), comm_policy=ENCODED, transport="all_reduce")


#
# Without a process group
#


def test_the_error_without_a_process_group_says_what_to_call() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"no process group.*init_process_group\(\) before thunder\.jit.*torchrun"):
        thunder.jit(Stack(1), transforms=[fsdp()])


@pytest.mark.parametrize("function", [lambda x: x * 2, Stack(1).forward], ids=["function", "method"])
def test_jitting_a_function_instead_of_a_module_is_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    jitted = thunder.jit(function, transforms=[fsdp()])
    with pytest.raises(TypeError, match=r"given a function; give it the torch\.nn\.Module.*thunder\.jit\(module,"):
        jitted(torch.ones(2, 4))


def test_the_plan_before_jit_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"no plan yet: pass it to thunder\.jit"):
        _ = fsdp().plan


#
# Errors on every rank
#


class _Subclassed(nn.Parameter):
    pass


def _with_last(module: Any, **params: nn.Parameter) -> list[FSDPTransform]:
    """Replace parameters of the last layer."""
    for name, param in params.items():
        setattr(module.last, name, param)
    return [fsdp()]


def _used_already(module: nn.Module) -> list[FSDPTransform]:
    thunder.jit(Stack(1), transforms=[transform := fsdp()])
    return [transform]


def _mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


def _wrapped_in_part(m: Any, wrap: Callable[[nn.Module], Any], **options: Any) -> list[FSDPTransform]:
    """Let a library shard, replicate or compile a part of the module."""
    wrapped = wrap(m.first)
    if wrapped is not None:
        m.first = wrapped
    return [fsdp(**options)]


# By what the user does: transforms for a module, which is changed as well, and the error on two ranks.
REFUSED: dict[str, tuple[Callable[[Any], list[FSDPTransform]], type[Exception], str]] = {
    "shared memory": (
        lambda m: _with_last(m, bias=nn.Parameter(m.first.bias.data.view(torch.bfloat16)[:3])),
        ValueError,
        r"'first\.bias' \(torch\.float32\) and 'last\.bias' \(torch\.bfloat16\) share memory.*Tie them.*or clone",
    ),
    "subclass": (
        lambda m: _with_last(m, weight=_Subclassed(torch.zeros(3, 4))),
        TypeError,
        r"'last\.weight' is a _Subclassed.*only plain strided.*Convert it, or.*ignored_params",
    ),
    "sparse": (
        lambda m: _with_last(m, weight=nn.Parameter(torch.zeros(3, 4).to_sparse())),
        TypeError,
        r"'last\.weight'.*torch\.sparse_coo.*ignored_params",
    ),
    "unknown ignored name": (
        lambda m: [fsdp(init=Init(ignored_params=["first.weight", "blocks.7.up.weight"]))],
        ValueError,
        r"Init: ignored_params: 'blocks\.7\.up\.weight' is not a parameter of the module",
    ),
    "foreign ignored parameter": (
        lambda m: [fsdp(init=Init(ignored_params=[nn.Parameter(torch.zeros(4, 9))]))],
        ValueError,
        r"Init: ignored_params: a parameter of shape \(4, 9\) is not a parameter of the module",
    ),
    "rule gives no name": (
        lambda m: [fsdp(bucketing_strategy=lambda name, param: None if name == "last.bias" else "all")],
        TypeError,
        r"bucketing_strategy: the callable must return a bucket's name.*None for 'last\.bias'",
    ),
    "broadcast from outside": (
        lambda m: [fsdp(init=Init(broadcast_from=2))],
        ValueError,
        "Init: broadcast_from: rank 2 is not in the process group",
    ),
    "broadcast of meta": (
        lambda m: m.to("meta") and [fsdp(init=Init(broadcast_from=0))],
        ValueError,
        "Init: broadcast_from: the module is on the meta device",
    ),
    "three-dimensional mesh": (
        lambda m: [fsdp(ranks=_mesh(1, 1, 2))],
        ValueError,
        r"ranks: expected one dimension .* or two .*, got 3; pass only those",
    ),
    "mesh and process group": (
        lambda m: [fsdp(ranks=Ranks(process_group=dist.group.WORLD, mesh=_mesh(2)))],
        ValueError,
        "Ranks: mesh and process_group: pass one of them, not both",
    ),
    "GPU without CUDA": (
        lambda m: [fsdp(init=Init(device="cuda:1"))],
        ValueError,
        r"device: 'cuda:1' is not available: .*Pass Init\(device='cpu'\), or leave device out",
    ),
    "a gradient, and an optimizer's state": (
        lambda m: m.first.bias.sum().backward() or [fsdp()],
        ValueError,
        r"'first\.bias' has a gradient.*zero_grad.*create optimizers after it",
    ),
    "sharded twice": (lambda m: [fsdp(), fsdp()], ValueError, r"sharded already; pass one fsdp"),
    "fully_shard before": (
        lambda m: _wrapped_in_part(m, fully_shard),
        TypeError,
        r"submodule 'first' is sharded by fully_shard\. Remove all calls of fully_shard: thunder\.jit\(model",
    ),
    "DDP before": (
        lambda m: _wrapped_in_part(m, DistributedDataParallel),
        TypeError,
        r"submodule 'first' is wrapped in DistributedDataParallel\. Give thunder\.jit the module itself",
    ),
    "compiled before": (
        lambda m: _wrapped_in_part(m, torch.compile, leaf_modules=()),
        TypeError,
        r"submodule 'first' is compiled by torch\.compile.*Name it in fsdp\(leaf_modules=\.\.\.\).*leave torch\.compile out",
    ),
    "compiled in place before": (
        lambda m: _wrapped_in_part(m, nn.Module.compile, leaf_modules=["last"]),
        TypeError,
        r"submodule 'first' is compiled by torch\.compile.*Name it in fsdp\(leaf_modules=\.\.\.\)",
    ),
    "DTensor": (
        lambda m: _with_last(m, weight=nn.Parameter(distribute_tensor(torch.zeros(3, 4), _mesh(2)))),
        TypeError,
        r"'last\.weight' is a DTensor already.*with placements \(Replicate\(\),\).*Leave that step out",
    ),
    "used for another module": (
        _used_already,
        ValueError,
        "already shards another module: make one transform for each",
    ),
}


@pytest.mark.parametrize("case", [case for case in REFUSED if "CUDA" not in case or not torch.cuda.is_available()])
@on_ranks(2)
def test_invalid_modules_and_options_are_refused_on_every_rank(case: str) -> None:
    model = Stack(2)
    make, error, message = REFUSED[case]
    before: dict[str, torch.Tensor] = {}
    with pytest.raises(error, match=message):
        transforms = make(model)
        before |= {name: param.detach().clone() for name, param in model.named_parameters()}
        thunder.jit(model, transforms=transforms)
    if case == "sharded twice" or not before:
        return
    # The user's module is unchanged, so that it can be corrected and sharded.
    for name, param in model.named_parameters():
        assert param.device == before[name].device and param.shape == before[name].shape, name
        if not param.is_meta and not param.is_sparse:
            torch.testing.assert_close(param.detach(), before[name], rtol=0, atol=0, equal_nan=True)


def test_methods_of_other_libraries_name_what_takes_their_place(one_rank: None) -> None:
    model = thunder.jit(Stack(1), transforms=[fsdp()])
    methods = [name for name in vars(FSDPModule) if not name.startswith("_")]
    described = (Path(__file__).parents[1] / "docs" / "from-fsdp2.md").read_text()
    for name in (*methods, "summon_full_params", "register_comm_hook"):
        with pytest.raises(AttributeError, match=rf"sharded by fsdp\(...\) has no '{name}': ."):
            getattr(model, name)()
        assert name not in methods or f"{name}(" in described
    assert type(model) is thunder.ThunderModule and not hasattr(model, "module")


def test_class_methods_of_fsdp1_find_nothing_to_do_as_documented(fake_ranks: None) -> None:
    model = thunder.jit(Stack(1), transforms=[fsdp()])
    with FullyShardedDataParallel.summon_full_params(model):
        assert model.first.weight.to_local().numel() < model.first.weight.numel()
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute"):
        FullyShardedDataParallel.optim_state_dict(model, torch.optim.SGD(model.parameters()))


def test_wrapping_a_sharded_module_is_refused_at_once(one_rank: None) -> None:
    model = thunder.jit(Stack(1), transforms=[fsdp()])
    for wrap, message in (
        (fully_shard, "fully_shard: the module is sharded by thunder.jit.* already: remove the call"),
        (lambda m: fully_shard(m._model.first), "fully_shard: the module is sharded by thunder.jit.* already: remove"),
        (DistributedDataParallel, "DistributedDataParallel: .* use the jitted module itself"),
    ):
        with pytest.raises(TypeError, match=message):
            wrap(model)
    compiled, inputs = torch.compile(model, backend="eager"), torch.ones(2, 4)
    for jitted in (thunder.jit(model), thunder.jit(nn.Sequential(model)), thunder.jit(lambda x: model(x) * 2)):
        with pytest.raises(TypeError, match=r"thunder\.jit was given .* already: jit only the outermost module"):
            jitted(inputs)
    for call in (compiled, torch.compile(lambda x: model(x).sum(), backend="eager")):
        with pytest.raises(RuntimeError, match=r"torch\.compile: a jitted module cannot .* leave torch\.compile out"):
            call(inputs)
    model(inputs).sum().backward()


class _Branches(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@on_ranks()
def test_errors_of_tracing_name_the_module_its_dtypes_and_the_line() -> None:
    line = inspect.getsourcelines(_Branches.forward)[1] + 1
    branch = rf"_Branches \(.*\), at .*test_errors\.py:{line}\. What forward does .*\(torch\.where.*"
    branch += r"To run it as it is, without tracing: fsdp\(leaf_modules=\('\*\.\*',\)\)"
    for second, error, note in (
        (nn.Linear(4, 4).bfloat16(), RuntimeError, r"Linear \(weight bfloat16, bias bfloat16\)"),
        (_Branches(4, 4), NotImplementedError, branch),
    ):
        options = {} if error is RuntimeError else {"leaf_modules": ()}  # the program's own error stays one
        model = thunder.jit(nn.Sequential(nn.Sequential(nn.Linear(4, 4), second)), transforms=[fsdp(**options)])
        with pytest.raises(error) as raised:
            model(torch.ones(2, 4))
        [found] = raised.value.__notes__
        assert re.fullmatch(rf"fsdp: while tracing module '0\.1', {note}", found), found


@on_ranks(2)
def test_a_rank_outside_of_the_process_group_raises(rank: int) -> None:
    group = dist.new_group([0])
    if rank == 0:
        thunder.jit(Stack(1), transforms=[fsdp(ranks=group)])
    else:
        with pytest.raises((TypeError, ValueError), match="ranks: "):
            thunder.jit(Stack(1), transforms=[fsdp(ranks=group)])


class _Layouts(Model):
    """Parameters of several dtypes, sizes and strides, one of them not aligned to 8 bytes."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.arange(40.0)
        self.unaligned = nn.Parameter(flat[1:14])
        self.transposed = nn.Parameter(torch.arange(15.0).reshape(3, 5).t())
        self.brief = nn.Parameter(torch.arange(7.0).bfloat16())
        self.long = nn.Parameter(torch.arange(3.0).double())
        self.complex = nn.Parameter(torch.arange(6.0).to(torch.complex64))
        self.flag = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks(lambda ranks: ranks)
def test_the_error_of_different_initial_values_names_the_parameter(rank: int, world_size: int, ranks: int) -> None:
    def make(model: Model, name: str = "", *, flips: bool = False) -> Model:
        if rank == world_size - 1 and name:
            with torch.no_grad():
                param = model.get_parameter(name)
                if flips:  # as experts in another order
                    param.copy_(param.flip(0))
                else:
                    param.view(-1)[-1] = 0 if param.dtype is torch.bool else 77
        return model

    def stack(name: str = "", *, flips: bool = False) -> Model:
        torch.manual_seed(0)
        return make(Stack(2), name, flips=flips)

    message = (
        rf"(?s)disagree: the values of the parameters\..*broadcast_from=0.*rank 0: last\.weight: digest \w+\n"
        rf".*rank {world_size - 1}: last\.weight"
    )
    for flips in (False, True):
        with pytest.raises(ScheduleDisagreement, match=message):
            thunder.jit(stack("last.weight", flips=flips), transforms=[fsdp()])
    for options in ({"init": Init(allow_different_values=True)}, {"init": Init(broadcast_from=0)}):
        thunder.jit(stack("last.weight"), transforms=[fsdp(**options)])
    thunder.jit(stack().to("meta"), transforms=[fsdp(init=Init(device="cpu"))])
    thunder.jit(stack(), transforms=[fsdp()])
    if world_size == 4:  # the last rank is in the second replica
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        with pytest.raises(ScheduleDisagreement, match=message):
            thunder.jit(stack("last.weight"), transforms=[fsdp(ranks=mesh)])
        return
    thunder.jit(_Layouts(), transforms=[fsdp()])
    for name in ("unaligned", "brief", "long", "complex", "flag"):
        with pytest.raises(ScheduleDisagreement, match=rf"rank 0: {name}: digest"):
            thunder.jit(make(_Layouts(), name), transforms=[fsdp()])


def test_join_is_refused_with_the_loop_that_takes_its_place(one_rank: None) -> None:
    model = thunder.jit(torch.nn.Linear(4, 4), transforms=[fsdp()])
    with pytest.raises(NotImplementedError, match=r"Join: .*batches\(model, loader\)"), Join([model]):
        pass
