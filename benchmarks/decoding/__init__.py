"""Benchmarks of decoding: time and memory per token."""
