"""Gather in backward among fewer ranks, from copies: ``Sharding(secondary_ranks=N)``."""
