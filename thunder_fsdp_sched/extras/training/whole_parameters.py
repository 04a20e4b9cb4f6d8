"""Run optimizers that need whole parameters, such as Muon, on shards: one rank updates each parameter.

[Note: One owner for each parameter]
A rank has some rows of each parameter. That is enough for optimizers that treat each element separately, such as AdamW
and SGD. But Muon orthogonalizes whole matrices, and Adafactor computes means over rows, over columns and over the whole
matrix. From a part of the rows, both would compute something else, so they are refused (``sharding.optimizer_steps``).

So each parameter has an *owner* among the ranks over which it is sharded. A step sends the rows of gradients and
parameters to their owners with one all-to-all. Each owner updates its parameters, and a second all-to-all returns the
new rows. Only the owner has a parameter's state, which is whole, as without sharding.

Parameters are sent in every step, although an owner could keep those that it has updated. So changes to the shards in
between, by a loaded checkpoint or by the user, are respected, and between two steps a rank holds only state.

Alternatives: gather each gradient on all ranks and update it on all of them, which multiplies compute and state by the
number of ranks. Or distribute the matrix products of the optimizer itself, which requires a special optimizer and one
collective per product, and does not yield the same bits.
"""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule

from ...errors import coded_error
from ...private_torch import labelled
from ...runtime.bucket import Bucket
from ...runtime.row_dtensor import local_rows
from ...sharding.sharded_module import find_jitted

_NAMES = ("params", "param_names")
"""Keys of a parameter group that are not optimizer options."""


class WholeParameters(torch.optim.Optimizer):
    """An optimizer that runs a torch optimizer, unchanged, on whole parameters of a sharded model.

    Use it for optimizers that do not treat each element separately, such as ``torch.optim.Muon`` and
    ``torch.optim.Adafactor``. Created directly on a sharded model's parameters, they would treat each rank's rows as a
    whole parameter and compute something else. These two are refused at their first step, **others like them are not
    recognized**. AdamW and SGD need only rows, and are faster without this::

        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        muon = tfs.WholeParameters(torch.optim.Muon, model, matrices, lr=0.02, weight_decay=0.1)
        adamw = torch.optim.AdamW([p for p in model.parameters() if all(p is not m for m in matrices)], lr=3e-4)

    Choose parameters by names and ``ndim``, which are the same on all ranks; the number of rows is not. The result is
    bit for bit that of the optimizer on the unsharded model with the same gradients. A parameter's state is whole and
    on one rank. Parameters are distributed so that their ranks own about equally many elements.

    A step sends the rows of gradients and parameters, and returns the new rows, with two collectives for each process
    group and dtype. These are all-to-alls, with a message to each rank. In all, a rank sends and receives three times
    its rows and three times the parameters that it owns, on any number of ranks. While it runs, each rank holds the
    whole gradients and parameters that it owns. The constructor, ``step`` and ``add_param_group`` are collectives.
    ``state_dict`` has the state of the parameters that this rank owns; use :func:`save_checkpoint` to change the number
    of ranks.

    Args:
        optimizer_class: any ``torch.optim.Optimizer`` whose ``step`` needs no closure.
        model: the jitted, sharded module.
        params: parameters of ``model``, named parameters or groups, as ``optimizer_class`` accepts them.
        options: all other arguments of ``optimizer_class``.

    Raises:
        TypeError: ``optimizer_class`` is not such a class, or ``model`` is not sharded by ``fsdp(...)``.
        ValueError: a parameter is not one of the model, or is not sharded.
        ScheduleDisagreement: ranks passed different parameters, or a different order.
    """

    inner: torch.optim.Optimizer
    """The optimizer that updates whole parameters."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        model: ThunderModule,
        params: Iterable[Any],
        **options: Any,
    ) -> None:
        _check_class(optimizer_class)
        self._class = optimizer_class
        model, self._sharded = find_jitted(model)
        self._names = {param: name for name, param in model.named_parameters()}
        self._params: dict[torch.Tensor, OwnedParam] = {}
        super().__init__(params, {})
        self._take(self.param_groups, options)

    def owns(self, param: torch.Tensor) -> bool:
        """Return whether this rank updates ``param`` and has its state."""
        return self._params[param].is_owned_here

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run one step of the optimizer; a collective. It skips parameters without gradients, the same on all ranks.

        Raises:
            ScheduleDisagreement: ranks have gradients of different parameters, or do something else.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # In an order that is the same on all ranks, even if they have parameters of different process groups.
        by_exchange: dict[tuple[Any, ...], list[OwnedParam]] = defaultdict(list)
        for param in self._params.values():
            if param.param.grad is not None:
                by_exchange[param.exchange_key].append(param)
        exchanges = [by_exchange[key] for key in sorted(by_exchange)]
        control = self._sharded.control
        every = itertools.chain.from_iterable(exchanges)
        control.rendezvous_in_step(
            "WholeParameters.step for", *(p.spec.name for p in every if p.bucket.is_on_all_ranks)
        )
        for params in exchanges:
            with labelled("rows_to_owners"):
                rows_to_owners(params)
        try:
            self._update()
        finally:  # even if this rank's update failed, because the others wait for their rows
            for params in exchanges:
                with labelled("rows_from_owners"):
                    rows_from_owners(params)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "inner"):  # the constructor passes all groups together
            try:
                self._take(self.param_groups[-1:], {})
            except Exception:
                del self.param_groups[-1]
                raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict()`` on this rank, from a run with the same ranks, parameters and groups.

        Raises:
            ValueError: it contains the state of a parameter that another rank owns.
        """
        numbers = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for number, param in zip(numbers, params, strict=False):  # the lengths are checked when loading
            if number in state_dict["state"] and not self.owns(param):
                raise coded_error(ValueError, "optimizer.state-of-other-rank", name=self._names[param])
        super().load_state_dict(state_dict)

    def _update(self) -> None:
        """Let the optimizer update the parameters that this rank owns, with current options and state."""
        inner = self.inner
        for ours, theirs in zip(self.param_groups, inner.param_groups, strict=True):
            theirs.update(_options(ours))  # a scheduler may have changed them
        owned = [param for param in self._params.values() if param.is_owned_here]
        inner.state = defaultdict(dict, {p.unsharded: self.state[p.param] for p in owned if p.param in self.state})
        inner.step()
        self._keep_state()
        for ours, theirs in zip(self.param_groups, inner.param_groups, strict=True):
            ours.update(_options(theirs))  # some optimizers count steps there

    def _keep_state(self) -> None:
        inner = self.inner
        for param in self._params.values():
            if param.is_owned_here and param.unsharded in inner.state:
                self.state[param.param] = inner.state[param.unsharded]
        inner.state = defaultdict(dict)  # frees state that a loaded state replaces

    def _take(self, groups: Sequence[dict[str, Any]], options: dict[str, Any]) -> None:
        """Check groups, compare them among ranks, assign an owner to each parameter, and add them to the optimizer."""
        new = {param: self._param(param) for group in groups for param in group["params"]}
        # Ranks with different parameters would block each other in `step`, or drift apart.
        self._sharded.control.check_same_in_groups(
            f"what WholeParameters was given for {self._class.__name__}",
            [
                (group_of_ranks, f"group {i}: {new[param].spec}")
                for i, group in enumerate(groups)
                for param in group["params"]
                for group_of_ranks in new[param].bucket.ranks.groups
            ],
        )
        unsharded_groups = [
            {**_options(group), "params": [new[param].unsharded for param in group["params"]]} for group in groups
        ]
        # Every rank passes all parameters to the optimizer, so that errors occur on all ranks.
        if hasattr(self, "inner"):
            for whole in unsharded_groups:
                self.inner.add_param_group(whole)
        else:
            self.inner = self._class(unsharded_groups, **options)
            self.defaults = self.inner.defaults
        choose_owners(self._params.values(), new.values())
        self._params |= new
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            ours.update(_options(theirs))
            theirs["params"] = [self._params[param].unsharded for param in ours["params"] if self.owns(param)]
        self._keep_state()  # some optimizers create it in the constructor

    def _param(self, param: torch.Tensor) -> OwnedParam:
        name = self._names.get(param)
        if name is None:
            raise coded_error(ValueError, "optimizer.tensor-not-model-parameter", shape=tuple(param.shape))
        if name not in self._sharded.locations:
            raise coded_error(ValueError, "optimizer.parameter-not-sharded", name=name, optimizer=self._class.__name__)
        return OwnedParam(*self._sharded.locations[name])


def _check_class(optimizer_class: object) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise coded_error(TypeError, "optimizer.class-not-of-torch", optimizer_class=optimizer_class)
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise coded_error(TypeError, "optimizer.class-requires-closure", name=optimizer_class.__name__)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NAMES}


class OwnedParam:
    """A parameter, this rank's rows of it, and its owner.

    Attributes:
        param: the parameter of the sharded model.
        local: this rank's rows, as a plain tensor.
        unsharded: the parameter that the optimizer updates. Outside of a step it has a shape but no memory.
        owner: the rank that updates it, in the process group over which it is sharded.
    """

    def __init__(self, bucket: Bucket, index: int) -> None:
        self.param, self.spec, self.rows = bucket.params[index], bucket.spec.params[index], bucket.rows[index]
        self.local = local_rows(self.param)
        self.bucket, self.group = bucket, bucket.ranks.group
        self.owner = 0
        self.unsharded = torch.nn.Parameter(self._blank(), self.param.requires_grad)

    @property
    def is_owned_here(self) -> bool:
        return self.owner == self.group.rank

    @property
    def exchange_key(self) -> tuple[Any, ...]:
        """A key that is equal for parameters that one collective can send, and that sorts equally on all ranks."""
        return (tuple(self.group.global_ranks), self.group.name, str(self.local.dtype), str(self.spec.device))

    def allocate(self) -> None:
        """Allocate memory for :attr:`unsharded` and its gradient."""
        self.unsharded.data = torch.empty_like(self.unsharded, memory_format=torch.contiguous_format)
        self.unsharded.grad = torch.empty_like(self.unsharded)

    def of_rank(self, rank: int) -> slice:
        """Return the rows of ``rank`` in :attr:`unsharded`."""
        return slice(*self.rows.starts[rank : rank + 2])

    def free(self) -> None:
        self.unsharded.grad = None
        self.unsharded.data = self._blank()

    def _blank(self) -> torch.Tensor:
        # A 0-dim parameter counts as one row, as in its bucket and in checkpoints.
        return self.local.new_zeros(()).expand(self.rows.shape or (1,))


def choose_owners(known: Iterable[OwnedParam], new: Iterable[OwnedParam]) -> None:
    """Assign new parameters, largest first, to the rank that owns least; among equals to the one with most of its rows."""
    loads: dict[str, list[int]] = defaultdict(list)
    for param in itertools.chain(known, sorted(new, key=lambda p: -p.spec.numel)):
        load = loads.setdefault(param.group.name, [0] * param.group.size)
        if param in new:
            param.owner = min(zip(load, (-length for length in param.rows.lengths), itertools.count(), strict=False))[
                -1
            ]
        load[param.owner] += param.spec.numel


def rows_to_owners(params: Sequence[OwnedParam]) -> None:
    """Send this rank's rows of parameters and gradients to their owners."""
    mine = [p for p in params if p.is_owned_here]
    for param in mine:
        param.allocate()
    _all_to_all(
        params[0],
        [[t for p in params if p.owner == rank for t in _with_grad(p.param)] for rank in _ranks(params)],
        [[t[p.of_rank(rank)] for p in mine for t in _with_grad(p.unsharded)] for rank in _ranks(params)],
    )


def rows_from_owners(params: Sequence[OwnedParam]) -> None:
    """Send updated rows from this rank to the ranks that hold them, and receive its own rows from the other owners."""
    mine = [p for p in params if p.is_owned_here]
    _all_to_all(
        params[0],
        [[p.unsharded[p.of_rank(rank)] for p in mine] for rank in _ranks(params)],
        [[p.local for p in params if p.owner == rank] for rank in _ranks(params)],
    )
    torch.autograd.graph.increment_version(p.param for p in params)
    for param in mine:
        param.free()


def _with_grad(param: Any) -> tuple[Any, Any]:
    return param, param.grad


def _ranks(params: Sequence[OwnedParam]) -> range:
    return range(params[0].group.size)


def _all_to_all(param: OwnedParam, sent: Sequence[Sequence[Any]], received: Sequence[Sequence[torch.Tensor]]) -> None:
    """Send tensors to each rank of a group, and copy those from each rank to ``received``; one collective.

    Args:
        param: a parameter with the group, the device and the dtype to use.
    """
    group, device = param.group, param.spec.device
    counts, lengths = ([sum(local_rows(t).numel() for t in tensors) for tensors in each] for each in (sent, received))
    outgoing = torch.cat([param.local.new_empty(0), *(local_rows(t).reshape(-1) for tensors in sent for t in tensors)])
    incoming = outgoing
    if group.size > 1:
        # They may be on a device that the group does not support, such as the CPU.
        incoming = outgoing.new_empty(sum(lengths), device=device)
        assert param.bucket.control is not None
        with param.bucket.control.doing("the exchange of rows with the owners of whole parameters"):
            dist.all_to_all_single(incoming, outgoing.to(device), lengths, counts, group=group.process_group)
    targets = list(itertools.chain.from_iterable(received))
    pieces = incoming.to(param.local.device).split([target.numel() for target in targets])
    for target, piece in zip(targets, pieces, strict=True):
        target.copy_(piece.view(target.shape))
