"""The shards of a module, and the hooks that run before and after its calls.

[Note: Set attributes]
Forward reads attributes of the original module, but users set them on the jitted one. For a number or a string,
Thunder's prologue would read the jitted module, but its trace the original one, which also has all functions and
buffers. So at the start of a call, attributes that were set on the jitted module move to the original one; the jitted
module shows these as well. Attributes of the jitted module's class (``forward``, ``state_dict``) stay there, and so do
private names that the original module does not have, because libraries store data under them and delete it again.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import thunder
import torch
from thunder.core.module import ThunderModule
from thunder.core.transform_common import Transform
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..capture.leaves import Leaves
from ..capture.while_compiling import CollectsLess
from ..errors import coded_error
from ..extensions import load
from ..logs import Progress
from ..plan.specs import BucketSpec, Plan
from ..private_cache import watch_compilations
from ..private_thunder import extend_calls, repeated
from ..private_torch import state_name, unwrap_fabric
from ..proof.audit import PreShardStorages
from ..ranks.control import Control
from ..ranks.rounds import begin_work
from ..runtime.bucket import Bucket
from .former_parameters import FormerParameters, check_gradients
from .module_parameters import ModuleParameters
from .refusals import (
    refuse_backward_hooks,
    refuse_compilation,
    refuse_conflicts,
    refuse_function_transforms,
    refuse_nested,
    refuse_old_backward_hooks,
)


@dataclass(eq=False)
class ShardedModule:
    """The shards of one module on this rank.

    Attributes:
        module: the user's module, whose own parameters are now the shards.
        buckets: the buckets with their memory, in the order of the plan.
        locations: the bucket of each sharded parameter and its index there, keyed by each of its names, also those in a
            state dict (see [Note: Names in state dicts] in ``extras.state_dicts.jitted``).
        shards: each sharded parameter, a DTensor over this rank's rows in the shard buffer, keyed by each of its names.
        control: the agreement of all ranks that share parameters with this one.
        mp_policy: the mixed precision of the module's own inputs and outputs.
        former_params: the parameters that the sharded ones have replaced (see [Note: Former parameters]).
        replaced: ignored parameters and buffers on their new device, and buffers that have replaced others later.
        began_on_meta: names of tensors without values, until all of them are known to have some.
        kept_buckets_are_final: whether ``max_memory`` has already chosen the kept buckets.
        attached: objects that extras keep with this module, by name.
        running_eagerly: whether the module's own forward may be called right now (``eager``).
        leaves: the modules that are not traced.
    """

    module: torch.nn.Module
    plan: Plan
    buckets: list[Bucket]
    locations: dict[str, tuple[Bucket, int]]
    control: Control
    mp_policy: MixedPrecisionPolicy
    pre_shard_storage: PreShardStorages
    former_params: FormerParameters
    replaced: dict[str, torch.Tensor]
    began_on_meta: set[str]
    leaves: Leaves
    kept_buckets_are_final: bool = False
    attached: dict[str, Any] = field(default_factory=dict)
    running_eagerly: bool = False

    def __post_init__(self) -> None:
        self.shards = {name: bucket.params[index] for name, (bucket, index) in self.locations.items()}
        self.locations |= {state_name(name): location for name, location in self.locations.items()}
        self.world_group = self.control.group
        self.progress = Progress(self.control.title, self.world_group.rank)
        for bucket in self.buckets:
            bucket.control, bucket.issue_counts = self.control, self.control.issue_counts
        self.module_params = ModuleParameters(self.module, self.buckets, self.leaves)
        self.module_params.objects.copies.append(self.replaced)
        self._attributes = SetAttributes()
        self._collects_less = CollectsLess()
        self._model: Callable[[], ThunderModule | None] = lambda: None
        self._is_starting = False  # whether a call has begun whose trace does not run yet
        self._is_tracing = False

    @property
    def kept_buckets(self) -> set[Bucket]:
        """The buckets that stay unsharded between forward and backward."""
        return {bucket for bucket in self.buckets if bucket.spec.options.sharding_strategy == "zero2"}

    def set_kept_buckets(self, names: Collection[str]) -> None:
        """Keep exactly the named buckets unsharded between forward and backward from now on."""
        self._set_specs(b.with_options(sharding_strategy="zero2" if b.name in names else "zero3") for b in self.plan)

    def set_gradient_divide_factor(self, names: Collection[str], factor: float | None) -> None:
        """Divide the sum of gradients in the named buckets by ``factor`` from now on."""
        self._set_specs(b.with_options(gradient_divide_factor=factor) if b.name in names else b for b in self.plan)

    def _set_specs(self, specs: Iterable[BucketSpec]) -> None:
        self.plan = replace(self.plan, buckets=tuple(specs))
        for bucket, spec in zip(self.buckets, self.plan, strict=True):
            bucket.spec = spec

    def attach(
        self,
        model: ThunderModule,
        on_entry: Callable[[Any], object],
        again: Callable[[ThunderModule, Any], Callable[[], Any] | None],
    ) -> None:
        """Make ``model`` use the shards, in its prologue and in ``parameters()``.

        Args:
            on_entry: called with each entry of Thunder's cache before it can run.
            again: returns a function that compiles an entry's trace for the present mode of ``no_sync``, or ``None``.
        """
        self._model = reference = weakref.ref(model)
        model._overrides_parameters.update(self.shards)
        for name, tensor in self.replaced.items():
            is_param = isinstance(tensor, torch.nn.Parameter)
            (model._overrides_parameters if is_param else model._overrides_buffers)[name] = tensor
        self._attributes.add(model)
        self.module_params.objects.copies.append(model._overrides_buffers)

        def before_trace() -> None:
            self.before_compiling(reference(), "tracing the module for new inputs", stage="tracing")
            self.module_params.replace_shards(self.module_params.placeholders)

        def compiles_again(entry: Any) -> Callable[[], Any] | None:
            jitted = reference()
            return None if jitted is None else again(jitted, entry)

        def after_trace(entry: Any) -> None:
            on_entry(entry)
            self._is_starting = self._is_tracing = False
            self.leaves.obstacle = None  # the program has handled the exception itself

        install_placeholders_on_miss = watch_compilations(model, before_trace, after_trace, compiles_again)

        def before_call() -> None:
            begin_work()
            refuse_nested()
            refuse_compilation("a jitted module", "thunder.jit compiles it already, so leave torch.compile out")
            refuse_function_transforms()
            if self.running_eagerly:
                raise coded_error(RuntimeError, "step.compiled-call-inside-eager")
            self._is_starting = self.control.agrees_in_steps
            self._collects_less.end()  # compiling without a call may have failed
            self._attributes.move()
            if (jitted := reference()) is not None:
                refuse_old_backward_hooks(jitted)
            # Compiling without a call may have failed and left placeholders in the module.
            self.module_params.replace_placeholders()
            self.module_params.check()
            self.former_params = check_gradients(self.former_params)
            install_placeholders_on_miss()
            self._is_starting = False

        offloads = any(bucket.spec.comm.offload for bucket in self.buckets)
        finish_copies = load("extras.shard_offload:finish_copies") if offloads else None

        def after_call(jitted: Any, *_: Any) -> None:
            with in_turn:
                clean_up(jitted)

        def clean_up(jitted: Any) -> None:
            self._collects_less.end()
            if finish_copies is not None:
                finish_copies()
            if self.leaves:
                self.module_params.objects.replaced()  # buffers that leaf modules have assigned
            if not self.running_eagerly and self.module_params.has_placeholders:  # tracing failed
                self.module_params.replace_placeholders()
                for path, name in self.module_params.in_containers().items():
                    warnings.warn(
                        f"fsdp: {path} holds parameter {name!r}, which is sharded: if forward reads it there, tracing sees "
                        f"only this rank's rows. Read it as {name}",
                        stacklevel=2,
                    )
            error = sys.exc_info()[1]
            if self._is_starting and isinstance(error, Exception):  # it failed before its trace announced itself
                self._is_starting = False
                self.control.announce("starting a call", error)

        in_turn = (
            threading.RLock()
        )  # while a thread traces the module, it has placeholders, with which others would fail
        extend_calls(model, before_call, self._adds_leaf, in_turn)
        model.register_forward_hook(after_call, always_call=True)

    def before_compiling(self, jitted: ThunderModule | None, text: str, *, stage: str) -> None:
        """Check the module, and begin a compilation."""
        self._is_starting = self._is_tracing = True
        if jitted is not None:
            refuse_conflicts(jitted)
        refuse_backward_hooks(self.module)
        self.check_ready()
        self.progress.begin(text, stage=stage)
        self._collects_less.begin()

    def compile(self, model: ThunderModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Compile ``model`` for a call without running it; return Thunder's cache entry, and the inputs of its traces."""
        compile_call = repeated(thunder.compile_data(model).get_computation_and_inputs, self._adds_leaf)
        try:
            entry, inputs, _ = compile_call(*args, **kwargs)
        finally:
            self._collects_less.end()
        return entry, inputs

    def _adds_leaf(self) -> bool:
        """Return whether the failed compilation has found a module to run as a leaf, so that a retry makes sense."""
        error = sys.exc_info()[1]
        bsym = getattr(error, "bsym", None)  # the operator that a pass has refused
        if bsym is not None and self.leaves.automatic:
            load("extras.leaf_modules.choose:note_operator")(self.leaves, bsym, error)
        if not (self._is_tracing and self.leaves.obstacle):
            return False
        self._is_tracing = False
        self.module_params.replace_placeholders()
        return bool(load("extras.leaf_modules.choose:add_obstacle")(self.leaves))

    def known(self) -> Collection[str]:
        """Return the names of all parameters that Thunder may unpack, including those that other transforms created."""
        return self._jitted._overrides_parameters.keys()

    @property
    def _jitted(self) -> ThunderModule:
        model = self._model()
        assert model is not None, "the jitted module is gone"
        return model

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return all names of a parameter in a state dict, the leading one first; if it is not sharded, only ``name``."""
        if name not in self.locations:
            return (name,)
        bucket, index = self.locations[name]
        return tuple(map(state_name, bucket.spec.params[index].names))

    def take_attributes(self) -> None:
        """Move attributes set on the jitted module to the original one, and update the jitted module's buffers.

        See [Note: Set attributes] above.
        """
        self._attributes.move()
        self.module_params.objects.replaced()

    def check_ready(self) -> None:
        """Raise an error unless the parameters in the module are the shards, and have values.

        Raises:
            RuntimeError: names those that are not.
        """
        self.module_params.replace_placeholders()  # a failed compilation may have left placeholders
        self.take_attributes()
        self.module_params.check()
        self.module_params.check_shards()
        self.check_initialized()

    def check_initialized(self) -> None:
        """Raise an error on all ranks if parameters or buffers have not been initialized; only before the first run.

        Raises:
            RuntimeError: names them.
            ScheduleDisagreement: names those of another rank.
        """
        if not self.began_on_meta or self.world_group.is_fake:  # a plan needs no values
            return
        with self.control.all_or_none("whether all parameters have values"):
            load("extras.initial_values:refuse_blank")(self._jitted, self.began_on_meta)
        self.began_on_meta.clear()


class ShardingTransform(Transform):
    """A transform that shards a module, for functions that need only the shards."""

    def __init__(self) -> None:
        self._sharded: ShardedModule | None = None

    @property
    def sharded(self) -> ShardedModule:
        """The module's shards.

        Raises:
            RuntimeError: the transform has not been given to ``thunder.jit`` yet.
        """
        if self._sharded is None:
            raise coded_error(RuntimeError, "plan.no-plan-before-jit")
        return self._sharded


def find_sharding(model: object) -> ShardingTransform:
    """Return the transform that shards ``model``, which is a jitted module or Lightning Fabric's wrapper of one.

    Raises:
        TypeError: no ``fsdp(...)`` shards it.
        RuntimeError: a parameter or submodule was replaced after ``thunder.jit``.
    """
    jitted = unwrap_fabric(model)
    transform = next((t for t in getattr(jitted, "_lc_transforms", ()) if isinstance(t, ShardingTransform)), None)
    if transform is None:
        raise coded_error(TypeError, "module.expected-sharded-model", got=type(jitted).__name__)
    transform.sharded.module_params.check()
    return transform


def find_jitted(model: object) -> tuple[ThunderModule, ShardedModule]:
    """Return the jitted module in ``model``, which Lightning Fabric may have wrapped, and its shards.

    Raises:
        TypeError, RuntimeError: see :func:`find_sharding`.
    """
    sharded = find_sharding(model).sharded
    return unwrap_fabric(model), sharded


class SetAttributes:
    """The attributes of the jitted modules of one module; adding a transform makes another jitted module."""

    def __init__(self) -> None:
        self._own: weakref.WeakKeyDictionary[ThunderModule, set[str]] = weakref.WeakKeyDictionary()

    def add(self, model: ThunderModule) -> None:
        """Record the present attributes of ``model``, which stay there."""
        self._own[model] = vars(model).keys() | set()

    def move(self) -> None:
        """Move attributes that were set since the latest call to the original module; cheap enough for every call.

        Raises:
            RuntimeError: names a parameter, buffer or submodule, for which the module would have to be sharded again.
        """
        for model, own in self._own.items():
            _move(model, own)


def _move(model: ThunderModule, own: set[str]) -> None:
    module = model._model
    for kind, name in _registered(model) if len(model._modules) > 1 or model._parameters or model._buffers else ():
        raise coded_error(RuntimeError, "module.registered-on-jitted-module", role=kind, name=name)
    for name in () if vars(model).keys() <= own else vars(model).keys() - own:
        if hasattr(type(model), name) or (name.startswith("_") and not hasattr(module, name)):
            continue
        value = vars(model)[name]
        if name == "training" and value != module.training:
            raise coded_error(RuntimeError, "module.training-flags-differ", jitted=value, original=module.training)
        setattr(module, name, value)
        delattr(model, name)


def _registered(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the parts that were registered in the jitted module itself, other than the original module."""
    yield from (("submodule", name) for name in model._modules if name != "_model")
    yield from (("parameter", name) for name in model._parameters)
    yield from (("buffer", name) for name in model._buffers)
