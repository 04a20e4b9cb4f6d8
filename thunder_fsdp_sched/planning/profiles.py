"""A measured step as a value, and the cost model that uses its times."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.effects import Issue, effects, is_declared
from ..ir.inspection import runs_nothing
from ..ir.json_files import read_json, write_json
from ..runtime.bucket import Bucket
from .clusters import GLOO
from .cost import Seconds

_FORMAT = 2


@dataclass(frozen=True)
class OpTime:
    """The measured time of one bound symbol of compute.

    Attributes:
        symbol: its name, the same whether or not it writes a gradient in place.
        shapes: dtypes and shapes of its tensors, inputs before outputs.
        host: seconds of the host for issuing it (0 on a CPU, where the host computes).
        device: seconds of compute.
    """

    symbol: str
    shapes: str
    host: float
    device: float


@dataclass(frozen=True)
class CollectiveTime:
    """The measured time of one collective.

    Attributes:
        kind: the name of its symbol.
        bucket: name of its bucket.
        nbytes: bytes of the unsharded bucket.
        wire: seconds from its issue to its end, without concurrent work.
        issue: seconds of the compute stream for the issue itself, including the copies of gradients that are not
            written in place.
        wait: seconds of the compute stream for the wait after the collective has finished.
        issue_host, wait_host: seconds of the host for them (0 on a CPU, where the two above are the host's).
    """

    kind: str
    bucket: str
    nbytes: int
    wire: float
    issue: float
    wait: float
    issue_host: float = 0.0
    wait_host: float = 0.0


_Time = TypeVar("_Time", OpTime, CollectiveTime)


@dataclass(frozen=True)
class Profile:
    """A measured step; :class:`MeasuredCost` turns it into a cost model.

    Attributes:
        world_size: ranks of the process group.
        device: the device on which it ran.
        synchronous: whether the host itself computes (CPU).
        forward, backward: compute in trace order; ``backward`` is empty without gradients.
        collectives: the collectives of both traces, in issue order.
        contention: share of compute speed that is lost while a collective runs, keyed by its kind.
        step_seconds: median time of the unmodified step, with overlapped communication, on the slowest rank.
    """

    world_size: int
    device: str
    synchronous: bool
    forward: tuple[OpTime, ...]
    backward: tuple[OpTime, ...]
    collectives: tuple[CollectiveTime, ...]
    contention: dict[str, float]
    step_seconds: float

    @property
    def compute_seconds(self) -> float:
        """The compute of forward and backward, including the host's cost of collectives."""
        ops = sum(op.host + op.device if self.synchronous else op.device for op in (*self.forward, *self.backward))
        return ops + sum(c.issue + c.wait for c in self.collectives)

    @property
    def communication_seconds(self) -> float:
        """The time of all collectives one after the other."""
        return sum(c.wire for c in self.collectives)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        write_json(path, _FORMAT, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file written by :meth:`save`.

        Raises:
            ValueError: the file is not one; the message names the file and the first fault.
        """
        return read_json(path, "profile", "profile", _FORMAT, cls)


class MeasuredCost:
    """The cost model that looks costs up in a profile, for any schedule of the same model, shapes and dtypes.

    The time of compute is the mean of all measured bound symbols with the same symbol and shapes.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.synchronous = profile.synchronous
        link: Mapping[str, Any] = GLOO if profile.synchronous else {}
        self.concurrent: int = link.get("concurrent", 1)
        self.gather_share: float = link.get("gather_share", 1.0)
        self.reduction_share: float = link.get("reduction_share", 0.0)
        self._ops = _means((*profile.forward, *profile.backward), lambda op: (op.symbol, op.shapes))
        self._collectives = _means(profile.collectives, lambda collective: (collective.kind, collective.bucket))

    def __repr__(self) -> str:
        return f"MeasuredCost({self.profile.device}, {self.profile.world_size} ranks)"

    def seconds(self, trace: TraceCtx) -> Sequence[Seconds]:
        return [self._compute(b) if computes(b) else self._communication(b) for b in trace.bound_symbols]

    def collective_seconds(self, issue: Issue) -> float:
        assert issue.bucket is not None
        return self._collective(issue.kind, issue.bucket).wire

    def contention(self, kind: str) -> float:
        return self.profile.contention.get(kind, 0.0)

    def host_copy_seconds(self, nbytes: int) -> float:
        raise ValueError("profile: it holds no copies to host memory; simulate them on a cluster (AnalyticCost)")

    def _communication(self, bsym: BoundSymbol) -> Seconds:
        e = effects(bsym)
        if e.issues is not None and e.bucket is not None:
            collective = self._collective(e.issues.kind, e.bucket)
            return Seconds(collective.issue_host, collective.issue)
        if e.waits is not None and e.bucket is not None:
            (kind,) = e.waits.kinds
            collective = self._collective(kind, e.bucket)
            return Seconds(collective.wait_host, collective.wait)
        return Seconds(0.0, 0.0)

    def _collective(self, kind: str, bucket: Bucket) -> CollectiveTime:
        try:
            return self._collectives[kind, bucket.spec.name]
        except KeyError:
            known = sorted({name for _, name in self._collectives})
            raise ValueError(f"profile: no {kind} of bucket {bucket.spec.name!r}; it has the buckets {known}") from None

    def _compute(self, bsym: BoundSymbol) -> Seconds:
        symbol, shapes = symbol_of(bsym), shapes_of(bsym)
        if (op := self._ops.get((symbol, shapes))) is None:
            raise ValueError(f"profile: it holds no {symbol} of {shapes}; measure a step of the same model and shapes")
        return Seconds(op.host, op.device)


def _means(times: Iterable[_Time], key: Callable[[_Time], tuple[str, str]]) -> dict[tuple[str, str], _Time]:
    """Return the mean of all times with the same key, by key."""
    found: dict[tuple[str, str], list[_Time]] = defaultdict(list)
    for one in times:
        found[key(one)].append(one)
    return {key: _mean(ones) for key, ones in found.items()}


def _mean(times: Sequence[_Time]) -> _Time:
    names = ("host", "device", "wire", "issue", "wait", "issue_host", "wait_host")
    known = [name for name in names if hasattr(times[0], name)]
    means: dict[str, Any] = {name: statistics.fmean(getattr(one, name) for one in times) for name in known}
    return dataclasses.replace(times[0], **means)


def computes(bsym: BoundSymbol) -> bool:
    """Return whether ``bsym`` counts as compute in a profile."""
    e = effects(bsym)
    communicates = e.issues is not None or e.waits is not None or e.ensures is not None or e.runs is not None
    return not runs_nothing(bsym) and (not is_declared(bsym.sym) or (e.bucket is not None and not communicates))


def symbol_of(bsym: BoundSymbol) -> str:
    """Return the name of ``bsym`` in a profile, the same for a matmul that writes a gradient in place."""
    is_in_place = effects(bsym).fills is not None
    return bsym.sym.name.removeprefix("fsdp_").removesuffix("_into") if is_in_place else bsym.sym.name


def shapes_of(bsym: BoundSymbol) -> str:
    """Return the dtypes and shapes of the tensors of ``bsym``, inputs before outputs."""
    tensors = (p for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs) if isinstance(p, TensorProxy))
    return " ".join(f"{t.dtype.shortname()}{list(t.shape)}" for t in tensors)
