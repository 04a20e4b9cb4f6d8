"""The module's side: parameters become shards."""
