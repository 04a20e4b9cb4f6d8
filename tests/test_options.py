"""May an option be this: what ``fsdp`` and the parts of its options accept, what they keep of it, and what tools see."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
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


class Quiet(Debug):
    """A user's class of options."""


def _one(name: Any) -> None:
    """Takes one argument, where options take functions of two."""


TAKES_OTHERS, DIFFER = "callable-takes-other-arguments", "conflicts-with-ranks-may-differ"
TYPE, CHOICE, SMALL = "wrong-type", "unknown-choice", "too-small"
LOW = [MixedPrecisionPolicy(**{n: d}) for n, d in (("param_dtype", "bf16"), ("reduce_dtype", torch.int32))]

# By an option of `fsdp` or of a part, values by the code of their error.
REFUSED: dict[str, dict[str, Sequence[Any]]] = {
    "sharding_strategy": {"unknown-strategy": ("zero4", 3, None), TAKES_OTHERS: [_one]},
    "bucketing_strategy": {
        "unknown-bucketing-strategy": ("blocks", True, None),
        "size-not-positive": (0, -1),
        "size-not-understood": ["25 bananas"],
        TAKES_OTHERS: [_one],
    },
    "prefetch": {SMALL: [-1], TYPE: [True]},
    "max_memory": {TYPE: [1.5]},
    "accumulate": {CHOICE: ["both"]},
    "max_gathers_in_flight": {SMALL: [0]},
    "schedule": {TYPE: (3, ("a",), ())},
    "transport": {"unknown-transport": ["pigeon"], TAKES_OTHERS: [_one]},
    "mp_policy": {
        TYPE: (torch.bfloat16, NewerPolicy(param_dtype_override_fn=3)),
        "dtype-not-floating-point": (*LOW, MixedPrecisionPolicy(output_dtype=torch.bool)),
        "unknown-policy-field": [NewerPolicy(flavour="hot")],
        TAKES_OTHERS: [_one],
    },
    "comm_policy": {TYPE: ("int8", CommPolicy)},
    "gradient_divide_factor": {
        TYPE: ("2", True),
        "expected-positive-number": (0, -1.0, float("nan"), float("inf")),
        TAKES_OTHERS: [_one],
    },
    "all_reduce_hook": {TYPE: ["average"], TAKES_OTHERS: [_one]},
    "offload_policy": {
        TYPE: [True],
        "unknown-policy-field": [NewerOffload(level=2)],
        "unknown-offload-policy": [Elsewhere()],
    },
    "ranks": {TYPE: ["world"]},
    "init": {TYPE: [{"device": "cpu"}]},
    "leaf_modules": {TYPE: ("mlp", nn.Linear, 3, [3], [("a", 1)])},
    "agree": {CHOICE: ["often"]},
    "ranks_may_differ": {TYPE: [1]},
    "debug": {TYPE: [True]},
    "Sharding: strategy": {"unknown-strategy": ["zero4"]},
    "Sharding: secondary_ranks": {SMALL: [1], TYPE: [True]},
    "Sharding: reshard_after_backward": {TYPE: [1]},
    "Ranks: process_group": {TYPE: [2]},
    "Ranks: mesh": {TYPE: [2]},
    "Ranks: process_group_for": {TYPE: [dist]},
    "Init: device": {TYPE: (1.5, True), "invalid-device": ["gpu"], "meta-device-for-shards": ["meta"]},
    "Init: param_init_fn": {TYPE: ["reset"]},
    "Init: broadcast_from": {TYPE: [False]},
    "Init: ignored_params": {TYPE: ("wte.weight", nn.Parameter(torch.zeros(2, 2)))},
    "Debug: audit": {TYPE: ["no"]},
    "Debug: skip_passes": {TYPE: ["verify"]},
    "Debug: check_passes": {TYPE: [0]},
    "CommPolicy: gather": {CHOICE: ["int4"]},
    "CommPolicy: reduce": {CHOICE: ("mxfp8", ["int8"])},
    "CommPolicy: block": {SMALL: (0, -1), TYPE: [64.0]},
    "CommPolicy: exempt": {TYPE: ("a", ("a", 1))},
    "CommPolicy: min_ndim": {TYPE: [1.0]},
    "CommPolicy: error_feedback": {TYPE: [1], "comm-error-feedback-without-reduce": [True]},
}


@pytest.mark.parametrize("option", REFUSED)
def test_errors_name_an_option_and_what_it_may_be(option: str) -> None:
    *of, name = option.split(": ")
    for code, values in REFUSED[option].items():
        for value in values:
            error = TypeError if code in (TYPE, TAKES_OTHERS) else ValueError
            with pytest.raises(error, check=coded(f"option.{code}", f"{option}: ")):
                getattr(thunder_fsdp_sched, *of or ["fsdp"])(**{name: value})


HOOK, SECONDARY = (lambda name, gradients: None), Sharding(secondary_ranks=2)

# A call, the code of its error, and what that names.
WRONG_CALLS: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: Sharding("zero2", secondary_ranks=2), "secondary-ranks-with-zero2", "use 'zero3'"),
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
ROOT, LAST = "{}, returned by the callable for the root module: ", "{}, returned by the callable for module 'last': "

# What a module is needed for: an option, a value, the code of the error, and what it names.
REFUSED_FOR_A_MODULE: list[tuple[str, Any, str, str]] = [
    ("comm_policy", _in("", "int8"), TYPE, ROOT),
    *(("comm_policy", n, "comm-exempt-matches-nothing", "exempt: '*.wieght'") for n in (TYPO, _in("last", TYPO))),
    ("sharding_strategy", _in("last", True), "unknown-strategy", LAST),
    ("sharding_strategy", SINGLE, SMALL, ROOT.format("secondary_ranks")),
    ("mp_policy", _in("last", 3), TYPE, LAST),
    ("mp_policy", _in("", MixedPrecisionPolicy(torch.int8)), "dtype-not-floating-point", ROOT),
    ("transport", lambda *_: "pigeon", "unknown-transport", "transport: "),
]


@pytest.mark.parametrize(("option", "value", "code", "text"), REFUSED_FOR_A_MODULE)
def test_errors_name_an_option_that_is_wrong_for_a_module(option: str, value: Any, code: str, text: str) -> None:
    error = TypeError if code == TYPE else ValueError
    with pytest.raises(error, check=coded(f"option.{code}", text.format(option))):
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
    ("debug", Quiet(differentiate_once=False), Quiet(differentiate_once=False)),
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
    assert "fsdp(debug=Quiet(differentiate_once=False))" in lines(debug=Quiet(differentiate_once=False))
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
