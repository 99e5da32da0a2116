"""What a run will take: the engine itself, run with tensors that have no memory."""
