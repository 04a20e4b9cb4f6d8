"""A virtual GPU: runs real traces on fake CUDA tensors, logs the work of streams, and finds accesses that are not ordered.

See ``README.md`` beside this file. Start with ``world.run``.
"""
