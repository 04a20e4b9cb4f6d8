"""The symbols that copy saved activations to host memory and back; they run in ``extras.activation_offload.copies``.

Forward has for each offloaded value the first two lines, backward the others::

    ft0 = fsdp_copy_to_host(t5)                     # issue
    host_t5 = fsdp_wait_host_copy(ft0, t5)          # t5 may be freed; host_t5 is saved for backward
    ft1 = fsdp_copy_to_device(host_t5, 'cuda:0')    # issue, to new memory
    bw_t5 = fsdp_wait_device_copy(ft1)

They do not communicate with other ranks. The first wait reads ``t5`` only so that it lives until then.

[Note: Tokens of host copies]
Thunder's split moves everything to backward that no output of forward needs, and none needs the copy in host memory. So
until the split the first wait also takes and returns an argument of the trace, the token, and Thunder counts a bound
symbol that returns one as forward: ``(host_t5, x) = fsdp_wait_host_copy(ft0, t5, x)``.
"""

from __future__ import annotations

import torch
from thunder.core import devices
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from ...ir.effects import Allocation, Effects, Issue, LocalWork, Wait
from ...ir.inspection import nbytes_of
from ...ir.registry import register
from .copies import copy_to_device, copy_to_host, wait_device_copy, wait_host_copy


def _copy_to_host_meta(source: TensorProxy) -> FutureTensorProxy:
    return FutureTensorProxy(like=source, device=devices.cpu)


def _wait_host_copy_meta(
    future: FutureTensorProxy, source: TensorProxy, token: TensorProxy | None = None
) -> TensorProxy | tuple[TensorProxy, TensorProxy]:
    host = TensorProxy(like=source, device=devices.cpu, requires_grad=False)
    return host if token is None else (host, token)


def _copy_to_device_meta(host: TensorProxy, device: str) -> FutureTensorProxy:
    return FutureTensorProxy(like=host, device=devices.to_device(torch.device(device)))


def _wait_device_copy_meta(future: FutureTensorProxy) -> TensorProxy:
    return TensorProxy(like=future, requires_grad=False)


def _copy_to_host_effects(bsym: BoundSymbol) -> Effects:
    source, copy = bsym.args[0], bsym.output
    issue = Issue(bsym.sym.name, copy.name, None, None, nbytes_of(source), None)
    return Effects(issues=issue, work=LocalWork(), views={copy.name: ()}, layouts={copy.name: source.name})


fsdp_copy_to_host = register("fsdp_copy_to_host", copy_to_host, _copy_to_host_effects, _copy_to_host_meta)


def _wait_host_copy_effects(bsym: BoundSymbol) -> Effects:
    (future, source, *_), host = bsym.args, bsym.flat_proxy_outs[0]
    return Effects(
        waits=Wait(future.name, (fsdp_copy_to_host.name,), source.name),
        work=LocalWork(),
        on_host=(host.name,),
        gives={host.name: ("activation", source.shape, source.dtype, source.device)},
        views={host.name: ()},
        layouts={host.name: source.name},
        frees_value=source.name,
    )


fsdp_wait_host_copy = register("fsdp_wait_host_copy", wait_host_copy, _wait_host_copy_effects, _wait_host_copy_meta)


def _copy_to_device_effects(bsym: BoundSymbol) -> Effects:
    (host, device), copy = bsym.args, bsym.output.name
    return Effects(
        issues=Issue(bsym.sym.name, copy, None, None, nbytes_of(host), None),
        work=LocalWork(),
        layouts={copy: host.name},
        reads_host=True,
        allocates=(Allocation(copy, nbytes_of(host), str(device).partition(":")[0], kind="values"),),
    )


fsdp_copy_to_device = register("fsdp_copy_to_device", copy_to_device, _copy_to_device_effects, _copy_to_device_meta)


def _wait_device_copy_effects(bsym: BoundSymbol) -> Effects:
    future, copy = bsym.args[0].name, bsym.output
    return Effects(
        waits=Wait(future, (fsdp_copy_to_device.name,)),
        work=LocalWork(),
        views={copy.name: (future,)},
        layouts={copy.name: future},
        gives={copy.name: ("activation", copy.shape, copy.dtype, copy.device)},
    )


fsdp_wait_device_copy = register(
    "fsdp_wait_device_copy", wait_device_copy, _wait_device_copy_effects, _wait_device_copy_meta
)


def without_token(wait: BoundSymbol) -> BoundSymbol:
    """Return a ``fsdp_wait_host_copy`` without its token; see [Note: Tokens of host copies]."""
    if len(wait.args) < 3:
        return wait
    return wait.from_bsym(args=wait.args[:2], output=wait.output[0])
