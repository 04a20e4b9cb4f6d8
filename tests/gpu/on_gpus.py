"""Functions that the GPU tests run on each rank. ``tests/test_on_gpus.py`` runs them on CPUs.

``tests/test_on_virtual_gpus.py`` runs some of them on virtual GPUs, and ``bytes_allocated_after_steps`` only there.

Each takes a :class:`Size`, which chooses the model and the type of device. A rank uses its current device.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import thunder_fsdp_sched
from thunder_fsdp_sched import clip_grad_norm_, fsdp, full_state_dict
from thunder_fsdp_sched.demo.model import GPT, VOCABULARY
from thunder_fsdp_sched.planning.simulate import simulate
from thunder_fsdp_sched.reports.profiler import MeasuredCost, measure

import thunder
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

__all__ = ["LARGE", "SMALL", "TINY", "NoAttention", "Size"]

TOLERANCE, BFLOAT16_TOLERANCE = 1e-4, 0.1
"""Largest distance from the unsharded model, relative to the distance that training moved its parameters."""


@dataclass(frozen=True)
class Size:
    """A byte-level GPT, its batch, and the type of the device."""

    blocks: int
    width: int
    length: int
    batch: int
    device_type: str

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.is_cuda else torch.device("cpu")

    @property
    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def model(self, device: torch.device | str | None = None) -> GPT:
        torch.manual_seed(0)
        with torch.device(device or self.device):
            return GPT(blocks=self.blocks, width=self.width, heads=max(self.width // 64, 1), length=self.length)

    def tokens(self, rank: int, device: torch.device | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(VOCABULARY, (self.batch, self.length), generator=generator).to(device or self.device)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


LARGE = Size(6, 1024, 256, 4, "cuda")
"""76 M parameters: kernels and collectives that last long enough to overlap."""

SMALL = Size(1, 64, 8, 2, "cpu")


class NoAttention(Size):
    """The same model with a linear layer for each block: attention takes most of the time of compiling."""

    def model(self, device: torch.device | str | None = None) -> GPT:
        torch.manual_seed(0)
        with torch.device(device or self.device):
            model = GPT(blocks=0, width=self.width, heads=1, length=self.length)
            model.blocks.extend(torch.nn.Linear(self.width, self.width) for _ in range(self.blocks))
        return model


TINY = NoAttention(1, 64, 8, 2, "cpu")


#
# Training
#


def _train(module: Any, tokens: torch.Tensor, steps: int = 4) -> torch.Tensor:
    """Train without synchronizing between steps and return the losses."""
    # Not AdamW: its first steps depend only on the signs of gradients.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = module(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@functools.lru_cache(maxsize=1)
def _unsharded(size: Size, world_size: int) -> dict[str, torch.Tensor]:
    """Return the parameters (on the CPU) of the unsharded model after training on the batches of all ranks."""
    module = thunder.jit(size.model())
    _train(module, torch.cat([size.tokens(rank) for rank in range(world_size)]))
    return {name: value.cpu() for name, value in module.state_dict().items()}


def _distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((a[name].double().to(b[name].device) - b[name].double()).square().sum()) for name in b))


def _assert_like_unsharded(size: Size, got: dict[str, torch.Tensor], world_size: int, tolerance: float) -> None:
    """Compare parameters with those of the unsharded model after :func:`_train`."""
    _assert_near(got, _unsharded(size, world_size), size.model().state_dict(), tolerance)


def _assert_near(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], start: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert got.keys() == expected.keys()
    distance = _distance(got, expected) / _distance(start, expected)
    assert distance < tolerance, f"off by {distance:.3g} of the distance that training covered"


def trains_like_unsharded(
    rank: int, world_size: int, size: Size, transport: str, strategy: str, dtype: torch.dtype | None = None
) -> None:
    """Train through a transport and compare with the unsharded model."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None
    sharded = thunder.jit(
        size.model(), transforms=[fsdp(transport=transport, sharding_strategy=strategy, mp_policy=policy)]
    )
    _train(sharded, size.tokens(rank))
    tolerance = TOLERANCE if dtype is None else BFLOAT16_TOLERANCE
    _assert_like_unsharded(size, full_state_dict(sharded), world_size, tolerance)


def training_digests(rank: int, world_size: int, size: Size, transport: str, repeats: int = 5) -> tuple[list[str], str]:
    """Train several times from the same parameters.

    Returns a digest of the bits of each run, and the error if an operator has no deterministic implementation.
    """
    with _deterministic():
        sharded = thunder.jit(size.model(), transforms=[fsdp(transport=transport)])
        start = [param.detach().clone() for param in sharded.parameters()]
        found = []
        for _ in range(repeats):
            with torch.no_grad():
                for param, value in zip(sharded.parameters(), start, strict=True):
                    param.copy_(value)
            try:
                losses = _train(sharded, size.tokens(rank))
            except RuntimeError as error:
                if "deterministic" in str(error):
                    return [], str(error).split("\n")[0]
                raise
            total = hashlib.sha256(losses.cpu().numpy().tobytes())
            for value in full_state_dict(sharded).values():
                total.update(value.cpu().numpy().tobytes())
            found.append(total.hexdigest())
        return found, ""


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def accumulates_and_clips_gradients(rank: int, world_size: int, size: Size, transport: str) -> None:
    """Compare gradients accumulated with ``no_sync``, and their norm, with the unsharded model's."""
    sharded = thunder.jit(size.model(), transforms=[fsdp(transport=transport)])
    unsharded = thunder.jit(size.model())
    first, second = size.tokens(rank), size.tokens(rank + world_size)
    with sharded.no_sync():
        sharded(first, first).backward()
    sharded(second, second).backward()
    for number in range(2 * world_size):
        tokens = size.tokens(number)
        (unsharded(tokens, tokens) / world_size).backward()
    expected = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 0.1)
    norm = clip_grad_norm_(sharded, 0.1)
    torch.testing.assert_close(norm.to(expected.device), expected, rtol=1e-4, atol=0)
    start = size.model().state_dict()
    for module in (sharded, unsharded):
        torch.optim.SGD(module.parameters(), lr=1.0).step()
    _assert_near(full_state_dict(sharded), unsharded.state_dict(), start, 1e-3)


def recovers_after_an_exception(rank: int, world_size: int, size: Size) -> None:
    """Compare training after a forward without backward, and after a backward that raises, with the unsharded model's."""
    sharded = thunder.jit(size.model(), transforms=[fsdp()])
    tokens = size.tokens(rank)
    sharded(tokens, tokens)  # its backward never runs
    loss = sharded(tokens, tokens)
    loss.register_hook(_raise)
    try:
        loss.backward()
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("the hook did not raise")
    sharded.zero_grad()
    _train(sharded, tokens)
    _assert_like_unsharded(size, full_state_dict(sharded), world_size, TOLERANCE)


def _raise(grad: torch.Tensor) -> None:
    raise ZeroDivisionError


#
# Devices and memory
#


def uses_its_own_device(rank: int, world_size: int, size: Size) -> None:
    """Check that ``device="cuda"`` means the rank's current device, for shards and the arena."""
    sharded = thunder.jit(size.model(), transforms=[ours := fsdp(device=size.device_type)])
    _train(sharded, size.tokens(rank), steps=1)
    assert {param.device for param in sharded.parameters()} == {size.device}
    assert {bucket.arena._memory.device for bucket in ours.sharded.buckets} == {size.device}


def trains_on_a_device_that_is_not_current(
    rank: int, world_size: int, size: Size, device: torch.device, transport: str
) -> None:
    """Train on ``device`` while another device is current. Streams and events must belong to ``device``."""
    sharded = thunder.jit(size.model(device), transforms=[fsdp(transport=transport)])
    _train(sharded, size.tokens(rank, device))
    assert {param.device for param in sharded.parameters()} == {device}
    _assert_like_unsharded(size, full_state_dict(sharded), world_size, TOLERANCE)


def bytes_allocated_after_steps(rank: int, world_size: int, size: Size, transport: str) -> list[int]:
    """Return the bytes allocated after each step, from the third step on."""
    sharded = thunder.jit(size.model(), transforms=[fsdp(transport=transport)])
    tokens, found = size.tokens(rank), []
    for step in range(7):
        sharded(tokens, tokens).backward()
        sharded.zero_grad()
        size.synchronize()
        if step > 1:
            found.append(torch.cuda.memory_allocated() if size.is_cuda else 0)
    return found


def trains_with_offloading(rank: int, world_size: int, size: Size) -> None:
    """Check that offloaded shards are in pinned host memory, and compare training with that without offloading."""
    on_gpu, states = [], []
    for policy in (None, CPUOffloadPolicy(pin_memory=size.is_cuda)):
        before = torch.cuda.memory_allocated() if size.is_cuda else 0
        sharded = thunder.jit(size.model(), transforms=[ours := fsdp(offload_policy=policy, device=size.device_type)])
        _train(sharded, size.tokens(rank))
        for param in sharded.parameters():
            assert param.is_cpu == (policy is not None or not size.is_cuda)
            assert param.is_cuda or param.is_pinned() == size.is_cuda
        states.append({name: value.cpu() for name, value in full_state_dict(sharded).items()})
        arena = ours.sharded.buckets[0].arena.nbytes
        on_gpu.append(torch.cuda.memory_allocated() - before - arena if size.is_cuda else 0)
        del sharded, ours, param
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert on_gpu[1] < on_gpu[0] or not size.is_cuda


def initializes_on_the_device(rank: int, world_size: int, size: Size) -> None:
    """Initialize a module on the meta device directly into shards."""
    sharded = thunder.jit(
        size.model("meta"), transforms=[fsdp(device=size.device_type, param_init_fn=_fill, transport="flat")]
    )
    _train(sharded, size.tokens(rank), steps=1)
    assert {param.device for param in sharded.parameters()} == {size.device}
    assert all(bool(torch.isfinite(value).all()) for value in full_state_dict(sharded).values())


def _fill(module: torch.nn.Module) -> None:
    for param in module.parameters(recurse=False):
        torch.nn.init.constant_(param, 0.01)


#
# Kernels, measuring, eager runs
#


def launched_kernels(rank: int, world_size: int, size: Size, transport: str) -> dict[str, int]:
    """Return the number of launches in a step by kernel name, and under ``"buckets"`` the number of buckets."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    sharded = thunder.jit(size.model(), transforms=[ours := fsdp(transport=transport, mp_policy=policy)])
    tokens = size.tokens(rank)
    for _ in range(2):
        sharded(tokens, tokens).backward()
        size.synchronize()
    activity = torch.profiler.ProfilerActivity.CUDA if size.is_cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        sharded(tokens, tokens).backward()
        size.synchronize()
        dist.barrier()
    return {**{event.key: event.count for event in profile.key_averages()}, "buckets": len(ours.plan)}


def measured_and_simulated_seconds(rank: int, world_size: int, size: Size) -> tuple[float, float]:
    """Return the seconds of a step as measured, and as simulated from the measured profile."""
    sharded = thunder.jit(size.model(), transforms=[ours := fsdp()])
    tokens = size.tokens(rank)
    _train(sharded, tokens, steps=1)
    profile = measure(sharded, tokens, tokens, repeats=3)
    assert profile.device == str(size.device)
    assert profile.synchronous == (not size.is_cuda)
    compiled = ours.compiled[-1]
    return profile.step_seconds, simulate(compiled.forward, compiled.backward, MeasuredCost(profile)).step_seconds


def runs_eagerly(rank: int, world_size: int, size: Size) -> None:
    """Compare the loss of an eager run with the unsharded module's."""
    sharded = thunder.jit(size.model(), transforms=[fsdp()])
    expected, tokens = size.model(), size.tokens(0)
    with thunder_fsdp_sched.eager(sharded) as module:
        got = module(tokens, tokens)
    torch.testing.assert_close(got, expected(tokens, tokens).detach(), rtol=1e-4, atol=1e-4)
