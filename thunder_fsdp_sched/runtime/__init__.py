"""The run-time side of a step: memory, buckets, the shards to send, and the functions that traces call."""

from . import row_operators as row_operators  # tells `RowDTensor` how to run operators
