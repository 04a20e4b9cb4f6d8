"""The executors that run torch's kernels: see [Note: Torch's kernels]."""

from __future__ import annotations

from thunder.core.symbol import BoundSymbol
from thunder.extend import OperatorExecutor, register_executor


class _KernelExecutor(OperatorExecutor):
    """An executor that claims a function only if the function's own check says so.

    Otherwise Thunder would apply the grad rule of a loss that the check has refused, if its log-softmax and its negative
    log-likelihood can be claimed.
    """

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        return False


executor = _KernelExecutor("torch_kernels", version="0.1")
elementwise = _KernelExecutor("torch_elementwise", version="0.1")
gradients = _KernelExecutor("torch_gradients", version="0.1")
for _executor in (executor, elementwise, gradients):
    register_executor(_executor)
