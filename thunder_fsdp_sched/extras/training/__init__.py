"""Functions for training scripts: checkpoints, evaluation, gradients, optimizers."""
