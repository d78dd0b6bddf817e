"""What benchmarks share: timing, peaks of devices, collectives, bare steps."""
