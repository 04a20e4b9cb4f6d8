"""Whether a record made with gradients holds without them, and the other way round.

[Note: Records and the grad mode]
Thunder interprets a module in the same way with and without gradients, unless the program asks for the grad mode. The
traces differ in two places, both of which can be rewritten:

1. Without gradients ``Symbol.__call__`` tags the tensors that a symbol makes, also those of subsymbols, with
   ``DETACHED_AUTOGRAD_GRAPH``. Neither arguments that a symbol returns nor numbers are tagged.
2. ``thunder.torch`` passes the grad mode to ``prims.copy_``, which in-place operators end with.

A record is *portable* if nothing else can differ:

- The program neither reads nor changes the grad mode. The observer counts such uses.
- All symbols, with subsymbols, belong to ``thunder.torch`` or ``thunder.core.prims``, whose metadata functions do not
  depend on the grad mode otherwise. Symbols that Thunder registers automatically do: they run torch's operator on fake
  tensors and take ``requires_grad`` from the result. Symbols that call functions (``activation_checkpoint``, autograd
  functions), those of other executors, and custom operators may do anything.
- The tags and the arguments of ``prims.copy_`` are those that both rules predict for the mode of the record.

Other records hold only in the mode in which they were made, which includes torch's own grad mode and inference mode.

Arguments of a call without gradients may have been made with gradients, and vice versa. Without gradients the tag of an
argument changes nothing, because all that a portable call makes has the tag anyway. With gradients, calls with such
arguments repeat only records of calls with the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import thunder.torch as ltorch
import torch
from thunder.core import prims
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol

from ..ir.inspection import nested

DETACHED = ProxyTag.DETACHED_AUTOGRAD_GRAPH
"""Thunder's tag of tensors that are constants for differentiation."""

_CALL_FUNCTIONS = ("set_grad_enabled", "activation_checkpoint", "torch.ops.higher_order.autograd_function_apply")
"""The ids of Thunder's symbols that change the grad mode or call a function, which may change it."""


class GradMode(NamedTuple):
    """The state of Thunder and torch that decides whether operators are recorded for backward.

    Attributes:
        enabled: whether Thunder's trace is in a region with gradients.
        of_torch: ``torch.is_grad_enabled()``, which Thunder does not change when a traced program does.
        infers: ``torch.is_inference_mode_enabled()``.
    """

    enabled: bool
    of_torch: bool
    infers: bool


def grad_mode_of(compile_data: Any) -> GradMode:
    """Return the grad mode in which Thunder traces the next operator."""
    return GradMode(compile_data.is_grad_enabled, torch.is_grad_enabled(), torch.is_inference_mode_enabled())


class Validity(NamedTuple):
    """The grad modes in which a record holds.

    Attributes:
        mode: that of the recorded call.
        detached: which of the recorded call's tensor arguments had the tag ``DETACHED``.
        is_portable: whether the record holds in other modes.
    """

    mode: GradMode
    detached: frozenset[int]
    is_portable: bool

    def covers(self, mode: GradMode, detached: frozenset[int]) -> bool:
        """Return whether the record holds for a call in this mode whose ``detached`` arguments have the tag."""
        if (mode, detached) == (self.mode, self.detached):
            return True
        return self.is_portable and not (mode.enabled and detached)


def is_portable(bsyms: Sequence[BoundSymbol], known: Set[str], enabled: bool) -> bool:
    """Return whether bound symbols of a module call in one grad mode determine those in the other one.

    Args:
        bsyms: those of a call that neither reads nor changes the grad mode.
        known: the names of the proxies that the call did not make.
        enabled: whether the call was traced with gradients.
    """
    symbols: dict[int, Symbol] = {}
    made: dict[str, Proxy] = {}
    returned: set[str] = set()
    for bsym in nested(bsyms):
        symbols[id(bsym.sym)] = bsym.sym
        if bsym.sym.id is PrimIDs.COPY_ and bsym.kwargs.get("grad_enabled") is not enabled:
            return False
        arguments = {proxy.name for proxy in bsym.flat_proxy_args}
        for proxy in bsym.flat_proxy_outs:
            if proxy.name in arguments:
                returned.add(proxy.name)
            else:
                made[proxy.name] = proxy
    return (
        all(map(_is_understood, symbols.values()))
        and not any(bsym.sym.id is PrimIDs.COPY_ for bsym in bsyms)  # the program itself has chosen the argument
        and returned <= {*known, *made}
        and all((DETACHED in proxy.tags) is _is_detached(proxy, enabled) for proxy in made.values())
    )


def tags_in(proxy: Proxy, tags: Iterable[Any], enabled: bool) -> set[Any]:
    """Return the tags that a proxy which a portable call makes has with or without gradients."""
    return {*tags, DETACHED} if _is_detached(proxy, enabled) else {*tags} - {DETACHED}


def kwargs_in(bsym: BoundSymbol, enabled: bool) -> dict[str, Any]:
    """Return the keyword arguments that a bound symbol of a portable call has with or without gradients."""
    return {**bsym.kwargs, "grad_enabled": enabled} if bsym.sym.id is PrimIDs.COPY_ else bsym.kwargs


def _is_detached(proxy: Proxy, enabled: bool) -> bool:
    return not enabled and isinstance(proxy, TensorProxy)


def _is_understood(sym: Symbol) -> bool:
    """Return whether the grad mode changes only tags and ``prims.copy_`` in what a call of ``sym`` adds to a trace."""
    if sym.executor is not None or OpTags.AUTO_REGISTERED in (sym.tags or ()) or sym.id in _CALL_FUNCTIONS:
        return False
    return any(getattr(module, sym.name, None) is sym for module in (ltorch, prims))
