"""The run-time side of a step: memory, buckets, the shards to send, and the functions that traces call."""

from . import row_elements as row_elements  # tells `RowDTensor` how to run operators
