"""Mistakes of users raise errors that name the mistake and say what to do; their table and the code belong together."""

from __future__ import annotations

import ast
import configparser
import inspect
import pickle
import re
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import thunder_fsdp_sched
from thunder_fsdp_sched import CommPolicy, FSDPTransform, Init, Ranks, ScheduleDisagreement, fsdp, full_state_dict

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from models import Model, Stack, compile_model
from ranks import on_ranks
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

X = torch.ones(2, 4)


def test_transforms_must_be_a_list_of_what_fsdp_returns() -> None:
    for transforms, code in ((fsdp(), "option.transforms-not-a-list"), ([fsdp], "option.fsdp-not-called")):
        with pytest.raises(TypeError, check=coded(code, "thunder.jit(model, transforms=[fsdp")):
            thunder.jit(Stack(1), transforms=transforms)
    for made in (fsdp().compiled, fsdp().schedules):
        with pytest.raises(IndexError, check=coded("trace.nothing-compiled-yet")):
            made[-1]
        assert made == [] == made[:1]


@pytest.mark.parametrize(
    "model", [Stack(1), thunder.jit(Stack(1)), Stack(1).forward], ids=["module", "jitted", "method"]
)
def test_functions_of_sharded_models_refuse_others_by_name(model: Any) -> None:
    with pytest.raises(TypeError, check=coded("module.expected-sharded-model")):
        full_state_dict(model)


def _jit(module: Any, **options: Any) -> Any:
    return thunder.jit(module, transforms=[fsdp(**options)])


def _with_format() -> Any:
    return compile_model(lambda: Stack(1).double(), comm_policy=CommPolicy(gather="int8"), transport="all_reduce")


# What raises without a process group.
WITHOUT_RANKS: dict[str, tuple[Callable[[], Any], type[Exception], coded]] = {
    "no group": (lambda: _jit(Stack(1)), RuntimeError, coded("ranks.no-process-group")),
    "function": (lambda: _jit(lambda x: x * 2)(X), TypeError, coded("module.function-instead-of-module")),
    "method": (lambda: _jit(Stack(1).forward)(X), TypeError, coded("module.function-instead-of-module")),
    "plan": (lambda: fsdp().plan, RuntimeError, coded("plan.no-plan-before-jit")),
    "format": (_with_format, ValueError, coded("transport.refused-for-bucket", "transport='all_reduce'", "'flat'")),
}


@pytest.mark.parametrize("case", WITHOUT_RANKS)
def test_mistakes_without_a_process_group_are_named(case: str) -> None:
    use, error, expected = WITHOUT_RANKS[case]
    with pytest.raises(error, check=expected):
        use()


@pytest.mark.parametrize(
    ("use", "error", "expected"),
    [
        (
            lambda: thunder.jit(nn.Linear(4, 4), cache="symbolic values", transforms=[fsdp(ranks_may_differ=True)]),
            ValueError,
            coded("option.symbolic-cache-with-ranks-may-differ"),
        ),
        (lambda: Join([_jit(nn.Linear(4, 4))]).__enter__(), NotImplementedError, coded("ranks.join-not-supported")),
    ],
)
def test_what_else_cannot_be_used_is_named(one_rank: None, use: Any, error: type[Exception], expected: coded) -> None:
    with pytest.raises(error, check=expected):
        use()


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


# By the error on two ranks and what the user does: transforms for a module, which is changed as well.
REFUSED: dict[type[Exception], dict[str, tuple[Callable[[Any], list[FSDPTransform]], coded]]] = {
    ValueError: {
        "shared memory": (
            lambda m: _with_last(m, bias=nn.Parameter(m.first.bias.data.view(torch.bfloat16)[:3])),
            coded("parameter.objects-share-memory", "first.bias", "torch.float32", "last.bias", "torch.bfloat16"),
        ),
        "unknown ignored name": (
            lambda m: [fsdp(init=Init(ignored_params=["first.weight", "blocks.7.up.weight"]))],
            coded("option.ignored-not-a-parameter", "'blocks.7.up.weight'"),
        ),
        "foreign ignored parameter": (
            lambda m: [fsdp(init=Init(ignored_params=[nn.Parameter(torch.zeros(4, 9))]))],
            coded("option.ignored-not-a-parameter", "a parameter of shape (4, 9)"),
        ),
        "broadcast from outside": (
            lambda m: [fsdp(init=Init(broadcast_from=2))],
            coded("option.broadcast-rank-outside-group", "2"),
        ),
        "three-dimensional mesh": (
            lambda m: [fsdp(ranks=_mesh(1, 1, 2))],
            coded("option.wrong-mesh-dimensions", "ranks", "3"),
        ),
        "mesh and process group": (
            lambda m: [fsdp(ranks=Ranks(process_group=dist.group.WORLD, mesh=_mesh(2)))],
            coded("option.mesh-and-process-group"),
        ),
        "GPU without CUDA": (lambda m: [fsdp(init=Init(device="cuda:1"))], coded("option.no-gpu-for-device", "cuda:1")),
        "sharded twice": (lambda m: [fsdp(), fsdp()], coded("module.second-fsdp-transform")),
        "used for another module": (_used_already, coded("module.transform-of-another-module")),
    },
    TypeError: {
        "subclass": (
            lambda m: _with_last(m, weight=_Subclassed(torch.zeros(3, 4))),
            coded("parameter.not-plain-strided", "last.weight", "_Subclassed"),
        ),
        "sparse": (
            lambda m: _with_last(m, weight=nn.Parameter(torch.zeros(3, 4).to_sparse())),
            coded("parameter.not-plain-strided", "last.weight", "torch.sparse_coo"),
        ),
        "rule gives no name": (
            lambda m: [fsdp(bucketing_strategy=lambda name, param: None if name == "last.bias" else "all")],
            coded("option.invalid-bucket-name", "None", "last.bias"),
        ),
        "fully_shard before": (
            lambda m: _wrapped_in_part(m, fully_shard),
            coded("module.sharded-by-fully-shard", "'first'"),
        ),
        "DDP before": (
            lambda m: _wrapped_in_part(m, DistributedDataParallel),
            coded("module.wrapped-in-other-parallelism", "'first'", "DistributedDataParallel"),
        ),
        "compiled before": (
            lambda m: _wrapped_in_part(m, torch.compile, leaf_modules=()),
            coded("module.submodule-compiled-by-torch-compile", "first"),
        ),
        "compiled in place before": (
            lambda m: _wrapped_in_part(m, nn.Module.compile, leaf_modules=["last"]),
            coded("module.submodule-compiled-by-torch-compile", "first"),
        ),
        "DTensor": (
            lambda m: _with_last(m, weight=nn.Parameter(distribute_tensor(torch.zeros(3, 4), _mesh(2)))),
            coded("parameter.already-a-dtensor", "last.weight", "(Replicate(),)"),
        ),
    },
}


HERE = [
    (e, case) for e, cases in REFUSED.items() for case in cases if "CUDA" not in case or not torch.cuda.is_available()
]


@pytest.mark.parametrize(("error", "case"), HERE)
@on_ranks(2)
def test_invalid_modules_and_options_are_refused_on_every_rank(error: type[Exception], case: str) -> None:
    model = Stack(2)
    make, expected = REFUSED[error][case]
    before: dict[str, torch.Tensor] = {}
    with pytest.raises(error, check=expected):
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
        with pytest.raises(AttributeError, check=coded("module.foreign-method-called", name)):
            getattr(model, name)()
        assert name not in methods or f"{name}(" in described
    assert type(model) is thunder.ThunderModule and not hasattr(model, "module")


def test_wrapping_a_sharded_module_is_refused_at_once(one_rank: None) -> None:
    model = thunder.jit(Stack(1), transforms=[fsdp()])
    for wrap, expected in (
        (fully_shard, coded("module.other-sharding-after-fsdp", "fully_shard")),
        (lambda m: fully_shard(m._model.first), coded("module.other-sharding-after-fsdp", "fully_shard")),
    ):
        with pytest.raises(TypeError, check=expected):
            wrap(model)
    compiled, inputs = torch.compile(model, backend="eager"), torch.ones(2, 4)
    for jitted in (thunder.jit(model), thunder.jit(nn.Sequential(model)), thunder.jit(lambda x: model(x) * 2)):
        with pytest.raises(TypeError, check=coded("module.jitted-module-inside-jit")):
            jitted(inputs)
    for call in (compiled, torch.compile(lambda x: model(x).sum(), backend="eager")):
        with pytest.raises(RuntimeError, check=coded("module.called-under-torch-compile", "a jitted module")):
            call(inputs)
    for call in (torch.func.vmap(model), torch.func.grad(lambda x: model(x).sum()), torch.func.jacrev(model)):
        with pytest.raises(RuntimeError, check=coded("module.called-under-torch-func")):
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
        with pytest.raises((TypeError, ValueError), check=coded("option.wrong-type", "ranks")):
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
    def changed(name: str, *, flips: bool = False) -> Model:
        """Return a model of which the last rank has another value, or experts in another order."""
        torch.manual_seed(0)
        model = Stack(2) if "last" in name else _Layouts()
        param = model.get_parameter(name)
        if rank == world_size - 1 and flips:
            param.data.copy_(param.data.flip(0))
        elif rank == world_size - 1:
            param.data.view(-1)[-1] = 0 if name == "flag" else 77
        return model

    def refused(name: str, *, flips: bool = False, **options: Any) -> None:
        differ = coded("ranks.ranks-disagree", f"rank 0: {name}: ", f"rank {world_size - 1}: {name}: ")
        with pytest.raises(ScheduleDisagreement, check=differ):
            thunder.jit(changed(name, flips=flips), transforms=[fsdp(**options)])

    for flips in (False, True):
        refused("last.weight", flips=flips)
    for options in ({"init": Init(allow_different_values=True)}, {"init": Init(broadcast_from=0)}):
        thunder.jit(changed("last.weight"), transforms=[fsdp(**options)])
    thunder.jit(Stack(2).to("meta"), transforms=[fsdp(init=Init(device="cpu"))])
    thunder.jit(_Layouts(), transforms=[fsdp()])
    if world_size == 4:  # the last rank is in the second replica
        refused("last.weight", ranks=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for name in ("unaligned", "brief", "long", "complex", "flag") if world_size == 2 else ():
        refused(name)


PACKAGE = Path(thunder_fsdp_sched.__file__).parent
TABLE = configparser.ConfigParser(delimiters=("=",), comment_prefixes=("#",), interpolation=None)
TABLE.read(PACKAGE / "errors.ini", encoding="utf-8")
TEXTS = {f"{section}.{name}": text for section in TABLE.sections() for name, text in TABLE[section].items()}


def _uses() -> Iterator[tuple[str, str, set[str]]]:
    """Yield each code in the package's calls: the place, the code, and the names of the values that are given there."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                given = {keyword.arg for keyword in node.keywords if keyword.arg}
                if isinstance(node.func, ast.Name) and node.func.id == "coded_error":
                    code = node.args[1]
                    assert not isinstance(code, ast.Constant) or code.value in TEXTS, f"{place}: {code.value!r}"
                for arg in node.args:
                    if isinstance(arg, ast.Constant) and arg.value in TEXTS:
                        yield place, arg.value, given


def _placeholders(text: str) -> set[str]:
    """Return the names in braces, and check that they are names, which ``format_map`` can look up."""
    names = {name for _, name, spec, _ in string.Formatter().parse(text) if name is not None}
    assert all(name.isidentifier() for name in names), text
    return names


def test_each_error_fits_its_text() -> None:
    used = set()
    for place, code, given in _uses():
        # What a function that raises many errors adds: the title of a leaf, where forward writes in place, ...
        added = _placeholders(TEXTS[code]) - given
        assert given <= _placeholders(TEXTS[code]) and added <= {"title", "where"}, f"{place}: {code}"
        used.add(code)

    assert used == set(TEXTS), "the table has texts that nothing raises"


def test_an_error_of_the_table_has_a_code_also_in_another_process() -> None:
    with pytest.raises(ValueError, check=coded("option.too-small")) as raised:
        thunder_fsdp_sched.fsdp(prefetch=-1)
    error = pickle.loads(pickle.dumps(raised.value))

    assert (error.code, str(error), type(error)) == ("option.too-small", str(raised.value), ValueError)


def test_the_page_of_errors_shows_the_code_that_its_example_raises() -> None:
    [example] = re.findall(r"```python\n(.*?)```", (PACKAGE.parent / "docs" / "errors.md").read_text(), re.DOTALL)

    exec(example, {"tfs": thunder_fsdp_sched})
