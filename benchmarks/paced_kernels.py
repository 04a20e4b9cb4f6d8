"""Emulated compute in the kernels themselves: a matrix multiplication or attention takes a time given by its FLOPs.

``systems.Emulation`` sleeps after matrix multiplications that it finds in a trace or in a module. That misses whatever a
system runs again on its own. :class:`PacedKernels` replaces the kernels of torch's operators on a CPU instead, so every
system pays the same time for every multiplication that really runs: recomputed ones too, and those whose result a
selective checkpoint has saved not a second time.

A kernel computes its result and then sleeps for the rest of its time. While it sleeps, the core is free for communication.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import thunder
import torch
from systems import Emulation, Shape
from torch.utils.flop_counter import flop_registry, register_flop_formula

__all__ = ["PacedKernels"]

aten = torch.ops.aten


def _attention(forward: Any, q: Any, k: Any, v: Any, causal: bool) -> int:
    flops = int(flop_registry[forward](q, k, v) if forward is _FLASH else flop_registry[forward](q, q, k, v))
    return flops // 2 if causal and q[2] == k[2] else flops


_FLASH = aten._scaled_dot_product_flash_attention
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward


@register_flop_formula(aten._scaled_dot_product_flash_attention_for_cpu)
def _attention_flops(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *_: Any, **__: Any) -> int:
    return _attention(_FLASH, q, k, v, causal)


@register_flop_formula(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *rest: Any, **_: Any) -> int:
    return _attention(_FLASH_BACKWARD, q, k, v, rest[3] if len(rest) > 3 else False)


_KERNELS = (
    aten.mm.default,
    aten.mm.out,
    aten.addmm.default,
    aten.addmm.out,
    aten.bmm.default,
    aten.bmm.out,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class PacedKernels(Emulation):
    """The emulation of compute by slower kernels, in this process and for all systems, until :meth:`close`.

    ``seconds`` are those of a step without recomputation and attention. They may change at any time; 0 emulates nothing.

    Attributes:
        flops: the FLOPs of the kernels that have run. It may be reset at any time.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.flops = 0
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the kernels that are replaced
            for overload in _KERNELS:
                name = overload._schema.name.removeprefix("aten::")
                name += f".{overload._overloadname}" if overload._overloadname != "default" else ""
                kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
                self._library.impl(name, self._paced(kernel, overload), "CPU", with_keyset=True)

    @property
    def flops_per_second(self) -> float | None:
        """The FLOP/s that are emulated."""
        return self._flops / self.seconds if self.seconds else None

    def _paced(self, kernel: Any, overload: Any) -> Any:
        formula = flop_registry[overload._overloadpacket]

        @torch.compiler.disable
        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = kernel.call_boxed(keys, *args, **kwargs)
            shapes = {key: value for key, value in kwargs.items() if key != "out"}
            flops = formula(*args, **shapes, out_val=result)
            self.flops += flops
            rate = self.flops_per_second
            if rate:
                time.sleep(max(started + flops / rate - time.perf_counter(), 0.0))
            return result

        return run

    def transform(self) -> thunder.Transform:
        """Return a transform that does nothing."""
        return thunder.Transform()

    def eager(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module unchanged."""
        return model

    def close(self) -> None:
        """Restore the kernels of torch."""
        self._library._destroy()
