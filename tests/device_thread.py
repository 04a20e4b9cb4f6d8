"""Backward on a thread of its own, as on a GPU.

Autograd runs the nodes of a GPU on that device's thread, and those of the CPU on the calling thread. So tests on CPUs
run autograd's engine on another thread: all tests in every second backward, those of a table of scenarios also in each
one (``scenario.each``), and the virtual GPU in each one. As on a GPU, the thread has the caller's grad mode and
dispatch modes, but not its context variables.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, TypeVar
from unittest import mock

import torch
from device import IS_CUDA
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

T = TypeVar("T")

Thread = Literal["alternating", "caller", "device"]

_engine = torch.autograd._engine_run_backward


@contextlib.contextmanager
def backward_on(
    thread: Thread, carry: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
) -> Iterator[None]:
    """Run each backward in the context on the thread that calls it, on a thread of its own, or on either in turn.

    Args:
        carry: a function that is called on the thread that calls backward, and returns a context for the other thread.
    """
    process = os.getpid()
    own = itertools.cycle({"alternating": (True, False), "caller": (False,), "device": (True,)}[thread])
    with ThreadPoolExecutor(1) as executor:
        of_device = executor.submit(threading.current_thread).result()

        def run(*args: Any, **kwargs: Any) -> Any:
            call = partial(_engine, *args, **kwargs)
            # A backward inside of another one stays on its thread, and a forked process has no other.
            if threading.current_thread() is of_device or os.getpid() != process or not next(own):
                return call()
            state = torch.is_grad_enabled(), torch._C._is_multithreading_enabled(), _get_current_dispatch_mode_stack()
            try:
                return executor.submit(_call, call, carry(), *state).result()
            finally:
                # Once it takes another call, the thread refers to nothing of this one, such as an error and its frames.
                executor.submit(threading.current_thread).result()

        with contextlib.nullcontext() if IS_CUDA else mock.patch.object(torch.autograd, "_engine_run_backward", run):
            yield


def _call(
    call: Callable[[], T],
    carried: AbstractContextManager[None],
    grad_enabled: bool,
    multithreading: bool,
    modes: Sequence[Any],
) -> T:
    """Call a function on this thread with the state of another one."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad_enabled))
        stack.enter_context(torch.autograd.set_multithreading_enabled(multithreading))
        stack.enter_context(carried)
        for mode in modes:
            stack.enter_context(mode)
        return call()
