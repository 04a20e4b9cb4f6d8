"""The parameters that ``Init(ignored_params=...)`` leaves unsharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from ...errors import coded_error
from ...private_torch import state_name


def ignored_names(ignored: Iterable[str | nn.Parameter], named: Mapping[str, nn.Parameter]) -> set[str]:
    """Return all names of the ignored parameters.

    Raises:
        ValueError: one of them is not a parameter of the module.
    """
    found: set[str] = set()
    for wanted in ignored:
        is_name = isinstance(wanted, str)
        matches = [p for n, p in named.items() if (wanted in (n, state_name(n)) if is_name else p is wanted)]
        if not matches:
            what = repr(wanted) if isinstance(wanted, str) else f"a parameter of shape {tuple(wanted.shape)}"
            raise coded_error(ValueError, "option.ignored-not-a-parameter", parameter=what)
        found |= {n for n, p in named.items() if any(p is match for match in matches)}
    return found
