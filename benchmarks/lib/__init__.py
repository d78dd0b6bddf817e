"""Code that benchmarks share: collectives and moved bytes of compiled programs, other libraries, allocators."""
