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
        file: the file, from the folder of the package.
        old, new: a text that occurs once in the file, and what takes its place.
        tests: what ought to fail, the sharpest first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_BY_FILE: dict[str, list[tuple[str, str, str, tuple[str, ...]]]] = {
    "transforms/insert_agreement.py": [
        ("Z1", "(before_issue or start.expected)", "before_issue", _AGREEMENT),
    ],
    "runtime/autograd.py": [
        ("G1", "if request is None or request.number != backward_number():", "if request is None:", _GRADIENTS),
    ],
    "proof/machine.py": [
        ("P1", "if needed.content != root and needed.overlaps(", "if False and needed.overlaps(", _VERIFY),
        (
            "P2",
            "if issue.kind not in kinds or issue.bucket is not effect.bucket:",
            "if issue.kind not in kinds:",
            _VERIFY,
        ),
        (
            "P3",
            "if needed.content != root and needed.overlaps(",
            "if needed.content != root and content == _params(region) and needed.overlaps(",
            _VERIFY,
        ),
        (
            "P5",
            "if issue.resident or issue.window is not None:\n            self._check(",
            "if issue.resident:\n            self._check(",
            _VERIFY,
        ),
        ("P7", "self.defined_at.pop(name, None)", "pass", (*_VERIFY, "tests/proof/test_later_transforms.py")),
        (
            "P8",
            "known.pop(out, None)  # another trace may have used the name",
            "pass",
            (*_VERIFY, "tests/transforms/test_passes.py"),
        ),
    ],
    "transforms/sort_communication.py": [
        ("S1", "if r.holds_slot and r.group is reduction.group]", "if r.holds_slot]", _SORT),
        ("S3", "[r for r in self.reducing if r.group is until.group]", "list(self.reducing)", _SORT),
        (
            "S4",
            "if reduction.nbytes * _SMALL >= earlier.nbytes:",
            "if True:",
            (*_SORT, "tests/distributed/test_groups.py"),
        ),
        ("S5", "if section != self.section[min(position + 1, len(self.section) - 1)]:", "if False:", _SORT),
        ("S6", "accumulate(ends[:-1], initial=0)", "accumulate(ends)", _SORT),
        ("S7", "hidden += min(nbytes, stage_bytes[point])", "hidden += nbytes", _SORT),
        ("S8", "reduction.ready = max(reduction.ready, gather.first)", "pass", _SORT),
    ],
    "transforms/assign_slots.py": [
        ("A1", "if other.last >= live.first]", "if other.last > live.first]", _SLOTS),
        (
            "A2",
            "lambda r: (-r.nbytes, r.first),",
            "lambda r: (-r.nbytes, -r.first),",
            (*_SLOTS, "tests/test_freeze.py"),
        ),
        (
            "A6",
            "if other.bucket.arena is live.bucket.arena:",
            "if True:",
            (*_SLOTS, "tests/distributed/test_groups.py"),
        ),
    ],
    "ir/analysis.py": [
        ("I1", "reduction.accesses.get(index, reduction.issue)", "reduction.issue", _SLOTS),
        ("I3", "read < write for read, write", "True for read, write", _SLOTS),
        (
            "A7",
            "changes[last + 1] -= nbytes",
            "changes[max(last, 0)] -= nbytes",
            ("tests/ir/test_live_memory.py", *_SLOTS),
        ),
    ],
    "transforms/write_grads_in_place.py": [
        ("Z2", "or len(value.reads) != 1 ", "", ("tests/transforms/test_write_grads_in_place.py", *_SLOTS)),
    ],
    "plan/layout.py": [
        ("L3", "math.lcm(align, *(w", "math.lcm(1, *(w", _PLAN),
        ("L4", "= 1 / 8", "= 1 / 4", _PLAN),
    ],
    "extras/ranks_differ/merging.py": [
        (
            "X4",
            "return max(self.before[key] - self.placed[key[0] != GATHER], 0)",
            "return 0",
            ("tests/differ/test_merging.py", "tests/differ/test_latency.py"),
        ),
    ],
    "runtime/trace_start.py": [
        ("K1", "_BITS if agreed.is_alike else 1", "_BITS", _AGREEMENT),
        (
            "K2",
            "tuple(self._reduced), self._deferred, self._left",
            'tuple(self._reduced), "", self._left',
            (*_AGREEMENT, "tests/training/test_windows.py"),
        ),
    ],
    "ranks/channel.py": [
        ("H2", "self._started = self._started % 0x7FFFFFFF + 1", "self._started = 1", _AGREEMENT),
    ],
    "ranks/joint_control.py": [
        ("C2", 'hash64("call", self.number, what', 'hash64("call", what', _AGREEMENT),
    ],
    "runtime/ops.py": [
        (
            "O1",
            "arena.begin_write(slot)\n    unsharded = slot.grads",
            "arena.begin_use(slot)\n    unsharded = slot.grads",
            (_TRAINS.format("copied gradients in the place of kept parameters"),),
        ),
    ],
}

LISTED = [Listed(name, file, *more) for file, rows in _BY_FILE.items() for name, *more in rows]
