"""The training step, its state, its loop and its records."""
