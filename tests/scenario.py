"""The harness of numerical tests: the same actions on a sharded model and on the models that it must equal.

A *scenario* is data: how to make a model, the options of ``fsdp``, the number of ranks, a list of actions, and oracles. A
table of scenarios is a test::

    SCENARIOS = {
        "accumulation": Scenario(stack, [do.micro_batch(0), do.micro_batch(1, no_sync=False), do.step()], {"prefetch": 2}),
        "no prefetch": Scenario(stack, options={"prefetch": 0}, others=[{"prefetch": 9}], ranks=4, long=True),
    }

    @each(SCENARIOS)
    def test_trains_like_the_unsharded_model(name: str) -> None:
        SCENARIOS[name].run()

An action is ``do.<method of Run>(...)``, or a function of the :class:`Run` if data is not enough. Two oracles say what
is right, and every action compares what it has computed with both: the *unsharded* model, which each rank trains on the
batches of all ranks, so that comparing needs no communication; and *others*, the same model with other options, whose
bits must be the same. A test with a single scenario may drive a :class:`Run` itself, in a function under
``ranks.on_ranks``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs

import pytest
import thunder
import torch
import torch.distributed as dist
from device import DEVICE, IS_CUDA, RANKS, USES_KERNELS
from device_thread import Thread, backward_on
from internals import RowDTensor
from profiles import with_long
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves


def loss_of(output: Any) -> torch.Tensor:
    """Return a loss: the sum of scalar outputs and of weighted mean squares of others, so that every element matters."""
    terms = []
    for leaf in tree_leaves(output):
        weights = torch.linspace(0.5, 1.5, leaf.numel(), dtype=leaf.dtype, device=leaf.device).view(leaf.shape)
        terms.append(leaf if leaf.ndim == 0 else (leaf.square() * weights).mean())
    return sum(terms)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def whole_of(value: Any) -> Any:
    """Return the whole tensor of a DTensor, and anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def everywhere(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@dataclass(frozen=True)
class Action:
    """A call of a method of :class:`Run`. Write ``do.step(set_to_none=False)``."""

    kind: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __call__(self, run: Run) -> Any:
        return getattr(run, self.kind)(*self.args, **self.kwargs)


class _Actions:
    def __getattr__(self, kind: str) -> Callable[..., Action]:
        assert hasattr(Run, kind), f"Run has no method {kind}"
        return lambda *args, **kwargs: Action(kind, args, kwargs)


do = _Actions()


@dataclass(frozen=True)
class Scenario:
    """A model, how it is sharded, the actions, and what it must equal. See :class:`Run` for other attributes.

    Attributes:
        model: a function that makes the model. Its method ``inputs(generator, **size)`` makes a batch.
        options: options of ``fsdp`` and further arguments of :class:`Run`; or a function that makes them on a rank.
        long: whether only ``-m long`` runs it: a combination that adds no code path.
    """

    model: Callable[[], nn.Module]
    actions: Sequence[Callable[[Run], Any]] = (Action("train"),)
    options: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    others: Sequence[Mapping[str, Any] | Callable[[nn.Module], nn.Module]] = ()
    oracle: str | None = "unsharded"
    tolerance: float | None = None
    others_tolerance: float = 0
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    ranks: int = RANKS
    long: bool = False

    def run(self, **more: Any) -> Run:
        """Run all actions on this rank and return the :class:`Run`, for further assertions."""
        torch.manual_seed(0)
        options = self.options() if callable(self.options) else self.options
        own = {name: getattr(self, name) for name in ("others", "oracle", "tolerance", "others_tolerance", "optimizer")}
        run = Run(self.model(), **own, **options, **more)
        for number, action in enumerate(self.actions):
            run.at = f"action {number}, {action}"
            action(run)
        return run


def each(table: Mapping[str, Scenario]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function with an argument ``name`` into a test that runs on the ranks of each scenario of a table.

    Each scenario runs with backwards on the thread of forward and on another one in turn, in long runs also all on either.
    """
    names = with_long(table, *(name for name, scenario in table.items() if scenario.long))
    threads = ["alternating", *(pytest.param(thread, marks=pytest.mark.long) for thread in ("caller", "device"))]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def on_rank(thread: Thread, **arguments: Any) -> None:
            with backward_on(thread):
                function(**arguments)

        more = inspect.Parameter("thread", inspect.Parameter.KEYWORD_ONLY)
        own = inspect.signature(function)
        on_rank.__signature__ = own.replace(parameters=[*own.parameters.values(), more])  # type: ignore[attr-defined]
        test = on_ranks(lambda name, **_: table[name].ranks)(on_rank)
        return pytest.mark.device(
            pytest.mark.parametrize("thread", threads)(pytest.mark.parametrize("name", names)(test))
        )

    return decorate


@dataclass
class Pending:
    """Losses whose backward has not run yet: one for each sharded model, and the unsharded model's by rank."""

    losses: list[torch.Tensor]
    expected: dict[int, torch.Tensor]
    no_sync: bool


class Unsharded:
    """The unsharded model, trained on the batches of all ranks in one process.

    Attributes:
        models: by rank. They share parameters, and each has its own buffers.
        params: parameters by each of their names.
        unreduced: by rank, the gradients that are not in ``.grad`` yet.
    """

    def __init__(
        self, ranks: Sequence[int], model: nn.Module, compiled: Callable[[nn.Module], nn.Module] | None
    ) -> None:
        if compiled is None:
            self.models = {rank: copy.deepcopy(model, {id(p): p for p in model.parameters()}) for rank in ranks}
        else:
            self.models = dict.fromkeys(ranks, compiled(model))
        self.params = dict(self.models[ranks[0]].named_parameters(remove_duplicate=False))
        self.unreduced: dict[int, dict[nn.Parameter, torch.Tensor]] = {rank: {} for rank in ranks}

    def backward(self, losses: Mapping[int, torch.Tensor], *, retain: bool = False) -> None:
        """Add the gradients of each rank's loss to those that are unreduced."""
        params = dict.fromkeys(self.params.values())
        kept = {param: param.grad for param in params}
        try:
            for rank, loss in losses.items():
                for param in params:
                    param.grad = None
                loss.backward(retain_graph=retain)
                of_rank = self.unreduced[rank]
                for param in params:
                    if param.grad is not None:
                        of_rank[param] = of_rank[param] + param.grad if param in of_rank else param.grad
        finally:
            for param, grad in kept.items():
                param.grad = grad

    def discard(self) -> None:
        """Forget unreduced gradients."""
        for of_rank in self.unreduced.values():
            of_rank.clear()

    def reduce(self) -> None:
        """Add the means over ranks to ``.grad``."""
        for param in dict.fromkeys(self.params.values()):
            terms = [of_rank.pop(param) for of_rank in self.unreduced.values() if param in of_rank]
            if terms:
                mean = sum(terms) / len(self.unreduced)
                param.grad = mean if param.grad is None else param.grad + mean


class Run:
    """Models that are driven by the same actions and compared after each. Create it on every rank.

    Args:
        model: the model to shard. Its copies become the oracles.
        others: for each further sharded model, the options of ``fsdp`` that differ from those of the first, or a
            function that makes it from a copy of the module (such as :func:`fsdp2`).
        oracle: ``"unsharded"``, ``"compiled"`` (the unsharded model compiled by Thunder), or ``None``.
        tolerance: relative and absolute, between the sharded and the unsharded model; 0 requires equal bits. By default
            the model's ``tolerance`` or 1e-11: Thunder's decompositions round differently from eager torch, in float64 by
            about 1e-15, which three steps amplify a little.
        others_tolerance: between the sharded models, which must have the same bits by default.
        optimizer: makes an optimizer of a list of parameters.
        before, after: transforms around ``fsdp``'s.
        dtype: the dtype of floating-point inputs, if it differs from the model's own.
        options: the options of ``fsdp``. A tuple as ``ranks`` becomes a mesh of that shape.

    Attributes:
        model, transform: the first sharded model, and the ``fsdp(...)`` in use.
        models: all sharded models.
        unsharded, reference: the unsharded model, and its module for this rank.
        pending: losses whose backward has not run.
        at: the current action, for messages.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        others: Sequence[Mapping[str, Any] | Callable[[nn.Module], nn.Module]] = (),
        oracle: str | None = "unsharded",
        tolerance: float | None = None,
        others_tolerance: float = 0,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        before: Sequence[Any] = (),
        after: Sequence[Any] = (),
        jit_options: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if isinstance(options.get("ranks"), tuple):
            options["ranks"] = init_device_mesh(DEVICE.type, options["ranks"], mesh_dim_names=("replicate", "shard"))
        self.rank, self.dtype = dist.get_rank(), dtype
        self.transform = tfs.fsdp(**options)
        self.ranks = _ranks_of(self.transform.options.ranks)
        self.tolerance = getattr(model, "tolerance", 1e-11) if tolerance is None else tolerance
        self.others_tolerance = others_tolerance
        model = model.to(DEVICE)
        original = copy.deepcopy(model)
        self.make_inputs, self.initial = original.inputs, original.state_dict()
        self.unsharded: Unsharded | None = None
        kernels = ["torch_kernels"] if USES_KERNELS else []
        if IS_CUDA and kernels:
            jit_options = {"executors": [*kernels, *thunder.get_default_executors()], **(jit_options or {})}
        if oracle is not None:
            # With the executors that `fsdp` adds.
            executors = [*kernels, "torch_elementwise", "torch_gradients", *thunder.get_default_executors()]
            given = {"executors": executors, **(jit_options or {})}
            jit = lambda module: thunder.jit(module, transforms=[*before, *after], **given)  # noqa: E731
            self.unsharded = Unsharded(self.ranks, copy.deepcopy(model), jit if oracle == "compiled" else None)
        copies = [copy.deepcopy(model) for _ in others]
        self.model = thunder.jit(model, transforms=[*before, self.transform, *after], **(jit_options or {}))
        self.models = [self.model]
        for other, module in zip(others, copies, strict=True):
            make = other if callable(other) else partial(_jit, **{**options, **other})
            sharded = make(module)
            self.models.append(sharded)
        self.pending: list[Pending] = []
        self.at = ""
        self.use(optimizer)

    @property
    def reference(self) -> nn.Module:
        assert self.unsharded is not None
        return self.unsharded.models[self.rank]

    @property
    def every(self) -> list[nn.Module]:
        """The sharded models and all unsharded ones."""
        unsharded = [] if self.unsharded is None else dict.fromkeys(self.unsharded.models.values())
        return [*self.models, *unsharded]

    def inputs(self, step: int = 0, *, rank: int | None = None, **size: Any) -> tuple[torch.Tensor, ...]:
        """Return a rank's batch for a step: the same for all models, different for each rank."""
        rank = self.rank if rank is None else rank
        size = {
            name: value[self.ranks.index(rank)] if isinstance(value, tuple) else value for name, value in size.items()
        }
        made = self.make_inputs(torch.Generator().manual_seed(1000 * step + rank), **size)
        made = tuple(x.to(DEVICE) for x in made)
        return tuple(x.to(self.dtype) if self.dtype and x.is_floating_point() else x for x in made)

    #
    # Actions
    #

    def use(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        """Create an optimizer for the trainable parameters of each model."""
        self.make_optimizer = optimizer
        models = [*self.models, *([] if self.unsharded is None else [self.reference])]
        self.optimizers = [optimizer([p for p in model.parameters() if p.requires_grad]) for model in models]

    def reset(self) -> None:
        """Restore the initial parameters and buffers, forget gradients and losses, and create new optimizers."""
        for model in self.every:
            (model.load_original_state_dict if _is_jitted(model) else model.load_state_dict)(self.initial)
            for param in model.parameters():
                param.grad = None
        if self.unsharded is not None:
            self.unsharded.discard()
        self.pending.clear()
        self.use(self.make_optimizer)

    def train(self, steps: int = 3, *args: Any, first: int = 0, **size: Any) -> None:
        """Run whole steps, whose number is the seed of their batches."""
        for step in range(first, first + steps):
            self.micro_batch(step, *args, no_sync=False, **size)
            self.step()

    def micro_batch(self, step: int = 0, *args: Any, no_sync: bool = True, **size: Any) -> None:
        """Run forward and backward."""
        self.forward(step, *args, no_sync=no_sync, **size)
        self.backward()

    def forward(self, step: int = 0, *args: Any, no_sync: bool = False, grad: bool = True, **size: Any) -> Any:
        """Run forward, compare outputs, and return the first model's. ``args`` follow the inputs.

        A tuple as a size holds one value for each rank.
        """
        outputs = []
        for model in self.models:
            with _no_sync(model, no_sync), torch.set_grad_enabled(grad):
                outputs.append(model(*self.inputs(step, **size), *args))
        for other in outputs[1:]:
            self.close(other, outputs[0], "output", tolerance=self.others_tolerance)
        expected = {}
        if self.unsharded is not None:
            for rank, model in self.unsharded.models.items():
                with torch.set_grad_enabled(grad):
                    expected[rank] = model(*self.inputs(step, rank=rank, **size), *args)
            self.close(outputs[0], expected[self.rank], "output")
        if grad:
            losses = {rank: loss_of(output) for rank, output in expected.items()}
            self.pending.append(Pending([loss_of(output) for output in outputs], losses, no_sync))
        return outputs[0]

    def backward(self, which: int = -1, *, retain: bool = False) -> None:
        """Run the backward of a pending loss, and reduce gradients unless its forward ran under ``no_sync``."""
        pending = self.pending[which] if retain else self.pending.pop(which)
        for model, loss in zip(self.models, pending.losses, strict=True):
            with _no_sync(model, pending.no_sync):
                loss.backward(retain_graph=retain)
        if self.unsharded is not None:
            self.unsharded.backward(pending.expected, retain=retain)
            if not pending.no_sync:
                self.unsharded.reduce()

    def gradients(self, seed: int, *, without: Sequence[str] = ("unused",)) -> None:
        """Set random gradients, the same on all ranks, of trainable parameters, so that nothing has to be traced."""
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.model.named_parameters():
            whole = torch.randn(param.shape, generator=generator, dtype=param.dtype).to(DEVICE)
            for model in [*self.models, *([] if self.unsharded is None else [self.reference])]:
                own = model.get_parameter(name)
                if hasattr(own, "rows"):
                    grad = RowDTensor.wrap(own.rows.of(whole).clone(), own.rows)
                else:
                    is_fsdp2 = isinstance(own, DTensor)
                    grad = distribute_tensor(whole, own.device_mesh, own.placements) if is_fsdp2 else whole.clone()
                if own.requires_grad and name not in without:
                    own.grad = grad

    def clip(self, max_norm: float = 0.05) -> None:
        """Clip gradients and compare their norms."""
        norms = [tfs.clip_grad_norm_(model, max_norm) for model in self.models]
        for norm in norms[1:]:
            self.close(norm, norms[0], "norm", tolerance=self.others_tolerance)
        if self.unsharded is not None:
            expected = torch.nn.utils.clip_grad_norm_(dict.fromkeys(self.unsharded.params.values()), max_norm)
            self.close(norms[0], expected, "norm")

    def step(self, *, set_to_none: bool = True) -> None:
        """Compare gradients, step optimizers, zero gradients, and compare parameters."""
        self.compare_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        self.compare_parameters()

    def mode(self, *, training: bool) -> None:
        for model in self.every:
            model.train(training)

    def freeze(self, *names: str, frozen: bool = True) -> None:
        for model in self.every:
            for name in names:
                model.get_parameter(name).requires_grad_(not frozen)

    def change(self, change: Callable[[torch.Tensor], Any], *names: str) -> None:
        """Change parameters in place, all if no name is given, by an elementwise function."""
        models = [*self.models, *([] if self.unsharded is None else [self.reference])]
        for model in models:
            for param in map(model.get_parameter, names) if names else model.parameters():
                with torch.no_grad():
                    change(param)

    def save_and_load(self) -> None:
        """Save checkpoints, zero parameters, create new optimizers, load, and compare."""
        folder = Path(everywhere(tempfile.mkdtemp())[0])
        for number, model in enumerate(self.models):
            tfs.save_checkpoint(model, folder / str(number), self.optimizers[number])
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            self.optimizers[number] = self.make_optimizer([p for p in model.parameters() if p.requires_grad])
            tfs.load_checkpoint(model, folder / str(number), self.optimizers[number])
        self.compare_parameters()
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)

    #
    # Comparisons
    #

    def rows(self, name: str, unsharded_value: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a parameter's value."""
        return self.model.get_parameter(name).rows.of(unsharded_value)

    def compare_gradients(self) -> None:
        """Compare this rank's rows with those of the mean over ranks, and whole gradients between sharded models."""
        for name, param in self.model.named_parameters():
            if not hasattr(param, "rows"):  # ignored by ``fsdp``
                continue
            grad = param.grad
            if self.unsharded is not None:
                mean = self.unsharded.params[name].grad
                assert (grad is None) == (mean is None), f"gradient of {name}: {grad}, expected {mean}"
                if grad is not None:
                    self.close(grad.to_local(), self.rows(name, mean), f"gradient of {name}")
            for model in self.models[1:]:
                other = model.get_parameter(name).grad
                assert (grad is None) == (other is None), f"gradient of {name}: {grad}, expected {other}"
                if grad is not None:
                    values = other.full_tensor(), grad.full_tensor()
                    self.close(*values, f"gradient of {name}", tolerance=self.others_tolerance)

    def compare_parameters(self) -> None:
        """Compare parameters and buffers."""
        ours = tfs.full_state_dict(self.model)
        for model in self.models[1:]:
            for name, value in _whole(model).items():
                self.close(value, ours[name], name, tolerance=self.others_tolerance)
        if self.unsharded is not None:
            theirs = self.reference.state_dict()
            for name, value in ours.items():
                self.close(value, theirs[name], name)

    def close(self, actual: Any, expected: Any, what: str, *, tolerance: float | None = None) -> None:
        bound = self.tolerance if tolerance is None else tolerance
        if isinstance(actual, torch.Tensor):  # offloaded shards and their gradients are on the CPU
            expected = expected.to(actual.device)
        message = lambda text: f"{what} on rank {self.rank}, {self.at}: {text}"  # noqa: E731
        torch.testing.assert_close(actual, expected, rtol=bound, atol=bound, msg=message)

    #
    # What has been compiled
    #

    def buckets(self, symbol: str, *, backward: bool = False, index: int = -1) -> list[str]:
        """Return the buckets of a kind of communication in a compiled trace, in the order of the trace."""
        compiled = self.transform.compiled[index]
        schedule = compiled.backward_schedule if backward else compiled.forward_schedule
        return [op.bucket for op in schedule.of(symbol)]


def _ranks_of(ranks: tfs.Ranks) -> list[int]:
    """Return the ranks over which gradients are averaged."""
    if ranks.mesh is not None:
        return ranks.mesh.mesh.flatten().tolist()
    if ranks.process_group is not None:
        return list(ranks.process_group.global_ranks)
    return list(range(dist.get_world_size()))


def _jit(module: nn.Module, **options: Any) -> nn.Module:
    return thunder.jit(module, transforms=[tfs.fsdp(**options)])


def fsdp2(module: nn.Module, *, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Shard a model and each of its blocks with FSDP2: an oracle for ``others``.

    Use it with ReLU: Thunder decomposes the backward of tanh and GELU, which rounds differently from eager torch.
    """
    mesh = mesh or init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for block in module.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


@contextlib.contextmanager
def _no_sync(model: Any, no_sync: bool) -> Iterator[None]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not no_sync)
        yield
    else:
        with model.no_sync() if no_sync else contextlib.nullcontext():
            yield


def _is_jitted(model: nn.Module) -> bool:
    return isinstance(model, thunder.core.module.ThunderModule)


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    if _is_jitted(model):
        return tfs.full_state_dict(model)
    return {name: whole_of(value) for name, value in model.state_dict().items()}


@contextlib.contextmanager
def saved_for_backward() -> Iterator[list[torch.Tensor]]:
    """Collect the tensors that compiled forwards save for backward."""
    saved: list[torch.Tensor] = []
    connect = thunder.connect_to_autograd

    def spy(*args: Any, saved_tensors: Sequence[torch.Tensor], **kwargs: Any) -> Any:
        saved.extend(getattr(t, "_local_tensor", t) for t in saved_tensors)
        return connect(*args, saved_tensors=saved_tensors, **kwargs)

    with mock.patch.object(thunder, "connect_to_autograd", spy):
        yield saved


def train_and_check_what_is_saved(run: Run, steps: int = 3, **size: Any) -> None:
    """Train. No tensor that is saved for backward may be in memory that other buckets overwrite."""
    with saved_for_backward() as saved:
        run.train(steps, **size)
    shared = {bucket.arena for bucket in run.transform.sharded.buckets}
    leaked = [tuple(t.shape) for t in saved if any(arena.span_of(t) for arena in shared)]
    assert saved and not leaked, f"saved tensors of shapes {leaked} are in memory that other buckets overwrite"
