"""Pallas kernels beside what XLA compiles."""
