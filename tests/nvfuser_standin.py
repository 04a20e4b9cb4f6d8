"""Thunder's nvFuser executor on CPU tensors. Everything except the kernels is real.

Without CUDA and nvFuser, Thunder does not even import its nvFuser executor. :func:`install` provides a stand-in module
``nvfuser_direct``, makes the executor's support checks accept CPU tensors, and runs each fusion as plain torch. The patches
are never undone, so call it in a separate process, such as a worker of ``ranks``.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401

import thunder.core.utils
import thunder.torch as ltorch
import torch
from looseversion import LooseVersion
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors import nvfuserex, torchex
from thunder.executors.passes import transform_for_execution
from thunder.extend import FusionExecutor

VERSION = "0.2.36"

# The members of nvFuser's DataType that Thunder's executor uses.
_DATA_TYPES = """
    ComplexDouble ComplexFloat Double Float Half BFloat16 Int Int32 UInt64 Bool
    Float4_e2m1fn_x2 Float8_e5m2 Float8_e4m3fn Null
"""


def install() -> FusionExecutor:
    """Return Thunder's nvFuser executor, for ``thunder.jit(..., executors=[...])``."""
    if "thunder.executors.nvfuserex_impl" not in sys.modules:
        sys.modules["nvfuser_direct"] = _module()
        nvfuserex.nvfuser_version = lambda: LooseVersion(VERSION)
        import thunder.executors.nvfuserex_impl as impl

        impl.is_supported_device = lambda device: True
        impl.is_supported_devicetype = lambda devicetype: True
        impl.is_supported_tensor = _is_supported_tensor
        impl.nvFuserExecutor.has_cuda_input_or_output = _has_tensors
        impl.create_fusion_definition_wrapper = _as_plain_torch
        for symbol in (
            ltorch.cross_entropy,
            ltorch.scaled_dot_product_attention,
        ):  # real nvFuser runs them with its own operators, which the stand-in does not have
            del impl.ex.implmap[symbol.id]
    return sys.modules["thunder.executors.nvfuserex_impl"].ex


def _module() -> types.ModuleType:
    module = types.ModuleType("nvfuser_direct")
    module.version = lambda: VERSION
    module.DataType = enum.Enum("DataType", _DATA_TYPES.split())
    module.ParallelType = enum.Enum("ParallelType", ["mesh_x"])
    module.FusionDefinition = type("FusionDefinition", (), {})
    for name in ("multidevice", "execute_with_dtensors", "compute_tensor_descriptor"):
        setattr(module, name, None)  # read only when a real fusion runs
    return module


def _is_supported_tensor(a: TensorProxy, *, allow_low_precision_floats: bool = True) -> bool:
    import thunder.executors.nvfuserex_impl as impl

    thunder.core.utils.check_type(a, TensorProxy)
    return impl.is_supported_dtype(a.dtype, allow_low_precision_floats=allow_low_precision_floats) and a.ndim <= 8


def _has_tensors(executor: FusionExecutor, bsym: BoundSymbol) -> bool:
    return any(isinstance(p, TensorProxy) for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs))


def _as_plain_torch(
    bsyms: Sequence[BoundSymbol], name: str, inputs: Sequence[Proxy], outputs: Sequence[Proxy]
) -> Callable[..., Any]:
    region = TraceCtx(None)
    region.args = list(inputs)
    region.kwargs = {}
    region._siginfo = SigInfo("fusion")
    region._siginfo.args = [(a.name, None) for a in inputs]
    region.names = {p.name for b in bsyms for s in (b, *b.subsymbols) for p in (*b.flat_proxy_args, *s.flat_proxy_outs)}
    region.names |= {p.name for p in inputs}
    with tracectx(region):
        for a in inputs:
            prims.unpack_trivial(a, name=a.name)
    region.bound_symbols += [*bsyms, prims.python_return.bind(list(outputs), output=None)]
    run = transform_for_execution(region, executors_list=(torchex.ex,)).python_callable(include_decorators=False)
    return torch.no_grad()(run)
