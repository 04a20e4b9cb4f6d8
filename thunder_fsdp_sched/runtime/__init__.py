"""The run-time side of a step: memory, buckets, the shards to send, and the functions that traces call."""
