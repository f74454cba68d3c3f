"""Checkpoints of a whole training, from which it goes on as if it had never stopped."""
