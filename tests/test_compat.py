"""``thunder_fsdp_sched.compat``: the version check, and the additions to torch that make Thunder import.

Tests that change torch or import Thunder run in processes of their own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]

# Load compat without the package, so that torch has not been prepared and Thunder not imported before the test does so.
LOAD_COMPAT = """
import importlib.util, sys
_package = importlib.util.find_spec("thunder_fsdp_sched")
_spec = importlib.util.spec_from_file_location("compat", _package.submodule_search_locations[0] + "/compat.py")
compat = importlib.util.module_from_spec(_spec)
sys.modules["compat"] = compat
_spec.loader.exec_module(compat)
"""

# Imitate torch 2.14 and later, where Function.apply is the C classmethod of its base class, which has no __func__. Older
# releases have the same classmethod on the base class.
LIKE_TORCH_2_14 = """
import torch
Function = torch.autograd.function.Function
Function.apply = torch._C._FunctionBase.__dict__["apply"]
assert not hasattr(Function.apply, "__func__")
"""

# A custom autograd function whose gradient differs from the one that autograd would compute.
SCALE = """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor * 10 + 0 * ctx.saved_tensors[0], None
"""


def run_after_torch(code: str) -> str:
    """Run code in a process that has imported torch and nothing of Thunder or the package; return its output."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # the package of this work tree
    command, environment = [sys.executable, "-c", f"import torch\n{code}"], {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def compat() -> ModuleType:
    namespace: dict = {}
    exec(LOAD_COMPAT, namespace)
    return namespace["compat"]


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Pretend that these versions of ``torch`` and ``thunder`` are installed. ``None`` means not installed."""
    found = {"torch": versions.get("torch", "2.13.0"), "lightning-thunder": versions.get("thunder", "0.2.6")}

    def version(name: str) -> str | None:
        if found[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


# ---- versions


@pytest.mark.parametrize("torch", ["2.10", "2.10.0", "2.11.0", "2.12.1", "2.13.0+cpu", "2.14.1rc1", "2.15.7.post1"])
@pytest.mark.parametrize("thunder", ["0.2.6", "0.2.7.dev20260201", "0.2.7", "0.2.99"])
def test_supported_versions_pass(compat, monkeypatch, torch, thunder):
    installed(monkeypatch, torch=torch, thunder=thunder)
    compat.check_versions()


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"torch": "2.9.1"}, "torch 2.9.1 is too old (needs 2.10 or later)"),
        ({"torch": "2.16.0"}, "torch 2.16.0 is too new (needs a release before 2.16)"),
        ({"torch": "2.16.0.dev20261201"}, "torch 2.16.0.dev20261201 is too new"),
        ({"torch": "2.16rc1"}, "torch 2.16rc1 is too new"),
        ({"torch": None}, "torch is not installed"),
        ({"torch": "unknown"}, "torch has no version that can be read ('unknown')"),
        ({"thunder": "0.2.5"}, "lightning-thunder 0.2.5 is too old (needs 0.2.6 or later)"),
        ({"thunder": "0.3.0"}, "lightning-thunder 0.3.0 is too new (needs a release before 0.3)"),
        ({"thunder": None}, "lightning-thunder is not installed"),
        ({"thunder": ""}, "lightning-thunder has no version that can be read"),
        (
            {"torch": "2.16.1", "thunder": "0.2.2"},
            "is too new (needs a release before 2.16); lightning-thunder 0.2.2 is",
        ),
    ],
)
def test_the_error_of_an_unsupported_version_names_it_and_the_supported_ones(compat, monkeypatch, versions, expected):
    installed(monkeypatch, **versions)
    supported = '"torch>=2.10,<2.16" "lightning-thunder>=0.2.6,<0.3"'
    with pytest.raises(ImportError, match=f"{re.escape(expected)}(.|\n)*{re.escape(supported)}"):
        compat.prepare()


def test_a_wrong_version_stops_the_import_of_the_package_before_thunder():
    printed = run_after_torch(
        """
import importlib.metadata, sys
real = importlib.metadata.version
importlib.metadata.version = lambda name: "2.9.1" if name == "torch" else real(name)
try:
    import thunder_fsdp_sched
except ImportError as error:
    print(error)
assert "thunder" not in sys.modules
"""
    )
    assert "torch 2.9.1 is too old" in printed


# ---- the named-tensor methods


def test_missing_methods_are_added_once_and_raise_when_called():
    printed = run_after_torch(
        LOAD_COMPAT
        + """
import pytest, torch
compat.NAMED_TENSOR_METHODS += ("a_method_that_no_torch_has",)
def rename(self): return "mine"
torch.Tensor.rename = rename                # a method that exists is not replaced
had_func = hasattr(torch.autograd.Function.apply, "__func__")
missing = [name for name in compat.NAMED_TENSOR_METHODS if not hasattr(torch.Tensor, name)]
present = {name: getattr(torch.Tensor, name) for name in compat.NAMED_TENSOR_METHODS if name not in missing}
assert "a_method_that_no_torch_has" in missing

added = compat.prepare()
methods = [name for name in added if name.startswith("torch.Tensor.")]
assert methods == [f"torch.Tensor.{name}" for name in missing], added
assert all(getattr(torch.Tensor, name) is method for name, method in present.items())
assert ("torch.autograd.Function.apply.__func__" in added) == (not had_func)

stand_ins = {name: getattr(torch.Tensor, name) for name in missing}
assert compat.prepare() == ()
assert all(getattr(torch.Tensor, name) is stand_in for name, stand_in in stand_ins.items())

for name, stand_in in stand_ins.items():
    assert stand_in.__name__ == name
    for call in (lambda: getattr(torch.ones(2), name)("N"), lambda: stand_in(torch.ones(2), names=None)):
        with pytest.raises(AttributeError, match=rf"torch\\.Tensor\\.{name} does not exist in torch .*thunder_fsdp_sched"):
            call()
assert "thunder" not in sys.modules
print(*missing)
"""
    )
    torch = Version(Version(importlib.metadata.version("torch")).base_version)
    named = {"align_as", "align_to", "has_names", "refine_names"} if torch >= Version("2.13") else set()
    assert set(printed.split()) == named | {"a_method_that_no_torch_has"}


# ---- with thunder


def test_thunder_traces_custom_autograd_functions_through_the_replaced_apply():
    run_after_torch(
        LIKE_TORCH_2_14
        + LOAD_COMPAT
        + """
compat.prepare()
import thunder
assert compat.prepare() == ()               # thunder is imported already
"""
        + SCALE
        + """
jitted = thunder.jit(lambda x: Scale.apply(x.sin(), 3.0))
x, reference = (torch.tensor([0.5, 2.0], requires_grad=True) for _ in range(2))
y, expected = jitted(x), Scale.apply(reference.sin(), 3.0)
torch.testing.assert_close(y, expected)
y.sum().backward()
expected.sum().backward()
torch.testing.assert_close(x.grad, reference.grad)
assert "Scale" in str(thunder.last_traces(jitted)[0])
"""
    )
