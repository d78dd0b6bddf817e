"""Benchmarks of the traffic and memory of a training step on many devices."""
