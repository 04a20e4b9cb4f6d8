"""Passes that fix what Thunder does wrong or cannot do. They are independent of sharding: skip them on a first reading.

Thunder computes wrong numbers or gradients for writes in place, operands without dimensions, random numbers that are drawn
again in backward, and some operators. Each pass makes the program right or raises an error. They run with the others, in the
order of ``thunder_fsdp_sched.pipeline``; their docstrings show lines of a trace as those of ``transforms`` do.
"""
