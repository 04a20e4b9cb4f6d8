"""What a training script calls beside the jitted module: checkpoints, evaluation, gradients, optimizers."""
