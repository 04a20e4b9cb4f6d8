"""Attributes set after ``thunder.jit``, on the jitted or on the original module, have the effect of eager mode."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import eager, fsdp

import pytest
import thunder
import torch
import torch.nn.functional as F
from beside import Beside
from coded import coded
from models import Calling
from thunder.core.transform_common import Transform
from thunder.core.transforms import add_transform
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.kind = nn.Linear(4, 4), 1.0, "plain"
        self.function: Any = torch.relu
        self.register_buffer("offset", torch.ones(4))
        self.later = nn.ModuleList()
        self.register_module("missing", None)
        self.norm = nn.LayerNorm(4, bias=False)

    def helper(self, y: torch.Tensor) -> torch.Tensor:
        return y

    @property
    def temperature(self) -> float:
        return self.scale

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.scale = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.helper(self.function(self.linear(x)) * self.scale + self.offset))
        if getattr(self, "extra", None) is not None:
            y = y * self.extra
        for part in self.later:
            y = part(y)
        return y.neg() if self.kind == "other" else y


def _double(y: torch.Tensor) -> torch.Tensor:
    return y * 2


SET: dict[str, Any] = {
    "kind": "other",
    "scale": 2.0,
    "function": F.gelu,
    "offset": torch.zeros(4),
    "helper": _double,
    "temperature": 3.0,
    "extra": 5.0,
    "forward of a submodule": _double,
}


def _make() -> Beside:
    torch.manual_seed(0)
    return Beside(_Module())


X, ZERO = torch.linspace(-1, 1, 8).view(2, 4), torch.zeros(4)


def test_attributes_have_the_effect_of_eager_mode() -> None:
    both = _make()
    jitted, module, expected = both.model, both.own, both.module
    jitted(X)
    for name, value in SET.items():
        for each in (jitted, expected):
            setattr(each.linear if "submodule" in name else each, name.split()[0], value)
        both.check(X)
        if "submodule" not in name:
            assert getattr(jitted, name) is getattr(module, name) is value
    jitted.offset, jitted.scale = torch.full((4,), 3.0), 7.0
    expected.offset, expected.scale = jitted.offset, 7.0
    assert torch.equal(jitted.state_dict()["offset"], expected.offset)
    jitted.scale = expected.scale = 8.0
    with eager(jitted) as original:
        torch.testing.assert_close(original(X), expected(X), rtol=0, atol=0)
    for each in (jitted, expected):  # also with modes, and the other one last
        each.train()
        each.eval()
    module.kind = expected.kind = "plain"
    both.check(X)


def test_before_the_first_call_attributes_reach_the_trace() -> None:
    both = _make()
    for each in both.both:
        each.extra, each.function = 3.0, torch.tanh
    both.check(X)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda m: vars(m).update(scale=2.0),
    "a number's type": lambda m: vars(m).update(scale=2),
    "a string": lambda m: vars(m).update(kind="other"),
    "a flag": lambda m: vars(m).update(extra=True),
    "a flag that is a number": lambda m: vars(m).update(extra=1),
    "a hook": lambda m: m.linear.register_forward_hook(lambda *args: args[-1] * 2),
    "another hook with the same number": lambda m: m.linear._forward_hooks.update(
        {number: lambda *args: args[-1] * 3 for number in m.linear._forward_hooks}
    ),
    "a hook before": lambda m: m.linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "no gradient": lambda m: m.linear.bias.requires_grad_(False),
    "a mode": lambda m: m.eval(),
    "a hook of all modules": lambda m: nn.modules.module._global_forward_hooks.setdefault(-1, lambda *args: None),
    "not a number": lambda m: vars(m).update(scale=float("nan")),
}
"""Each is made on top of those before it."""


def test_what_forward_has_read_is_compared_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.modules.module, "_global_forward_hooks", {})
    both = _make()
    both.check(X)
    for number, (what, change) in enumerate(CHANGES.items(), 2):
        change(both.own)
        change(both.module)
        for _ in range(2):
            torch.testing.assert_close(both.model(X), both.module(X), equal_nan=True, msg=what)
            assert len(both.transform.compiled) == number, what
    monkeypatch.undo()
    both.own.scale = 2
    both.own.train()
    both.model(X)
    assert len(both.transform.compiled) == number


def test_methods_of_the_jitted_module_and_notes_of_libraries_stay_its_own() -> None:
    both = _make()
    jitted, forward, calls = both.model, both.model.forward, []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return forward(*args)

    jitted.forward, jitted._note = counted, "of a library"
    both.check(X)
    assert len(calls) == 1 and "forward" not in vars(both.own) and not hasattr(both.own, "_note")


def test_former_and_new_jitted_modules_follow_buffers_and_attributes_when_a_transform_is_added() -> None:
    both = _make()
    former, module, expected = both.model, both.own, both.module
    both.check(X)
    module.offset = expected.offset = torch.full((4,), 3.0)
    both.check(X)
    new = add_transform(former, transform=Transform())
    for number, each in enumerate((new, former, module, former)):
        for jitted in (new, former, new):
            torch.testing.assert_close(jitted(X), expected(X), rtol=0, atol=0)
        each.offset = expected.offset = torch.full((4,), 4.0 + number)
        each.scale = expected.scale = 2.0 + number


def test_a_buffer_that_is_removed_is_none_of_the_jitted_module_either() -> None:
    both = _make()
    both.model(X)
    both.own.offset = None
    assert "offset" not in both.model.state_dict() and not dict(both.model.named_buffers())


class _SetsOffset:
    """A forward pre-hook that gives a module another buffer in each call."""

    def __init__(self, how: str) -> None:
        self.how, self.offset = how, torch.zeros(4)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.how == "set":
            module.offset = self.offset
        else:
            module._buffers["offset"] = self.offset


@pytest.mark.parametrize("how", ["set", "assigned"])
@pytest.mark.parametrize("on", ["jitted", "original", "containing"])
def test_buffers_that_a_pre_hook_sets_hold_in_the_same_call(on: str, how: str) -> None:
    both = _make()
    jitted, module, expected = both.model, both.own, both.module
    hook = _SetsOffset(how)
    if on == "containing":
        parent = nn.Sequential(jitted)
        parent.register_forward_pre_hook(lambda _, args: hook(module, args))
    elif on == "jitted" and how == "assigned":
        jitted.register_forward_pre_hook(lambda _, args: hook(module, args))
    else:
        (jitted if on == "jitted" else module).register_forward_pre_hook(hook)
    expected.register_forward_pre_hook(hook)
    for value in range(3):
        hook.offset = torch.full((4,), float(value))
        torch.testing.assert_close((parent if on == "containing" else jitted)(X), expected(X), rtol=0, atol=0)


def _add_hooked(module: nn.Module) -> None:
    module.later.append(nn.Tanh())
    module.later[-1].register_forward_hook(lambda part, args, output: output * 2)


@pytest.mark.parametrize("add", [lambda module: module.later.append(nn.Tanh()), _add_hooked], ids=["plain", "hooked"])
def test_submodules_that_are_added_are_traced(add: Callable[[nn.Module], None]) -> None:
    both = _make()
    both.check(X)
    for _ in range(2):
        add(both.own)
        add(both.module)
        for _ in range(2):
            both.check(X)


_ON_JITTED, _REPLACED = coded("module.registered-on-jitted-module"), coded("module.part-replaced-after-jit")
REFUSED: dict[str, tuple[Callable[[Any, Any], object], coded]] = {
    "submodule": (lambda j, m: setattr(j, "linear", nn.Linear(4, 4)), _ON_JITTED.naming("submodule", "linear")),
    "parameter": (lambda j, m: setattr(j, "late", nn.Parameter(ZERO)), _ON_JITTED.naming("parameter", "late")),
    "buffer": (lambda j, m: j.register_buffer("late", ZERO), _ON_JITTED.naming("buffer", "late")),
    "mode": (lambda j, m: setattr(j, "training", False), coded("module.training-flags-differ")),
    "parameters": (lambda j, m: m.later.append(nn.Linear(4, 4)), coded("parameter.added-after-jit", "later.0.weight")),
    "a submodule for None": (lambda j, m: setattr(m, "missing", nn.Tanh()), _REPLACED.naming("submodule", "missing")),
    "None for an empty submodule": (lambda j, m: setattr(m, "later", None), _REPLACED.naming("submodule", "later")),
    "a parameter for None": (
        lambda j, m: setattr(m.norm, "bias", nn.Parameter(ZERO)),
        _REPLACED.naming("parameter", "norm.bias"),
    ),
}
"""Changes of the jitted module (the first argument) or of the original one, with the error that refuses them."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_reach_the_module_or_would_not_be_trained_is_refused_by_name(name: str) -> None:
    both = _make()
    both.model(X)
    change, expected = REFUSED[name]
    change(both.model, both.own)
    with pytest.raises((RuntimeError, ValueError), check=expected):
        both.model(X)


class _Settings:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class _Kind(enum.Enum):
    PLAIN, OTHER = "plain", "other"


class _Layer(nn.Module):
    def __init__(self, settings: Any, scales: list[float], table: dict[str, float]) -> None:
        super().__init__()
        self.linear, self.function, self.functions, self.kind = nn.Linear(4, 4), F.gelu, [torch.relu], _Kind.PLAIN
        self.settings, self.scales, self.table = settings, scales, table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.functions[0](
            self.function(self.linear(x) * self.settings.scale * self.scales[0] * self.table["scale"])
        )
        return y if self.kind is _Kind.PLAIN else y * 3


@pytest.mark.parametrize("layer", ["0", "1"])
def test_what_layers_share_may_be_replaced_in_one_of_them(layer: str) -> None:
    torch.manual_seed(0)
    shared = _Settings(1.0), [1.0], {"scale": 1.0}
    module = nn.Sequential(_Layer(*shared), _Layer(*shared))
    expected = copy.deepcopy(module)
    jitted = thunder.jit(module, transforms=[fsdp()])
    jitted(X)
    changed: dict[str, Any] = {
        "function": F.silu,
        "functions": [torch.tanh],
        "kind": _Kind.OTHER,
        "settings": _Settings(2.0),
        "scales": [3.0],
        "table": {"scale": 4.0},
    }
    for name, value in changed.items():
        for each in (module, expected):
            setattr(each.get_submodule(layer), name, value)
        torch.testing.assert_close(jitted(X), expected(X), rtol=0, atol=0, msg=name)


def test_a_buffer_that_forward_has_assigned_can_be_put_back() -> None:
    def count(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.linear(x) + self.calls

    both = Beside(Calling(count, linear=nn.Linear(4, 4), calls=nn.Buffer(torch.zeros(4))))
    for _ in range(2):
        kept = both.own.calls, both.module.calls
        both.check(X)
        both.own.calls, both.module.calls = kept
