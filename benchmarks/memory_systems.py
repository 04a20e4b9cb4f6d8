"""Equal conditions for the systems that ``memory.py`` compares: the same kernels, paced kernels, and models that recompute.

[Note: The same kernels]
On a CPU Thunder has no executor for layer norm, GELU and attention. It differentiates them after decomposition, which runs
and saves the elementwise steps one by one: a GPT block then saves twice the bytes that the same block saves without a
compiler. On a GPU there are executors for them. So a comparison of memory on a CPU that is to say something about other
systems, and not about decompositions, gives Thunder torch's own kernels (:data:`executor`). Every operator is one call of
an operator of ATen.

[Note: Paced kernels]
``systems.Emulation`` sleeps after matrix multiplications that it finds in a trace or in a module. That misses whatever a
system runs again on its own. :class:`PacedKernels` replaces the kernels of torch's operators on a CPU instead, so every
system pays the same time for every multiplication that really runs: recomputed ones too, and those whose result a
selective checkpoint has saved not a second time. A kernel computes its result and then sleeps for the rest of its time.
While it sleeps, the core is free for communication.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thunder_fsdp_sched.compat import prepare  # noqa: F401  # before thunder

import thunder
import torch
from systems import Emulation, Make, Shape, fsdp2, ours, overlapped_fsdp2
from byte_gpt import GPT, Block
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import get_grad, put_grads
from thunder.extend import OperatorExecutor, register_executor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry, register_flop_formula

aten = torch.ops.aten

#
# Kernels that take a time given by their FLOPs
#


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


#
# Models that recompute
#

# Operators whose results a selective checkpoint saves.
_SAVED = {aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}


class _CheckpointedBlock(Block):
    """A block that saves its input alone. The forward of the class is that which FSDP2's hooks surround."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class _SelectiveBlock(Block):
    """A block that saves its input, and the results of matrix multiplications and attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


class _ChunkedLoss(GPT):
    """A model whose logits exist for one chunk of tokens at a time."""

    chunks: int

    def loss_of(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(hidden), targets, reduction="none").sum()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        parts = zip(self.norm(x).flatten(0, 1).chunk(self.chunks), targets.flatten().chunk(self.chunks), strict=True)
        losses = [checkpoint(self.loss_of, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / targets.numel()


def loss_systems(chunks: int) -> dict[str, tuple[Make, int]]:
    """Return the systems with which a chunked loss is compared, and the number of chunks, keyed by name."""
    overlapped = functools.partial(overlapped_fsdp2, reshard=True, ahead=1, max_reductions=1)
    makes: dict[str, Make] = {
        "ours zero3": functools.partial(ours, sharding_strategy="zero3"),
        "ours zero2": functools.partial(ours, sharding_strategy="zero2"),
        "FSDP2 overlapped zero3": overlapped,
        "FSDP2 overlapped zero3, own head": functools.partial(overlapped, own_head=True),
        "FSDP2 zero3": functools.partial(fsdp2, reshard=True),
    }
    made: dict[str, tuple[Make, int]] = {}
    for name, make in makes.items():
        made[name] = make, 0
        made[f"{name}, loss in {chunks} chunks"] = make, chunks
    return made


@dataclass(frozen=True)
class RecomputingShape(Shape):
    """The shape of a GPT that recomputes in backward.

    Attributes:
        recompute: ``"none"``; ``"every block"`` and ``"every second block"`` with ``torch.utils.checkpoint``;
            ``"selective"``, which saves the results of matrix multiplications and attention in every block; or the
            budget of ``torch.compile``, the share of a block's activations that is saved, as a string: ``"0.5"``.
        loss_chunks: the number of chunks of which the loss is the sum; 0 for a loss that is not divided.
    """

    recompute: str = "none"
    loss_chunks: int = 0

    def model(self) -> GPT:
        model = super().model()
        if self.loss_chunks:
            model.__class__ = _ChunkedLoss
            model.chunks = self.loss_chunks  # type: ignore[assignment]
        compiled = _compiler(float(self.recompute)) if self.recompute[0].isdigit() else None
        for number, block in enumerate(model.blocks):
            if self.recompute == "every block" or (self.recompute == "every second block" and number % 2 == 0):
                block.__class__ = _CheckpointedBlock
            elif self.recompute == "selective":
                block.__class__ = _SelectiveBlock
            elif compiled is not None:
                block.forward = compiled(block.forward)
        return model


def _compiler(budget: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return ``torch.compile`` as it divides a function into forward and backward, without its compiler of kernels.

    Inductor allocates without operators, so its memory on a CPU could not be counted as that of others is.

    Args:
        budget: the share of the activations that forward saves.
    """
    import torch._dynamo
    import torch._functorch.config as config
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    torch._dynamo.config.recompile_limit = 64  # blocks of several models, each compiled on its own
    backend = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition
    )

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        runs = torch.compile(function, backend=backend, dynamic=False)

        def run(*args: Any) -> Any:
            with config.patch(activation_memory_budget=budget):  # read when a block is compiled
                return runs(*args)

        return run

    return compiled


#
# Torch's kernels in Thunder
#

executor = OperatorExecutor("torch_kernels", version=torch.__version__)
register_executor(executor)


def _operator(function: Any, meta: Callable[..., Any]) -> Symbol:
    return executor.register_operator(f"torch.ops.aten.{function._overloadpacket.__name__}", meta=meta, fn=function)


def _like(a: TensorProxy, shape: Sequence[int] | None = None) -> TensorProxy:
    return TensorProxy(like=a, shape=tuple(a.shape if shape is None else shape))


def _statistic(a: TensorProxy, normalized_shape: Sequence[int]) -> TensorProxy:
    outer = a.ndim - len(normalized_shape)
    return _like(a, (*a.shape[:outer], *(1 for _ in normalized_shape)))


_layer_norm = _operator(
    aten.native_layer_norm.default,
    lambda a, shape, weight, bias, eps: (_like(a), _statistic(a, shape), _statistic(a, shape)),
)
_layer_norm_backward = _operator(
    aten.native_layer_norm_backward.default,
    lambda grad, a, shape, mean, rstd, weight, bias, mask: (_like(a), _like(weight), _like(bias)),
)
_gelu = _operator(aten.gelu.default, lambda a: _like(a))
_gelu_backward = _operator(aten.gelu_backward.default, lambda grad, a: _like(a))
_attend = _operator(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    lambda q, k, v, dropout, causal: (_like(q), _like(q, q.shape[:3])),
)
_attend_backward = _operator(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    lambda grad, q, k, v, out, logsumexp, dropout, causal: (_like(q), _like(k), _like(v)),
)


def _runs_layer_norm(a: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> bool:
    return bool(weight is not None and bias is not None and a.dtype == weight.dtype == bias.dtype)


def _run_layer_norm(a: Any, shape: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    return _layer_norm(a, tuple(weight.shape), weight, bias, eps)[0]


def _grad_of_layer_norm(a: Any, shape: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    shape = tuple(weight.shape)
    out, mean, rstd = _layer_norm(a, shape, weight, bias, eps)
    grads = _layer_norm_backward(get_grad(out), a, shape, mean, rstd, weight, bias, (True, True, True))
    put_grads((a, weight, bias), grads)
    return out


def _runs_gelu(a: Any, *, approximate: str = "none") -> bool:
    return approximate == "none" and dtypes.is_float_dtype(a.dtype)


def _run_gelu(a: Any, *, approximate: str = "none") -> Any:
    return _gelu(a)


def _grad_of_gelu(a: Any, *, approximate: str = "none") -> Any:
    out = _gelu(a)
    put_grads((a,), (_gelu_backward(get_grad(out), a),))
    return out


def _runs_attention(
    q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, causal: bool = False, **how: Any
) -> bool:
    scaled = how.get("scale") is not None
    return mask is None and not dropout and not scaled and q.ndim == 4 and q.shape[-1] == k.shape[-1] == v.shape[-1]


def _run_attention(
    q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, **_: Any
) -> Any:
    return _attend(q, k, v, 0.0, is_causal)[0]


def _grad_of_attention(
    q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, **_: Any
) -> Any:
    out, logsumexp = _attend(q, k, v, 0.0, is_causal)
    put_grads((q, k, v), _attend_backward(get_grad(out), q, k, v, out, logsumexp, 0.0, is_causal))
    return out


for _sym, _checker, _run, _grad in (
    (thunder.torch.layer_norm, _runs_layer_norm, _run_layer_norm, _grad_of_layer_norm),
    (thunder.torch.gelu, _runs_gelu, _run_gelu, _grad_of_gelu),
    (thunder.torch.scaled_dot_product_attention, _runs_attention, _run_attention, _grad_of_attention),
):
    executor.register_implementation(_sym, checker=_checker, execution_transform=_run, grad_transform=_grad)
