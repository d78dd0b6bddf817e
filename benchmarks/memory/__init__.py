"""Benchmark of the memory of a training step."""
