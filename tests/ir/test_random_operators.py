"""Random operators from Thunder's registry give the same results sharded and unsharded.

Each operator first runs unsharded under plain ``thunder.jit``. If it fails there or differs from eager torch, the defect is
Thunder's and the operator is skipped. So are operators whose results are uninitialized memory. Random operators are
compared with plain ``thunder.jit`` from the same seed. Where backward would draw again, gradients would belong to another
sample, so the error that names the operator is the right outcome. ``-m long -s`` tries hundreds, and
shows the count of each outcome.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.runtime.row_dtensor import local_rows

import pytest
import thunder
import torch
from hypothesis import strategies as st
from profiles import LONG
from random_models import draw_numbered
from random_operators import OperatorModel, Use, operators, returns_uninitialized_memory, uses
from ranks import RankError, Ranks, on_ranks
from scenario import everywhere

REFUSED = "refused"
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
        if any(returns_uninitialized_memory(use.name) for use in together):
            return "uninitialized memory", {}
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
    """Return how the sharded model fails, or an empty string; :data:`REFUSED` if it refuses one of the random operators."""
    try:
        model = OperatorModel(together)
        transform = fsdp(**options)
        jitted = thunder.jit(model, transforms=[transform])
        named = {name: transform.sharded.shards[name] for name in dict(model.named_parameters())}
        for _ in range(2):  # the second run starts with slots that the first has used
            values = {
                key: None if v is None else local_rows(v) for key, v in _values(jitted, named, model.width).items()
            }
            wanted = dict(expected)
            for name in named:
                bucket, index = transform.sharded.locations[name]
                if (unsharded := expected[f"gradient of {name}"]) is not None:
                    wanted[f"gradient of {name}"] = bucket.rows[index].of(unsharded)
            if difference := _difference(values, wanted):
                return f"wrong: {difference}"
    except NotImplementedError as error:
        names = [operators()[use.name][0].__name__ for use in together if _is_random(use)]
        if any(f"fsdp: thunder runs the random operator {name!r} again" in str(error) for name in names):
            return REFUSED
        return f"raises NotImplementedError: {error}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    return ""


def _is_random(use: Use) -> bool:
    """Return whether another seed gives other values in eager torch."""
    model = OperatorModel((use,))
    named = dict(model.named_parameters())
    first, second = (_values(model, named, model.width, seed=seed) for seed in (11, 12))
    return bool(_difference(first, second))


def _first_on_any_rank(text: str) -> str:
    """Return the first text of any rank that is not empty, the same on all ranks."""
    return next(filter(None, everywhere(text)), "")


def try_operators(rank: int, world_size: int, drawn: list[tuple[Use, int]]) -> tuple[list[str], list[str]]:
    """Shard models of up to three operators each.

    Returns the outcome of each operator ("right", "refused", "failed", or why it was skipped), and the failures.
    """
    outcomes: list[str] = []
    failures: list[str] = []
    usable: list[tuple[Use, int]] = []
    for use, strategy in drawn:
        if reason := _first_on_any_rank(_expected_values((use,))[0]):
            outcomes.append(reason)
        else:
            usable.append((use, strategy))
    for start in range(0, len(usable), 3):
        together, options = tuple(use for use, _ in usable[start : start + 3]), STRATEGIES[usable[start][1]]
        reason, expected = _expected_values(together)
        if not _first_on_any_rank(reason):
            failure = _first_on_any_rank(_failure_of_sharded(together, expected, options))
            if not failure:
                outcomes += ["right"] * len(together)
                continue
            if failure != REFUSED:
                failures.append(f"rank {rank}: {together} with {options}: {failure}")
        for use in together:
            failure = _failure_of_sharded((use,), _expected_values((use,))[1], options)
            failure = _first_on_any_rank(failure)
            outcomes.append("right" if not failure else "refused" if failure == REFUSED else "failed")
            if outcomes[-1] == "failed":
                failures.append(f"rank {rank}: {use} with {options}: {failure}")
    return outcomes, failures


def run_operators(ranks: Ranks, drawn: list[tuple[Use, int]]) -> tuple[list[str], list[str]]:
    """Run :func:`try_operators` on all ranks. Return the outcome of each operator and the failures of all ranks."""
    try:
        results = ranks.run(try_operators, drawn, timeout=600)
    except RankError as error:
        return ["failed"] * len(drawn), [f"{drawn}: {error}"]
    return results[0][0], [failure for _, failures in results for failure in failures]


@pytest.mark.timeout(0 if LONG else 600)  # the long run takes longer
def test_random_operators_give_the_same_results_sharded_and_unsharded(ranks: Ranks) -> None:
    failures: list[str] = []
    outcomes: Counter[str] = Counter()
    choice = st.tuples(uses(sorted(operators())), st.integers(0, len(STRATEGIES) - 1))
    count, size = (100, 12) if LONG else (1, 4)
    for number in range(count):
        found, wrong = run_operators(ranks, draw_numbered(st.lists(choice, min_size=size, max_size=size), number))
        outcomes.update(found)
        failures.extend(f"{number}: {failure}" for failure in wrong)
        print(number, dict(outcomes), *wrong, flush=True)
    assert not failures, "\n\n".join(failures)
    assert outcomes["right"], "nothing was compared"


@on_ranks()
def test_a_random_operator_that_backward_would_run_again_is_refused() -> None:
    for source in ("parameter", "activation"):
        use = Use("random gumbel_softmax", 0, (source,))
        assert _failure_of_sharded((use,), _expected_values((use,))[1], STRATEGIES[0]) == REFUSED


def test_operators_whose_results_are_uninitialized_memory_are_recognized() -> None:
    names = {"empty_like", "new_empty", "zeros_like", "new_full", "clone", "random rand_like", "cat", "isfinite"}
    assert {name for name in names if returns_uninitialized_memory(name)} == {"empty_like", "new_empty"}
