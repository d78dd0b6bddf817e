"""Benchmarks of checkpoints: the cost of saving, and runs that are killed."""
