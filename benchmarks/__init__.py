"""Benchmarks of this project, by subject: programs, their library and what they measured."""
