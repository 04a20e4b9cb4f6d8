"""Random operators from Thunder's registry give the same results sharded and unsharded.

Each operator first runs unsharded under plain ``thunder.jit``. If it fails there or differs from eager torch, the defect is
Thunder's and the operator is skipped. Random operators are compared with plain ``thunder.jit`` from the same seed: if
backward drew again, gradients would belong to another sample. ``--hypothesis-profile=long`` tries hundreds.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from random_histories import draw_numbered
from random_operators import OperatorModel, Use, operators, uses
from ranks import RankError, Ranks

LONG = settings().max_examples > 100
STRATEGIES: tuple[dict[str, Any], ...] = (
    {"sharding_strategy": "zero3"},
    {"sharding_strategy": "zero2", "bucketing_strategy": "layer"},
    {"sharding_strategy": "zero3", "bucketing_strategy": "none", "prefetch": 2},
)


def _values(
    model: torch.nn.Module, named: dict[str, Any], width: int, seed: int = 11
) -> dict[str, torch.Tensor | None]:
    """Return the outputs before and after backward, and the gradients."""
    torch.manual_seed(seed)
    for param in named.values():
        param.grad = None
    x = torch.linspace(-1, 1, 2 * width, dtype=torch.float64).view(2, width).requires_grad_()
    outputs = model(x)
    values = {f"output {i}": output.detach().clone() for i, output in enumerate(outputs)}
    terms = [output.square().mean() for output in outputs if output.is_floating_point() and output.requires_grad]
    sum(terms[1:], terms[0]).backward()
    values |= {f"output {i} after backward": output.detach().clone() for i, output in enumerate(outputs)}
    values["gradient of the input"] = x.grad
    return values | {f"gradient of {name}": param.grad for name, param in named.items()}


def _difference(actual_values: dict[str, Any], expected_values: dict[str, Any]) -> str:
    """Describe the first value that differs. ``None`` equals zeros, which Thunder returns for unused inputs."""
    for name, expected in expected_values.items():
        actual = actual_values[name]
        if expected is None and actual is None:
            continue
        if expected is None or actual is None:
            if (actual if expected is None else expected).any():
                return f"{name}: {actual}, expected {expected}"
        elif actual.shape != expected.shape:
            return f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        elif not torch.allclose(actual.double(), expected.double(), rtol=1e-7, atol=1e-9, equal_nan=True):
            return f"{name}: {actual}\nexpected {expected}"
    return ""


def _expected_values(together: tuple[Use, ...]) -> tuple[str, dict[str, Any]]:
    """Return why a model of these operators cannot be compared, or an empty string, and its expected values."""
    try:
        model = OperatorModel(together)
        named = dict(model.named_parameters())
        eager = _values(model, named, model.width)
        again = _values(model, named, model.width, seed=12)
    except Exception:
        return "eager", {}
    if not all(value.isfinite().all() for value in eager.values() if value is not None):
        return "not finite", {}
    try:
        jitted = thunder.jit(model)
        values = _values(jitted, named, model.width)
    except Exception:
        return "thunder", {}
    if not _difference(eager, again):  # nothing is random
        return ("thunder is wrong", {}) if _difference(values, eager) else ("", eager)
    repeated = _values(jitted, named, model.width)
    return ("thunder is not repeatable", {}) if _difference(repeated, values) else ("", values)


def _failure_of_sharded(together: tuple[Use, ...], expected: dict[str, Any], options: dict[str, Any]) -> str:
    """Return how the sharded model fails, or an empty string."""
    try:
        model = OperatorModel(together)
        transform = fsdp(**options)
        jitted = thunder.jit(model, transforms=[transform])
        named = {name: transform.sharded.shards[name] for name in dict(model.named_parameters())}
        for _ in range(2):  # the second run starts with slots that the first has used
            values = _values(jitted, named, model.width)
            wanted = dict(expected)
            for name in named:
                bucket, index = transform.sharded.locations[name]
                if (unsharded := expected[f"gradient of {name}"]) is not None:
                    wanted[f"gradient of {name}"] = bucket.local_rows(index, unsharded)
            if difference := _difference(values, wanted):
                return f"wrong: {difference}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    return ""


def try_operators(rank: int, world_size: int, drawn: list[tuple[Use, int]]) -> tuple[dict[str, str], list[str]]:
    """Shard models of up to three operators each. Return the skipped operators with reasons, and the failures."""
    skipped: dict[str, str] = {}
    usable: list[tuple[Use, int]] = []
    for use, strategy in drawn:
        reasons: list[str] = [""] * world_size
        dist.all_gather_object(reasons, _expected_values((use,))[0])
        if reason := next(filter(None, reasons), ""):
            skipped[repr(use)] = reason
        else:
            usable.append((use, strategy))
    failures = []
    for start in range(0, len(usable), 3):
        together, options = tuple(use for use, _ in usable[start : start + 3]), STRATEGIES[usable[start][1]]
        reason, expected = _expected_values(together)
        reasons = [""] * world_size
        dist.all_gather_object(reasons, reason)
        if any(reasons):
            skipped[repr(together)] = reason
            continue
        if failure := _failure_of_sharded(together, expected, options):
            alone = [use for use in together if _failure_of_sharded((use,), _expected_values((use,))[1], options)]
            failures.append(f"rank {rank}: {alone or together} with {options}: {failure}")
    return skipped, failures


def run_operators(ranks: Ranks, drawn: list[tuple[Use, int]]) -> tuple[dict[str, str], list[str]]:
    """Run :func:`try_operators` on all ranks. Return the skipped operators and the failures of all ranks."""
    try:
        results = ranks.run(try_operators, drawn, timeout=600)
    except RankError as error:
        return {}, [f"{drawn}: {error}"]
    return results[0][0], [failure for _, failures in results for failure in failures]


@pytest.mark.timeout(0 if LONG else 600)  # the long run takes longer
def test_random_operators_give_the_same_results_sharded_and_unsharded(ranks: Ranks) -> None:
    failures: list[str] = []
    reasons: Counter[str] = Counter()
    choice = st.tuples(uses(sorted(operators())), st.integers(0, len(STRATEGIES) - 1))
    count, size = (100, 12) if LONG else (1, 9)
    for number in range(count):
        skipped, wrong = run_operators(ranks, draw_numbered(st.lists(choice, min_size=size, max_size=size), number))
        reasons.update(skipped.values())
        failures.extend(f"{number}: {failure}" for failure in wrong)
    print(f"{count * size} operators, skipped: {dict(reasons)}")
    assert not failures, "\n\n".join(failures)
    assert sum(reasons.values()) < count * size, "nothing was compared"
