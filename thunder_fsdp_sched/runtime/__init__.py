"""What runs inside a step: memory, buckets, and the shards that they send."""
