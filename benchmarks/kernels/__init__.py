"""Pallas kernels compared with XLA's versions."""
