"""The package says which device it means: the current one may be another.

``torch.cuda.set_device`` is the user's to call or not. A stream, an event or a tensor of the current device that stands for
one of the parameters' device is a race that no test on a CPU finds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import thunder_fsdp_sched

import pytest

PACKAGE = Path(thunder_fsdp_sched.__file__).parent

NEED_A_DEVICE = {
    "Stream",
    "current_stream",
    "default_stream",
    "get_device_capability",
    "get_device_properties",
    "memory_allocated",
    "stream",
    "synchronize",
}
"""Functions and classes of ``torch.cuda`` that mean the current device if they are given none."""

ASK_FOR_THE_CURRENT = {"current_device", "set_device"}
"""Allowed in ``options.resolve_device`` alone."""


def _faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        given = bool(node.args or node.keywords)
        match node.func:
            case ast.Attribute(value=ast.Attribute(value=ast.Name("torch"), attr="cuda"), attr=name):
                if name in NEED_A_DEVICE and not given:
                    yield f"line {node.lineno}: torch.cuda.{name}() without a device"
                if name in ASK_FOR_THE_CURRENT:
                    yield f"line {node.lineno}: torch.cuda.{name} changes or asks for the current device"
            case ast.Attribute(attr="record") if not given:
                yield f"line {node.lineno}: record() without a stream"
            case ast.Attribute(attr="cuda") if not given:
                yield f"line {node.lineno}: cuda() without a device"
            case ast.Attribute(attr="device", value=ast.Name("torch")):
                match node.args:
                    case [ast.Constant("cuda")]:
                        yield f"line {node.lineno}: torch.device('cuda') without an index"
        for keyword in node.keywords:
            match keyword:
                case ast.keyword(arg="device", value=ast.Constant("cuda")):
                    yield f"line {node.lineno}: device='cuda' without an index"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("torch.cuda.current_stream()", "torch.cuda.current_stream() without a device"),
        ("torch.cuda.Stream()", "torch.cuda.Stream() without a device"),
        ("torch.cuda.synchronize()", "torch.cuda.synchronize() without a device"),
        ("torch.cuda.Event(enable_timing=True).record()", "record() without a stream"),
        ("end.record()", "record() without a stream"),
        ("torch.cuda.set_device(device)", "torch.cuda.set_device changes or asks for the current device"),
        ("param.cuda()", "cuda() without a device"),
        ("torch.empty(3, device='cuda')", "device='cuda' without an index"),
        ("torch.device('cuda')", "torch.device('cuda') without an index"),
    ],
)
def test_calls_that_mean_the_current_device_are_found(source: str, fault: str) -> None:
    assert list(_faults(f"\nx = {source}")) == [f"line 2: {fault}"]
    assert not list(_faults("torch.cuda.current_stream(d); e.record(s); torch.cuda.Stream(d); torch.device('cuda', 1)"))


def test_the_package_never_means_the_current_device() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}, {fault}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for fault in _faults(path.read_text())
    }
    allowed = {fault for fault in found if fault.startswith("options.py") and "device" in fault}
    assert found - allowed == set()
    assert len(allowed) == 2, "resolve_device asks whether a device is the current one, and which that is"
