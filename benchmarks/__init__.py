"""Benchmarks of this project, by subject: programs, shared library and results."""
