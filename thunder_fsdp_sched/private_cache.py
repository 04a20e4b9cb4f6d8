"""Private names of Thunder's cache of compiled traces, each used in one function or class only: see ``private_thunder``."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import thunder
import torch
from thunder.core.module import ThunderModule
from thunder.core.options import CACHE_OPTIONS
from thunder.distributed import (
    get_skip_data_parallel_grad_sync,
    reset_skip_data_parallel_grad_sync,
    set_skip_data_parallel_grad_sync,
)

Again = Callable[[Any], Callable[[], Any] | None]
"""For an entry of the other mode of ``no_sync``, returns a function that compiles a new entry for the present mode."""


class TraceCache(list[Any]):
    """A list of Thunder's compiled traces of one module, with callbacks around a compilation.

    Thunder tries its entries in reversed order and stops at the first that fits. If none does, one of the other mode of
    ``no_sync`` may fit: its traces are then compiled again, into another entry.

    Args:
        on_miss: called when none fits a call, before Thunder traces.
        on_entry: called with a new entry before it can run. If it raises an error, the entry is not kept.
        again: asked about each entry.
    """

    def __init__(
        self, entries: Iterable[Any], on_miss: Callable[[], object], on_entry: Callable[[Any], object], again: Again
    ) -> None:
        super().__init__(entries)
        self._on_miss, self._on_entry, self._again = on_miss, on_entry, again

    def append(self, entry: Any) -> None:
        self._on_entry(entry)
        super().append(entry)

    def __reversed__(self) -> Iterator[Any]:
        yield from super().__reversed__()
        for entry in super().__reversed__():
            if (compile_again := self._again(entry)) is None:
                continue
            prologue = _OtherMode(entry.prologue_fn)
            yield entry._replace(prologue_fn=prologue)  # Thunder calls it with the inputs, and ignores its error
            if prologue.fits:
                self.append(new := compile_again())
                yield new
                break
        self._on_miss()


class _OtherMode:
    """A prologue that raises an error, once it is known whether another one fits in the other mode of ``no_sync``."""

    def __init__(self, prologue: Callable[..., Any]) -> None:
        self._prologue, self.fits = prologue, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = set_skip_data_parallel_grad_sync(not get_skip_data_parallel_grad_sync())
        try:
            self._prologue(*args, **kwargs)
        finally:
            reset_skip_data_parallel_grad_sync(token)
        self.fits = True
        raise RuntimeError("fsdp: these traces were compiled for the other mode of no_sync")


class Acquired(NamedTuple):
    """The traces with which Thunder begins to compile."""

    prologue: Any
    computation: Any
    epilogue: Any

    @classmethod
    def of(cls, entry: Any) -> Acquired | None:
        """Return the traces of an entry; ``None`` if they have been freed."""
        histories = entry.prologue_traces, entry.computation_traces, entry.epilogue_traces
        return cls(*(traces[0] for traces in histories)) if all(histories) else None


def compile_acquired(model: ThunderModule, acquired: Acquired) -> Any:
    """Compile the traces of an earlier entry of Thunder's cache again; return the new entry."""
    data, stats = thunder.compile_data(model), thunder.compile_stats(model)
    stats.cache_misses += 1
    stats.last_compile_reasons = defaultdict(list)
    stats.last_trace_tracing_start = time.perf_counter_ns()
    entry = data.apply_transforms_and_build_cache_entry(data, stats, thunder._get_cache_info(), *acquired)
    stats.cache_hits -= 1  # Thunder counts one when it finds the new entry
    return entry


def watch_compilations(
    model: ThunderModule, on_miss: Callable[[], object], on_entry: Callable[[Any], object], again: Again
) -> Callable[[], object]:
    """Call ``on_miss`` before Thunder traces ``model`` for new inputs, and ``on_entry`` before the result runs.

    Returns a function to call before each call of ``model``: ``on_miss`` if Thunder's cache option disables look-ups.

    Thunder records the autocast context of each call in ``CompileData.autocast_stack``, and never removes it. All later
    compilations would then be for autocast, so the contexts of earlier calls are removed before each.

    Args:
        again: see :class:`TraceCache`.
    """
    stats = thunder.compile_stats(model)
    contexts = thunder.compile_data(model).autocast_stack.stack
    looks_up = thunder.cache_option(model) in (CACHE_OPTIONS.CONSTANT_VALUES, CACHE_OPTIONS.SYMBOLIC_VALUES)

    def forget_contexts() -> None:
        is_noted = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        while len(contexts) > is_noted:  # the last is that of this call
            contexts.popleft()

    def before_trace() -> None:
        forget_contexts()
        on_miss()

    def before_again(entry: Any) -> Callable[[], Any] | None:
        forget_contexts()
        return again(entry)

    def before_call() -> None:
        contexts.clear()
        if not looks_up:
            on_miss()

    stats.interpreter_cache = TraceCache(stats.interpreter_cache, before_trace, on_entry, before_again)
    return before_call
