"""The values of parameters and buffers before sharding: by default, each rank's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from thunder.core.module import ThunderModule

from ..errors import coded_error
from ..extensions import load
from ..options import Options
from ..plan.specs import ParamSpec
from ..ranks.control import Control
from ..ranks.process_groups import BucketRanks


class ShardedParam(NamedTuple):
    """A parameter to shard.

    Attributes:
        param: the jitted module's object. Another transform may have created it.
        own: the original module's object; ``param`` if that has none.
        ranks: the ranks that share it.
    """

    spec: ParamSpec
    param: torch.nn.Parameter
    own: torch.nn.Parameter
    ranks: BucketRanks


class ValueSource:
    """The source of values if all tensors of this rank have one; ``extras.initial_values`` has the other source.

    Attributes:
        rank: the rank that broadcasts, if there is one.
        began_on_meta: names of tensors without values.
    """

    rank: int | None = None
    began_on_meta: AbstractSet[str] = frozenset()

    def has_value(self, name: str) -> bool:
        """Return whether a tensor has a value, here or on the rank that broadcasts; otherwise it is to be initialized."""
        return True

    def device_of(self, name: str, tensor: torch.Tensor) -> torch.device:
        """Return the device of a tensor; if it is on the meta device here, its device on the rank that broadcasts."""
        return tensor.device

    def check(self, params: AbstractSet[str], *, initializes: bool) -> None:
        """Raise an error if this rank cannot receive the values that the rank of ``broadcast_from`` sends.

        Args:
            params: the names of the parameters to shard.
            initializes: whether ``param_init_fn`` is given.

        Raises:
            ValueError: it names the tensor.
        """

    def begin(self, steps: Any) -> Callable[[ShardedParam], torch.Tensor]:
        """Initialize tensors without values, and fill those that are not sharded.

        Returns:
            a function that returns the values of a parameter, whose rows the caller copies before the next call.
        """
        return lambda param: param.param


def source_of(model: ThunderModule, options: Options, control: Control) -> ValueSource:
    """Return the source of the values of a module; a collective with ``broadcast_from``."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    if options.init.broadcast_from is None and not any(tensor.is_meta for _, tensor in tensors):
        return ValueSource()
    source: ValueSource = load("extras.initial_values:RemoteValues")(model, options, control)
    return source


def resolve_device(device: torch.device) -> torch.device:
    """Return ``device`` as the ``device`` of a tensor there: a GPU always has an index, a CPU never.

    A GPU without an index means the current one of this process. Thunder would read it as ``cuda:0`` on every rank,
    while inputs and parameters may be on ``cuda:1``.

    Raises:
        ValueError: there is no such GPU.
    """
    if device.type != "cuda":
        return torch.device("cpu") if device.type == "cpu" else device
    if not torch.cuda.is_available():
        built = "torch sees no GPU" if torch.backends.cuda.is_built() else "this build of torch has no CUDA support"
        raise coded_error(ValueError, "option.no-gpu-for-device", device=str(device), reason=built)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise coded_error(
            ValueError, "option.device-index-too-high", device=str(device), gpus=torch.cuda.device_count()
        )
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
