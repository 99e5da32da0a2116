"""Checkpoints: what a run writes and reads."""
