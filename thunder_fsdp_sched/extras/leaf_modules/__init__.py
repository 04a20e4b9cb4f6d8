"""Leaf modules, whose Python forward runs as it is, as one operator of the trace."""
