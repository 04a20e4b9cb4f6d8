"""Executors that keep whole what torch has as one kernel with a backward, such as layer norm or attention.

[Note: Torch's kernels]
Thunder decomposes layer norm, GELU, attention or a loss into prims, and differentiates those. Torch has one kernel for
each, and another for its gradient, which read and write memory less often, take less time to launch, and save less for
backward. ``functions`` lists the functions that are kept whole. When Thunder traces a call of one, ``calls`` asks
``torch_program`` which operators torch runs, and makes symbols of Thunder of them.

One executor is registered as ``torch_kernels``. On a CPU it claims before Thunder's default executors, and before fusion
executors, which would have to compile what torch has. On GPUs nobody has measured it beside nvFuser and Thunder's own
attention yet, so there it runs only if ``thunder.jit(executors=[...])`` names it. An operator that is wrong for some
strides of its inputs, or fails for them, is replaced. What operators share memory with, and whether they
are pure, is observed as for torch's functions.

Another executor, ``torch_elementwise``, claims activations, and other elementwise functions of bfloat16 and float16. Thunder
casts operands of those to float32 and the result back, which a fusion executor makes one kernel of; torch has one. So on
each device it comes first unless an executor fuses such operators. Its results have the bits of eager mode, those of Thunder
have not where an operand is a number: Thunder rounds that first.

A third, ``torch_gradients``, claims the functions for whose gradient Thunder runs them again under autograd, of which
``torch.addmm`` and transposed convolutions compute the most. It always comes first; nothing fuses them.
"""
