"""Benchmarks of a model that others have trained."""
