"""Agreement of one model's ranks: on what they shard and compile, and on each set of collectives before it runs.

[Note: Agreement of ranks]
Before the collectives of a trace, a state dict, a checkpoint and so on, every rank announces which of these it is about
to run. The announcement is a round of the channel (see [Note: Rounds] in ``channel``). In a trace, ``fsdp_agree`` posts
the round and ``fsdp_agreed`` settles it. With gloo, it is settled before the first collective is issued, because gloo
aborts the process if sizes differ. With NCCL, a forward settles it before the first wait, so the round overlaps the
first gather; a backward that expects resident buckets settles it before it sends anything.

A token identifies the *agreed program*, not the trace: ranks may run traces of different shapes whose collectives
match, and with ``process_group_for`` even different programs. ``check_program`` compared the programs when they
were compiled and numbered those that match.

The token also has bits for buckets that need not be gathered if they are resident: see [Note: Decisions of one rank].
A forward in a window may skip the gather of a bucket that an earlier micro-batch has gathered. If this rank could, it
waits for the round at once, because the answers decide what it gathers. A backward expects the buckets that forward has
kept or left. If all of them are resident on this rank, it computes with them before the round has ended. It settles the
round before it sends anything, and takes part in gathering the buckets that other ranks have lost. A rank that has lost
some waits at once, and gathers them first.

The token also contains how many more collectives this rank has issued than the traces that it started contain. That is
0 unless an exception interrupted a trace. Otherwise ranks that were interrupted at different collectives would match
collectives that do not belong together.

[Note: Decisions of one rank]
No decision that one rank makes alone changes what it sends. State that could make ranks issue different collectives, or
reduce different gradients, is part of the token. If it is in the hash and differs, all ranks raise an error. If it is
in the bits, only what all ranks offer is left out, so a wrong answer of one rank costs all ranks a gather.

=================================================  ============================================================
decision                                           where the ranks agree on it
=================================================  ============================================================
how a module is sharded, with which options        ``check_same`` in ``thunder.jit``
whether a trace is compiled for new inputs         a round that a rank in a cached trace does not join: error
its collectives, marks and computation             ``check_program``, when it is compiled
that a call or a backward fails before its trace   ``Control.announce``: a round that the others do not join
which compiled trace runs                          the hash: the number of the agreed program
what an exception has left out                     the hash: ``IssueCounts.surplus_issues``
which gradients of ``no_sync`` are reduced         the hash; by process group if not all ranks share the bucket
that backward leaves such gradients (``inputs``)   the hash, of buckets that all ranks share
that such gradients are discarded                  ``discard_unreduced``, which is a round
that a failed backward has left no such gradients  the hash: ``Accumulation.dropped``
whether backward has what forward kept or left     offered (``TraceStart.expected``): else all gather it again
whether the memory of what it kept was freed       the hash: ``SlotOfBucket.is_freed``
whether a window has left a bucket for forward     offered (``TraceStart.reusable_gathers``): else all gather it
whether an optimizer's step has gathered for it    the same; whether it gathers: a round (``EarlyStep``)
which parameters have no gradient                  the last hash; if it differs, names: those that no rank has used
whether an asynchronous save has failed            offered: the error is raised once all ranks know of it
what a search for settings finds                   one rank searches for all: ``choosing.decide_once``
whether the first run of its trace is audited      offered: then all ranks end the run with ``report``
that its traces exceed ``max_memory``, or a later
transform has broken them                          an error here, of which ``announcing_failure`` tells the others
any other call that communicates                   ``rendezvous`` with its name and arguments
=================================================  ============================================================

With ``agree="compile"`` or ``"never"`` there is no round in a step, and nothing is offered. Then all steps are alike:
no gather is ever left out, a kept bucket that is lost before backward is an error, and a parameter has a gradient
whether or not it was used.

With ``ranks_may_differ``, programs, gradients of ``no_sync`` and lost buckets may differ, and nothing is compared when a
trace is compiled: see [Note: Ranks that differ] in ``extras.ranks_differ.programs``.

Each rank decides alone whether it casts a shard again, which memory it frees, and when the host waits, because these
decisions change nothing that is sent.

[Note: Comparing texts]
When ranks shard or compile, they compare texts in a round, which also detects a rank that does something else. The
tokens contain a digest of the texts. If all digests are the same, nothing more is exchanged, for any number of ranks.
Otherwise the ranks exchange details in two all-gathers, because other shapes and other process groups may be right. If
they are not, two ranks broadcast their texts, in which every rank finds the same first difference. So all ranks raise
the same error, and none hangs.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist

from ..errors import coded_error
from .process_groups import ProcessGroupRef
from .rounds import IssueCounts

Agreement = Literal["step", "compile", "never"]
"""How often ranks agree: before each compiled trace runs, when they compile it, or not at all."""


class Control:
    """The agreement of the ranks that share one model. This class is for a single rank, and sends nothing.

    ``JointControl`` is for several ranks, and documents the methods.

    Args:
        group: the ranks.
        name: the model's unique name, the same on all ranks.
        title: the model's name in messages.
        agreement: how often they agree.
    """

    def __init__(
        self, group: ProcessGroupRef, name: str = "", title: str = "the model", *, agreement: Agreement = "step"
    ) -> None:
        self.group = group = replace(group)  # models given one `Ranks` object, or one mesh, share `group`
        self.title = title
        self.number = hash64(name)
        self.failure: Callable[[], object] | None = None  # raises the error of an asynchronous save
        self.issue_counts = IssueCounts()
        self.agreement = agreement
        _controls[group] = weakref.ref(self)

    @property
    def global_rank(self) -> int:
        """This process's global rank."""
        return self.group.global_ranks[self.group.rank]

    @property
    def is_single_rank(self) -> bool:
        """Whether there are no other ranks to agree with."""
        return True

    @property
    def agrees_in_steps(self) -> bool:
        """Whether the ranks agree before each compiled trace runs; a single rank does."""
        return True

    @property
    def is_alike(self) -> bool:
        """Whether all ranks had the same digest in the last round."""
        return True

    def process_group(self, otherwise: ProcessGroupRef) -> dist.ProcessGroup:
        """Return the process group for torch's own collectives after a round; ``otherwise`` without other ranks."""
        return otherwise.process_group

    def rendezvous(self, what: str, *details: str) -> None: ...

    def rendezvous_in_step(self, what: str, *details: str) -> None: ...

    def begin(self, what: str, *details: str) -> None: ...

    def settle(self) -> None: ...

    def exchange(self, what: str, value: Any) -> list[Any]:
        return [value]

    def reduce(self, what: str, values: Sequence[float], op: Any) -> list[float]:
        return list(values)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Wrap a collective so that its error names this rank, the collective, and what happened on the other ranks."""
        try:
            yield
        except RuntimeError as error:
            failure = coded_error(
                RuntimeError, "ranks.collective-failed", rank=self.global_rank, what=what, error=error
            )
            raise self.explained(failure) from error

    def explained(self, failure: RuntimeError) -> RuntimeError:
        return failure

    def report(self, what: str, failure: Exception | None, digest: int = 0) -> None:
        if failure is not None:
            raise failure

    def announce(self, what: str, failure: Exception) -> None: ...

    def announcing_failure(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def check_same(self, what: str, lines: Iterable[str]) -> None: ...

    def check_same_in_groups(
        self, what: str, lines: Iterable[tuple[ProcessGroupRef, str]], *, met: bool = False
    ) -> None: ...

    def all_or_none(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()


def hash64(*parts: object) -> int:
    """Return a 64-bit hash of values, for a token; it depends only on how they print."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little", signed=True)


_controls: weakref.WeakKeyDictionary[ProcessGroupRef, weakref.ref[Control]] = weakref.WeakKeyDictionary()
"""Weak both ways, because a control refers to its group."""


def control_of(group: ProcessGroupRef) -> Control:
    """Return the control whose ``group`` this is, hence of one model; a single-rank one if there is none."""
    known = _controls.get(group)
    return (known and known()) or Control(group)
