"""Executors that run functions such as layer norm or attention as torch's own kernels, forward and backward.

[Note: Torch's kernels]
Thunder decomposes layer norm, GELU, attention or a loss into prims, and differentiates the prims. Torch has one kernel for
each function, and another for its gradient. They access memory less often, take less time to launch, and save less for
backward. ``functions`` lists the functions that are kept whole. When Thunder differentiates or claims a call of one,
``calls`` asks ``torch_program`` which operators torch runs, and records each of them as a symbol of Thunder.

One executor is registered as ``torch_kernels``. On a CPU it comes before Thunder's default executors, and before fusion
executors that follow them, which would otherwise compile these functions. On GPUs nobody has measured it beside nvFuser
and Thunder's own attention yet, so there it runs only if ``thunder.jit(executors=[...])`` names it. Operators that fail or
are wrong for some strides of their inputs are replaced. Which tensors share memory, and whether an operator is pure, is
observed as for torch's functions.

A second executor, ``torch_elementwise``, claims activations, and other elementwise functions of bfloat16 and float16.
Thunder casts their operands to float32 and the result back. A fusion executor merges the casts into one kernel; torch has
one kernel anyway. So on each device ``torch_elementwise`` comes before the defaults, unless an executor fuses such
operators. Its results equal those of eager mode bit for bit. Thunder's do not if an operand is a number, which it rounds.

A third, ``torch_gradients``, claims functions whose gradient Thunder computes by running them again under autograd. Of
these, ``torch.addmm`` and transposed convolutions compute the most. It always comes before the defaults: nothing fuses
these functions.
"""
