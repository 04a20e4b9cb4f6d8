"""The run-time side of a step: memory, buckets, the shards to send, and the functions that traces call."""

from typing import Any

from .row_dtensor import RowDTensor


def _run_first_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the first operator on rows. Importing ``row_elements`` replaces this function."""
    from .row_elements import run_operator  # here, because torch's optimizers step on plain rows

    return run_operator(func, args, kwargs)


RowDTensor.run_operator = staticmethod(_run_first_operator)
