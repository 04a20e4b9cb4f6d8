"""The checks of options that a function of (module name, module) may decide for each module.

Each takes the start of its message, which says who gave the value: by default the user, as an option.
"""

from __future__ import annotations

import math
from typing import Any

from thunder.distributed import FSDPType
from torch.distributed.fsdp import MixedPrecisionPolicy

_STRATEGIES = {"zero2": False, "zero3": True, FSDPType.ZERO2: False, FSDPType.ZERO3: True}


def check_strategy(strategy: Any, expected: str = "expected") -> bool:
    """Return whether the strategy frees parameters after forward.

    Raises:
        ValueError: there is no such strategy.
    """
    key = strategy.lower() if isinstance(strategy, str) else strategy
    if not isinstance(key, (str, FSDPType)) or key not in _STRATEGIES:
        raise ValueError(
            f"sharding_strategy: {expected} 'zero2', 'zero3' or a thunder.distributed.FSDPType, got {strategy!r}"
        )
    return _STRATEGIES[key]


def check_secondary_size(size: Any, expected: str = "expected") -> int | None:
    """Return over how many ranks parameters are sharded between forward and backward, or ``None``.

    Raises:
        TypeError, ValueError: it is neither an int of at least 2 nor ``None``.
    """
    expected = f"reshard_after_forward: {expected} a number of ranks{' or None' * (expected == 'expected')}"
    if isinstance(size, bool):
        raise TypeError(f"{expected}, got {size}; use sharding_strategy={'zero3' if size else 'zero2'!r}")
    if not isinstance(size, (int, type(None))):
        raise TypeError(f"{expected}, got {size!r}")
    if size is not None and size < 2:
        raise ValueError(f"{expected}, at least 2, got {size}; sharding_strategy='zero2' keeps whole parameters")
    return size


def check_precision(policy: Any, expected: str = "expected") -> MixedPrecisionPolicy:
    """Return ``policy``, or the default for ``None``.

    Raises:
        TypeError, ValueError: it is no policy, or has a dtype that is not a floating-point one.
    """
    if not isinstance(policy, (MixedPrecisionPolicy, type(None))):
        raise TypeError(
            f"mp_policy: {expected} a MixedPrecisionPolicy{' or None' * (expected == 'expected')}, got {policy!r} of type "
            f"{type(policy).__name__}"
        )
    policy = policy or MixedPrecisionPolicy()
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not dtype.is_floating_point:
            of = "" if expected == "expected" else f"{expected} a MixedPrecisionPolicy whose "
            raise ValueError(f"mp_policy: {of}{name} must be a floating-point dtype, got {dtype}")
    return policy


def check_factor(factor: Any, expected: str = "expected") -> float | None:
    """Return ``factor`` as a float, or ``None``.

    Raises:
        TypeError, ValueError: it is neither a positive number nor ``None``.
    """
    expected = f"gradient_divide_factor: {expected} a positive number{' or None' * (expected == 'expected')}"
    if isinstance(factor, bool) or not isinstance(factor, (int, float, type(None))):
        raise TypeError(f"{expected}, got {factor!r}")
    if factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"{expected}, got {factor!r}")
    return None if factor is None else float(factor)
