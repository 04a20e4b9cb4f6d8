"""Builds and loads ``guard.cpp``, the device guard from which torch's C++ gets the current CUDA device and streams."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_SOURCE = Path(__file__).with_name("guard.cpp")

Callback = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def missing() -> str:
    """Return why the virtual GPU cannot run here, or an empty string."""
    if torch.backends.cuda.is_built():
        return "this torch was built with CUDA"
    if shutil.which("g++") is None:
        return "g++ is not installed"
    return ""


@functools.cache
def library() -> Any:
    """Load the guard once, built for the installed torch. It has no effect while no virtual GPU is in use."""
    loaded = ctypes.PyDLL(str(_build()))
    for name in ("devices", "device", "stream", "new_stream", "new_event"):
        getattr(loaded, f"virtual_gpu_{name}").restype = ctypes.c_int64
    return loaded


def listen(record: Callable[[int, int, int], None], block: Callable[[int, int, int], None]) -> tuple[Any, Any]:
    """Register callbacks for the engine's event records and waits. The caller must keep the result alive."""
    callbacks = Callback(record), Callback(block)
    library().virtual_gpu_listen(*callbacks)
    return callbacks


def _build() -> Path:
    digest = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode() + torch.__file__.encode()).hexdigest()
    built = Path(tempfile.gettempdir()) / f"virtual_gpu_guard_{digest[:16]}.so"
    if not built.exists():
        root = Path(torch.__file__).parent
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            fresh = Path(folder) / built.name
            flags = ["-shared", "-fPIC", "-std=c++20", "-O1", f"-I{root}/include"]
            libraries = [f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"]
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
            done = subprocess.run(
                ["g++", *flags, str(_SOURCE), "-o", str(fresh), abi, *libraries], capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"guard.cpp does not compile:\n{done.stderr}")
            fresh.rename(built)
    return built
