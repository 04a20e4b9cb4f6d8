"""May an option be this: what ``fsdp`` and the parts of its options accept, what they keep of it, and what tools see."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import thunder_fsdp_sched
from thunder_fsdp_sched import CommPolicy, Debug, Init, Ranks, Schedule, Sharding, StepSchedule, fsdp
from thunder_fsdp_sched.extras.foreign_names import OPTIONS as FORMER
from thunder_fsdp_sched.planning import CLUSTERS

import pytest
import torch
import torch.distributed as dist
from coded import coded
from models import Stack, compile_model
from thunder.distributed import FSDPBucketingStrategy, FSDPType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy


@dataclass(frozen=True)
class NewerPolicy(MixedPrecisionPolicy):
    """A stand-in for a policy of the future: torch 2.15 has the first field."""

    param_dtype_override_fn: Any = field(default=None, kw_only=True)
    flavour: str = "plain"


@dataclass
class NewerOffload(CPUOffloadPolicy):
    level: int = 0


class Elsewhere(OffloadPolicy):
    """A stand-in for another kind of offloading."""


def _one(name: Any) -> None:
    """Takes one argument, where options take functions of two."""


TAKES_OTHERS, DIFFER = "callable-takes-other-arguments", "conflicts-with-ranks-may-differ"
NAN, INF, ONE_PARAM = float("nan"), float("inf"), nn.Parameter(torch.zeros(2, 2))
FORMATS, PATH = "'bfloat16', 'float8_e4m3fn', 'int8' or None", "a path to a saved schedule, a StepSchedule or None"
SEQUENCE, MATCHES = "'auto', or a sequence such as ('model.layers.*.mlp',)", "names, classes or functions"
DTYPES = {"param_dtype": "bf16", "reduce_dtype": torch.int32, "output_dtype": torch.bool}
OF_MODULE = "the callable must accept (module name, module)"

# An option of `fsdp` or of a part, a value, the code of the error, and what it says after the option.
REFUSED: list[tuple[str, Any, str, str]] = [
    *(("sharding_strategy", n, "unknown-strategy", "expected 'zero2', 'zero3' or a th") for n in ("zero4", 3, None)),
    *(("bucketing_strategy", n, "unknown-bucketing-strategy", "expected 'none'") for n in ("blocks", True, None)),
    *(("bucketing_strategy", n, "size-not-positive", f"expected more than 0 bytes, got {n}") for n in (0, -1)),
    ("bucketing_strategy", "25 bananas", "size-not-understood", "expected bytes such as '40GiB'"),
    ("prefetch", -1, "too-small", "expected 0 or more buckets, got -1"),
    ("prefetch", True, "wrong-type", "expected a number of buckets (int), 'auto' or None, got True of type bool"),
    ("max_memory", 1.5, "wrong-type", "expected bytes as an int or a string such as '40GiB', got 1.5 of type float"),
    ("accumulate", "both", "unknown-choice", "expected 'unsharded', 'sharded' or None, got 'both'"),
    ("max_gathers_in_flight", 0, "too-small", "expected 1 or more gathers, got 0"),
    *(("schedule", n, "wrong-type", f"expected {PATH}, got {n!r}") for n in (3, ("a",))),
    ("transport", "pigeon", "unknown-transport", "expected 'auto', one of ['all_reduce', 'all_to_all', "),
    ("mp_policy", torch.bfloat16, "wrong-type", "expected a MixedPrecisionPolicy or None, got torch.bfloat16"),
    *(
        ("mp_policy", MixedPrecisionPolicy(**{n: DTYPES[n]}), "dtype-not-floating-point", f"{n} must be")
        for n in DTYPES
    ),
    ("mp_policy", NewerPolicy(flavour="hot"), "unknown-policy-field", "flavour='hot' is a field of NewerPolicy"),
    ("mp_policy", NewerPolicy(param_dtype_override_fn=3), "wrong-type", "param_dtype_override_fn: expected a callable"),
    *(("comm_policy", n, "wrong-type", f"expected a CommPolicy or None, got {n!r}") for n in ("int8", CommPolicy)),
    *(
        ("gradient_divide_factor", n, "wrong-type", f"expected a positive number or None, got {n!r}")
        for n in ("2", True)
    ),
    *(("gradient_divide_factor", n, "expected-positive-number", "expected a positive") for n in (0, -1.0, NAN, INF)),
    ("all_reduce_hook", "average", "wrong-type", "expected a callable (bucket name, gradients) -> None, or None, got"),
    ("offload_policy", True, "wrong-type", "expected a CPUOffloadPolicy, OffloadPolicy or None, got True"),
    ("offload_policy", NewerOffload(level=2), "unknown-policy-field", "level=2 is a field of NewerOffload"),
    ("offload_policy", Elsewhere(), "unknown-offload-policy", "expected a CPUOffloadPolicy, OffloadPolicy or None"),
    ("ranks", "world", "wrong-type", "expected a torch.distributed.ProcessGroup, a 1-D or 2-D DeviceMesh, Ranks(...)"),
    ("init", {"device": "cpu"}, "wrong-type", "expected Init(...), got {'device': 'cpu'} of type dict"),
    *(("leaf_modules", n, "wrong-type", f"expected {SEQUENCE}, got {n!r}") for n in ("mlp", nn.Linear, 3)),
    *(
        ("leaf_modules", [n], "wrong-type", f"expected {MATCHES} (name, module) -> bool, got {n!r}")
        for n in (3, ("a", 1))
    ),
    ("agree", "often", "unknown-choice", "expected 'step', 'compile' or 'never', got 'often'"),
    ("ranks_may_differ", 1, "wrong-type", "expected a bool, got 1 of type int"),
    ("debug", True, "wrong-type", "expected Debug(...), got True"),
    *((name, _one, TAKES_OTHERS, OF_MODULE) for name in ("sharding_strategy", "mp_policy", "gradient_divide_factor")),
    (
        "bucketing_strategy",
        _one,
        TAKES_OTHERS,
        "the callable must accept (parameter name, parameter), but its parameters",
    ),
    ("transport", _one, TAKES_OTHERS, "the callable must accept (bucket name, parameters)"),
    ("all_reduce_hook", _one, TAKES_OTHERS, "the callable must accept (bucket name, gradients)"),
    ("Sharding: strategy", "zero4", "unknown-strategy", "expected 'zero2', 'zero3'"),
    ("Sharding: max_unsharded_bytes", "much", "size-not-understood", "expected bytes such as"),
    ("Sharding: secondary_ranks", 1, "too-small", "expected 2 or more ranks (the strategy 'zero2' keeps"),
    ("Sharding: secondary_ranks", True, "wrong-type", "expected a number of ranks or None, got True"),
    ("Sharding: reshard_after_backward", 1, "wrong-type", "expected a bool, got 1 of type int"),
    ("Ranks: process_group", 2, "wrong-type", "expected a torch.distributed.ProcessGroup or None, got 2"),
    ("Ranks: mesh", 2, "wrong-type", "expected a 1-D or 2-D torch.distributed.device_mesh.DeviceMesh or None, got 2"),
    (
        "Ranks: process_group_for",
        dist,
        "wrong-type",
        "expected a callable (parameter name, parameter) -> process group, m",
    ),
    *(("Init: device", n, "wrong-type", f"expected a torch.device, its name or None, got {n}") for n in (1.5, True)),
    ("Init: device", "gpu", "invalid-device", "expected a torch.device, its name or None, got 'gpu': "),
    ("Init: device", "meta", "meta-device-for-shards", "shards need memory, got"),
    (
        "Init: param_init_fn",
        "reset",
        "wrong-type",
        "expected a callable that initializes a module, or None, got 'reset'",
    ),
    ("Init: broadcast_from", False, "wrong-type", "expected a global rank (int) or None, got False"),
    *(
        ("Init: ignored_params", n, "wrong-type", "expected parameters or their names")
        for n in ("wte.weight", ONE_PARAM)
    ),
    ("Debug: audit", "no", "wrong-type", "expected a bool, got 'no' of type str"),
    ("Debug: skip_passes", "verify", "wrong-type", "expected a list or tuple of names, got 'verify'"),
    ("Debug: check_passes", 0, "wrong-type", "expected a bool, got 0"),
    ("CommPolicy: gather", "int4", "unknown-choice", f"expected {FORMATS}, got 'int4'"),
    *(("CommPolicy: reduce", n, "unknown-choice", f"expected {FORMATS}, got {n!r}") for n in ("mxfp8", ["int8"])),
    *(("CommPolicy: block", n, "too-small", f"expected 1 or more elements, got {n}") for n in (0, -1)),
    ("CommPolicy: block", 64.0, "wrong-type", "expected a number of elements (int), got 64.0"),
    *(
        ("CommPolicy: exempt", n, "wrong-type", f"expected a list or tuple of names, got {n!r}")
        for n in ("a", ("a", 1))
    ),
    ("CommPolicy: min_ndim", 1.0, "wrong-type", "expected a number of dimensions (int), got 1.0"),
    ("CommPolicy: error_feedback", 1, "wrong-type", "expected a bool, got 1"),
    ("CommPolicy: error_feedback", True, "comm-error-feedback-without-reduce", "nothing is lost without reduce"),
]


@pytest.mark.parametrize(("option", "value", "code", "text"), REFUSED)
def test_errors_name_an_option_and_what_it_may_be(option: str, value: Any, code: str, text: str) -> None:
    *of, name = option.split(": ")
    error = TypeError if code in ("wrong-type", TAKES_OTHERS) else ValueError
    with pytest.raises(error, check=coded(f"option.{code}", f"{option}: {text}")):
        getattr(thunder_fsdp_sched, *of or ["fsdp"])(**{name: value})


HOOK, SECONDARY = (lambda name, gradients: None), Sharding(secondary_ranks=2)

# A call, the code of its error, and what that names.
WRONG_CALLS: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: Sharding("zero2", secondary_ranks=2), "secondary-ranks-with-zero2", "use 'zero3'"),
    (lambda: Sharding("zero2", max_unsharded_bytes=9), "max-unsharded-bytes-with-zero2", "use 'zero3'"),
    (lambda: fsdp(init=Init(param_init_fn=id)), "param-init-fn-without-device", "also pass device=..."),
    (lambda: fsdp(ranks_may_differ=True, all_reduce_hook=HOOK), DIFFER, "all_reduce_hook"),
    (lambda: fsdp(ranks_may_differ=True, sharding_strategy=SECONDARY), DIFFER, "Sharding: secondary_ranks"),
    (lambda: fsdp(ranks_may_differ=True, agree="compile"), DIFFER, "agree='compile'"),
    (lambda: fsdp(ranks_may_differ=True, agree="never"), DIFFER, "agree='never'"),
    (lambda: fsdp("zero3"), "positional-arguments", "'zero3'"),
    (lambda: fsdp(Stack(1)), "model-passed-to-fsdp", "thunder.jit(model, transforms=[fsdp(...)])"),
    (lambda: fsdp(bucket_strategy=1), "no-such-option", "'bucket_strategy'; did you mean 'bucketing_strategy'?"),
    (lambda: fsdp(prefetchs=1), "no-such-option", "'prefetchs'; did you mean 'prefetch'?"),
    (lambda: fsdp(zzz=1), "no-such-option", "'zzz'"),
    (lambda: fsdp(device="cpu"), "renamed-option", "device: now init=Init(device=...)"),
    (lambda: fsdp(audit=False), "renamed-option", "audit: now debug=Debug(audit=...)"),
    (lambda: fsdp(secondary_ranks=8), "renamed-option", "now sharding_strategy=Sharding(secondary_ranks=...)"),
    *((functools.partial(fsdp, **{n: 1}), "renamed-option", f"{n}: now {FORMER[n]}") for n in FORMER),
]


@pytest.mark.parametrize("call, code, named", WRONG_CALLS)
def test_errors_say_what_to_write_instead(call: Callable[[], Any], code: str, named: str) -> None:
    of_type = ("positional-arguments", "model-passed-to-fsdp", "no-such-option", "renamed-option")
    with pytest.raises(TypeError if code in of_type else ValueError, check=coded(f"option.{code}", named)):
        call()


def _in(path: str, answer: Any) -> Callable[[str, nn.Module], Any]:
    return lambda name, module: answer if name == path else None


TYPO, SINGLE = CommPolicy(gather="int8", exempt=("first", "*.wieght")), Sharding(secondary_ranks=_in("", 1))
ROOT, LAST = (
    "{}, returned by the callable for the root module: {}",
    "{}, returned by the callable for module 'last': {}",
)

# What a module is needed for: an option, a value, the code of the error, and what it says of the option.
REFUSED_FOR_A_MODULE: list[tuple[str, Any, str, str]] = [
    ("comm_policy", _in("", "int8"), "wrong-type", ROOT.format("comm_policy", "expected a CommPolicy or None")),
    *(("comm_policy", n, "comm-exempt-matches-nothing", "exempt: '*.wieght'") for n in (TYPO, _in("last", TYPO))),
    ("sharding_strategy", _in("last", True), "unknown-strategy", LAST.format("sharding_strategy", "expected 'zero2'")),
    ("sharding_strategy", SINGLE, "too-small", ROOT.format("secondary_ranks", "expected 2 or more ranks")),
    ("mp_policy", _in("last", 3), "wrong-type", LAST.format("mp_policy", "expected a MixedPrecisionPolicy or None")),
    ("mp_policy", _in("", MixedPrecisionPolicy(torch.int8)), "dtype-not-floating-point", ROOT.format("mp_policy", "")),
    ("transport", lambda *_: "pigeon", "unknown-transport", "transport: expected 'auto', one of"),
]


@pytest.mark.parametrize(("option", "value", "code", "text"), REFUSED_FOR_A_MODULE)
def test_errors_name_an_option_that_is_wrong_for_a_module(option: str, value: Any, code: str, text: str) -> None:
    with pytest.raises(TypeError if code == "wrong-type" else ValueError, check=coded(f"option.{code}", text)):
        compile_model(lambda: Stack(1).double(), **{option: value})


PINNED = StepSchedule(Schedule(ops=(), statements=0, compute=""), None)

# An option, a value, and what is kept of it.
KEPT: list[tuple[str, Any, Any]] = [
    *(("sharding_strategy", value, Sharding("zero2")) for value in ("ZeRO2", FSDPType.ZERO2, Sharding("zero2"))),
    ("sharding_strategy", FSDPType.ZERO3, Sharding()),
    *(
        ("bucketing_strategy", value, kept)
        for value, kept in (("Layer", "layer"), (FSDPBucketingStrategy.NONE, "none"))
    ),
    *(("bucketing_strategy", value, kept) for value, kept in ((1024, 1024), ("25MB", 25_000_000), ("2 KiB", 2048))),
    *(("prefetch", value, kept) for value, kept in ((None, 1), (0, 0), ("auto", "auto"))),
    ("max_memory", "3GB", 3_000_000_000),
    ("gradient_divide_factor", 2, 2.0),
    ("cluster", "h100-sxm", CLUSTERS["h100-sxm"]),
    ("schedule", PINNED, (PINNED,)),
    ("mp_policy", None, MixedPrecisionPolicy()),
    ("mp_policy", NewerPolicy(), NewerPolicy()),  # the unknown field is at its default
    ("offload_policy", None, OffloadPolicy()),
    ("offload_policy", NewerOffload(pin_memory=False), NewerOffload(pin_memory=False)),
    ("ranks", None, Ranks()),
    ("init", Init("cpu", ignored_params=["a"]), Init(torch.device("cpu"), ignored_params=("a",))),
    ("leaf_modules", "auto", ("auto",)),
    ("leaf_modules", [nn.Linear], (nn.Linear,)),
    ("debug", None, Debug()),
    *(
        (option, function, function)
        for option in ("bucketing_strategy", "transport", "mp_policy", "gradient_divide_factor", "all_reduce_hook")
        for function in (functools.partial(lambda prefix, name, value: None, "a"), lambda *args: None)
    ),
]


@pytest.mark.parametrize(("option", "value", "kept"), KEPT)
def test_options_are_accepted_in_all_spellings_and_what_is_kept_is_an_option(
    option: str, value: Any, kept: Any
) -> None:
    transform = fsdp(**{option: value})
    found = getattr(transform.options, option)
    assert found == kept
    assert replace(transform.options, agree="never") == replace(fsdp(**{option: found}).options, agree="never")
    if option in ("bucketing_strategy", "prefetch"):
        assert f"{option}={kept!r}" in repr(transform)


def test_what_is_given_is_shown_and_a_limit_on_memory_chooses_the_distance() -> None:
    options = fsdp(max_memory="3GB", sharding_strategy=Sharding(release=True)).options
    assert repr(options) == "Options(sharding_strategy=Sharding(release=True), prefetch='auto', max_memory=3000000000)"
    assert options.needs_search and not fsdp().options.needs_search


def test_a_bucket_of_a_few_bytes_is_warned_of_where_it_is_asked_for() -> None:
    with pytest.warns(UserWarning, match="bucketing_strategy=25 .*'25MB'") as warned:
        options = fsdp(bucketing_strategy=25).options
        fsdp(bucketing_strategy="25B")  # which says what it is
        assert options.with_kept(schedule=None) == options
    assert [each.filename for each in warned] == [__file__]


def test_ranks_compare_each_option_but_objects_of_a_process() -> None:
    def lines(**options: Any) -> list[str]:
        return [*fsdp(**options).options.lines("fsdp")]

    def function(captured: str) -> Callable[[str, Any], str]:
        return lambda name, value: captured

    compared = [name for line in lines() for name in re.findall(r"(\w+)=", line)]
    parts = {name for each in (Sharding, Ranks, Init, Debug) for name in inspect.signature(each).parameters}
    options = {*inspect.signature(fsdp).parameters, *parts, *(f.name for f in fields(MixedPrecisionPolicy))}
    assert {*compared} == options - {"process_group", "ignored_params", "check_passes"}
    assert "fsdp(init=Init(device=cuda))" in lines(init=Init("cuda:1"))
    for option, is_compared in (("all_reduce_hook", True), ("transport", False)):  # of which ranks compare the answers
        assert is_compared == (lines(**{option: function("a")}) != lines(**{option: function("b")}))


def _described(text: str) -> list[str]:
    """Return the names under ``Args``, in their order."""
    section = inspect.cleandoc(text).split("\nArgs:")[1].split("\nRaises:")[0].split("\nReturns:")[0]
    return re.findall(r"^    (\w+): ", section, re.MULTILINE)


@pytest.mark.parametrize("called", [fsdp, Sharding, Ranks, Init, Debug, CommPolicy])
def test_signatures_show_what_users_give_and_documentation_each_option(called: Callable[..., Any]) -> None:
    signature = inspect.signature(called)
    options = dict(signature.parameters)
    assert [*options] == _described(called.__doc__ or "")
    assert not any("Option[" in str(p) or "option(" in str(p) for p in options.values())
    assert all(p.default is not p.empty for p in options.values())
    if called is fsdp:
        assert {p.kind for p in options.values()} == {inspect.Parameter.KEYWORD_ONLY}
        assert str(options["max_memory"]) == "max_memory: 'int | str | None' = None"
        assert signature.return_annotation == fsdp.__annotations__["return"] == "FSDPTransform"
        assert options.keys() == fsdp.__annotations__.keys() - {"return"}
    if called is not CommPolicy:  # each is a row of a table
        page = (Path(__file__).parents[1] / "docs" / "options.md").read_text()
        title = "option" if called is fsdp else f"`{called.__name__}`"
        table = page.split(f"\n| {title} | set it if | default |\n")[1].split("\n\n")[0]
        assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*options]


def test_former_names_are_spelled_with_options_that_exist() -> None:
    known = {name for each in (fsdp, Sharding, Ranks, Init) for name in inspect.signature(each).parameters}
    named = {name for text in FORMER.values() for name in re.findall(r"(\w+)=", text)}
    assert named <= known and {"ranks", "prefetch"} <= named and not {*FORMER} & {*inspect.signature(fsdp).parameters}


class _Quiet(Debug):
    """A user's class of options."""


def test_derived_option_classes_have_the_same_options() -> None:
    options = fsdp(debug=_Quiet(differentiate_once=False)).options
    assert "Options(debug=_Quiet(differentiate_once=False))" in list(options.lines("Options"))


def test_an_empty_list_of_schedules_is_refused() -> None:
    with pytest.raises(TypeError, check=coded("option.wrong-type", "schedule")):
        fsdp(schedule=())  # type: ignore[arg-type]
