"""Run optimizers that need whole parameters, such as Muon, on shards: one rank updates each parameter.

[Note: One owner for each parameter]
A rank has some rows of each parameter. That is enough for optimizers that treat each element separately, such as AdamW
and SGD. But Muon orthogonalizes whole matrices, and Adafactor computes means over rows, over columns and over the whole
matrix. On some of the rows, both would compute something else, and are refused (``sharding.state_entries``).

So each parameter has an *owner* among the ranks over which it is sharded. A step sends the rows of gradients and
parameters to their owners with one all-to-all. Each owner updates its parameters, and a second all-to-all returns the
new rows. Only the owner has a parameter's state, which is whole, as without sharding.

Parameters are sent in every step, although an owner could keep those that it has updated. This way, changes to the
shards in between, by a loaded checkpoint or by the user, are respected, and between two steps ranks hold nothing but
state.

Alternatives: gather each gradient on all ranks and update it on all of them, which multiplies compute and state by the
number of ranks. Or distribute the matrix products of the optimizer itself, which requires a special optimizer and one
collective per product, and does not yield the same bits.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule

from ..runtime.bucket import Bucket
from ..runtime.row_dtensor import local_rows
from ..sharding.sharded_module import find_jitted

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
    group and dtype. While it runs, each rank holds the whole gradients and parameters that it owns. The constructor,
    ``step`` and ``add_param_group`` are collectives. ``state_dict`` has the state of the parameters that this rank
    owns; use :func:`save_checkpoint` to change the number of ranks.

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
        self._inner: torch.optim.Optimizer | None = None
        super().__init__(params, {})
        self._take(self.param_groups, options)

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that updates whole parameters."""
        assert self._inner is not None
        return self._inner

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
        control.rendezvous(
            "WholeParameters.step for", *(p.spec.name for p in every if control.is_on_all_ranks(p.bucket))
        )
        for params in exchanges:
            with torch.profiler.record_function("fsdp_rows_to_owners"):
                rows_to_owners(params)
        try:
            self._update()
        finally:  # even if this rank's update failed, because the others wait for their rows
            for params in exchanges:
                with torch.profiler.record_function("fsdp_rows_from_owners"):
                    rows_from_owners(params)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._inner is not None:  # the constructor passes all groups together
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
                raise ValueError(
                    f"state_dict: it has the state of {self._names[param]!r}, which another rank owns: it was saved by "
                    f"another rank, or with another number of ranks. save_checkpoint and load_checkpoint support any number"
                )
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
        self._agree([[new[param] for param in group["params"]] for group in groups])
        unsharded_groups = [
            {**_options(group), "params": [new[param].unsharded for param in group["params"]]} for group in groups
        ]
        # Every rank passes all parameters to the optimizer, so that errors occur on all ranks.
        if self._inner is None:
            self._inner = self._class(unsharded_groups, **options)
            self.defaults = self._inner.defaults
        else:
            for whole in unsharded_groups:
                self._inner.add_param_group(whole)
        choose_owners(self._params.values(), new.values())
        self._params |= new
        for ours, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            ours.update(_options(theirs))
            theirs["params"] = [self._params[param].unsharded for param in ours["params"] if self.owns(param)]
        self._keep_state()  # some optimizers create it in the constructor

    def _param(self, param: torch.Tensor) -> OwnedParam:
        name = self._names.get(param)
        if name is None:
            raise ValueError(
                f"params: a tensor of shape {tuple(param.shape)} is no parameter of the model: pass parameters of the "
                f"jitted module, model.parameters()"
            )
        if name not in self._sharded.locations:
            raise ValueError(
                f"params: {name!r} is not sharded (ignored_params), every rank has it whole: pass it to "
                f"{self._class.__name__} directly"
            )
        return OwnedParam(*self._sharded.locations[name])

    def _agree(self, groups: Sequence[Sequence[OwnedParam]]) -> None:
        """Raise an error if parameters differ between ranks, which would block each other in ``step`` or drift apart."""
        self._sharded.control.check_same_in_groups(
            f"what WholeParameters was given for {self._class.__name__}",
            [
                (group, f"group {i}: {param.spec}")
                for i, params in enumerate(groups)
                for param in params
                for group in param.bucket.ranks.groups
            ],
        )


def _check_class(optimizer_class: object) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(
            f"optimizer_class: expected a class of torch.optim, torch.optim.Muon for example, got {optimizer_class!r}"
        )
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"optimizer_class: {optimizer_class.__name__} computes the loss several times in a step, and one direction for "
            f"all parameters: it cannot be spread over ranks"
        )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NAMES}


class OwnedParam:
    """A parameter, this rank's rows of it, and its owner.

    Attributes:
        param: the parameter of the sharded model.
        rows: this rank's rows, as a plain tensor.
        unsharded: the parameter that the optimizer updates. Outside of a step it has a shape but no memory.
        owner: the rank that updates it, in the process group over which it is sharded.
    """

    def __init__(self, bucket: Bucket, index: int) -> None:
        self.param = bucket.params[index]
        self.rows = local_rows(self.param)
        self.spec = bucket.spec.params[index]
        self.bucket, self.group = bucket, bucket.ranks.group
        self.owner = 0
        self._all_rows = bucket.rows[index]
        self.unsharded = torch.nn.Parameter(self._blank(), self.param.requires_grad)

    @property
    def is_owned_here(self) -> bool:
        return self.owner == self.group.rank

    @property
    def exchange_key(self) -> tuple[Any, ...]:
        """A key that is equal for parameters that one collective can send, and that sorts equally on all ranks."""
        return (tuple(self.group.global_ranks), self.group.name, str(self.rows.dtype), str(self.spec.device))

    @property
    def grad(self) -> torch.Tensor:
        """Return this rank's rows of the gradient, which must exist."""
        assert self.param.grad is not None
        return local_rows(self.param.grad)

    def shape_on(self, rank: int) -> tuple[int, ...]:
        return (self._all_rows.lengths[rank], *self._all_rows.shape[1:])

    def rows_of(self, rank: int) -> torch.Tensor:
        start, end = self._all_rows.starts[rank : rank + 2]
        return self.unsharded[start:end]

    def fill(self, values: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Assemble :attr:`unsharded` from the rows of each rank."""
        self.unsharded.data = torch.cat(list(values))
        self.unsharded.grad = torch.cat(list(grads))

    def empty(self) -> None:
        self.unsharded.grad = None
        self.unsharded.data = self._blank()

    def _blank(self) -> torch.Tensor:
        # A 0-dim parameter counts as one row, as in its bucket and in checkpoints.
        return self.rows.new_zeros(()).expand(self._all_rows.shape or (1,))


def choose_owners(known: Iterable[OwnedParam], new: Iterable[OwnedParam]) -> None:
    """Assign new parameters, largest first, to the rank that owns least; among equals to the one with most of its rows."""
    loads: dict[str, list[int]] = {}
    for param in known:
        loads.setdefault(param.group.name, [0] * param.group.size)[param.owner] += param.spec.numel
    for param in sorted(new, key=lambda p: -p.spec.numel):
        load = loads.setdefault(param.group.name, [0] * param.group.size)
        param.owner = min((load[rank], -param.shape_on(rank)[0], rank) for rank in range(param.group.size))[-1]
        load[param.owner] += param.spec.numel


def rows_to_owners(params: Sequence[OwnedParam]) -> None:
    """Send this rank's rows of parameters and gradients to their owners, which assemble them."""
    group = params[0].group
    mine = [p for p in params if p.is_owned_here]
    received = _all_to_all(
        params[0],
        [[t for p in params if p.owner == rank for t in (p.rows, p.grad)] for rank in range(group.size)],
        [[shape for p in mine for shape in (p.shape_on(rank), p.shape_on(rank))] for rank in range(group.size)],
    )
    for i, param in enumerate(mine):
        param.fill([pieces[2 * i] for pieces in received], [pieces[2 * i + 1] for pieces in received])


def rows_from_owners(params: Sequence[OwnedParam]) -> None:
    """Send updated rows from this rank to the ranks that hold them, and receive its own rows from the other owners."""
    group = params[0].group
    mine = [p for p in params if p.is_owned_here]
    by_owner = [[p for p in params if p.owner == rank] for rank in range(group.size)]
    received = _all_to_all(
        params[0],
        [[p.rows_of(rank) for p in mine] for rank in range(group.size)],
        [[p.shape_on(group.rank) for p in owned] for owned in by_owner],
    )
    updated = [param for owned in by_owner for param in owned]
    torch._foreach_copy_([p.rows for p in updated], list(itertools.chain.from_iterable(received)))
    torch.autograd.graph.increment_version(p.param for p in updated)
    for param in mine:
        param.empty()


def _all_to_all(
    of: OwnedParam, sent: Sequence[Sequence[Any]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[torch.Tensor]]:
    """Send tensors to each rank of a group and return those from each, with the given shapes; one collective.

    Args:
        of: a parameter with the group, the device and the dtype to use.
    """
    group, rows, device = of.group, of.rows, of.spec.device
    lengths = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
    outgoing = torch.cat([rows.new_empty(0), *(t.reshape(-1) for of_rank in sent for t in of_rank)])
    if group.size == 1:
        incoming = outgoing
    else:
        # They may be on a device that the group does not support, such as the CPU.
        incoming = rows.new_empty(sum(map(sum, lengths)), device=device)
        counts = [sum(t.numel() for t in of_rank) for of_rank in sent]
        process_group = group.process_group
        assert of.bucket.control is not None
        with of.bucket.control.doing("the exchange of rows with the owners of whole parameters"):
            dist.all_to_all_single(incoming, outgoing.to(device), list(map(sum, lengths)), counts, group=process_group)
    flat = iter(incoming.to(rows.device).split(list(itertools.chain.from_iterable(lengths))))
    return [[next(flat).view(shape) for shape in of_rank] for of_rank in shapes]
