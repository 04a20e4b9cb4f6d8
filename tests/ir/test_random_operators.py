"""Random operators from Thunder's registry give the same results sharded and unsharded.

Each operator first runs unsharded under plain ``thunder.jit``. If it fails there or differs from eager torch, the defect is
Thunder's and the operator is skipped. So are operators whose results are uninitialized memory. Random operators are
compared with plain ``thunder.jit`` from the same seed. Where backward would draw again, gradients would belong to another
sample, so the error that names the operator is the right outcome. ``-m long`` tries hundreds.
"""

from __future__ import annotations

from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from internals import local_rows
from profiles import LONG_ONLY
from random_models import draw_numbered
from random_operators import OperatorModel, Use, operators, returns_uninitialized_memory, uses
from ranks import on_ranks
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


def _expected_values(use: Use) -> tuple[str, dict[str, Any]]:
    """Return why a model of this operator cannot be compared, or an empty string, and its expected values."""
    try:
        if returns_uninitialized_memory(use.name):
            return "uninitialized memory", {}
        model = OperatorModel((use,))
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


def _failure_of_sharded(use: Use, expected: dict[str, Any], options: dict[str, Any]) -> str:
    """Return how the sharded model fails, or an empty string; :data:`REFUSED` if it refuses a random operator."""
    try:
        model = OperatorModel((use,))
        transform = fsdp(**options)
        jitted = thunder.jit(model, transforms=[transform])
        named = {name: transform.sharded.shards[name] for name in dict(model.named_parameters())}
        for _ in range(2):  # the second run starts with slots that the first has used
            values = _values(jitted, named, model.width)
            rows = {key: None if value is None else local_rows(value) for key, value in values.items()}
            wanted = dict(expected)
            for name in named:
                bucket, index = transform.sharded.locations[name]
                if (unsharded := expected[f"gradient of {name}"]) is not None:
                    wanted[f"gradient of {name}"] = bucket.rows[index].of(unsharded)
            if difference := _difference(rows, wanted):
                return f"wrong: {difference}"
    except NotImplementedError as error:
        message = f"fsdp: thunder runs the random operator {operators()[use.name][0].__name__!r} again"
        return REFUSED if message in str(error) else f"raises NotImplementedError: {error}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    return ""


def _first_on_any_rank(text: str) -> str:
    """Return the first text of any rank that is not empty, the same on all ranks."""
    return next(filter(None, everywhere(text)), "")


@pytest.mark.parametrize("count", [4, pytest.param(1200, marks=[LONG_ONLY, pytest.mark.timeout(0)])])
@on_ranks(timeout=7200)
def test_random_operators_give_the_same_results_sharded_and_unsharded(count: int) -> None:
    failures, compared = {}, 0
    for number in range(count):
        use = draw_numbered(uses(sorted(operators())), number)
        reason, expected = _expected_values(use)
        if not _first_on_any_rank(reason):
            options = STRATEGIES[number % len(STRATEGIES)]
            failure = _first_on_any_rank(_failure_of_sharded(use, expected, options))
            compared += not failure
            if failure not in ("", REFUSED):
                failures[use] = options, failure
    assert not failures, failures
    assert compared, "nothing was compared"


@on_ranks()
def test_a_random_operator_that_backward_would_run_again_is_refused() -> None:
    for source in ("parameter", "activation"):
        use = Use("random gumbel_softmax", 0, (source,))
        assert _failure_of_sharded(use, _expected_values(use)[1], STRATEGIES[0]) == REFUSED
