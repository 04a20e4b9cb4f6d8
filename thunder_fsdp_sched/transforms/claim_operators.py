"""Executors claim the operators of the joint trace.

[Note: Operators are claimed once]
Thunder lets executors claim the operators of a trace twice: first to see whether the result waits for communication of
its own, and again for the trace that runs. Each time, every operator is decomposed and its parts are traced anew, which
takes as long as tracing a model with repeated blocks. ``JointPasses`` therefore claims all operators as they are, and they
are claimed here for the executors that follow, in Thunder's order and by Thunder's function.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import dce
from thunder.extend import Executor, FusionExecutor, OperatorExecutor, StatefulExecutor

from ..ir.registry import with_caches
from ..private_thunder import claim, gradient_rules_of


def claim_operators(trace: TraceCtx, *, executors: Sequence[Executor]) -> TraceCtx:
    """Return the trace with its operators claimed by ``executors``, the first that can, without dead code.

    Args:
        trace: the joint trace as Thunder has differentiated it (forward alone without gradients).
        executors: in order of priority.
    """
    return dce(with_caches(claim(trace, executors)))


_OWNERS = ("thunder", "thunder_fsdp_sched")


class RepeatableRules:
    """Whether executors claim bound symbols, and Thunder differentiates them, in the same way each time.

    They may not if an executor keeps state, or if an executor or a rule belongs neither to Thunder nor to this package.

    Args:
        executors: those that claim operators.
    """

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = executors
        self._are_known = all(map(_is_known, executors))
        self._known: dict[Any, bool] = {}

    def __call__(self, bsym: BoundSymbol) -> bool:
        return self._are_known and self._is_repeatable(bsym)

    def _is_repeatable(self, bsym: BoundSymbol) -> bool:
        sym_id = bsym.sym.id
        if sym_id not in self._known:
            functions = [
                function
                for executor in self._executors
                if (impl := executor.implmap.get(sym_id)) is not None
                for function in (
                    impl.checker,
                    impl.execution_transform,
                    impl.grad_transform,
                    getattr(impl.symbol, "meta", None),
                )
            ]
            self._known[sym_id] = all(map(_is_owned, (*functions, *gradient_rules_of(sym_id))))
        return self._known[sym_id] and all(map(self._is_repeatable, bsym.subsymbols))


def _is_known(executor: Executor) -> bool:
    kind = type(executor)
    if isinstance(executor, StatefulExecutor) or not isinstance(executor, OperatorExecutor | FusionExecutor):
        return False
    return kind.__module__.partition(".")[0] in _OWNERS


def _is_owned(function: Any) -> bool:
    function = None if function is None else inspect.unwrap(function)
    if isinstance(function, Symbol):
        function = function.meta
    return function is None or str(getattr(function, "__module__", None)).partition(".")[0] in _OWNERS
