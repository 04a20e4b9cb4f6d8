"""Sharding of a module: its parameters become shards, or it is refused with the reason."""
