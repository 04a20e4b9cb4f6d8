"""The package always names the CUDA device that it uses and never relies on the current one.

Users may leave another device current. A stream, event or tensor on the current device instead of the parameters' device
would be a race that no test on a CPU can find, so this checks the source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import thunder_fsdp_sched

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
"""Functions and classes of ``torch.cuda`` that use the current device if no device is given."""

ASK_FOR_THE_CURRENT = {"current_device", "set_device"}
"""Functions that only ``resolve_device`` may call."""


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


def test_the_package_never_uses_the_current_device_implicitly() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}, {fault}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for fault in _faults(path.read_text())
    }
    allowed = {fault for fault in found if fault.startswith("sharding/initial_values.py") and "device" in fault}
    assert found - allowed == set()
    assert len(allowed) == 1, "only resolve_device may ask for the current device"
