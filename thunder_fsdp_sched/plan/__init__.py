"""Buckets and layouts as pure data: which parameters share a collective, and their offsets in its buffers."""
