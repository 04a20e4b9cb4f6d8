"""The systems that the benchmarks compare: one model, trained by Thunder, FSDP2, DDP and this project in turns.

Every system is a :class:`System`: ``step(system, batch)`` runs forward and backward, and then the optimizer. Compute can be
real or emulated (:class:`Emulation`). If it is emulated, every matrix multiplication also sleeps, in proportion to its
FLOPs. That leaves the processors to communication and makes ratios repeatable.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import thunder_fsdp_sched
from thunder_fsdp_sched.compat import prepare  # noqa: F401  # before thunder
from thunder_fsdp_sched.extras.planning.cost import flops_of
from thunder_fsdp_sched.ir.schedule import ISSUES, WAITS
from thunder_fsdp_sched.ir.symbols import fsdp_all_gather

import thunder
import torch
import torch.distributed as dist
from harness import say
from byte_gpt import GPT, VOCABULARY
from thunder.core.prims import OpTags
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class Shape:
    """The shape of a byte-level GPT and of its batches: ``batch`` sequences of ``length`` bytes per rank and step."""

    blocks: int = 8
    width: int = 384
    length: int = 16
    batch: int = 1
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, arguments: argparse.Namespace, **others: Any) -> Shape:
        """Return the shape that the options ask for, with sequences of at most 256 bytes."""
        length = min(arguments.length, 256)
        return cls(arguments.blocks, arguments.width, length, max(arguments.length // length, 1), **others)

    def model(self) -> GPT:
        torch.manual_seed(0)
        heads = max(self.width // 64, 1)
        with torch.device(self.device):  # large ones take seconds on a CPU
            model = GPT(blocks=self.blocks, width=self.width, heads=heads, length=self.length)
        return model.to(self.dtype)

    def tokens(self, rank: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(VOCABULARY, (self.batch, self.length), generator=generator).to(self.device)

    @property
    def flops(self) -> float:
        """FLOPs of the matrix multiplications with parameters, in forward and backward."""
        return 6.0 * self.batch * self.length * (12 * self.blocks * self.width + VOCABULARY) * self.width


def sleeping(sleep: Callable[[float], object]) -> thunder.Transform:
    """Return a transform that calls ``sleep`` after every matrix multiplication, with its FLOPs."""

    def attach(bsym: BoundSymbol) -> None:
        bsym._call_ctx = {"emulated_compute": sleep}

    symbol = Symbol(
        "emulated_compute", lambda flops: None, is_prim=True, tags=[OpTags.DONT_DCE], _bind_postprocess=attach
    )

    class Sleeping(thunder.Transform):
        def transform_trace_post_optimization(self, trace: TraceCtx, **kwargs: Any) -> TraceCtx:
            new = from_trace(trace)
            for bsym in trace.bound_symbols:
                new.bound_symbols.append(bsym)
                flops = sum(flops_of(bsym).values())
                if flops:
                    new.bound_symbols.append(symbol.bind(flops, output=None))
            new.set_provenance(TraceProvenance("emulated compute"))
            return new

    return Sleeping()


class Emulation:
    """The emulation of compute: matrix multiplications of a model sleep, ``seconds`` in total for forward and backward.

    ``seconds`` may change at any time, without compiling again. 0 emulates nothing. With ``real``, models have no calls
    that could sleep, which take time of the host.
    """

    def __init__(self, shape: Shape, *, real: bool = False) -> None:
        self.seconds, self.real = 0.0, real
        self._flops = shape.flops

    def sleep(self, flops: float) -> None:
        if self.seconds:
            time.sleep(self.seconds * flops / self._flops)

    def transform(self) -> thunder.Transform:
        """Return the transform for ``thunder.jit(transforms=[..., emulation.transform()])``."""
        return thunder.Transform() if self.real else sleeping(self.sleep)

    def eager(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make every ``Linear`` of an uncompiled module sleep, in forward and in backward; return the module."""

        class Sleep(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, y: torch.Tensor, flops: float) -> torch.Tensor:
                ctx.flops = flops
                self.sleep(flops)
                return y.view_as(y)

            @staticmethod
            def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
                self.sleep(2 * ctx.flops)  # followed by the matmuls for the gradients of input and weight
                return grads[0], None

        def slow_down(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            return Sleep.apply(output, 2.0 * inputs[0].numel() * module.out_features)

        for module in () if self.real else model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(slow_down)
        return model


@dataclass
class System:
    """A way to train the model.

    Attributes:
        module: a callable that gets tokens and targets and returns the loss.
        after_backward: finishes the step's communication after each backward, within the measured time.
        transform: this project's transform; ``None`` for other systems.
        losses: the loss of each step.
        first_seconds: of the step that compiles.
    """

    name: str
    module: Any
    optimizer: torch.optim.Optimizer
    after_backward: Callable[[], object] = lambda: None
    transform: Any = None
    losses: list[float] = field(default_factory=list)
    first_seconds: float = 0.0


def _jitted(name: str, module: Any, transform: Any = None) -> System:
    return System(name, module, _optimizer(module), transform=transform)


def _optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=True)


def unsharded(name: str, shape: Shape, emulation: Emulation) -> System:
    """Return Thunder's unsharded step without communication, which measures the time of compute."""
    return _jitted(name, thunder.jit(shape.model(), transforms=[emulation.transform()]))


def unsharded_eager(name: str, shape: Shape, emulation: Emulation, *, compiled: bool = False) -> System:
    """Return the unsharded step without Thunder.

    Args:
        compiled: whether ``torch.compile`` compiles each block.
    """
    module = emulation.eager(shape.model())
    for block in module.blocks if compiled else ():
        block.compile()
    return System(name, module, _optimizer(module))


def ours(
    name: str,
    shape: Shape,
    emulation: Emulation,
    executors: Sequence[str] | None = None,
    compiled_blocks: bool = False,
    **options: Any,
) -> System:
    """Return this project's ``fsdp(**options)``, by default with the default executors.

    Args:
        compiled_blocks: whether each block is a leaf module that ``torch.compile`` compiles.
    """
    model = shape.model()
    if compiled_blocks:
        options["leaf_modules"] = ("blocks.*",)
        for block in model.blocks:
            block.compile()
    transform = thunder_fsdp_sched.fsdp(**options)
    return _jitted(
        name, thunder.jit(model, transforms=[transform, emulation.transform()], executors=executors), transform
    )


def thunders_fsdp(name: str, shape: Shape, emulation: Emulation, strategy: str, bucketing: str) -> System:
    """Return Thunder's ``fsdp``; strategy: ``"zero2"``, ``"zero3"``; bucketing: ``"none"``, ``"layer"``, ``"block"``."""
    from thunder.distributed import FSDPBucketingStrategy, FSDPType

    module = thunder.distributed.fsdp(
        thunder.jit(shape.model(), transforms=[emulation.transform()]),
        device=torch.device(shape.device),
        sharding_strategy=FSDPType[strategy.upper()],
        bucketing_strategy=FSDPBucketingStrategy[bucketing.upper()],
    )
    return _jitted(name, module)


def ddp(name: str, shape: Shape, emulation: Emulation) -> System:
    """Return PyTorch's ``DistributedDataParallel`` with default options."""
    module = torch.nn.parallel.DistributedDataParallel(emulation.eager(shape.model()))
    if dist.get_backend() == "fake":  # its collectives return nothing that the default hook can use

        def reduce(state: None, bucket: Any) -> Any:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            dist.all_reduce(bucket.buffer())
            done.set_result(bucket.buffer())
            return done

        # DDP checks the annotations, which are strings in this file.
        reduce.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        module.register_comm_hook(None, reduce)
    return System(name, module, _optimizer(module))


def _fully_shard(shape: Shape, emulation: Emulation, reshard: bool, policy: MixedPrecisionPolicy | None = None) -> Any:
    model = emulation.eager(shape.model())
    for part in (*model.blocks, model):
        fully_shard(part, reshard_after_forward=reshard, mp_policy=policy or MixedPrecisionPolicy())
    return model


def fsdp2(name: str, shape: Shape, emulation: Emulation, *, reshard: bool, compiled: bool = False) -> System:
    """Return PyTorch's ``fully_shard`` of each block and of the model. On a CPU it overlaps nothing.

    Args:
        compiled: whether each block is compiled by itself, as its documentation advises.
    """
    model = _fully_shard(shape, emulation, reshard)
    for block in model.blocks if compiled else ():
        block.compile()
    return System(name, model, _optimizer(model))


def overlapped_fsdp2(
    name: str, shape: Shape, emulation: Emulation, *, reshard: bool, policy: MixedPrecisionPolicy | None = None
) -> System:
    """Return FSDP2 with its means to overlap on a CPU: asynchronous custom collectives, and gathers two blocks ahead.

    Args:
        reshard: FSDP2's ``reshard_after_forward``.
        policy: the precision of parameters and reductions.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    class Allocating:
        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

    class Gather(Allocating, AllGather):
        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)

    class Reduce(Allocating, ReduceScatter):
        def __init__(self) -> None:
            self.works: list[Any] = []

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
            # FSDP2 makes the gradients views of the output, and does not read them before the optimizer does.
            work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=True)
            self.works.append(work)

        def finish(self) -> None:
            for work in self.works:
                work.wait()
            self.works.clear()

    model = _fully_shard(shape, emulation, reshard, policy)
    reduce = Reduce()
    parts: list[FSDPModule] = [model, *model.blocks]
    for part in parts:
        part.set_custom_all_gather(Gather())
        part.set_custom_reduce_scatter(reduce)
    for index, part in enumerate(parts):
        part.set_modules_to_forward_prefetch(parts[index + 1 : index + 3])
    for index, part in enumerate(parts[1:]):
        before = parts[1:][max(0, index - 2) : index][::-1]
        part.set_modules_to_backward_prefetch(before)
    return System(name, model, _optimizer(model), after_backward=reduce.finish)


@contextmanager
def micro_batch(system: System, *, last: bool) -> Iterator[None]:
    """Run a micro-batch of a window in this context: all but the last do not reduce gradients.

    An FSDP2 system whose name ends in "kept" keeps parameters unsharded until the next micro-batch.
    """
    module = system.module
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        module.set_reshard_after_backward(last or not system.name.endswith("kept"))
    with nullcontext() if last or system.transform is None else module.no_sync():
        yield


def step(system: System, *batches: torch.Tensor, watch: Any = None, host: list[float] | None = None) -> float:
    """Run one step; return the seconds of forward and backward on this rank. The optimizer runs after them, untimed.

    Args:
        batches: the micro-batches of a window, or one batch.
        watch: a context manager for forward and backward. It may have a method ``phase``.
        host: time the optimizer as well, and append the processor seconds of this thread.
    """
    phase = getattr(watch, "phase", lambda name: nullcontext())
    system.optimizer.zero_grad(set_to_none=True)
    losses = []
    if dist.is_initialized():
        dist.barrier()
    with watch or nullcontext():
        started, on_host = time.perf_counter(), time.thread_time()
        for tokens in batches:
            with micro_batch(system, last=tokens is batches[-1]):
                with phase("forward"):
                    loss = system.module(tokens, tokens) / len(batches)
                with phase("backward"):
                    loss.backward()
                losses.append(loss)
        system.after_backward()
        seconds = time.perf_counter() - started
    system.optimizer.step()
    if host is not None:
        seconds = time.perf_counter() - started
        host.append(time.thread_time() - on_host)
    system.losses += [loss.item() for loss in losses]
    return seconds


def wire_bytes(kind: str, nbytes: int, world_size: int, *, gloo: bool = False) -> float:
    """Return the bytes that a rank sends for a collective on an unsharded tensor of ``nbytes`` bytes."""
    if kind == "broadcast_":
        return nbytes
    ring = nbytes * (world_size - 1) / world_size
    return 2 * ring if "allreduce" in kind or (gloo and kind == "reduce_scatter") else ring


def communicate(system: System, compiled: Any = None) -> float:
    """Run only the collectives of one step of this project, in order; return the seconds on this rank.

    Args:
        compiled: the traces of the step; by default those compiled last.
    """
    compiled = compiled or system.transform.compiled[-1]
    dist.barrier()
    started = time.perf_counter()
    flights: dict[str, Any] = {}
    for bsym in (*compiled.forward.bound_symbols, *compiled.backward.bound_symbols):
        name = bsym.sym.name
        if name in WAITS:
            bsym._call_ctx[name](bsym.args[0], flights.pop(bsym.args[1].name))
        elif name in ISSUES:
            bucket, slot = bsym.args[:2]
            bucket.is_reuse_agreed = False  # no trace starts here, so ranks have agreed on nothing
            # A reduction reads the current contents of the slot.
            tensors = bucket.params if name == fsdp_all_gather.name else slot.grads[bucket].tensors
            flights[bsym.output.name] = bsym._call_ctx[name](bucket, slot, *tensors, **bsym.kwargs)
    return time.perf_counter() - started


# A function that builds a system from its name, a shape and an emulation.
Make = Callable[[str, Shape, Emulation], System]


def build(
    makes: Mapping[str, Make], shape: Shape, emulation: Emulation, first_step: Callable[[System], float]
) -> dict[str, System]:
    """Build each system, and run its first step, which compiles."""
    built = {}
    for name, make in makes.items():
        say(f"building: {name}")
        built[name] = make(name, shape, emulation)
        built[name].first_seconds = first_step(built[name])
    return built
