"""Keep activations in host memory between forward and backward, where ``max_memory`` chooses that."""
