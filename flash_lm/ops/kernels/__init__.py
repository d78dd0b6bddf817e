"""Pallas kernels for GPU and TPU: the same mathematics as the modules above, which stay reference and fallback."""
