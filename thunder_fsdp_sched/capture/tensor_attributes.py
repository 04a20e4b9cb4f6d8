"""Torch's attributes and types of traced tensors, in place of Thunder's.

[Note: Attributes of traced tensors]
While Thunder traces, a tensor is a proxy. Its ``dtype`` and ``device`` are Thunder's, which equal none of torch's, so
``x.dtype == torch.float32`` would be false for all inputs, and one branch would run for all of them. The same holds for
``type(x)``, and for ``requires_grad`` of computed tensors, which Thunder does not track. A program that Thunder traces gets
what torch would return, or an error where only the run of the trace knows it, as for strides. Thunder's own functions, which
the interpreter interprets as well, still get Thunder's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from thunder.core.devices import to_torch_device
from thunder.core.dtypes import is_inexact_dtype, to_torch_dtype
from thunder.core.interpreter import WrappedValue, do_raise, unwrap, wrap_const
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.langctxs import resolve_method
from thunder.core.prims import PrimIDs
from thunder.core.proxies import NumberProxy, ProxyTag, StringProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from ..ir.gradients import RETURNING_CONSTANTS
from ..ir.inspection import nested
from .refusals import refusal

_LAYOUT = frozenset({"is_contiguous", "stride", "storage_offset", "data_ptr", "untyped_storage", "storage"})
_MAY_RETURN_INPUT = frozenset(
    (
        "to",
        "contiguous",
        "torch_type",
        "type_as",
        "cuda",
        "cpu",
        "float",
        "double",
        "half",
        "bfloat16",
        "long",
        "int",
        "bool",
    )
    + ("dropout", "flatten", "ravel", "expand_as", "detach_", "requires_grad_", "real", "resolve_conj", "resolve_neg")
    + ("broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d")
)
"""Methods and functions of torch that return their input itself if there is nothing to do."""


def answer_of(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return what to call in place of ``getattr``, ``hasattr`` or ``type`` of a tensor, or of ``torch.device``."""
    if function is torch.device:
        return _device
    if function is type:
        return _type if len(args) == 1 else None
    name = unwrap(args[1])
    if function is hasattr:
        return _has if _is_unknown(args[0], name) else None
    if name in _PROPERTIES:
        return lambda tensor, name, *default: _PROPERTIES[unwrap(name)](tensor)
    if name in _LAYOUT and args[0].python_typ is not torch.nn.Parameter:
        return _refuse_layout
    return _refuse_attribute if _is_unknown(args[0], name) else None


def error_of_same(a: TensorProxy, b: TensorProxy) -> NotImplementedError | None:
    """Return the error if two tensors may be one object for torch."""
    if a.name in _origins_of(b) or b.name in _origins_of(a):
        return refusal(
            "forward asks whether two tensors are one object (is), one of which may be returned by an operator that had "
            "nothing to do, such as .to or .contiguous, or that works in place",
            "Compare dtypes or shapes instead, or compute with both",
        )
    return None


def _origins_of(tensor: TensorProxy) -> Iterator[str]:
    made_by = {out.name: bsym for bsym in _traced() for out in bsym.flat_proxy_outs}
    name = tensor.name
    while (bsym := made_by.get(name)) is not None and (bsym.sym.name in _MAY_RETURN_INPUT or _is_in_place(bsym)):
        origin = next(arg.name for arg in bsym.flat_proxy_args)
        if origin == name:
            return
        yield (name := origin)


def _is_in_place(bsym: BoundSymbol) -> bool:
    return any(inner.sym.id is PrimIDs.COPY_ for inner in nested([bsym]))


def _traced() -> Iterator[BoundSymbol]:
    for scope in get_jit_ctx().computation_trace.scopes:
        yield from scope


def _requires_grad(tensor: WrappedValue) -> Any:
    """Return whether torch would record the operators of a tensor for backward."""
    if (known := requires_grad(tensor.value)) is not None:
        return wrap_const(known)
    return do_raise(
        refusal(
            "forward asks for requires_grad of a tensor after it has changed one in place, so that it is not known",
            "Ask for torch.is_grad_enabled() or self.training, or change no tensor in place before",
        )
    )


def requires_grad(tensor: TensorProxy) -> bool | None:
    """Return whether torch would record the operators of a traced tensor for backward; ``None`` if it is not known."""
    traced = list(nested(_traced()))
    made_by = {out.name: bsym for bsym in traced if not bsym.subsymbols for out in bsym.flat_proxy_outs}
    for out in (out for bsym in traced if bsym.sym.name in RETURNING_CONSTANTS for out in bsym.flat_proxy_outs):
        made_by.pop(out.name, None)
    writes = [bsym.args for bsym in made_by.values() if bsym.sym.id is PrimIDs.COPY_]
    read, is_written = _recorded([tensor], made_by), False
    while not any(proxy.requires_grad for proxy in read.values()):
        reaching = [args for args in writes if not read.keys().isdisjoint(_recorded(args[1:2], made_by))]
        if not reaching:
            return False
        writes = [args for args in writes if not any(args is other for other in reaching)]
        read, is_written = read | _recorded([args[0] for args in reaching], made_by), True
    return None if is_written else True


def _recorded(tensors: Iterable[TensorProxy], made_by: Mapping[str, BoundSymbol]) -> dict[str, TensorProxy]:
    """Return tensors, and those from which autograd would record that they are computed, by name."""
    todo, found = list(tensors), dict[str, TensorProxy]()
    while todo:
        proxy = todo.pop()
        if proxy.name in found or not isinstance(proxy, TensorProxy):
            continue
        found[proxy.name] = proxy
        is_recorded = is_inexact_dtype(proxy.dtype) and ProxyTag.DETACHED_AUTOGRAD_GRAPH not in proxy.tags
        if is_recorded and proxy.name in made_by:
            todo.extend(made_by[proxy.name].flat_proxy_args)
    return found


def _is_unknown(tensor: WrappedValue, name: Any) -> bool:
    """Return whether a tensor of torch has an attribute that its proxy does not have."""
    proxy, original = tensor.value, tensor.original_value
    if (
        hasattr(type(proxy), name)
        or resolve_method(name, proxy) is not None
        or proxy.get_default_attr(name) is not None
    ):
        return False
    return hasattr(original if isinstance(original, torch.Tensor) else torch.Tensor, name)


def _has(tensor: WrappedValue, name: WrappedValue) -> Any:
    return wrap_const(True)


def _refuse_layout(tensor: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    return do_raise(
        refusal(
            f"forward asks for the memory layout of a tensor ({unwrap(name)}), which is known only when the trace runs",
            "Call .contiguous() or .reshape() without asking; they copy nothing if there is nothing to do",
        )
    )


def _refuse_attribute(tensor: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    instead = "Compute with shapes, dtypes and values; keep what belongs to a parameter in an attribute of its module"
    known = _ADVICE.get(unwrap(name), instead)
    return do_raise(
        refusal(
            f"forward reads the attribute {unwrap(name)} of a tensor, which Thunder does not know while tracing", known
        )
    )


_ADVICE = {
    "data": "Call .detach()",
    "register_hook": "Register a hook on the module instead; see 'Hooks' in docs/training.md",
    "requires_grad_": "torch.autograd.grad in forward cannot be traced; in place of gradient_checkpointing_enable of "
    "transformers, pass max_memory or wrap the blocks",
}
"""The advice for attributes that Thunder does not know, by their names."""


def _type(tensor: WrappedValue) -> Any:
    kind = tensor.python_typ
    return wrap_const(kind if issubclass(kind, torch.Tensor) else torch.Tensor)


_PROPERTIES: dict[str, Callable[[WrappedValue], Any]] = {
    "dtype": lambda tensor: wrap_const(to_torch_dtype(tensor.value.dtype)),
    "device": lambda tensor: wrap_const(to_torch_device(tensor.value.device)),
    "layout": lambda tensor: wrap_const(torch.strided),
    "is_sparse": lambda tensor: wrap_const(False),
    "is_quantized": lambda tensor: wrap_const(False),
    "requires_grad": _requires_grad,
    "__class__": _type,
}


def _device(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
    return wrap_const(torch.device(*map(_plain, args), **{name: _plain(arg) for name, arg in kwargs.items()}))


def _plain(argument: WrappedValue) -> Any:
    value = argument.value
    return value.value if isinstance(value, StringProxy | NumberProxy) else value
