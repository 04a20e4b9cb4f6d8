"""Makes the prologue expect shards where the module has parameters, and guards what the compiled traces depend on."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx

from ..symbols import fsdp_check_no_sync
from ..traces import with_bound_symbols

__all__ = ["shard_prologue", "unpacked_parameters"]


def unpacked_parameters(prologue: TraceCtx) -> dict[str, str]:
    """Parameter name of each proxy that the prologue unpacks from the module, by the proxy's name."""
    return {bsym.output.name: bsym.args[1] for bsym in prologue.bound_symbols if bsym.sym is prims.unpack_parameter}


def shard_prologue(prologue: TraceCtx, *, shards: Mapping[str, torch.nn.Parameter], no_sync: bool) -> TraceCtx:
    """Gives every unpacked parameter the shape of its shard, in its proxy and in the prologue's checks.

    Parameters that are checked without being an input of the computation are among them.

    Args:
        shards: this rank's shard of each parameter, by each of its names.
        no_sync: whether the traces are compiled for ``no_sync``; a cache entry is used only in the same state.

    Raises:
        NotImplementedError: the traces unpack parameters of more than one module.
    """
    started = time.perf_counter()
    unpacked = unpacked_parameters(prologue)
    modules = [bsym.output for bsym in prologue.bound_symbols if bsym.sym is prims.unpack_thunder_module]
    if len(modules) > 1:
        raise NotImplementedError("fsdp: the compiled function uses more than one module; jit the outermost one")
    bsyms = []
    for bsym in prologue.bound_symbols:
        if bsym.sym is prims.unpack_parameter and bsym.args[1] in shards:
            become_shard(bsym.output, shards[bsym.args[1]])
        elif bsym.sym is prims.check_tensor_shape_and_metadata and unpacked.get(bsym.args[0].name) in shards:
            shard = shards[unpacked[bsym.args[0].name]]
            checks = (
                tuple(shard.shape),
                devices.to_device(shard.device).device_str(),
                shard.dtype,
                shard.requires_grad,
            )
            bsym = bsym.from_bsym(args=(bsym.args[0], *checks))
        bsyms.append(bsym)
        if bsym.sym is prims.unpack_thunder_module:
            # The module is an argument so that transforms which sort checks by what they read see that it reads it.
            with tracectx(prologue):
                bsyms.append(fsdp_check_no_sync.bind(bsym.output, no_sync, output=None))
    return with_bound_symbols(prologue, bsyms, "fsdp: shard the prologue", started)


def become_shard(proxy: TensorProxy, shard: torch.nn.Parameter) -> None:
    """Turns the proxy of a parameter into that of its shard, in place: traces and prologue share proxies by name."""
    proxy._shape = tuple(shard.shape)
    proxy._numel = shard.numel()
    proxy._ndim = shard.ndim
    proxy._device = devices.to_device(shard.device)
    dtype = dtypes.to_dtype(shard.dtype)
    if proxy.dtype is not dtype:  # traced in the lower precision in which it is used
        proxy._dtype = proxy._true_dtype = dtype
    proxy._requires_grad = shard.requires_grad
