"""All single changes of a Python file that ``mutate.py`` draws from, and the tests that run for them.

A comparison is replaced by its neighbour (``<`` by ``<=``) or its opposite, an integer grows by one, ``and`` becomes ``or``,
``+`` becomes ``-``, a condition always holds or never, and a call whose result nobody uses is left out. Texts stay.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_PASSES = "runtime/test_one_rank.py transforms/test_passes.py transforms/test_random_traces.py"
_PROOF = "proof/test_verify.py proof/test_audit.py proof/test_mutants.py"
ROOMS = {
    "plan": "plan transforms/test_passes.py sharding/test_module_policies.py test_errors.py",
    "proof": f"{_PROOF} proof",
    "ir": f"ir/test_effects.py ir/test_liveness.py {_PASSES} {_PROOF} agreement/test_agree.py ir",
    "transforms": f"{_PASSES} proof/test_verify.py transforms",
    "mends": "mends",
    "runtime": "runtime/test_one_rank.py runtime training/test_gradients.py test_errors.py",
    "ranks": "agreement/test_rounds.py agreement distributed test_errors.py",
}
"""The tests of each room. Those that are fast, or that fail for most defects, run first."""

_SHARP = {
    "traced_inputs value_keys": "capture/test_input_reads.py",
    "bound_symbols": "transforms/test_differentiate.py",
    "bound_symbols traced_computation": "capture/test_shared_joint.py",
    "row_elements rows row_shard": "runtime/test_row_dtensor.py",
    "autograd": "training/test_gradient_hooks.py",
    "unused_outputs autograd": "training/test_unused_outputs.py",
    "trace_start": "agreement/test_decisions.py training/test_unused_outputs.py agreement",
    "accumulation trace_start": "training/test_windows.py",
    "traced_module shard_prologue": "sharding/test_set_attributes.py capture/test_shared_joint.py",
    "insert_agreement": "agreement/test_decisions.py agreement/test_agreement.py",
    "registry": "ir/test_caching.py",
    "observation": "ir/test_operator_facts.py",
    "computation": "agreement/test_agree.py agreement/test_agreement.py",
    "fuse_downcast keep_fusions_apart": "transforms/test_fusions.py",
    "fuse_downcast": "sharding/test_input_casts.py",
    "claim_operators wrong_gradients": "capture/test_torch_functions.py",
    "calls": "agreement/test_agreement.py",
    "insert_unshard": "ir/test_operators_on_parameters.py",
    "regather_for_backward": "mends/test_recompute_whole_regions.py",
    "assignment process_groups new_groups": "distributed/test_groups.py",
    "process_groups": "test_forks.py planning/test_dry_run.py",
}
"""Tests of some files, which run before those of the room, like any test file with the name of the file."""

_OPPOSITES: list[tuple[type[ast.cmpop], type[ast.cmpop]]] = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
]
_COMPARISONS = dict(_OPPOSITES) | {new: old for old, new in _OPPOSITES}
_TEXTS = {
    *("__repr__", "__str__", "coded_error", "describe", "fail", "_fail"),
    *("_refuse", "log", "debug", "info", "warn", "warning"),
}
"""Functions that make or take texts for users, in which nothing is changed."""


class Change(NamedTuple):
    """A change of one place.

    Attributes:
        line: its number.
        text: the whole file, changed.
        shown: the old and the new text of the place.
    """

    line: int
    text: str
    shown: str


def changes_of(source: bytes) -> Iterator[Change]:
    """Yield all changes of a file, given its text."""
    starts = list(itertools.accumulate(map(len, source.splitlines(keepends=True)), initial=0))
    for node in _nodes(ast.parse(source)):
        for old, new in _changes(node):
            begin, end = starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset
            text = ast.unparse(new) if isinstance(new, ast.stmt | ast.Constant) else f"({ast.unparse(new)})"
            shown = f"{' '.join(source[begin:end].decode().split())}  ->  {text}"
            yield Change(old.lineno, (source[:begin] + text.encode() + source[end:]).decode(), shown)


def tests_of(room: str, file: Path, root: Path) -> tuple[str, ...]:
    """Return the tests of a file in their order, as paths from ``root``."""
    same_name = [str(test.relative_to(root / "tests")) for test in root.glob(f"tests/*/test_{file.name}")]
    sharp = [test for names, tests in _SHARP.items() if file.stem in names.split() for test in tests.split()]
    return tuple(f"tests/{test}" for test in dict.fromkeys([*same_name, *sharp, *ROOMS[room].split()]))


def _nodes(node: ast.AST) -> Iterator[Any]:
    """Yield the nodes that may change, none in texts for users, annotations, or code that only type checkers read."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "msg", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_text(child):
                yield from _nodes(child)


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.FunctionDef):
        return node.name in _TEXTS
    called = node.value if isinstance(node, ast.Expr) else node
    if isinstance(called, ast.Call):
        return str(getattr(called.func, "attr", getattr(called.func, "id", ""))) in _TEXTS
    return isinstance(node, ast.Raise | ast.JoinedStr)


def _changes(node: Any) -> Iterator[tuple[Any, ast.AST]]:
    """Yield parts of a node with their possible replacements."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            ops = [*node.ops[:index], _COMPARISONS[type(operator)](), *node.ops[index + 1 :]]
            yield node, ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.Constant) and isinstance(value := node.value, int):
        yield node, ast.Constant(not value if isinstance(value, bool) else value + 1)
    elif isinstance(node, ast.BoolOp):
        yield node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        if not any(isinstance(side, ast.List | ast.Tuple | ast.JoinedStr) for side in (node.left, node.right)):
            yield node, ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, ast.Pass()
    tests = (
        node.ifs if isinstance(node, ast.comprehension) else [node.test] if isinstance(node, ast.If | ast.IfExp) else []
    )
    for test, always in itertools.product(tests, (True, False)):
        yield test, ast.Constant(always)
