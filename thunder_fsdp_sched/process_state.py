"""Process-wide state of this package, and its fate after a fork and at exit.

[Note: State of the process]
A forked process (a rank that a notebook launches, a worker of a ``DataLoader``) has copies of everything but the threads.
It must not use the connections, shared memory and files of its parent, nor finish the parent's work. ``tests/test_forks.py``
compares this table with the code:

| module | state | after a fork | at exit |
|---|---|---|---|
| `extras.checkpoint.beside` | `_latest`: save in flight | the parent's `Saving` raises | waited for; sets the exit code |
| `extras.checkpoint.beside` | `_rounds`: gloo connections | kept: freeing them would wait for the parent's threads | |
| `extras.checkpoint.beside` | `_finalizer`, `_has_failed` | none; the next save makes another | finishes the save |
| `extras.checkpoint.staging` | `host_memory`: shared memory, a process | none; copies are closed | the writer ends itself |
| `extras.checkpoint.folder` | each `SaveRun`: files of an unfinished save | the parent's: none is deleted | |
| `ranks.process_groups` | each `ProcessGroupRef` | raises an error, but for fake groups | gloo groups end (hook) |
| `ranks.new_groups` | `_companions` | kept, and replaced: their groups are unusable | |
| `ranks.process_groups` | `_planned` ranks of fake groups | kept | |
| `ranks.process_groups` | `_used` groups | kept: they are unusable | |
| `ranks.process_groups` | `_register_exit_hook` | the first group registers the hook again | |
| `ranks.joint_control` | `_channels` | kept, and replaced: their groups are unusable | |
| `ranks.rounds` | `_work`: a counter | kept: it marks exceptions, which are not shared | |
| `ranks.open_control` | `_numbers` of modules | begin at 0, as on a rank that was not forked | |
| `ranks.control` | `_controls` | kept: of groups that are unusable | |
| `runtime.autograd` | `_moments`: a counter | kept: numbers stay larger than earlier ones | |
| `runtime.names` | `_optimizer_steps` | kept: a number in labels of profiles | |
| `extras.shard_offload` | `_last_copies`: events of CUDA | kept: torch refuses CUDA in a forked process | |
| `transports.works` | `_side_streams` of CUDA | kept: the same | |
| `sharding.optimizer_steps` | `_checked` optimizers | kept | |
| `capture.module_calls` | `_reads`: jitted modules | kept | |
| `ir.observation` | `_cache`: facts on operators | kept | |
| `ir.operator_facts` | `_declared` operators | kept | |
| `ir.observation` | `_quiet`: filters of warnings, a logger | restored if another thread had changed them | |
| `kernels.calls` | `_cache`: what torch runs for functions | kept | |
| `extras.checkpoint.storage` | `_numpy_is_safe`: torch's safe globals | the same | |
| `extras.ranks_differ.programs` | `_differences`, `_stepped`: models, optimizers | kept | |
| `logs` | `_followers` | kept: open `with` blocks | |

What the package changes in Python, torch and Thunder (docs/how-it-works.md says when):

| module | change | after a fork | at exit |
|---|---|---|---|
| `compat` | methods that torch has removed and Thunder needs; a filter of warnings during an import | kept | |
| `private_torch` | torch's lists of types for `foreach` | kept | |
| `private_interpreter` | Thunder's table of functions that its interpreter calls in place of others | kept | |
| `ir.registry`, `kernels.executor` | `executor` in Thunder's registry | kept | |
| `runtime.names`, `sharding.shard_module` | torch's hooks after and before steps of any optimizer | kept | |
| `extras.ranks_differ.programs` | a hook after steps of any optimizer | kept | |
| `capture.while_compiling` | thresholds of the collector while a model compiles | kept | |
| `capture.while_compiling` | the time until threads switch while a model is traced | kept | |
| `capture.callbacks` | while a native function of a traced program runs: no collections, a profile function | kept | |
| `extras.checkpoint.beside` | exit hook, thread of a save | the hook finds no save | `sys.stderr` is wrapped if it failed |
| `extras.checkpoint.writer_process` | a process that writes | the parent's | it ends when its connection does |
| `extras.symmetric_memory` | a variable of the environment | inherited | |
| `extras.planning.dry_run` | `sys.excepthook`, restored after a plan | inherited | |
| `extras.bench` | torch's seed, and the process group, of the process of the command line | | |
| `extras.command_line` | `sys.path`, of the process of the command line | | |

Registries (transports, formats), and what functions remember of operators and code (``cache``), are kept.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def reset_after_fork(reset: Callable[[], object]) -> None:
    """Call ``reset`` in each process that is forked off this one; see [Note: State of the process]."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=reset)


class Reentrant:
    """A context manager that changes state of the process, which may be nested and entered in several threads.

    The first to enter changes the state, and the last to leave restores it.

    Args:
        make: returns a context manager that changes the state.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._lock, self._depth = threading.Lock(), 0
        reset_after_fork(self._reset)

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._changed = self._make()
                self._changed.__enter__()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._changed.__exit__(None, None, None)

    def _reset(self) -> None:
        """Restore the state in a forked process, which has no other threads that will."""
        is_changed, self._lock, self._depth = self._depth > 0, threading.Lock(), 0
        if is_changed:
            self._changed.__exit__(None, None, None)
