"""One file per family: its oracle, closed forms of its size and FLOPs, and how it differs from most in the tests."""
