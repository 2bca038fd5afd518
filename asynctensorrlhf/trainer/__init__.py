"""Training: the loop, updates, checkpoints, evaluation."""
