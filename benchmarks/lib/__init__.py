"""Code that benchmarks share: timing, peak rates of devices, collectives, bare steps."""
