"""Passes that mend what Thunder does wrong or cannot do, and so have nothing to do with sharding: leave them out at first.

Thunder computes wrong numbers or gradients for writes in place, operands without dimensions, random numbers that are drawn
again in backward, and some operators. Each pass makes the program right or raises an error. They run with the others, in the
order of ``thunder_fsdp_sched.pipeline``; their docstrings show lines of a trace as those of ``transforms`` do.
"""
