"""The strategy: sets up processes as Fabric's DDP does, and shards modules with ``thunder.jit`` and ``fsdp(...)``.

[Note: Two packages of Fabric]
The distribution ``lightning`` has Fabric as ``lightning.fabric``; ``lightning-fabric`` and ``pytorch-lightning`` have it as
``lightning_fabric``. Each package has its own classes, and a ``Fabric`` accepts strategies of its own package only. Both
may be installed. So our classes derive from those of the package that has been imported before them; from those of
``lightning.fabric`` if both or neither have been imported, and both are installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import thunder
import torch
from thunder.core.module import ThunderModule
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from ...api import fsdp
from ...errors import coded_error
from ...option_groups import Init, Ranks
from ...private_torch import control_fabric_sync
from ...runtime.row_dtensor import DTENSORS
from ...sharding.former_parameters import refuse_former
from ...transform import FSDPTransform, find_transform
from ..training.gradients import clip_grad_norm_
from . import checkpoint

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
        scaler: for ``"16-mixed"``. Another scaler is replaced by a ``ShardedGradScaler`` with its settings.
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
    """Return the precision plugin for sharded modules that corresponds to ``precision``, one of Fabric's.

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


_TIMEOUT = timedelta(minutes=30)
"""The timeout of collectives: Fabric's default, for gloo and NCCL."""


_strategies = fabric_module("strategies")


class FSDPSchedStrategy(_strategies.DDPStrategy):  # type: ignore[name-defined]
    """Sharded training with Lightning Fabric: ``Fabric(strategy=FSDPSchedStrategy(prefetch=2), devices=8)``.

    ``fabric.setup(model)`` runs ``thunder.jit(model, transforms=[fsdp(...)])``. The ranks, the process group and the
    start of processes are those of Fabric's ``DDPStrategy``, so it runs on CPUs, too. Create optimizers after
    ``fabric.setup(model)``, as with Fabric's ``FSDPStrategy``.

    Args:
        state_dict_type: ``"sharded"``: ``fabric.save`` writes a folder, to which each rank writes its rows. ``"full"``:
            it writes one file with whole parameters and optimizer state. ``fabric.load`` reads both.
        jit_options: other arguments of ``thunder.jit``, such as ``executors``. ``transforms`` run after sharding.
        ranks: as for ``fsdp``, or the sizes ``(replicas, shards)``, because no mesh exists before Fabric launches.
        init: as for ``fsdp``, without ``device``, which is Fabric's. For a module with parameters on the meta device, the
            default of ``param_init_fn`` calls ``reset_parameters`` of each submodule.
        process_group_backend: as for ``DDPStrategy``: the default is NCCL on GPUs, else gloo.
        timeout: the timeout of collectives.
        start_method: how Fabric starts processes, unless torchrun does.
        accelerator: by default Fabric chooses it, and the following three.
        parallel_devices: the devices of this node.
        cluster_environment: the source of ranks and addresses.
        precision: one of Fabric's precision plugins.
        **options: all other options of :func:`thunder_fsdp_sched.fsdp`. With ``precision="bf16-mixed"`` or
            ``"16-mixed"``, the strategy passes ``mp_policy``.

    Raises:
        TypeError, ValueError: an option is invalid; the message names it.
    """

    root_device: torch.device
    world_size: int
    broadcast: Callable[..., Any]

    def __init__(
        self,
        *,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        jit_options: Mapping[str, Any] | None = None,
        ranks: ProcessGroup | DeviceMesh | Ranks | tuple[int, int] | None = None,
        init: Init = Init(),  # noqa: B008  # frozen
        process_group_backend: str | None = None,
        timeout: timedelta = _TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        precision: Any = None,
        **options: Any,
    ) -> None:
        if state_dict_type not in ("sharded", "full"):
            raise coded_error(ValueError, "fabric.unknown-state-dict-type", state_dict_type=state_dict_type)
        if Init.of("init", init).device is not None:
            raise coded_error(TypeError, "fabric.device-in-init")
        if isinstance(ranks, tuple):
            _check_sizes(ranks)
        # This raises an error now rather than after the launch.
        fsdp(
            **options, init=replace(init, device=torch.device("cpu")), ranks=None if isinstance(ranks, tuple) else ranks
        )
        self._options, self._ranks, self._init = options, ranks, init
        self._jit_options = dict(jit_options or {})
        self.state_dict_type = state_dict_type
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        control_fabric_sync(self, _NoSync())

    @property
    def precision(self) -> Any:
        """How modules, inputs and outputs are converted. Fabric sets it."""
        return super().precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        chosen = None if precision is None else for_shards(precision)
        if isinstance(chosen, ShardedMixedPrecision) and self._options.get("mp_policy") is not None:
            raise coded_error(ValueError, "fabric.two-precision-policies", precision=chosen.precision)
        super(FSDPSchedStrategy, type(self)).precision.fset(self, chosen)

    def setup_module(self, module: torch.nn.Module) -> ThunderModule:
        """Return the jitted, sharded module; a collective.

        Raises:
            TypeError: ``module`` is jitted already.
        """
        if isinstance(module, ThunderModule):
            raise coded_error(TypeError, "fabric.module-already-jitted")
        transforms = [self._new_transform(module), *self._jit_options.get("transforms", ())]
        jitted = thunder.jit(module, **{**self._jit_options, "transforms": transforms})
        _refuse_other_forwards(jitted, module)
        return jitted

    def _new_transform(self, module: torch.nn.Module) -> FSDPTransform:
        options, init = dict(self._options), replace(self._init, device=self.root_device)
        if isinstance(self._ranks, tuple):
            if math.prod(self._ranks) != self.world_size:
                raise coded_error(
                    ValueError,
                    "fabric.ranks-do-not-match",
                    ranks=self._ranks,
                    count=math.prod(self._ranks),
                    world_size=self.world_size,
                )
            self._ranks = init_device_mesh(self.root_device.type, self._ranks, mesh_dim_names=("replicate", "shard"))
        if isinstance(self.precision, ShardedMixedPrecision):
            options["mp_policy"] = self.precision.mp_policy
        if any(tensor.is_meta for tensor in itertools.chain(module.parameters(), module.buffers())):
            init = replace(init, param_init_fn=init.param_init_fn or _reset_parameters)
        return fsdp(**options, ranks=self._ranks, init=init)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer.

        Raises:
            RuntimeError: it was created before its module was sharded.
        """
        refuse_former(param for group in optimizer.param_groups for param in group["params"])
        return optimizer

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Do nothing: ``setup_module`` moves each parameter when it shards it."""

    def module_init_context(self, empty_init: bool | None = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which modules are created: on the meta device with ``empty_init``, else on the CPU."""
        stack = contextlib.ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip the gradients of an optimizer's parameters by the norm of the unsharded gradients; a collective.

        Returns:
            The norm before clipping, a plain 0-dim tensor.
        """
        mine = {param for group in optimizer.param_groups for param in group["params"] if param.requires_grad}
        if mine != {param for param in module.parameters() if param.requires_grad}:
            norm = super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
            return norm.full_tensor() if isinstance(norm, DTENSORS) else norm
        self.precision.unscale_gradients(optimizer)
        # With one collective, while torch's function, as called above, has one for each parameter.
        return clip_grad_norm_(module, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: checkpoint.Filter | None = None,
    ) -> None:
        """Save a module, its optimizers and other values, as ``state_dict_type`` says; a collective.

        Numbers and other objects are saved as the first rank has them. A checkpoint of the same name is replaced.

        Raises:
            CheckpointError: on all ranks, if it could not be saved.
        """
        if storage_options is not None:
            raise coded_error(TypeError, "fabric.no-storage-options")
        whole = self.state_dict_type == "full"
        checkpoint.save(Path(self.broadcast(path)), state, whole=whole, keep=filter)

    def load_checkpoint(
        self,
        path: str | Path,
        state: torch.nn.Module | torch.optim.Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load what :meth:`save_checkpoint` has saved, in either format, or a file with a module's state dict.

        Returns:
            The values of the checkpoint that ``state`` does not have.

        Raises:
            CheckpointError: on all ranks, if it cannot be read or does not fit.
        """
        path = Path(self.broadcast(path))
        if isinstance(state, torch.nn.Module):
            checkpoint.load_module(path, state, strict=strict, weights_only=weights_only)
            return {}
        if not state or isinstance(state, torch.optim.Optimizer):
            raise coded_error(ValueError, "fabric.module-not-passed")
        return checkpoint.load(path, state, strict=strict, weights_only=weights_only)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register nothing: the strategy is passed as an object, with its options."""


class _NoSync:
    """The object that skips the reduction of gradients in Fabric's ``no_backward_sync``."""

    def no_backward_sync(self, module: ThunderModule, enabled: bool) -> contextlib.AbstractContextManager[None]:
        find_transform(module)
        return module.no_sync() if enabled else contextlib.nullcontext()


def _check_sizes(sizes: tuple[int, ...]) -> None:
    if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise coded_error(TypeError, "fabric.ranks-not-a-mesh", got=sizes)


def _reset_parameters(module: torch.nn.Module) -> None:
    """Initialize a submodule, if it can do so itself. Parameters that stay blank must be loaded before the first call."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _refuse_other_forwards(jitted: ThunderModule, module: torch.nn.Module) -> None:
    """Make calls raise an error while Fabric has replaced ``forward`` by another method (``mark_forward_method``).

    Thunder's traces of ``forward`` would run instead of that method.
    """
    own = module.__dict__.get("forward")

    def check(*_: Any) -> None:
        if module.__dict__.get("forward") is own:
            return
        if own is None:
            del module.forward
        else:
            module.forward = own
        raise coded_error(RuntimeError, "fabric.forward-replaced-after-setup")

    jitted.register_forward_pre_hook(check, prepend=True)
