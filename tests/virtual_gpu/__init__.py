"""A virtual GPU: runs real traces on fake CUDA tensors, logs the work of streams, and finds accesses that are not ordered.

See ``docs/virtual_gpu.md``. Start with ``world.run``.
"""
