"""Mutations that tests once did not notice. ``mutate.py`` runs them; ``README.md`` says which test kills each."""

from __future__ import annotations

from typing import NamedTuple

_VERIFY = ("tests/proof/test_verify.py", "tests/proof/test_mutants.py")
_SORT = (
    "tests/transforms/test_schedule.py",
    "tests/transforms/test_passes.py",
    "tests/transforms/test_random_traces.py",
)
_SLOTS = ("tests/transforms/test_passes.py", "tests/transforms/test_random_traces.py", "tests/ir/test_live_memory.py")
_PLAN = ("tests/plan",)
_GRADIENTS = (
    "tests/training/test_gradients.py",
    "tests/training/test_gradient_hooks.py",
    "tests/training/test_unused_outputs.py",
)
_TRAINS = "tests/test_training.py::test_trains_like_the_unsharded_model[{}-alternating]"
_AGREEMENT = (
    "tests/agreement/test_decisions.py",
    "tests/agreement/test_rounds.py",
    "tests/agreement",
    "tests/test_virtual_gpu_agreement.py",
)


class Listed(NamedTuple):
    """A change that removes one rule.

    Attributes:
        name: its id.
        rule: the rule, for people.
        file: the file, from the folder of the package.
        old, new: a text that occurs once in the file, and what takes its place.
        tests: what ought to fail, the sharpest first.
    """

    name: str
    rule: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


LISTED = (
    Listed(
        "Z1",
        "with NCCL, backward issues nothing before it knows whether a rank has lost a bucket",
        "transforms/insert_agreement.py",
        "(before_issue or start.expected)",
        "before_issue",
        _AGREEMENT,
    ),
    Listed(
        "G1",
        "what an earlier backward was asked for does not count for the next",
        "runtime/autograd.py",
        "if request is None or request.number != backward_number():",
        "if request is None:",
        _GRADIENTS,
    ),
    Listed(
        "P1",
        "a statement does not write over what it reads",
        "proof/machine.py",
        "if needed.content != root and needed.overlaps(",
        "if False and needed.overlaps(",
        _VERIFY,
    ),
    Listed(
        "P2",
        "a wait returns the bucket that was sent",
        "proof/machine.py",
        "if issue.kind not in kinds or issue.bucket is not effect.bucket:",
        "if issue.kind not in kinds:",
        _VERIFY,
    ),
    Listed(
        "P3",
        "gradients do not overwrite the parameter that the same statement reads",
        "proof/machine.py",
        "if needed.content != root and needed.overlaps(",
        "if needed.content != root and content == _params(region) and needed.overlaps(",
        _VERIFY,
    ),
    Listed(
        "P5",
        "a gather in a window finds in its slot what it may leave there",
        "proof/machine.py",
        "if issue.resident or issue.window is not None:\n            self._check(",
        "if issue.resident:\n            self._check(",
        _VERIFY,
    ),
    Listed(
        "P7",
        "nothing reads a value after its `del`",
        "proof/machine.py",
        "self.defined_at.pop(name, None)",
        "pass",
        (*_VERIFY, "tests/proof/test_later_transforms.py"),
    ),
    Listed(
        "P8",
        "a name that is used again needs nothing of its former value",
        "proof/machine.py",
        "known.pop(out, None)  # another trace may have used the name",
        "pass",
        (*_VERIFY, "tests/transforms/test_passes.py"),
    ),
    Listed(
        "S1",
        "the limit on reductions in flight holds for each group",
        "transforms/sort_communication.py",
        "if r.holds_slot and r.group is reduction.group]",
        "if r.holds_slot]",
        _SORT,
    ),
    Listed(
        "S2",
        "a gather lives until the reduction that reads its parameter",
        "transforms/sort_communication.py",
        "gather.last = max(gather.last, reduction.ready)",
        "pass",
        _SORT,
    ),
    Listed(
        "S3",
        "a wait waits for reductions of its own group",
        "transforms/sort_communication.py",
        "[r for r in self.reducing if r.group is until.group]",
        "list(self.reducing)",
        _SORT,
    ),
    Listed(
        "S4",
        "an all-reduce follows only a reduce-scatter that is large enough to hide its own",
        "transforms/sort_communication.py",
        "if reduction.nbytes * _SMALL >= earlier.nbytes:",
        "if True:",
        (*_SORT, "tests/distributed/test_groups.py"),
    ),
    Listed(
        "S5",
        "no gather moves across the communication of others",
        "transforms/sort_communication.py",
        "if section != self.section[min(position + 1, len(self.section) - 1)]:",
        "if False:",
        _SORT,
    ),
    Listed(
        "S6",
        "compute that communicates belongs to the section that it ends",
        "transforms/sort_communication.py",
        "accumulate(ends[:-1], initial=0)",
        "accumulate(ends)",
        _SORT,
    ),
    Listed(
        "S7",
        "a small prefetch step hides only a part of a larger gather",
        "transforms/sort_communication.py",
        "hidden += min(nbytes, stage_bytes[point])",
        "hidden += nbytes",
        _SORT,
    ),
    Listed(
        "S8",
        "a reduction that reads a gathered parameter follows its wait",
        "transforms/sort_communication.py",
        "reduction.ready = max(reduction.ready, gather.first)",
        "pass",
        _SORT,
    ),
    Listed(
        "I1",
        "each gradient that is copied counts as written at the reduction, the others where they are written",
        "ir/slots.py",
        "reduction.accesses.get(index, reduction.issue)",
        "reduction.issue",
        _SLOTS,
    ),
    Listed(
        "I3",
        "a gradient takes the place of its parameter after the last read",
        "ir/slots.py",
        "read < write for read, write",
        "True for read, write",
        _SLOTS,
    ),
    Listed(
        "A1",
        "slots that meet at one statement share no bytes",
        "transforms/assign_slots.py",
        "if other.last >= live.first]",
        "if other.last > live.first]",
        _SLOTS,
    ),
    Listed(
        "A2",
        "of equally large slots, the first in the trace is placed first",
        "transforms/assign_slots.py",
        "lambda r: (-r.nbytes, r.first),",
        "lambda r: (-r.nbytes, -r.first),",
        (*_SLOTS, "tests/test_freeze.py"),
    ),
    Listed(
        "A5",
        "the budget also counts kept buckets that this trace does not gather",
        "transforms/assign_slots.py",
        "elsewhere = set(kept_buckets) - {region.bucket.base for region in gathered}",
        "elsewhere: set[Bucket] = set()",
        (*_SLOTS, "tests/ir", "tests/planning/test_search.py"),
    ),
    Listed(
        "A6",
        "only slots of one arena are neighbours",
        "transforms/assign_slots.py",
        "if other.bucket.arena is live.bucket.arena:",
        "if True:",
        (*_SLOTS, "tests/distributed/test_groups.py"),
    ),
    Listed(
        "A7",
        "a slot counts for the peak at its last position, too",
        "ir/analysis.py",
        "changes[last + 1] -= nbytes",
        "changes[max(last, 0)] -= nbytes",
        ("tests/ir/test_live_memory.py", *_SLOTS),
    ),
    Listed(
        "Z2",
        "a gradient with other readers is not written in place",
        "transforms/write_grads_in_place.py",
        "or len(value.reads) != 1 ",
        "",
        ("tests/transforms/test_write_grads_in_place.py", *_SLOTS),
    ),
    Listed("L3", "shards start at aligned elements", "plan/layout.py", "math.lcm(align, *(w", "math.lcm(1, *(w", _PLAN),
    Listed("L4", "padding beyond an eighth divides a segment", "plan/layout.py", "= 1 / 8", "= 1 / 4", _PLAN),
    Listed(
        "X4",
        "of a knot, the collective that overtakes the fewest is next",
        "extras/ranks_differ/merging.py",
        "return max(self.before[key] - self.placed[key[0] != GATHER], 0)",
        "return 0",
        ("tests/differ/test_merging.py", "tests/differ/test_latency.py"),
    ),
    Listed(
        "K1",
        "buckets of programs that differ share one bit",
        "runtime/trace_start.py",
        "_BITS if agreed.is_alike else 1",
        "_BITS",
        _AGREEMENT,
    ),
    Listed(
        "K2",
        "ranks compare the gradients that only earlier micro-batches have",
        "runtime/trace_start.py",
        "tuple(self._reduced), self._deferred, self._left",
        'tuple(self._reduced), "", self._left',
        (*_AGREEMENT, "tests/training/test_windows.py"),
    ),
    Listed(
        "H2",
        "each all-gather of the channel has a tag of its own",
        "ranks/channel.py",
        "self._started = self._started % 0x7FFFFFFF + 1",
        "self._started = 1",
        _AGREEMENT,
    ),
    Listed(
        "C2",
        "a rendezvous is one of a model",
        "ranks/control.py",
        'hash64("call", self.number, what',
        'hash64("call", what',
        _AGREEMENT,
    ),
    Listed(
        "O1",
        "a reduction in the private slot overwrites the parameters",
        "runtime/ops.py",
        "arena.begin_write(slot)\n    unsharded = slot.grads",
        "arena.begin_use(slot)\n    unsharded = slot.grads",
        (_TRAINS.format("copied gradients in the place of kept parameters"),),
    ),
)
