"""A virtual GPU: runs real traces on fake CUDA tensors, logs what streams would do, and finds what is not ordered.

See ``docs/virtual_gpu.md``. ``run`` in ``world`` is the way in.
"""
