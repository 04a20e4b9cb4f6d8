"""Fabric's precisions for a sharded module: mixed precision is that of the buckets, not of ``torch.autocast``.

[Note: Two packages of Fabric]
The distribution ``lightning`` has Fabric as ``lightning.fabric``; ``lightning-fabric`` and ``pytorch-lightning`` have it as
``lightning_fabric``. Each package has its own classes, and a ``Fabric`` accepts strategies of its own package only. Both
may be installed. So classes of ours derive from those of the package that has been imported when they are; of
``lightning.fabric`` if both or neither have been imported, and both are installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from ...errors import coded_error

_PACKAGES = ("lightning.fabric", "lightning_fabric")


def fabric_module(name: str) -> Any:
    """Return a module of Fabric, such as ``"strategies"``.

    Raises:
        ImportError: Fabric is not installed.
    """
    imported = [package for package in _PACKAGES if package in sys.modules]
    for package in imported or _PACKAGES:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return importlib.import_module(f"{package}.{name}")
    raise coded_error(ImportError, "environment.fabric-missing")


_plugins = fabric_module("plugins")


class ShardedMixedPrecision(_plugins.MixedPrecision):  # type: ignore[name-defined]
    """Mixed precision by casting shards before they are gathered, as FSDP2 does.

    Parameters, gradients and the optimizer's state are float32. Shards are cast to 16 bits and gathered, and the module
    computes in 16 bits. Gradients are cast to float32 before they are averaged, so accumulation under
    ``no_backward_sync`` is in float32, too. ``fsdp(mp_policy=...)`` offers other choices, with ``precision="32-true"``.

    Args:
        precision: ``"bf16-mixed"`` or ``"16-mixed"``. The latter scales the loss.
        device: the type of the device, such as ``"cuda"``.
        scaler: for ``"16-mixed"``. A ``ShardedGradScaler`` with its settings takes the place of another scaler.
    """

    precision: str

    def __init__(self, precision: str, device: str, scaler: torch.amp.GradScaler | None = None) -> None:
        if precision == "16-mixed" and not isinstance(scaler, ShardedGradScaler):
            scaler = _sharded(scaler, device)
        super().__init__(precision, device, scaler)

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The policy for ``fsdp(mp_policy=...)``."""
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)

    def forward_context(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def convert_input(self, data: Any) -> Any:
        return data  # the jitted module casts its inputs and outputs by the policy

    def convert_output(self, data: Any) -> Any:
        return data


def _sharded(scaler: torch.amp.GradScaler | None, device: str) -> ShardedGradScaler:
    made = ShardedGradScaler(device=device, enabled=scaler is None or scaler.is_enabled())
    if scaler is not None:
        made.load_state_dict(scaler.state_dict())
    return made


def for_shards(precision: Any) -> Any:
    """Return a precision plugin for sharded modules that does what ``precision``, one of Fabric's, is for.

    Raises:
        TypeError: there is none.
    """
    if isinstance(precision, ShardedMixedPrecision):
        return precision
    if isinstance(precision, _plugins.MixedPrecision):
        return ShardedMixedPrecision(precision.precision, precision.device, precision.scaler)
    if isinstance(precision, _plugins.FSDPPrecision) and precision.precision in ("bf16-mixed", "16-mixed"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return ShardedMixedPrecision(precision.precision, device, precision.scaler)
    known = (_plugins.Precision, _plugins.HalfPrecision, _plugins.DoublePrecision, _plugins.FSDPPrecision)
    if type(precision) in known:
        return precision
    raise coded_error(TypeError, "fabric.unknown-precision-plugin", got=type(precision).__name__)
