"""Training with ranks whose computations differ: ``fsdp(ranks_may_differ=True)``. Loaded only with that option."""
