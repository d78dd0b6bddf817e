"""Benchmarks of training steps and of their overhead."""
