"""Pallas kernels for GPU and TPU; the same mathematics as the modules above them, which stay reference and fallback."""
